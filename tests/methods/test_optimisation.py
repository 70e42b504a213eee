"""Training configurations, and the optimisers and schedules built from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from datasets.config import as_plain, build_config
from datasets.errors import UsageError
from methods.optimisation import TrainConfig, build_optimizer, build_schedule, step_schedule


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1 but got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1 but got 0"),
        ({"lr": 0.0}, "lr must be positive but got 0.0"),
        ({"lr": float("inf")}, "lr must be positive but got inf"),
        ({"lr": float("nan")}, "lr must be positive but got nan"),
        ({"weight_decay": -1.0}, "weight_decay cannot be negative"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\]"),
        ({"patience": -1}, "patience cannot be negative"),
        ({"scheduler": "step"}, "scheduler = step needs milestones"),
    ],
)
def test_wrong_values_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        TrainConfig(**settings)
    assert raised.value.remedy


def test_config_survives_its_recorded_form() -> None:
    config = TrainConfig(scheduler="step", milestones=(3, 5), lr=0.1 + 0.2)
    assert build_config(TrainConfig, as_plain(config), "erm") == config


def test_quick_cuts_epochs_and_nothing_else() -> None:
    config = TrainConfig(epochs=300, lr=0.3)
    assert config.quick() == TrainConfig(epochs=2, lr=0.3)
    assert TrainConfig(epochs=1).quick().epochs == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)],
)
def test_optimizer_takes_a_step_as_torch_does(name: Any, kind: type) -> None:
    config = TrainConfig(optimizer=name, lr=0.1, weight_decay=0.2, momentum=0.7)
    ours, theirs = nn.Linear(3, 1), nn.Linear(3, 1)
    theirs.load_state_dict(ours.state_dict())
    extra = {"momentum": 0.7} if name == "sgd" else {}
    optimizers = (
        build_optimizer(config, ours),
        kind(theirs.parameters(), lr=0.1, weight_decay=0.2, **extra),
    )
    assert type(optimizers[0]) is kind
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)  # ours is fused


def test_groups_without_a_rate_take_the_configured_one() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = (
        {"params": part.parameters(), **rate} for part, rate in ((body, {"lr": 1e-4}), (head, {}))
    )
    optimizer = build_optimizer(TrainConfig(lr=0.5), groups)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 0.5]


def schedule_of(higher_is_better: bool = True, **settings: Any) -> Any:
    config = TrainConfig(lr=1.0, **settings)
    return build_schedule(config, build_optimizer(config, nn.Linear(1, 1)), higher_is_better)


def test_kinds_of_schedule() -> None:
    assert schedule_of(scheduler="none") is None
    assert isinstance(schedule_of(scheduler="step", milestones=(1,)), lr_scheduler.MultiStepLR)
    assert schedule_of(scheduler="cosine", epochs=7).T_max == 7
    assert schedule_of(scheduler="plateau", decay=1.0) is None


@pytest.mark.parametrize(("higher_is_better", "rates"), [(True, [1, 0.5]), (False, [1, 1])])
def test_plateau_knows_which_way_is_up(higher_is_better: bool, rates: list[float]) -> None:
    settings: dict[str, Any] = {"scheduler": "plateau", "plateau_patience": 0, "decay": 0.5}
    schedule = schedule_of(higher_is_better, **settings)
    seen = []
    for value in (2.0, 1.0):  # worse where higher is better
        step_schedule(schedule, value)
        seen.append(schedule.optimizer.param_groups[0]["lr"])
    assert seen == rates


def test_no_schedule_can_be_stepped() -> None:
    step_schedule(None, 1.0)
