"""A step of Correct-n-Contrast's second stage as its authors take it, written anew.

One set at a time: either side encodes its first sample with the negatives and once more with the
positives, cross-entropy encodes all roles again in chunks, every loss goes back at once, and the
gradients of all sets add up to those of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from methods.backbones import Classifier
from methods.cnc import ROLES


def exponentials(model: Classifier, images: Tensor, temperature: float) -> Tensor:
    """Encode some images; compare the first with each of the others."""
    features = model.backbone(images)
    similarity = functional.cosine_similarity(features[0].view(1, -1), features[1:], dim=1)
    return torch.exp(similarity / temperature)


def side(model: Classifier, images: Tensor, per_role: int, temperature: float) -> Tensor:
    """Contrast the first image with the positives after it and with the negatives at the end."""
    negatives = exponentials(
        model, images[[0, *range(len(images) - per_role, len(images))]], temperature
    )
    positives = exponentials(model, images[: 1 + per_role], temperature)
    below = negatives.sum(0, keepdim=True) + positives.sum(0, keepdim=True)
    return -(torch.log(positives) - torch.log(below)).mean()


def official_step(
    model: Classifier,
    images: Tensor,
    y: Tensor,
    per_role: int,
    temperature: float,
    weight: float,
    chunk: int,
    generator: torch.Generator,
) -> float:
    """Add a step's gradients to the model's, and give its loss: the mean over its sets."""
    sets = list(zip(images.split(ROLES * per_role), y.split(ROLES * per_role), strict=True))
    total = 0.0

    def back(loss: Tensor) -> float:
        loss.backward()
        return float(loss.item())

    for own, labels in sets:
        anchors, positives, negatives, easy = own.split(per_role)
        for first, wanted, unwanted in (
            (anchors[:1], positives, negatives),
            (positives[:1], anchors, easy),
        ):
            stacked = torch.vstack((first, wanted, unwanted))
            total += back(side(model, stacked, per_role, temperature) * weight / len(sets))
        order = torch.randperm(len(own), generator=generator)
        for part in order.split(chunk):
            entropy = functional.cross_entropy(model(own[part]), labels[part])
            total += back(entropy * (1 - weight) * (len(part) / len(own)) / len(sets))
    return total
