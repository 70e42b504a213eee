"""What is compared: the network on ready tensors, our loop, and a tree's phases, case by case.

The eager limit is the network on tensors that are ready, and nothing else: what torch, called step
by step, can do with this network, batch and optimiser on one thread. A loop that reaches it costs
nothing. It is not the processor's limit: compiled code can pass it.

Our own arms go through the interfaces that methods use. An epoch is charged what a run's record
would charge, which leaves out checkpoints and progress reports, and without its validation pass,
which is a case of its own. Both come once an epoch and would weigh more in these short epochs than
they do in real ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from bench.perf import dataloader, photos
from bench.perf.measure import EAGER_LIMIT, Arm, Case, Samples, timed
from bench.perf.workload import PHASES, SEED, TREE_METHOD, EpochClock, Workload
from methods.base import get_method
from methods.optimisation import TrainConfig, build_optimizer
from methods.prediction import EvalImages, predict_with
from methods.training import Training

OURS, FIRST_PASS, ERM = "ours", "ours, first pass", "ERM"
PASSES = 3  # over the evaluated split: one alone is over too soon to be timed
READY_BATCHES = 8  # as warm in the caches as a batch that was just made


def cases_of(workload: Workload) -> list[Case]:
    """Return the cases of a workload; nothing is made or measured yet."""
    name, effort, batch = workload.dataset, workload.effort, workload.tree_batch

    def training(batch: int) -> list[Arm]:
        theirs = [dataloader.training(workload, batch, workers) for workers in dataloader.WORKERS]
        return [eager_limit_training(workload, batch), our_training(workload, batch), *theirs]

    def evaluation() -> list[Arm]:
        theirs = [dataloader.evaluation(workload, workers) for workers in dataloader.WORKERS]
        return [eager_limit_evaluation(workload), our_evaluation(workload), *theirs]

    def tree() -> list[Arm]:
        arms = (eager_limit_training, erm_training, tree_training)
        return [arm(workload, batch) for arm in arms]

    title = f"{get_method(TREE_METHOD).title}, batch {batch}"
    height, width = photos.NATIVE
    batches = f"{name}: photos of {width} x {height} to batches"
    prepared = Case(batches, partial(photos.native_photos, workload), limit=photos.LIMIT)
    sizes = {f"{name}: training, batch {size}": size for size in workload.batches}
    return [
        *(Case(what, partial(training, b), effort.max_repeats) for what, b in sizes.items()),
        Case(f"{name}: evaluation", evaluation, effort.max_repeats),
        Case(f"{name}: {title}", tree, effort.max_tree_repeats),
        *([prepared] if workload.is_photo else []),
    ]


def eager_limit_training(workload: Workload, batch: int) -> Arm:
    """Return the arm that runs forward, backward and step on ready batches."""
    task, config = workload.task(), workload.recipe(batch)
    model = workload.network("limit").train()
    optimizer = build_optimizer(config, model)
    generator = torch.Generator().manual_seed(SEED)
    ready = []
    for _ in range(READY_BATCHES):
        index = torch.randint(len(task.train), (batch,), generator=generator)
        images = task.train_transform(task.train.images.batch(index), generator)
        ready.append((images.contiguous(memory_format=torch.channels_last), task.train.y[index]))

    def epoch() -> int:
        steps = workload.effort.trained // batch
        for images, y in islice(cycle(ready), steps):
            functional.cross_entropy(model(images), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return steps * batch

    return lambda: {EAGER_LIMIT: timed(epoch)}


def eager_limit_evaluation(workload: Workload) -> Arm:
    """Return the arm that passes ready batches forward, of the size that our own pass has."""
    images = workload.task(workload.effort.evaluated).train.images
    batches = [batch.clone() for batch in EvalImages(images, workload.facts.eval_transform)]
    model = workload.network("limit").eval()

    def forward() -> int:
        with torch.no_grad():
            return sum(len(model(batch)) for batch in batches)

    return lambda: {EAGER_LIMIT: timed(forward, PASSES)}


def clocked(fit: Callable[[EpochClock], object]) -> EpochClock:
    """Fit, and return what the epochs took."""
    with tempfile.TemporaryDirectory() as folder:
        clock = EpochClock(Path(folder))
        fit(clock)
        return clock


def our_training(workload: Workload, batch: int) -> Arm:
    """Return the arm that runs our loop: sampling, gathering, augmentation, steps, history.

    It is an epoch after the first, as nearly all are: the first may also make what others reuse.
    """
    task, config = workload.task(), replace(workload.recipe(batch), epochs=2)
    model = workload.network("ours")
    spread = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(SEED))
    visited = spread[: workload.effort.trained // batch * batch]

    def sampler(epoch: int, generator: torch.Generator) -> Tensor:
        """Shuffle what an epoch visits, which is not all of the split."""
        return visited[torch.randperm(len(visited), generator=generator)]

    def train(clock: EpochClock) -> None:
        Training(model, task, config, clock, name="erm", sampler=sampler).run()

    return lambda: {OURS: clocked(train).later_epochs("erm")}


def our_evaluation(workload: Workload) -> Arm:
    """Return the arm that passes over a split, for the first time and again.

    Every epoch of a training after its first does the latter.
    """
    images = workload.task(workload.effort.evaluated).train.images
    model = workload.network("ours")

    def turn() -> Samples:
        split = EvalImages(images, workload.facts.eval_transform)

        def forward() -> int:
            return len(predict_with(model, split))

        return {FIRST_PASS: timed(forward), OURS: timed(forward, PASSES)}

    return turn


def tree_training(workload: Workload, batch: int) -> Arm:
    """Return the arm that grows a tree of two levels: what a step of either phase takes."""
    task, config = workload.task(workload.effort.grown), workload.tree_recipe(batch)

    def turn() -> Samples:
        clock = clocked(lambda clock: get_method(TREE_METHOD).fit(task, config, clock))
        return {arm: clock.later_epochs(training) for arm, training in PHASES.items()}

    return turn


def erm_training(workload: Workload, batch: int) -> Arm:
    """Return the arm that trains by ERM with the optimiser, batches and images of a tree."""
    task = workload.task(workload.effort.grown)
    config: TrainConfig = workload.tree_recipe(batch).phase(2, 2)
    model = workload.network("erm")

    def train(clock: EpochClock) -> None:
        Training(model, task, config, clock, name="erm").run()

    return lambda: {ERM: clocked(train).later_epochs("erm")}
