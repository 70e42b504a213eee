"""That baselines cost a fraction of what their authors' way of computing them costs.

Ratios of arms that were measured interleaved, by processor time, never seconds.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bench.perf.arms import OURS
from bench.perf.dataloader import stored_images
from bench.perf.measure import Arm, Case, Samples, measure_interleaved, speed_ratio, timed
from bench.perf.workload import LENET_EFFORT, EpochClock, Workload
from methods.backbones import Classifier
from methods.base import get_method
from methods.cnc import ROLES, CncConfig, ContrastiveSets, TwoSidedLoss, frozen_statistics
from methods.eiil import InferenceConfig, infer_environments, scale_gradients
from methods.erm import ErmConfig
from methods.optimisation import build_optimizer
from methods.presets import preset_config
from methods.training import Training

sys.path.append(str(Path(__file__).parents[1] / "methods"))
from official_cnc import official_step
from official_eiil import official_assignment

pytestmark = pytest.mark.slow

OFFICIAL = "official"
TURNS, ATTEMPTS = 5, 4
OF_THE_OFFICIAL = 2.0  # measured 4.9 and 3.7 (CMNIST); there 2.6 to 2.9 with AVX-512, busy
OF_AUTOGRAD = 15.0  # measured 28
SAMPLES, CLASSES = 43_554, 2  # UMNIST
EIIL_STEPS = {OURS: 400, OFFICIAL: 40}
CHUNK = {"umnist": 128, "cmnist": 32}  # of the authors' cross-entropy: photos' and CMNIST's
STEPS = 6
ERRORS = {"umnist": 0.1, "cmnist": 0.005}  # about what the first stages leave


def sets_of(workload: Workload, config: CncConfig) -> ContrastiveSets:
    """Sets over slices that err on as many samples as a real first stage."""
    draw = torch.Generator().manual_seed(0)
    classes = len(workload.facts.classes)
    wrong = torch.rand(len(workload.y), generator=draw) < ERRORS[workload.dataset]
    shift = torch.randint(1, classes, (len(workload.y),), generator=draw)
    slices = torch.where(wrong, (workload.y + shift) % classes, workload.y)
    return ContrastiveSets(workload.y, slices, classes, config.per_role, config.anchor_ratio)


class FirstSets:
    """The sets of an epoch's first steps."""

    def __init__(self, sets: ContrastiveSets, config: CncConfig) -> None:
        self.sets = sets
        self.images = STEPS * config.batch_factor * ROLES * sets.per_role

    def __call__(self, epoch: int, generator: torch.Generator) -> Tensor:
        return self.sets(epoch, generator)[: self.images]


def ours(workload: Workload, config: CncConfig) -> Arm:
    """Train as the method does, through the loop."""
    sets = sets_of(workload, config)
    sampler = FirstSets(sets, config)
    task, model = workload.task(), workload.network("cnc")

    def turn() -> Samples:
        with tempfile.TemporaryDirectory() as folder:
            clock = EpochClock(Path(folder))
            Training(
                model,
                task,
                replace(config.second_stage(sets.per_role), epochs=1, selection="last"),
                clock,
                name="cnc",
                sampler=sampler,
                objective=TwoSidedLoss(
                    sets.per_role,
                    config.sets_per_forward,
                    config.temperature,
                    config.contrastive_weight,
                ),
                set_mode=frozen_statistics,
                accumulate=config.batch_factor // config.sets_per_forward,
            ).run()
            return {OURS: clock.epochs["cnc"][0]}

    return turn


def official(workload: Workload, config: CncConfig) -> Arm:
    """Train as the authors do; it gets our network, memory format and fused optimiser."""
    sets = sets_of(workload, config)
    sampler = FirstSets(sets, config)
    data = stored_images(workload, workload.effort.split, workload.facts.train_transform)
    model = workload.network("cnc")
    assert isinstance(model, Classifier)
    optimizer = build_optimizer(config.second_stage(sets.per_role), model)
    at_once = config.batch_factor * ROLES * sets.per_role
    draw = torch.Generator().manual_seed(0)
    loss_of = config.temperature, config.contrastive_weight, CHUNK[workload.dataset]

    def epoch() -> int:
        frozen_statistics(model)
        order = sampler(0, draw)
        seen = 0
        for images, y in DataLoader(data, at_once, sampler=order.tolist()):
            optimizer.zero_grad()
            images = images.contiguous(memory_format=torch.channels_last)
            official_step(model, images, y, sets.per_role, *loss_of, draw)
            optimizer.step()
            seen += len(y)
        return seen

    def turn() -> Samples:
        return {OFFICIAL: timed(epoch)}

    return turn


def best_ratio(enough: float, *arms: Arm) -> float:
    """Compare, again where it was not enough: a busy machine hides the truth, it makes none up."""
    case, ratios = Case("", lambda: arms), [0.0]
    while len(ratios) <= ATTEMPTS and max(ratios) < enough:
        ratios.append(speed_ratio(measure_interleaved(case, TURNS), OURS, OFFICIAL))
    return max(ratios)


@pytest.mark.benchmark(group="a contrastive set of CnC against the official way")
@pytest.mark.parametrize("dataset", ["umnist", "cmnist"])
def test_contrastive_sets(benchmark: Any, dataset: str) -> None:
    workload = Workload(dataset, LENET_EFFORT)
    config: CncConfig = preset_config(get_method("cnc"), dataset)
    arms = official(workload, config), ours(workload, config)
    ratio = float(benchmark.pedantic(best_ratio, (OF_THE_OFFICIAL, *arms), rounds=1))
    benchmark.extra_info["ours / official"] = ratio
    assert ratio >= OF_THE_OFFICIAL


def inferring() -> list[Arm]:
    """Infer environments of as many samples as UMNIST has; a step counts as an image."""
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(SAMPLES, CLASSES, generator=draw)
    y = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    start = torch.randn(SAMPLES, generator=draw)
    config = InferenceConfig(ErmConfig(), "adam", EIIL_STEPS[OURS], lr=1e-3, eps=1e-8)

    def cached() -> int:
        infer_environments(scale_gradients(logits, y), start, config)
        return config.steps

    def autograd() -> int:
        official_assignment(logits, y, start, EIIL_STEPS[OFFICIAL], config.lr, config.eps)
        return EIIL_STEPS[OFFICIAL]

    return [lambda: {OFFICIAL: timed(autograd)}, lambda: {OURS: timed(cached)}]


@pytest.mark.benchmark(group="a step of EIIL's inference against autograd")
def test_environment_inference(benchmark: Any) -> None:
    ratio = float(benchmark.pedantic(best_ratio, (OF_AUTOGRAD, *inferring()), rounds=1))
    benchmark.extra_info["ours / autograd"] = ratio
    assert ratio >= OF_AUTOGRAD
