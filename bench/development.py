"""Development seeds: what is settled on them is settled by validation.

Readings, presets and variants are developed on seeds from 100 up. A figure that was seen cannot be
unseen, so the terminal shows validation figures of such runs, of them those that the method's tier
grants, and the others only to those who open the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

FIRST_DEVELOPMENT_SEED = 100
WITHOUT_GROUPS = ("avg", "auroc")  # what of the metrics takes no group label


def shown_split(seed: int) -> Literal["val", "test"]:
    """Name the split whose figures the terminal shows of a run with this seed."""
    return "val" if seed >= FIRST_DEVELOPMENT_SEED else "test"


def shown_figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """Give the figures of a finished run that the terminal shows.

    A method without validation groups is developed by what it selects by itself, so that stands
    in the place of worst groups.
    """
    split = shown_split(record["seed"])
    found: dict[str, Any] = record["metrics"][split]
    if split == "test" or record["supervision"]["val_groups"]:
        return found
    own = {name: found[name] for name in WITHOUT_GROUPS if name in found}
    selected = record.get("selection") or {}  # a method need not choose anything
    return {"selection": selected.get("value"), **own}
