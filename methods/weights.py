"""Where fetched ImageNet weights lie."""

from __future__ import annotations

from pathlib import Path

# The weights of the torchvision recipe the field's papers start from; `bench data get weights`
# fetches the first, or the second where the first cannot be had.
FETCHED = {"resnet50": ("resnet50.tv_in1k.safetensors", "resnet50-0676ba61.pth")}


def find_weights(root: Path, backbone: str) -> Path | None:
    """Find fetched weights of a backbone below the data root."""
    for name in FETCHED.get(backbone.removesuffix(".tv_in1k"), ()):
        path = root / "weights" / name
        if path.is_file():
            return path
    return None
