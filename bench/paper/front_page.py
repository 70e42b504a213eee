"""What the README and the results page say in numbers: made from the published runs.

The pages have blocks between `<!-- begin: NAME -->` and `<!-- end: NAME -->`; `python -m
bench.paper.front_page` writes them, and the README's picture, anew. A test fails where a page says
something else than the runs do.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.api import load_results
from bench.pages.methods import idea_of
from bench.paired import compare
from bench.paper.campaigns import CAMPAIGNS
from bench.paper.numbers import paper_by
from bench.reporting.names import dataset_title, method_title
from bench.reporting.statistics import seed_interval
from bench.resources import published_folder
from bench.store import Store
from datasets.base import SPLITS
from datasets.catalogue import load_datasets
from methods.base import get_method, load_methods

TREE = Path(__file__).resolve().parents[2]
PICTURE = Path("docs/images/cmnist.svg")
SHORTCUT, RARE = "cmnist", "umnist"  # where a colour gives the class away; with one rare digit
METHOD, PLUS, PLAIN = "nct", "nct_plus", "erm"
BIASED = "cmnist.protocol=biased_val"
FAILED = 10.0  # a worst group of at most so many percent is nothing learnt of it
ABLATIONS = {
    "ablation_trainable": "Scope",
    "abl_split": "Heads",
    "abl_minsamples": "Merging",
    "aux_sweep": "Auxiliary loss",
}


@dataclass(frozen=True)
class Score:
    """The worst-group accuracy of a method on a dataset, over its published seeds."""

    method: str
    version: int
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def text(self) -> str:
        """Mean and standard deviation."""
        if len(self.values) < 2:
            return f"{self.mean:.1f}"
        return f"{self.mean:.1f} ± {statistics.stdev(self.values):.1f}"

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% t-interval of the mean, within what an accuracy can be."""
        low, high = seed_interval(self.values)
        if low is None or high is None:
            return self.mean, self.mean
        return max(0.0, low), min(100.0, high)

    @property
    def sees(self) -> str:
        """Which group labels the method sees: of training, of validation, or none."""
        tier = get_method(self.method).supervision(get_method(self.method).config_type())
        return "training" if tier.train_groups else "validation" if tier.val_groups else "none"


@cache
def scores(dataset: str, variant: str = "") -> dict[str, Score]:
    """Return every method's published score, of the version with most seeds, the best first."""
    runs = load_results("published")
    runs = runs[(runs["dataset"] == dataset) & (runs["variant"] == variant) & ~runs["quick"]]
    found: dict[str, Score] = {}
    for (method, version), own in runs.groupby(["method", "version"]):
        if method not in load_methods():
            continue
        score = Score(str(method), int(str(version)), tuple(own.sort_values("seed")["test_wga"]))
        before = found.get(score.method)
        if before is None or len(score.values) >= len(before.values):
            found[score.method] = score
    return dict(sorted(found.items(), key=lambda entry: -entry[1].mean))


def findings() -> list[str]:
    """Return what the runs say, the paper's method first: where it wins, loses and fails."""
    return [
        line
        for line in (_shortcut(), _rare(), _biased(), _against_the_paper(), _not_run(), _how())
        if line
    ]


def in_short() -> list[str]:
    """Return one sentence: where the paper's method wins against plain training, and where not."""
    parts = []
    for dataset in (SHORTCUT, RARE):
        found = scores(dataset)
        if {METHOD, PLAIN} <= found.keys():
            ours, plain = found[METHOD].mean, found[PLAIN].mean
            parts.append(
                f"on {dataset_title(dataset)} it {_against_plain(dataset)} {method_title(PLAIN)}, "
                f"{ours:.1f} to {plain:.1f}"
            )
    text = "; ".join(parts)
    return [f"Accuracy in the worst group: {text}."] if text else []


