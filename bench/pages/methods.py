"""A page for each registered method: idea, what it may see, settings with sources, our numbers."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from bench.api import load_results
from bench.pages.docstrings import attributes, describe
from datasets.catalogue import get_dataset, load_datasets
from datasets.dataset import Dataset
from methods.base import Method, load_methods
from methods.presets import Sourced, read_presets

if TYPE_CHECKING:
    import pandas as pd

SHOWN_METRICS = 2  # of a dataset: its headline and the next


def method_pages() -> dict[str, str]:
    """Return the page of every registered method, and one that lists them, by path in the site."""
    methods = sorted(load_methods().values(), key=lambda method: (method.order, method.name))
    pages = {f"methods/{method.name}.md": method_page(method) for method in methods}
    rows = [(f"[{m.title}]({m.name}.md)", *_seen(m), idea_of(m)) for m in methods]
    head = ("method", "sees training groups", "sees validation groups", "interpretable", "idea")
    introduction = (
        "A method sees the group labels of a split only where its tier says so; the harness "
        "enforces it. Interpretable: it names the latent group of an image when it predicts. Every "
        "page here is made from the method's file."
    )
    return {"methods/index.md": f"# Methods\n\n{introduction}\n\n{table(head, rows)}\n"} | pages


def method_page(method: Method) -> str:
    """Return the page of a method."""
    described = describe(docstring_of(method))
    trains, validates, interpretable = _seen(method)
    lines = [f"# {method.title}", "", idea_of(method), ""]
    lines += [
        f"- Sees the groups of training images: **{trains}**",
        f"- Sees the groups of validation images: **{validates}**",
        f"- Names the latent group of an image when it predicts: **{interpretable}**",
        f"- Version: {method.version_of(method.config_type())}",
        "",
        "```sh",
        f"python -m bench run --methods {method.name} --datasets cmnist --seeds 1",
        "```",
        "",
    ]
    if "Paper" in described.parts:
        lines += [f"**Source.** {described.parts['Paper']}", ""]
    if described.body:
        lines += ["## How it works", "", *_paragraphs(described.body)]
    numbers = numbers_of(method)
    lines += ["## Our numbers", "", *(numbers or ["No published runs yet.", ""])]
    lines += ["## What differs from the authors' way", ""]
    lines += [described.parts.get("Deviations", "Nothing that we know of."), ""]
    for title, text in described.parts.items():
        if title.startswith("Version"):
            lines += [f"**{title}.** {text}", ""]
    lines += _settings(method)
    return "\n".join(lines)


def numbers_of(method: Method) -> list[str]:
    """Return a table of a method's published results, a row a dataset; empty without any."""
    runs = published_runs()
    runs = runs[runs["method"] == method.name]
    rows = []
    for dataset in load_datasets().values():
        own = runs[runs["dataset"] == dataset.name]
        for version, seeds in own.groupby("version"):
            rows.append(
                (dataset.title or dataset.name, version, len(seeds), *shown(dataset, seeds))
            )
    if not rows:
        return []
    head = ("dataset", "version", "seeds", "worst group (ISIC: AUROC)", "average")
    note = "Mean and standard deviation over seeds, on test images, under the paper's settings."
    return [note, "", table(head, rows), ""]


def shown(dataset: Dataset, runs: pd.DataFrame) -> list[str]:
    """Return the first metrics of a dataset's tables over runs, as text."""
    facts = dataset.facts(dataset.config_type())
    metrics = (dataset.table_metrics or (facts.metric, "avg"))[:SHOWN_METRICS]
    return [mean_text(runs.get(f"test_{metric}")) for metric in metrics]


def mean_text(values: Any) -> str:
    """Return mean and standard deviation of what is known."""
    known = [] if values is None else [float(value) for value in values.dropna()]
    if not known:
        return "-"
    digits = 3 if max(known) <= 1 and min(known) > 0 else 1
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


@cache
def published_runs() -> pd.DataFrame:
    """Return the published runs of main tables: the paper's settings, nothing changed."""
    runs = load_results("published")
    main = runs[(runs["variant"] == "") & (runs["preset"] == "paper") & ~runs["quick"]]
    plain = [get_dataset(name) for name in main["dataset"].unique() if name in load_datasets()]
    protocols = {one.name: one.facts(one.config_type()).protocol for one in plain}
    return main[main["protocol"] == main["dataset"].map(protocols)]


def _settings(method: Method) -> list[str]:
    """Return what can be set, and each preset's values with where they come from."""
    config = method.config_type
    meanings: dict[str, str] = {}
    for base in reversed(inspect.getmro(config)):
        meanings |= attributes(base.__doc__)
    lines = ["## Settings", ""]
    if dataclasses.is_dataclass(config):
        rows = [
            (f"`{method.name}.{field.name}`", _default(field), meanings.get(field.name, ""))
            for field in dataclasses.fields(config)
        ]
        lines += [
            "Change one with `--set`.",
            "",
            table(("setting", "default", "meaning"), rows),
            "",
        ]
    for dataset in load_datasets().values():
        preset = read_presets(dataset.name).get(method.name, {})
        if not preset:
            continue
        lines += [f'??? note "On {dataset.title or dataset.name}: values and their sources"', ""]
        shown = table(("setting", "value", "source"), _preset_rows(preset))
        lines += [f"    {line}" for line in shown.splitlines()]
        lines += [""]
    return lines


def _preset_rows(preset: Mapping[str, Sourced], prefix: str = "") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for knob, entry in preset.items():
        if isinstance(entry.value, Mapping):
            plain = ", ".join(f"{name} = {_value(value)}" for name, value in entry.value.items())
            rows.append((f"`{prefix}{knob}`", plain, entry.source))
        else:
            rows.append((f"`{prefix}{knob}`", _value(entry.value), entry.source))
    return rows


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return _value(field.default)
    return "" if field.default_factory is dataclasses.MISSING else "see its own settings"


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_value(one) for one in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, "") else str(value)


def _seen(method: Method) -> tuple[str, str, str]:
    tier = method.supervision(method.config_type())
    words = {True: "yes", False: "no"}
    flags = (tier.train_groups, tier.val_groups, tier.interpretable)
    trains, validates, interpretable = (words[flag] for flag in flags)
    return trains, validates, interpretable


def docstring_of(method: Method) -> str | None:
    """Return the docstring of the file that a method is in."""
    return sys.modules[type(method).__module__].__doc__


def idea_of(method: Method) -> str:
    """Return the idea of a method in a sentence: by its file, and its package if it has one."""
    described = describe(docstring_of(method))
    package = type(method).__module__.rpartition(".")[0]
    if described.body or package.count(".") == 0:
        return described.summary or f"{method.title}."
    more = describe(sys.modules[package].__doc__).summary
    return f"{described.summary.rstrip('.')}: {more[:1].lower()}{more[1:]}"


def _paragraphs(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in (text, "")]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in cells)]
    return "\n".join(f"| {line} |" for line in lines)
