"""A page for each registered dataset: its task, groups and counts, options, our numbers."""

from __future__ import annotations

import dataclasses
import sys

from bench.pages.docstrings import attributes, describe
from bench.pages.methods import published_runs, shown, table
from datasets.base import SPLITS, Facts
from datasets.catalogue import load_datasets
from datasets.dataset import Dataset
from methods.base import load_methods

MANY_GROUPS = 12  # from here on their counts are folded


def dataset_pages() -> dict[str, str]:
    """Return the page of every registered dataset, and one that lists them, by path in the site."""
    known = load_datasets()
    pages = {f"datasets/{name}.md": dataset_page(dataset) for name, dataset in known.items()}
    rows = []
    for name, dataset in known.items():
        facts = dataset.facts(dataset.config_type())
        counts = " / ".join(f"{facts.counts.get(split, 0):,}" for split in SPLITS)
        title = f"[{dataset.title or name}]({name}.md)"
        rows.append((title, facts.task, facts.spurious, len(facts.groups), counts))
    head = ("dataset", "task", "shortcut", "groups", "train / val / test")
    introduction = (
        "Splits and groups are fixed and never depend on the training seed. A protocol asserts its "
        "counts and stops with both numbers when files differ. [Your own data](../own-data.md) "
        "stand beside these."
    )
    return {"datasets/index.md": f"# Datasets\n\n{introduction}\n\n{table(head, rows)}\n"} | pages


def dataset_page(dataset: Dataset) -> str:
    """Return the page of a dataset under its default protocol."""
    config = dataset.config_type()
    facts = dataset.facts(config)
    described = describe(sys.modules[type(dataset).__module__].__doc__)
    lines = [f"# {dataset.title or dataset.name}", "", described.summary, ""]
    network = f"{facts.backbone}{', from ImageNet weights' if _pretrained(facts) else ''}"
    lines += [
        f"- Task: {facts.task}",
        f"- Shortcut: {facts.spurious}",
        f"- Headline metric: {'worst-group accuracy' if facts.metric == 'wga' else 'AUROC'}",
        f"- Network: {network}, at {facts.eval_transform.resolution} pixels",
        f"- Protocol: `{facts.protocol}`",
        "",
        "```sh",
        f"python -m bench data get {dataset.source or dataset.name}",
        f"python -m bench data verify {dataset.name}",
        "```",
        "",
    ]
    for title, text in described.parts.items():
        lines += [f"**{title}.** {text}", ""]
    for text in described.body:
        lines += [text, ""]
    lines += ["## Groups", "", *_groups(facts), *_options(dataset), *_numbers(dataset)]
    return "\n".join(lines)


def _pretrained(facts: Facts) -> bool:
    return facts.pretrained and not facts.backbone.startswith("lenet")


def _groups(facts: Facts) -> list[str]:
    """Return how many images each group has, by split."""
    rows = [
        (name, *(f"{counts[i]:,}" for counts in facts.group_counts.values()))
        for i, name in enumerate(facts.groups)
    ]
    total = ("all", *(f"{facts.counts[split]:,}" for split in facts.group_counts))
    shown = table(("group", *facts.group_counts), [*rows, total])
    if len(rows) < MANY_GROUPS:
        return [shown, ""]
    folded = [f"    {line}" for line in shown.splitlines()]
    return [f'??? note "{len(rows)} groups and their counts"', "", *folded, ""]


def _options(dataset: Dataset) -> list[str]:
    config = dataset.config_type
    if not dataclasses.is_dataclass(config) or not dataclasses.fields(config):
        return []
    meanings = attributes(config.__doc__)
    rows = [
        (
            f"`{dataset.name}.{field.name}`",
            getattr(config(), field.name),
            meanings.get(field.name, ""),
        )
        for field in dataclasses.fields(config)
    ]
    head = ("option", "default", "meaning")
    return ["## Options", "", "Change one with `--set`.", "", table(head, rows), ""]


def _numbers(dataset: Dataset) -> list[str]:
    """Return our results on the dataset, the highest worst group first."""
    runs = published_runs()
    runs = runs[runs["dataset"] == dataset.name]
    found = []
    for (name, version), own in runs.groupby(["method", "version"]):
        if (method := load_methods().get(str(name))) is not None:
            title = f"[{method.title}](../methods/{name}.md)"
            found.append((title, str(version), str(len(own)), *shown(dataset, own)))
    found.sort(key=lambda row: float(row[3].split()[0].replace("-", "0")), reverse=True)
    if not found:
        return ["## Our numbers", "", "No published runs yet.", ""]
    head = ("method", "version", "seeds", "worst group", "average")
    note = "Mean and standard deviation over seeds, on test images."
    return ["## Our numbers", "", note, "", table(head, found), ""]