def _against_plain(dataset: str) -> str:
    """Return what the seeds show of the paper's method against plain training, as a verb."""
    gap = compare(f"{METHOD}-{dataset}", f"{PLAIN}-{dataset}")
    if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        return "is within seed noise of"
    return "beats" if gap.low > 0 else "loses to"


def _named(score: Score) -> str:
    return f"{method_title(score.method)} {score.text}"


def _shortcut() -> str:
    """Return the line about the dataset whose shortcut gives the class away."""
    found = scores(SHORTCUT)
    if not {METHOD, PLUS, PLAIN} <= found.keys():
        return ""
    others = [s for s in found.values() if s.method not in (METHOD, PLUS, PLAIN)]
    blind = next((s for s in others if s.sees == "none"), None)
    seeing = next((s for s in others if s.sees != "none"), None)
    best = [
        _named(s) + f" {how}"
        for s, how in ((blind, "without group labels"), (seeing, "with them"))
        if s
    ]
    return (
        f"**{dataset_title(SHORTCUT)}**, worst of 25 groups: {_named(found[PLAIN])}, "
        f"{_named(found[METHOD])}, {_named(found[PLUS])} (NCT with calibrated leaves; ours, not "
        f"the paper's). The best others: {', '.join(best)}."
    )


def _rare() -> str:
    """Return the line about the dataset with one rare digit, and the method's place there."""
    found = scores(RARE)
    if not {METHOD, PLAIN} <= found.keys():
        return ""
    place, total = [*found].index(METHOD) + 1, len(found)
    rank = f"the lowest of {total}" if place == total else f"number {place} of {total}"
    first = next(iter(found.values()))
    return (
        f"**{dataset_title(RARE)}**, worst of 3 groups: {_named(found[METHOD])}, {rank}; it "
        f"{_against_plain(RARE)} {_named(found[PLAIN])}. The best: {_named(first)}."
    )


def _biased() -> str:
    """Return the line about validation data that are as biased as training data."""
    found = scores(SHORTCUT, BIASED)
    failed = [_named(score) for score in found.values() if score.mean <= FAILED]
    held = [_named(score) for score in found.values() if score.mean > FAILED]
    if not found:
        return ""
    told = [f"{', '.join(failed)}: it fails"] if failed else []
    told += [f"{', '.join(held)}: it holds"] if held else []
    needs = (
        " What fails needs validation images on which the shortcut does not always hold."
        if failed
        else ""
    )
    where = dataset_title(SHORTCUT)
    old = [method_title(score.method) for score in found.values() if score.version < _today(score)]
    late = f" Runs of an earlier version: {', '.join(old)}." if old else ""
    return f"**Validation as biased as training** ({where}): {'; '.join(told)}.{needs}{late}"


def _against_the_paper() -> str:
    """Return the line that counts how our cells compare with the paper's."""
    rows = committed_table("main_differences")
    counts = Counter(row["reason"] for row in rows if row["reason"] and row["metric"] == "wga")
    words = {
        "agrees": "agree with it",
        "higher": "are higher",
        "lower": "are lower",
        "cannot tell": "have too few seeds to tell",
    }
    told = [f"{counts[word]} {text}" for word, text in words.items() if counts[word]]
    return (
        f"**Against the NCT paper**: of {sum(counts[word] for word in words)} worst groups that "
        f"both have, {', '.join(told)} (Welch's 95% interval)."
        if told
        else ""
    )


def _not_run() -> str:
    """Return the line about datasets without published runs."""
    without = [dataset_title(name) for name in load_datasets() if not scores(name)]
    return (
        f"**No published runs yet**: {', '.join(without)}. `python -m bench data get NAME` says "
        "how to get the images."
        if without
        else ""
    )


def _how() -> str:
    seeds = sorted({len(s.values) for name in load_datasets() for s in scores(name).values()})
    span = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    earlier = []
    for dataset in load_datasets():
        old = [method_title(s.method) for s in scores(dataset).values() if s.version < _today(s)]
        earlier += [f"{', '.join(sorted(old))} on {dataset_title(dataset)}"] if old else []
    late = ""
    if earlier:
        late = f" Of an earlier version until all runs of today's are made: {'; '.join(earlier)}."
    return f"Mean ± standard deviation over {span} seeds, on test images.{late}"


