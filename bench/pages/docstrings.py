"""What the docstring of a method or dataset says, in the parts that a page shows.

The first paragraph begins with the name or a title; then come, as our files have it, `Paper: ...`
with `Supervision: ...` at its end, `Deviations: ...` and `Version N: ...`; what else there is
explains how it works.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

PARTS = re.compile(r"^(Paper|Deviations|Version \d+[^:]{0,60}):\s", re.MULTILINE)
SUPERVISION = re.compile(r"\s*Supervision: .*?\.(?=\s|$)(?!\s*\()", re.DOTALL)
ENTRY = re.compile(r"^    (\w[\w, ]*): (.*)$")


@dataclass(frozen=True)
class Described:
    """A docstring in parts.

    Attributes:
        summary: its first sentence, without the name.
        parts: by title: Paper, Deviations, Version 2 and so on.
        body: the paragraphs that explain.
    """

    summary: str
    parts: Mapping[str, str] = field(default_factory=dict)
    body: tuple[str, ...] = ()


def describe(docstring: str | None) -> Described:
    """Take a docstring apart; what has no docstring is described by nothing."""
    text = inspect.cleandoc(docstring or "")
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if not paragraphs:
        return Described("")
    first, *others = paragraphs
    parts: dict[str, str] = {}
    body = []
    for paragraph in others:
        found = [*PARTS.finditer(paragraph)]
        if not found:
            body.append(_joined(paragraph))
            continue
        if before := _joined(paragraph[: found[0].start()]):
            body.append(before)
        ends = [*(one.start() for one in found[1:]), len(paragraph)]
        for one, end in zip(found, ends, strict=True):
            parts[one.group(1)] = _capitalised(_joined(paragraph[one.end() : end]))
    if "Paper" in parts:
        parts["Paper"] = SUPERVISION.sub("", parts["Paper"]).strip()
    name, colon, rest = _joined(first).partition(": ")
    summary = rest if colon and len(name) < 40 else _joined(first)
    return Described(_capitalised(summary), parts, tuple(body))


def attributes(docstring: str | None) -> dict[str, str]:
    """Return what the section `Attributes` of a docstring says, by name."""
    text = inspect.cleandoc(docstring or "")
    _, found, section = text.partition("Attributes:\n")
    entries: dict[str, str] = {}
    name = ""
    for line in section.splitlines() if found else []:
        if entry := ENTRY.match(line):
            name = entry.group(1)
            entries[name] = entry.group(2)
        elif line.startswith("        ") and name:
            entries[name] += f" {line.strip()}"
        elif line.strip():
            break
    return {one.strip(): text for names, text in entries.items() for one in names.split(",")}


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _joined(text: str) -> str:
    return " ".join(text.split())
