"""The eager limit: the network on tensors that are ready, and nothing else.

It is what torch, called step by step, can do with this network, batch and optimiser on one thread.
A loop that reaches it costs nothing. It is not the processor's limit: compiled code can pass it.
"""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch import Tensor
from torch.nn import functional

from bench.perf.measure import LIMIT, Contender, timed
from bench.perf.subject import SEED, Subject
from methods.optimisation import build_optimizer
from methods.prediction import EvalImages

PASSES = 3  # over the evaluated split: one alone is over too soon to be timed
READY = 8  # batches kept; as warm in the caches as a batch that was just made


def training(subject: Subject, batch: int) -> Contender:
    """Forward, backward and step on ready batches."""
    task, config = subject.task(), subject.recipe(batch)
    model = subject.network("limit").train()
    optimizer = build_optimizer(config, model)
    generator = torch.Generator().manual_seed(SEED)
    ready = []
    for _ in range(READY):
        index = torch.randint(len(task.train), (batch,), generator=generator)
        images = task.train_transform(task.train.images.batch(index), generator)
        ready.append((_channels_last(images), task.train.y[index]))

    def epoch() -> int:
        steps = subject.effort.trained // batch
        for images, y in islice(cycle(ready), steps):
            functional.cross_entropy(model(images), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return steps * batch

    return lambda: {LIMIT: timed(epoch)}


def evaluation(subject: Subject) -> Contender:
    """Pass ready batches forward, of the size that our own pass has."""
    images = subject.task(subject.effort.evaluated).train.images
    batches = [batch.clone() for batch in EvalImages(images, subject.facts.eval_transform)]
    model = subject.network("limit").eval()

    def forward() -> int:
        with torch.no_grad():
            return sum(len(model(batch)) for batch in batches)

    return lambda: {LIMIT: timed(forward, PASSES)}


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
