"""Every method's search space, drawn from by a real Optuna trial, on every dataset."""

from __future__ import annotations

from typing import Any

import pytest

from bench.job import NO_DATA, Request, expand
from bench.tuning.source import drawn_overrides
from datasets.base import BackboneSpec, Task, outline_task
from datasets.catalogue import get_dataset, load_datasets
from datasets.config import as_plain
from methods.base import METHODS, load_methods

DATASETS = list(load_datasets())
METHOD_NAMES = [name for name, method in load_methods().items() if method.distribution is None]


def task_of(dataset: str) -> Task:
    """A task as far as constants go; a search space that needs samples would need data."""
    known = get_dataset(dataset)
    facts = known.facts(known.config_type())
    return outline_task(facts, BackboneSpec(facts.backbone))


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


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_draws_are_configurations_that_a_run_can_repeat(method: str, dataset: str) -> None:
    for config, params in drawn(method, dataset, 5):
        assert isinstance(config, METHODS[method].config_type)
        assert params, "nothing is searched"
        overrides = drawn_overrides(METHODS[method], dataset, config)
        request = Request((method,), (dataset,), (100,), NO_DATA, overrides=overrides)
        (job,) = expand(request)
        assert job.config.method == as_plain(config)
        (plain,) = expand(Request((method,), (dataset,), (100,), NO_DATA))
        assert job.supervision == plain.supervision, "a search must not change the tier"


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_two_draws_differ(method: str) -> None:
    (first, _), (second, _) = drawn(method, "umnist", 2)
    assert first != second


@pytest.mark.parametrize("dataset", DATASETS)
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
