"""What a figure is: a drawing with its caption, or the reason why there is none.

Figures are made without pyplot and inside an `rc_context`, so that drawing one changes nothing for
whoever else uses matplotlib in the same process. Colours are seaborn's colour-blind palette; every
colour comes with a hatch or a marker, so that a print in grey says the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report.collection import Run
from bench.report.names import METHODS, dataset_name
from datasets.catalogue import DATASETS

if TYPE_CHECKING:  # matplotlib is slow to import, and only the report needs it
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches: a page's text width
HATCHES = ("", "////", "..", "\\\\\\\\", "xx", "--", "||", "++", "//", "\\\\")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
LINES = ("-", "--", ":", "-.")
INK, FAINT, PAPER_INK = "#222222", "#9a9a9a", "#000000"
MANY_GROUPS = 8
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.05,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",  # text stays text: smaller, searchable
    "svg.hashsalt": "nct-bench",  # the same runs give the same file
}


@dataclass(frozen=True)
class Drawn:
    """A figure and what it has to say for itself."""

    figure: Figure
    caption: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotDrawn:
    """Why a figure cannot be drawn."""

    reason: str


@dataclass(frozen=True)
class View:
    """The runs a figure may show: published ones, or trials (stand-in data, quick runs).

    Trials are never mixed with results; their figures are drawn apart, and say so.

    Attributes:
        data_root: where datasets may lie; figures that show images need it.
    """

    runs: tuple[Run, ...]
    trial: bool = False
    data_root: Path | None = None

    def by_dataset(self, method: str | None = None) -> dict[str, list[Run]]:
        """Group runs by dataset as a figure names it, datasets in the catalogue's order."""
        order = {name: place for place, name in enumerate(DATASETS)}
        chosen = [run for run in self.runs if method in (None, run.record["method"])]
        chosen.sort(key=lambda run: (order.get(run.record["dataset"], len(order)), seed_of(run)))
        grouped: dict[str, list[Run]] = {}
        for run in chosen:
            grouped.setdefault(label_of(run), []).append(run)
        return grouped

    def trees(self, depth: int = 1) -> dict[str, list[Run]]:
        """Group the NCT runs whose tree was grown to at least `depth` levels."""
        grown = {
            label: [run for run in runs if len(iterations_of(run)) >= depth]
            for label, runs in self.by_dataset("nct").items()
        }
        return {label: runs for label, runs in grown.items() if runs}

    def missing(self, shown: Sequence[str]) -> tuple[str, ...]:
        """Say which datasets a figure of published runs lacks."""
        lacking = [dataset_name(name) for name in DATASETS if dataset_name(name) not in shown]
        if self.trial or not lacking:
            return ()
        return (f"Not run yet, so not shown: {', '.join(lacking)}.",)


def label_of(run: Run) -> str:
    """Name a run's dataset, with what keeps it from being a result."""
    marks = [name for name, key in (("stand-in", "standin"), ("quick", "quick")) if run.record[key]]
    name = dataset_name(str(run.record["dataset"]))
    return f"{name} ({', '.join(marks)})" if marks else name


def seed_of(run: Run) -> tuple[int, str]:
    """Order runs by seed."""
    return int(run.record["seed"]), run.run_id


def iterations_of(run: Run) -> list[dict[str, Any]]:
    """Give what a record keeps of each of its tree's iterations; nothing if it has no tree."""
    found: list[dict[str, Any]] = run.record.get("nct", {}).get("iterations", [])
    return found


def seeds_text(runs: Sequence[Run]) -> str:
    """Say how many seeds a panel shows."""
    return f"{len(runs)} seed" + ("s" if len(runs) != 1 else "")


def shown_groups(record: dict[str, Any]) -> dict[str, str]:
    """Map each group to the name it is shown under: its own, or its union's if there are many.

    More than eight colours cannot be told apart, so a dataset with many groups shows the unions
    it names (CMNIST: aligned and conflicting).
    """
    groups = list(record["metrics"]["test"]["group_accuracy"])
    dataset = DATASETS.get(str(record["dataset"]))
    if len(groups) <= MANY_GROUPS or dataset is None:
        return {group: group for group in groups}
    unions = dataset.facts(dataset.config_type()).unions
    of = {groups[number]: name for name, own in unions.items() for number in own}
    return {group: of.get(group, group) for group in groups}


def in_order(methods: set[str]) -> list[str]:
    """Put methods in the paper's order, others after them."""
    return [*(name for name in METHODS if name in methods), *sorted(methods - set(METHODS))]


def plain(text: object) -> str:
    """Keep text of the data from being read as a formula."""
    return str(text).replace("$", r"\$")


def palette(count: int) -> list[Any]:
    """Give colours that a colour-blind reader can tell apart."""
    import seaborn

    return list(seaborn.color_palette("colorblind", max(count, 1)))


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the style for a while."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make a figure that nobody but its holder knows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def grid(count: int, columns: int, height: float, width: float = WIDTH) -> tuple[Figure, list[Any]]:
    """Make a figure of `count` panels in rows, and return its axes in order."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = new_figure(width * max(columns / 3, 0.62) if columns < 3 else width, height * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]
