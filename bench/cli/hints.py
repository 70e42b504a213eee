"""A parser whose errors suggest what was meant.

A wrong verb, option or choice gets the nearest one; names that follow each other without a comma
get it; an option that other tools have gets ours. Options are never shortened: `--seed` would
otherwise have been taken for `--seeds`, which means something else.
"""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from datasets.errors import did_you_mean

LISTS = ("--methods", "--datasets", "--seeds", "--tables")
"""The options that take several values, separated by commas."""

ELSEWHERE = {
    "--jobs": "--workers",
    "-j": "--workers",
    "--n-jobs": "--workers",
    "--epochs": "--set METHOD.epochs=N",
    "--lr": "--set METHOD.lr=VALUE",
    "--batch-size": "--set METHOD.batch_size=N",
    "--output": "--out",
    "--overwrite": "--rerun always",
    "--force": "--rerun always",
    "--dry-run": "the verb plan",
    "--smoke": "--quick",
    "--model": "--backbone",
    "--slurm": "--cluster slurm/PROFILE.toml",
}
"""What other tools call it, and what it is here."""


class HintingParser(ArgumentParser):
    """An `ArgumentParser` that says what a wrong word may have meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse; words that nothing takes are an error of the verb they were given to."""
        known, extras = super().parse_known_args(args, namespace)
        if extras:
            hint = self._hint(extras, [] if args is None else [*args])
            self.error(f"unrecognized arguments: {' '.join(extras)}{hint}")
        return known, extras

    def error(self, message: str) -> NoReturn:
        """End with what is wrong; the whole usage would hide it."""
        usage = f"usage: {self.prog} ...  ({self.prog} --help lists what it takes)"
        self.exit(2, f"{usage}\n{self.prog}: error: {message}\n")

    def _hint(self, extras: Sequence[str], given: Sequence[str]) -> str:
        """Return what the words may have meant, as the end of a sentence."""
        for option in LISTS:
            names = _values_after(option, given)
            if len(names) > 1 and {*names} & {*extras}:
                joined = ",".join(name.strip(",") for name in names)
                return f"; several are written with commas: {option} {joined}"
        known = [text for action in self._actions for text in action.option_strings]
        for word in extras:
            name = word.partition("=")[0]
            if name in ELSEWHERE and (
                ELSEWHERE[name].split()[0] in known or not ELSEWHERE[name].startswith("-")
            ):
                return f"; here that is {ELSEWHERE[name]}"
            if name.startswith("--") and (near := did_you_mean(name, known)):
                return near
        return ""

    def _check_value(self, action: Action, value: Any) -> None:
        """Refuse what is no choice, and name the nearest one."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), choices)
            listed = ", ".join(map(repr, choices))
            raise ArgumentError(action, f"invalid choice: {value!r}{near} (choose from {listed})")


def _values_after(option: str, given: Sequence[str]) -> list[str]:
    """Return the words that follow an option, up to the next one."""
    for i, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name == option:
            first = [value] if equals else []
            rest = given[i + 1 :]
            end = next((j for j, one in enumerate(rest) if one.startswith("-")), len(rest))
            return [*first, *rest[:end]]
    return []
