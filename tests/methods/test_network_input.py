"""What weights expect of images: taken for a user's own data, reported where a protocol differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from datasets.base import Facts, LoadedData
from datasets.catalogue import get_dataset
from datasets.features import RowTransform
from datasets.images import ImageBatch
from datasets.photos import IMAGENET_MEAN, IMAGENET_STD, photo_transforms
from datasets.transforms import PaddedRandomCrop, ResizedCentreCrop, Transform
from methods.network_input import NetworkInput, expected_input, input_for, with_input

LITE0 = NetworkInput((0.5,) * 3, (0.5,) * 3, "bicubic", 0.875)


@pytest.fixture
def photos() -> Facts:
    """The facts of photographs, as the paper brings them to its network."""
    dataset = get_dataset("waterbirds")
    return dataset.facts(dataset.config_type())


def test_weights_of_timm_say_what_they_expect() -> None:
    assert expected_input("tf_efficientnet_lite0", 3) == LITE0
    deit = expected_input("deit_tiny_patch16_224", 3)
    assert deit is not None
    assert (deit.mean, deit.interpolation, deit.crop) == (IMAGENET_MEAN, "bicubic", 0.9)
    assert expected_input("lenet5", 3) is None
    assert expected_input("resnet18", 1) is None  # ImageNet has no grey images


def test_the_papers_network_expects_what_the_paper_does(photos: Facts) -> None:
    """`resnet50` means torchvision's weights here, and by timm's name others."""
    assert input_for(photos, "resnet50") is None
    other = input_for(photos, "resnet50.a1_in1k")
    assert other is not None and other.crop == 0.95


def test_differences_are_told_in_words(photos: Facts) -> None:
    given = NetworkInput(IMAGENET_MEAN, IMAGENET_STD, "bilinear", 0.95)
    assert LITE0.differences(given) == [
        "mean 0.5 instead of 0.485 0.456 0.406",
        "std 0.5 instead of 0.229 0.224 0.225",
        "bicubic instead of bilinear resizing",
        "the central 0.875 instead of 0.95 of the side",
    ]
    assert LITE0.differences(LITE0) == []
    assert NetworkInput.from_plain(LITE0.plain()) == LITE0


def test_images_are_brought_to_the_network_so(photos: Facts) -> None:
    wanted = replace(LITE0, crop=0.9)
    seen = with_input(photos, {"input": wanted.plain()})
    assert seen.eval_transform.cut == ResizedCentreCrop(249)  # 224 / 0.9
    assert seen.eval_transform.interpolation == "bicubic"
    assert seen.train_transform.cut == photos.train_transform.cut
    assert seen.train_transform.mean == (0.5, 0.5, 0.5)
    white = ImageBatch(torch.full((1, 3, 9, 9), 255, dtype=torch.uint8), torch.tensor([[9, 9]]))
    assert torch.allclose(seen.eval_transform(white), torch.ones(1), atol=1e-5)
    assert with_input(photos, {"name": "resnet50"}) is photos


def test_small_images_are_looked_at_whole(photos: Facts) -> None:
    look = (32, IMAGENET_MEAN, IMAGENET_STD)
    shifted = Transform(PaddedRandomCrop(2), *look)
    small = replace(
        photos, train_transform=shifted, eval_transform=Transform(ResizedCentreCrop(32), *look)
    )
    wanted = input_for(small, "tf_efficientnet_lite0")
    assert wanted is not None and wanted.crop == 1.0
    seen = with_input(small, {"input": wanted.plain()})
    assert seen.eval_transform.cut == ResizedCentreCrop(32)


def test_rows_are_brought_to_no_network(photos: Facts, toy_data: LoadedData) -> None:
    row = RowTransform(length=4)
    rows = replace(photos, train_transform=row, eval_transform=row)
    assert input_for(rows, "tf_efficientnet_lite0") is None
    assert input_for(toy_data.facts, "resnet18") is None  # grey
    assert photo_transforms(112)[1].interpolation == "bilinear"