def _today(score: Score) -> int:
    method = get_method(score.method)
    return method.version_of(method.config_type())


def committed_table(name: str) -> list[dict[str, str]]:
    """Read a table of the published report, cell by cell; empty without it."""
    path = published_folder() / "report" / "tables" / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main_table() -> list[str]:
    """Return ours, the paper's and the verdict, for every cell of the main table that has runs."""
    cells = {
        (cell["dataset"], cell["method"], cell["metric"], cell["source"]): cell
        for cell in committed_table("main_results")
    }
    verdicts = {
        (cell["dataset"], cell["method"], cell["metric"]): cell["reason"]
        for cell in committed_table("main_differences")
    }
    rows = [
        "| dataset | method | seeds | WGA | paper | | average | paper | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dataset in load_datasets():
        for method in dict.fromkeys(key[1] for key in cells):
            ours = [
                cells.get((dataset, method, metric, "measured"), {}) for metric in ("wga", "avg")
            ]
            if not all(cell.get("mean") for cell in ours):
                continue
            words = [dataset_title(dataset), method_title(method), ours[0]["n"]]
            for cell in ours:
                paper = cells.get((dataset, method, cell["metric"], "paper"), {})
                known = bool(paper.get("mean"))
                verdict = verdicts.get((dataset, method, cell["metric"]), "") if known else ""
                words += [cell["text"], paper["text"] if known else "-", verdict]
            rows.append(f"| {' | '.join(words)} |")
    return rows


def arithmetic() -> list[str]:
    """Return how many runs of the main table can be repeated to the bit on other processors."""
    shown = {name for row in committed_table("main_results") for name in row["run_ids"].split()}
    counts: dict[str, Counter[bool]] = {}
    for record in Store(published_folder()).records():
        if record.run_id in shown:
            settings = record.provenance.environment.numerics or {}
            own = counts.setdefault(record.job.dataset, Counter())
            own[settings.get("choice") == "pinned"] += 1
    told = [
        f"{counts[name][True]} of {counts[name].total()} on {dataset_title(name)}"
        for name in load_datasets()
        if name in counts
    ]
    if not told:
        return []
    native = (
        "The others used native kernels, which repeat exactly on the same type of processor; means "
        "may mix both ([lab notes](../docs/lab-notes.md))."
    )
    return [
        "Runs of the table below whose arithmetic is pinned, so that they repeat to the bit on "
        f"every x86 processor with AVX2 that we tried: {', '.join(told)}.",
        *([native] if any(own[False] for own in counts.values()) else []),
    ]


def ablation_table() -> list[str]:
    """Return the ablations as published and as the depth rule chose, beside the paper's."""
    rows = [
        "| ablation | dataset | variant | seeds | WGA, as published | paper | | WGA, depth rule |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for campaign in CAMPAIGNS.values():
        if campaign.table not in ABLATIONS:
            continue
        cells = committed_table(campaign.table)
        for dataset in (RARE, SHORTCUT):
            own = [cell for cell in cells if cell["dataset"] == dataset]
            for reported in (cell for cell in own if cell["source"] == "paper"):
                name, ours = reported["variant"], [c for c in own if c["source"] == "measured"]
                as_published, *by_rule = [
                    cell for cell in ours if cell["variant"].split(";")[0] == name
                ]
                words = [
                    *(ABLATIONS[campaign.table], dataset_title(dataset), f"`{name}`"),
                    *(as_published["n"], as_published["text"], reported["text"]),
                    *(as_published["reason"], by_rule[0]["text"] if by_rule else ""),
                ]
                rows.append(f"| {' | '.join(words)} |")
    return rows


def method_table() -> list[str]:
    """Return the registered methods: which groups they see, and their idea in a line."""
    rows = ["| Method | T | V | I | What it does |", "|---|---|---|---|---|"]
    for method in sorted(load_methods().values(), key=lambda one: (one.order, one.name)):
        if method.distribution is not None:
            continue
        tier = method.supervision(method.config_type())
        flags = (tier.train_groups, tier.val_groups, tier.interpretable)
        cells = (f"`{method.name}`", *("x" if flag else " " for flag in flags), idea_of(method))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def dataset_table() -> list[str]:
    """Return the registered datasets: shortcut, classes, groups and counts."""
    rows = [
        "| Dataset | Shortcut | Classes | Groups | Train / val / test |",
        "|---|---|---|---|---|",
    ]
    for name, dataset in load_datasets().items():
        facts = dataset.facts(dataset.config_type())
        counts = " / ".join(f"{facts.counts.get(split, 0):,}" for split in SPLITS)
        sizes = f"{len(facts.classes)} | {len(facts.groups)}"
        rows.append(
            f"| {dataset.title} (`{name}`) | {facts.spurious.lower()} | {sizes} | {counts} |"
        )
    return rows


def bullets() -> list[str]:
    """Return the findings as a list."""
    return [f"- {line}" for line in findings()]


BLOCKS: Mapping[str, Mapping[str, Callable[[], Sequence[str]]]] = {
    "README.md": {
        "short": in_short,
        "results": bullets,
        "methods": method_table,
        "datasets": dataset_table,
    },
    "results/README.md": {"findings": bullets, "arithmetic": arithmetic, "main": main_table},
    "docs/lab-notes.md": {"ablations": ablation_table},
}
"""The generated blocks of each page."""


def with_blocks(text: str, blocks: Mapping[str, Callable[[], Sequence[str]]]) -> str:
    """Return a page with its blocks as the runs have them now."""
    for name, lines in blocks.items():
        mark = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        body = "\n".join(lines()).replace("\\", r"\\")
        text, count = mark.subn(rf"\g<1>{body}\n\g<2>", text)
        if count != 1:
            raise ValueError(f"the block '{name}' is there {count} times")
    return text


def stale_pages(tree: Path = TREE) -> list[str]:
    """Return the pages whose blocks are not what the runs say."""
    pages = {name: (tree / name).read_text(encoding="utf-8") for name in BLOCKS}
    return [name for name, text in pages.items() if with_blocks(text, BLOCKS[name]) != text]


def picture_is_stale(tree: Path = TREE) -> bool:
    """Return whether the picture was drawn from other numbers; it holds those it shows."""
    return picture_text() not in (tree / PICTURE).read_text(encoding="utf-8")


def picture_text() -> str:
    """Return what the picture shows, in words: its description for those who cannot see it."""
    shown = [f"{method_title(name)} {score.text}" for name, score in scores(SHORTCUT).items()]
    return f"Worst-group accuracy on {dataset_title(SHORTCUT)}: {', '.join(shown)}."


def papers_scores() -> dict[str, float]:
    """Return the paper's worst groups on the dataset of the picture, by method."""
    rows = paper_by("main_results", "dataset", "metric", "method")
    return {
        method: float(row["mean"])
        for (dataset, metric, method), row in rows.items()
        if (dataset, metric) == (SHORTCUT, "wga") and row["mean"]
    }


def refresh(tree: Path = TREE) -> list[Path]:
    """Write the pages' blocks and the picture anew; return what was written."""
    from bench.paper.front_picture import draw

    written = [tree / PICTURE]
    draw(tree / PICTURE)
    for name, blocks in BLOCKS.items():
        text = (tree / name).read_text(encoding="utf-8")
        (tree / name).write_text(with_blocks(text, blocks), encoding="utf-8")
        written.append(tree / name)
    return written


if __name__ == "__main__":
    for path in refresh():
        sys.stdout.write(f"{path}\n")
