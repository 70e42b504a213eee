"""Reading lists, seeds and settings from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from datasets.errors import UsageError


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read `5` as 0..4, and `3,7` or `3,` as exactly those."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part]
    if not numbers or not all(part.isdigit() for part in numbers):
        raise UsageError(f"--seeds must be a count or a list but got '{text}'", "e.g. 5 or 3,7")
    if len(parts) == 1:
        if int(numbers[0]) < 1:
            raise UsageError("--seeds must ask for at least one seed", "e.g. --seeds 1")
        return tuple(range(int(numbers[0])))
    return tuple(dict.fromkeys(int(part) for part in numbers))


def parse_names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Read a comma-separated list; `all` means every known name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("an empty list of names", f"choose from {', '.join(known)}, or all")
    return tuple(dict.fromkeys(n for name in names for n in (known if name == "all" else [name])))


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Read `owner.knob=value` pairs; a knob of a method's first stage is `owner.stage.knob`."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key.count(".") not in (1, 2) or not all(key.split(".")):
            raise UsageError(f"--set {text}: expected OWNER.KNOB=VALUE", "e.g. --set erm.lr=0.01")
        overrides[key] = value
    return overrides


def overrides_without(overrides: Mapping[str, str], owners: Set[str]) -> dict[str, str]:
    """Leave out what belongs to methods or datasets that are not concerned."""
    return {key: value for key, value in overrides.items() if key.split(".")[0] not in owners}
