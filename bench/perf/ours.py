"""Our own loop, evaluation pass and trees, through the interfaces that methods use.

An epoch is charged what a run's record would charge, which leaves out checkpoints and progress
reports, and without its validation pass, which is a case of its own. Both come once an epoch and
would weigh more in these short epochs than they do in real ones.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.context import RunContext, Spent
from bench.perf.limit import PASSES
from bench.perf.measure import Contender, Sample, Samples, timed
from bench.perf.subject import Subject, context
from methods.base import get_method
from methods.nct.config import NctConfig
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.stacking import train_stacked
from methods.training import Sampler, Training

OURS, FIRST_PASS = "ours", "ours, first pass"
STACKED_SEEDS = 4
STACKED = f"ours, {STACKED_SEEDS} seeds stacked"
ERM, PHASE_1, PHASE_2 = "ERM", "NCT phase 1", "NCT phase 2"
EPOCHS = 2  # of each training


class EpochClock(RunContext):
    """A context that notes what every epoch did and took, but for its validation pass."""

    def __init__(self, folder: Path) -> None:
        plain = context(folder)
        super().__init__(plain.scope, plain.part, plain.stage_records)
        self.epochs: dict[str, list[Sample]] = {}
        self.began = self.part.elapsed()
        self.passes: list[tuple[int, Spent]] = []

    def count_passes(self, images: int) -> None:
        """Count, and note when; an epoch's steps are counted first, then its validation."""
        super().count_passes(images)
        self.passes.append((images, self.part.elapsed()))

    def history(self, where: dict[str, Any], **row: float) -> None:
        """Keep the line, and note the epoch."""
        super().history(where, **row)
        (images, stepped), (_, validated) = self.passes[-2:]
        spent = self.part.elapsed() - self.began - (validated - stepped)
        self.epochs.setdefault(where["stage"], []).append(Sample(images, spent))

    def report(self, **progress: Any) -> None:
        """Report; from here on it is the next epoch."""
        super().report(**progress)
        self.began = self.part.elapsed()

    def later_epochs(self, stage: str) -> Sample:
        """Add up a training's epochs but for the first, before which there was other work."""
        _, *later = self.epochs[stage]
        images = sum(epoch.images for epoch in later)
        return Sample(images, sum((epoch.spent for epoch in later), Spent()))


def training(subject: Subject, batch: int) -> Contender:
    """Run the loop: sampling, gathering, augmentation, steps, history."""
    task, config = subject.task(), subject.recipe(batch)
    model = subject.network("ours")
    sampler = _first_of_an_epoch(len(task.train), subject.effort.trained // batch * batch)

    def turn() -> Samples:
        with tempfile.TemporaryDirectory() as folder:
            clock = EpochClock(Path(folder))
            Training(model, task, config, clock, name="erm", sampler=sampler).run()
            return {OURS: clock.epochs["erm"][0]}

    return turn


def stacked_training(subject: Subject, batch: int) -> Contender:
    """Run the same loop for several seeds at once; an image counts for every seed that sees one.

    The time is the last seed's, which has waited for all others: for their steps and, which is
    little, for their validation and checkpoints.
    """
    task, config = subject.task(), subject.recipe(batch)
    models = [subject.network(f"stacked-{seed}") for seed in range(STACKED_SEEDS)]
    sampler = _first_of_an_epoch(len(task.train), subject.effort.trained // batch * batch)

    def turn() -> Samples:
        with tempfile.TemporaryDirectory() as folder:
            clocks = [EpochClock(Path(folder) / str(number)) for number in range(STACKED_SEEDS)]
            train_stacked(
                [
                    Training(model, task, config, clock, name="erm", sampler=sampler)
                    for model, clock in zip(models, clocks, strict=True)
                ]
            )
            images = sum(clock.epochs["erm"][0].images for clock in clocks)
            return {STACKED: Sample(images, clocks[-1].epochs["erm"][0].spent)}

    return turn


def _first_of_an_epoch(count: int, images: int) -> Sampler:
    """Shuffle the whole split, as an epoch does, and stop early."""
    return lambda epoch, generator: torch.randperm(count, generator=generator)[:images]


def evaluation(subject: Subject) -> Contender:
    """Pass over a split, for the first time and again, as every epoch of a training does."""
    images = subject.task(subject.effort.evaluated).train.images
    model = subject.network("ours")

    def turn() -> Samples:
        split = EvalImages(images, subject.facts.eval_transform)

        def forward() -> int:
            return len(predict_with(model, split))

        return {FIRST_PASS: timed(forward), OURS: timed(forward, PASSES)}

    return turn


def growing(subject: Subject, batch: int) -> Contender:
    """Grow a tree of two levels: what a step of either phase takes."""
    task, config = subject.task(subject.effort.grown), nct_config(subject, batch)

    def turn() -> Samples:
        with tempfile.TemporaryDirectory() as folder:
            clock = EpochClock(Path(folder))
            get_method("nct").fit(task, config, clock)
            return {
                PHASE_1: clock.later_epochs("nct-2-1"),
                PHASE_2: clock.later_epochs("nct-2-2"),
            }

    return turn


def erm_beside_nct(subject: Subject, batch: int) -> Contender:
    """Train by ERM with the optimiser, batches and images that NCT has here."""
    task = subject.task(subject.effort.grown)
    config: TrainConfig = nct_config(subject, batch).phase(2, 2)
    model = subject.network("erm")

    def turn() -> Samples:
        with tempfile.TemporaryDirectory() as folder:
            clock = EpochClock(Path(folder))
            Training(model, task, config, clock, name="erm").run()
            return {ERM: clock.later_epochs("erm")}

    return turn


def nct_config(subject: Subject, batch: int) -> NctConfig:
    """Take the dataset's preset, with short phases that neither stop early nor leave images out."""
    preset: NctConfig = preset_config(get_method("nct"), subject.dataset)
    return replace(
        preset,
        iterations=2,
        batch_size=batch,
        epochs=(1, 2 * EPOCHS),
        phase1_ratio=(0.0, 0.5),
        scope="standard",
        sampling="class_weights",
        patience=0,
        phase2_patience=0,
        min_samples=0,
    )
