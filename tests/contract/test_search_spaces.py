"""Every method's search space, drawn from by a real Optuna trial, on every dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.plan import Request, expand
from bench.tune import drawn_overrides
from datasets.base import BackboneSpec, Task
from datasets.catalogue import DATASETS
from datasets.config import as_plain
from methods.base import METHODS, load_methods

load_methods()
NOWHERE = Path("/nonexistent")
METHOD_NAMES = [n for n in METHODS if METHODS[n].__module__.startswith("methods.")]


def task_of(dataset: str) -> Task:
    """A task as far as constants go; a search space that needs samples would need data."""
    facts = DATASETS[dataset].facts_of(DATASETS[dataset].config_type(), None)
    nothing: Any = None
    return Task(
        name=facts.name,
        classes=facts.classes,
        groups=facts.groups,
        metric=facts.metric,
        channels=facts.channels,
        train=nothing,
        val=nothing,
        train_transform=facts.train_transform,
        eval_transform=facts.eval_transform,
        backbone=BackboneSpec(facts.backbone),
    )


def drawn(method: str, dataset: str, count: int) -> list[Any]:
    """Configurations from real trials, each with the parameters that led to it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    found = []
    for _ in range(count):
        trial = study.ask()
        found.append((METHODS[method].search_space(trial, task_of(dataset)), dict(trial.params)))
    return found


@pytest.mark.parametrize("dataset", list(DATASETS))
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_draws_are_configurations_that_a_run_can_repeat(method: str, dataset: str) -> None:
    for config, params in drawn(method, dataset, 5):
        assert isinstance(config, METHODS[method].config_type)
        assert params, "nothing is searched"
        overrides = drawn_overrides(METHODS[method], dataset, config)
        request = Request((method,), (dataset,), (100,), NOWHERE, overrides=overrides)
        (job,) = expand(request)
        assert job.config["method"] == as_plain(config)
        (plain,) = expand(Request((method,), (dataset,), (100,), NOWHERE))
        assert job.supervision == plain.supervision, "a search must not change the tier"


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_two_draws_differ(method: str) -> None:
    (first, _), (second, _) = drawn(method, "umnist", 2)
    assert first != second


@pytest.mark.parametrize("dataset", list(DATASETS))
def test_ncts_ranges_are_the_papers(dataset: str) -> None:
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    trial = study.ask()
    METHODS["nct"].search_space(trial, task_of(dataset))
    ranges: dict[str, Any] = {}
    for name, space in trial.distributions.items():
        choices = getattr(space, "choices", None)
        ranges[name] = choices or (space.low, space.high, space.log)
    assert ranges == {
        "backbone_lr": (1e-6, 1e-2, True),
        "head_lr": (1e-6, 1e-2, True),
        "lr_decay_factor": (1.0, 3.0, False),
        "weight_decay": (1e-5, 2.0, True),
        "hidden": (16, 128, False),
        "dropout": (0.0, 0.5, False),
        "phase1_ratio_2": (0.0, 0.9, False),  # the paper searches the ratios but gives no range
        "phase1_ratio_3": (0.0, 0.9, False),
        "aux_weight": (0.0, 2.0, False),
        "sampling": ("class_weights", "downsample", "geomean"),
    }
