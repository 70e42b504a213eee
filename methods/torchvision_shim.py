"""Importing timm where torchvision was built for CUDA and torch was not.

The registry's torchvision declares operators that only a CUDA build of torch provides; on CPU-only
torch its import fails over two missing schemas. Declaring them is enough: nothing here calls them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

_keep: list[Any] = []  # a Library whose reference is dropped takes its declarations with it


def declare_missing_operators() -> None:
    """Declare the operators torchvision's import looks for, where they are missing."""
    import torch

    if torch.version.cuda is not None or _keep or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep.append(library)


def import_timm() -> ModuleType:
    """Import timm, which imports torchvision; only where a timm network is built."""
    declare_missing_operators()
    import timm

    module: ModuleType = timm
    return module
