"""How images are brought to a network whose weights expect them in a certain way.

Weights are trained on images of one normalisation, one filter and one crop, which timm keeps with
each set of weights. Where a dataset's protocol fixes its own, that holds and the difference is
reported; a user's own data takes the network's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from datasets.base import Facts
from datasets.config import Values, build_config
from datasets.transforms import Interpolation, RandomResizedCrop, ResizedCentreCrop, Transform
from datasets.weights_source import FETCHED_BACKBONES
from methods.backbones import SMALL_NETWORKS
from methods.torchvision_shim import import_timm

OUR_RECIPES = dict.fromkeys(FETCHED_BACKBONES, "resnet50.tv_in1k")
"""By a network's name the weights that are meant here, where timm means others by it."""
TOLERANCE = 0.01  # of crops: 96 pixels cannot be 0.875 of a whole number


@dataclass(frozen=True)
class NetworkInput:
    """What a network's weights expect of an image.

    Attributes:
        crop: side of the central crop by that of the resized image, in evaluation.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation = "bilinear"
    crop: float = 1.0

    def plain(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @staticmethod
    def from_plain(values: object) -> NetworkInput:
        """Read it back."""
        assert isinstance(values, dict)
        return build_config(NetworkInput, values, "backbone.input")

    def describe(self) -> str:
        """Return it as a sentence has it."""
        return (
            f"mean {_numbers(self.mean)}, std {_numbers(self.std)}, {self.interpolation} resizing "
            f"and the central {self.crop:.3g} of the side"
        )

    def differences(self, other: NetworkInput) -> list[str]:
        """Describe where this differs from another, which is named second."""
        found = [
            f"{name} {_numbers(mine)} instead of {_numbers(theirs)}"
            for name, mine, theirs in (
                ("mean", self.mean, other.mean),
                ("std", self.std, other.std),
            )
            if max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) > 1e-3
        ]
        if self.interpolation != other.interpolation:
            found.append(f"{self.interpolation} instead of {other.interpolation} resizing")
        if abs(self.crop - other.crop) > TOLERANCE:
            found.append(f"the central {self.crop:.3g} instead of {other.crop:.3g} of the side")
        return found


def _numbers(values: tuple[float, ...]) -> str:
    same = len({*values}) == 1
    return " ".join(f"{value:g}" for value in (values[:1] if same else values))


def expected_input(name: str, channels: int) -> NetworkInput | None:
    """Return what a network's weights expect by timm's configuration, if timm knows.

    It is known for colour images; other channels have no ImageNet.
    """
    if name in SMALL_NETWORKS or channels != 3:
        return None
    timm = import_timm()
    known = timm.get_pretrained_cfg(OUR_RECIPES.get(name, name))
    if known is None:
        return None
    found = timm.data.resolve_data_config(pretrained_cfg=known.to_dict(), verbose=False)
    return NetworkInput(
        tuple(found["mean"]),
        tuple(found["std"]),
        "bicubic" if found["interpolation"] == "bicubic" else "bilinear",
        float(found["crop_pct"]),
    )


def given_input(facts: Facts) -> NetworkInput | None:
    """Return what a dataset brings its images to; none for rows of features."""
    look = facts.eval_transform
    if facts.rows or not isinstance(look.cut, ResizedCentreCrop):
        return None
    crop = look.resolution / look.cut.resize
    return NetworkInput(look.mean, look.std, look.interpolation, crop)


def input_for(facts: Facts, name: str) -> NetworkInput | None:
    """Return what a network expects where that is not what the dataset brings its images to.

    Small images are looked at whole: the crop is that of photographs.
    """
    given = given_input(facts)
    if given is None or (name in OUR_RECIPES and not given.differences(PAPERS)):
        return None  # the second without asking timm, which takes seconds to import
    wanted = expected_input(name, facts.channels)
    if wanted is None:
        return None
    if not isinstance(facts.train_transform.cut, RandomResizedCrop):
        wanted = replace(wanted, crop=given.crop)
    return wanted if wanted.differences(given) else None


PAPERS = NetworkInput((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear", 0.875)
"""What photographs are brought to here, and torchvision's ResNet-50 expects."""


def with_input(facts: Facts, backbone: Values) -> Facts:
    """Return the facts with images brought to a network as its resolved settings say."""
    if "input" not in backbone:
        return facts
    wanted = NetworkInput.from_plain(backbone["input"])

    def seen(look: Transform) -> Transform:
        resized = look.cut
        if isinstance(resized, ResizedCentreCrop):
            resized = ResizedCentreCrop(max(look.resolution, round(look.resolution / wanted.crop)))
        return replace(
            look,
            cut=resized,
            mean=wanted.mean,
            std=wanted.std,
            interpolation=wanted.interpolation,
        )

    return replace(
        facts,
        train_transform=seen(facts.train_transform),
        eval_transform=seen(facts.eval_transform),
    )
