"""Several seeds of a LeNet method in one model: grouped convolutions and batched products.

A LeNet's layers are too small to keep a core busy. Here the networks of S seeds lie side by side in
the channels of one network, so that every call does S times the work. Each seed keeps its own
`Training`: order of samples, augmentation, weights, history, selected epoch and checkpoints are
those it has when it trains alone; only the optimiser steps are taken together, and what they
compute differs by rounding alone.

No sum ever runs over two seeds, so a seed's result is the same to the last bit whoever shares its
stack, as long as the number of seeds and its place among them are the same. Therefore a seed that
has stopped early keeps its place, untrained, while the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.errors import UsageError
from methods.backbones import LENETS, Classifier, LeNet, Pool, WholeImageConv
from methods.base import METHODS, Context, Method
from methods.optimisation import TrainConfig, build_optimizer
from methods.training import Trained, Training


class Stackable:
    """Mixed into methods whose fit is one `Training`, whose seeds can therefore be stacked."""

    def training(self, task: Task, config: Any, ctx: Context) -> Training:
        """Describe the training that `fit` carries out."""
        raise NotImplementedError

    def facts(self, task: Task, trained: Trained) -> dict[str, Any]:
        """Give what `fit` leaves in the record."""
        return {"selection": trained.as_facts()}


def check_stackable(method: Method, config: TrainConfig, backbone: str) -> None:
    """Refuse what cannot be stacked, with what can."""
    alone = "leave out --stack-seeds"
    if not isinstance(method, Stackable):
        able = sorted(name for name, known in METHODS.items() if isinstance(known, Stackable))
        raise UsageError(
            f"seeds of {method.name} cannot be stacked: its fit is more than one training",
            f"{alone}, or name only methods that can: {', '.join(able)}",
        )
    if backbone not in LENETS:
        raise UsageError(
            f"seeds with the backbone {backbone} cannot be stacked: it fills a core by itself",
            f"{alone}, or name only datasets whose backbone is {' or '.join(LENETS)}",
        )
    if config.scheduler == "plateau":
        raise UsageError(
            f"seeds of {method.name} cannot be stacked with scheduler = plateau: each seed would "
            "need a learning rate of its own",
            f"{alone}, or choose another scheduler",
        )


class StackedLeNet(nn.Module):
    """The networks of several seeds as one; every parameter has the seed as its first axis."""

    def __init__(self, models: Sequence[Classifier]) -> None:
        super().__init__()
        body = models[0].backbone.body
        assert isinstance(body, LeNet)
        self.seeds = len(models)
        self.layers = (*body.children(), models[0].head)  # in a tuple: not parts of this module
        same = zip(*(model.parameters() for model in models), strict=True)
        self.stacks = nn.ParameterList(_stacked([p.detach() for p in each]) for each in same)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits, seeds x batch x classes, of images that lie `side_by_side`."""
        stacks = iter(self.stacks)
        values = images
        for layer in self.layers:
            if isinstance(layer, nn.Linear | WholeImageConv):
                if values.dim() == 4:
                    values = values.unflatten(1, (self.seeds, -1)).flatten(2).transpose(0, 1)
                weight, bias = next(stacks).flatten(2), next(stacks)
                values = torch.baddbmm(bias[:, None], values, weight.transpose(1, 2))
            elif isinstance(layer, nn.Conv2d):
                weight, bias = next(stacks).flatten(0, 1), next(stacks).flatten()
                weight = weight.contiguous(memory_format=torch.channels_last)
                values = functional.conv2d(values, weight, bias, groups=self.seeds)
            elif isinstance(layer, Pool):
                values = functional.max_pool2d(values, 2)
            elif isinstance(layer, nn.ReLU):
                values = torch.relu_(values)
            else:
                assert isinstance(layer, nn.Flatten)  # done before the first product
        return values

    @torch.no_grad()
    def write_to(self, model: nn.Module, place: int) -> None:
        """Copy one seed's weights into a network of its own."""
        for own, stack in zip(model.parameters(), self.stacks, strict=True):
            own.copy_(stack[place])


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors in plain order: a fused optimiser takes all that it sees to lie alike."""
    return torch.stack(list(tensors)).contiguous()


def side_by_side(batches: Sequence[Tensor]) -> Tensor:
    """Lay the batches of all seeds next to each other in the channels, channels last."""
    return torch.cat(list(batches), dim=1).contiguous(memory_format=torch.channels_last)


class Known(nn.Module):
    """Stands in for a seed's network where its objective asks it: the logits are there already."""

    logits: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits of the current batch."""
        return self.logits


def train_stacked(trainings: Sequence[Training]) -> list[Trained]:
    """Carry out the trainings of several seeds together, from their last checkpoints.

    Those that are behind, after a kill between two seeds' checkpoints, catch up first.
    """
    for training in trainings:
        if training.accumulate > 1 or training.average > 0 or training.parameters is not None:
            raise ValueError("stacked steps know no accumulation, averages or parameter groups")
    for training in trainings:
        training.begin()
        training.val = trainings[0].val  # the same images: transformed and kept once
    while going := [place for place, each in enumerate(trainings) if each.unfinished]:
        epoch = min(trainings[place].epoch for place in going)
        _one_epoch(trainings, [place for place in going if trainings[place].epoch == epoch])
    return [training.finish() for training in trainings]


def _one_epoch(trainings: Sequence[Training], places: Sequence[int]) -> None:
    """Take the steps of an epoch for all, and conclude it for those that are at it."""
    began = time.perf_counter()
    going = [trainings[place] for place in places]
    models: list[Any] = [training.model for training in trainings]
    stack = StackedLeNet(models)
    optimizer = build_optimizer(going[0].config, stack)
    rate = going[0].optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = rate
    _gather_state(optimizer, stack, trainings, going[0])
    drawn = [training.draw_epoch() for training in going]
    totals = _steps(stack, optimizer, going, places, drawn)
    for place, training in zip(places, going, strict=True):
        stack.write_to(training.model, place)
        _scatter_state(optimizer, stack, training, place)
    each = (time.perf_counter() - began) / len(going)
    for training, total, parts in zip(going, totals, drawn, strict=True):
        training.set_mode(training.model)
        loss = training.mean_loss(total, sum(len(part) for part in parts))
        training.conclude(loss, rate, time.perf_counter() - each)


def _steps(
    stack: StackedLeNet,
    optimizer: torch.optim.Optimizer,
    going: Sequence[Training],
    places: Sequence[int],
    drawn: Sequence[list[Tensor]],
) -> Tensor:
    """Take the steps and give the sum of each seed's losses.

    Idle places see the first seed's images; what becomes of them is thrown away.
    """
    device = going[0].ctx.device
    known = [Known() for _ in going]
    totals = torch.zeros(len(going), device=device)
    streams = (training.batches(parts) for training, parts in zip(going, drawn, strict=True))
    for batches in zip(*streams, strict=True):
        of_place = dict(zip(places, batches, strict=True))
        seen = [of_place.get(place, batches[0]).images for place in range(stack.seeds)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = stack(side_by_side(seen))
            for model, place in zip(known, places, strict=True):
                model.logits = logits[place]
            asked = zip(going, known, batches, strict=True)
            losses = torch.stack([training.loss(model, batch) for training, model, batch in asked])
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        totals += losses.detach() * len(batches[0].y)
    return totals


def _gather_state(
    optimizer: torch.optim.Optimizer,
    stack: StackedLeNet,
    trainings: Sequence[Training],
    leader: Training,
) -> None:
    """Stack the seeds' optimiser states; counts of steps, which have no seed, are the leader's."""
    states = [_states(training) for training in trainings]
    for number, parameter in enumerate(stack.stacks):
        for key, value in _states(leader)[number].items():
            each = [state[number].get(key, value) for state in states]
            whole = value.shape == parameter.shape[1:]
            optimizer.state[parameter][key] = _stacked(each) if whole else value.clone()


def _scatter_state(
    optimizer: torch.optim.Optimizer, stack: StackedLeNet, training: Training, place: int
) -> None:
    """Give a seed's own optimiser its part of the state, as if it had taken the steps itself."""
    for own, stacked in zip(training.model.parameters(), stack.stacks, strict=True):
        for key, value in optimizer.state[stacked].items():
            whole = value.shape == stacked.shape
            part = torch.empty_like(own).copy_(value[place]) if whole else value.clone()
            training.optimizer.state[own][key] = part
    training.optimizer.step()  # without gradients: all it does is tell the schedule of the steps


def _states(training: Training) -> list[dict[str, Tensor]]:
    state = training.optimizer.state
    return [state[parameter] for parameter in training.model.parameters()]
