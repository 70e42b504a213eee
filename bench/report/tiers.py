"""Supervision tiers as methods declare them: the T, V and I columns, and the order of rows."""

from __future__ import annotations

from dataclasses import dataclass

from bench.report.names import METHODS
from datasets.catalogue import DATASETS
from methods.base import Supervision, load_methods
from methods.presets import preset_config

SECTIONS = (
    "Group labels in training and validation",
    "Group labels in validation",
    "No group labels",
    "Not implemented here",
)


@dataclass(frozen=True)
class Tier:
    """One method and what it declares for its presets; nothing, if it is not implemented here."""

    method: str
    declared: Supervision | None

    @property
    def section(self) -> str:
        """Name the tier."""
        if self.declared is None:
            return SECTIONS[3]
        if self.declared.train_groups:
            return SECTIONS[0]
        return SECTIONS[1 if self.declared.val_groups else 2]

    def marks(self) -> tuple[str, str, str]:
        """Give the T, V and I columns."""
        if self.declared is None:
            return ("", "", "")
        facts = (
            self.declared.train_groups,
            self.declared.val_groups,
            self.declared.interpretable,
        )
        first, second, third = ("yes" if fact else "no" for fact in facts)
        return first, second, third


def tiers() -> list[Tier]:
    """List the methods of the paper and all registered ones, tier by tier, the paper's first."""
    registered = load_methods()
    order = [*METHODS, *(name for name in registered if name not in METHODS)]
    found = [Tier(name, _declared(name) if name in registered else None) for name in order]
    return sorted(found, key=lambda tier: SECTIONS.index(tier.section))


def _declared(name: str) -> Supervision:
    """Ask a method what it may see under its presets: the most it asks for on any dataset."""
    method = load_methods()[name]
    asked = [method.supervision(preset_config(method, dataset)) for dataset in DATASETS]
    return Supervision(
        train_groups=any(one.train_groups for one in asked),
        val_groups=any(one.val_groups for one in asked),
        interpretable=any(one.interpretable for one in asked),
    )
