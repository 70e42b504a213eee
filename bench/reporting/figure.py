"""Figures: how one is drawn and written, or why there is none, and the two of any report.

Figures are made without pyplot and inside an `rc_context`, so that drawing one changes nothing for
other users of matplotlib in the same process. Colours are seaborn's colour-blind palette; every
colour comes with a hatch or a marker, so that a print in grey shows the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.record import Record
from bench.reporting import names
from bench.reporting.collection import Collection, Reference, ReportInput, Run, grouped
from bench.reporting.leaderboard import LABELS, leaderboard
from bench.reporting.table import Cell, CellKey
from datasets.catalogue import load_datasets
from datasets.files import atomic_file

if TYPE_CHECKING:  # slow to import, and only figures need it
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches: a page's text width
PADDING = 0.05  # inches
HATCHES = ("", "////", "..", "\\\\\\\\", "xx", "--", "||", "++", "//", "\\\\")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
LINES = ("-", "--", ":", "-.")
INK = "#222222"
MANY_GROUPS = 8  # more colours cannot be told apart
FORMATS = ("pdf", "svg")
NO_DATE = {"pdf": {"CreationDate": None, "ModDate": None}, "svg": {"Date": None}}
SMOKE_PREFIX = "smoke_"
NO_RUNS = "no finished run to show"
USUAL = ("avg", "wga")  # metrics across and up
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    **{"font.size": 8, "font.family": "sans-serif"},
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    **{"axes.titlesize": 8.5, "axes.titleweight": "bold", "axes.labelsize": 8},
    **{"axes.edgecolor": INK, "axes.linewidth": 0.7},
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6},
    **{"xtick.labelsize": 7.5, "ytick.labelsize": 7.5},
    **{"legend.fontsize": 7.5, "legend.frameon": False},
    **{"lines.linewidth": 1.3, "lines.markersize": 4.5},
    **{"hatch.linewidth": 0.5, "errorbar.capsize": 2},
    "pdf.fonttype": 42,
    "svg.fonttype": "none",  # text stays text: smaller, searchable
    "svg.hashsalt": "nct-bench",  # the same runs give the same file
}


class SkippedFigure(Exception):
    """Why a figure cannot be drawn."""


@dataclass(frozen=True)
class Drawn:
    """A figure and its caption."""

    figure: Figure
    caption: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FigureInput:
    """The runs that a figure may show: published ones, with a paper's numbers, or smoke runs.

    Smoke runs (stand-in data, quick runs) are never mixed with results; their figures are drawn
    apart, and say so.
    """

    runs: tuple[Run, ...]
    smoke: bool = False
    data_root: Path | None = None
    reference: Reference = field(default_factory=Reference)

    def by_dataset(self, method: str | None = None) -> dict[str, list[Run]]:
        """Return the runs by dataset as a figure names it, datasets in the order of tables."""
        order = {name: place for place, name in enumerate(names.dataset_names())}
        chosen = [run for run in self.runs if method in (None, run.job.method)]
        chosen.sort(key=lambda run: (order.get(run.job.dataset, len(order)), run))
        return grouped(chosen, dataset_label)

    def missing(self, shown: Sequence[str]) -> tuple[str, ...]:
        """Return a note on the datasets that a figure of published runs lacks."""
        titles = map(names.dataset_title, names.dataset_names())
        lacking = [title for title in titles if title not in shown]
        note = (f"Not run yet, so not shown: {', '.join(lacking)}.",)
        return note if lacking and not self.smoke else ()


@dataclass(frozen=True)
class FigureSpec:
    """One figure of the report."""

    name: str  # of its files
    title: str
    draw: Callable[[FigureInput], Drawn]
    of_runs: bool = True  # one that shows no runs is drawn once
    look: str = ""  # what to see in it, which its caption begins with
    first: bool = False  # the document shows it before its tables; the page has its own


@dataclass(frozen=True)
class WrittenFigure:
    """One figure as the page and the document show it, or the reason why it was not drawn."""

    name: str  # of its files, without their endings
    title: str
    smoke: bool  # it shows stand-in data or quick runs, which are not results
    caption: str = ""
    notes: tuple[str, ...] = ()
    svg: str = ""
    reason: str = ""
    look: str = ""
    first: bool = False


def write_figures(
    given: ReportInput, figures: Sequence[FigureSpec], out: Path, formats: Sequence[str] = FORMATS
) -> list[WrittenFigure]:
    """Draw all figures of published runs, and apart from them those of smoke runs if there are any.

    Files go to `out`; a figure that cannot be drawn has none, and any older one is removed: it
    would show other runs than the report beside it.
    """
    root, smoke = given.data_root, tuple(given.runs.of_kind("smoke"))
    inputs = [FigureInput(tuple(given.runs.of_main_table()), False, root, given.reference)]
    inputs += [FigureInput(smoke, True, root)] if smoke else []
    return [
        _write(spec, shown, out, formats)
        for shown in inputs
        for spec in figures
        if spec.of_runs or not shown.smoke
    ]


def _write(
    spec: FigureSpec, shown: FigureInput, out: Path, formats: Sequence[str]
) -> WrittenFigure:
    name = SMOKE_PREFIX * shown.smoke + spec.name
    with house_style():
        try:
            drawn = spec.draw(shown)
        except SkippedFigure as skipped:
            for ending in FORMATS:
                (out / f"{name}.{ending}").unlink(missing_ok=True)
            return WrittenFigure(name, spec.title, shown.smoke, reason=str(skipped))
        if shown.smoke:
            warning = "stand-in data or quick runs: not results"
            drawn.figure.suptitle(warning, fontsize=8, color="0.35", style="italic")
        drawn.figure.draw_without_rendering()  # the layout, once for all formats
        drawn.figure.set_layout_engine("none")
        box = drawn.figure.get_tightbbox().padded(PADDING)
        for ending in formats:
            how: dict[str, Any] = {"metadata": NO_DATE[ending], "bbox_inches": box}
            with atomic_file(out / f"{name}.{ending}") as draft:
                drawn.figure.savefig(draft, format=ending, **how)
    for ending in set(FORMATS) - set(formats):  # an older one would show other runs
        (out / f"{name}.{ending}").unlink(missing_ok=True)
    svg = (out / f"{name}.svg").read_text(encoding="utf-8") if "svg" in formats else ""
    shown_as = (name, spec.title, shown.smoke, drawn.caption, drawn.notes, svg)
    return WrittenFigure(*shown_as, look=spec.look, first=spec.first)


def dataset_label(run: Run) -> str:
    """Return the title of a run's dataset, with what keeps the run from being a result."""
    marks = ", ".join(run.job.labels)
    return names.dataset_title(run.job.dataset) + (f" ({marks})" if marks else "")


def seeds_text(runs: Sized) -> str:
    """Return how many seeds a panel shows."""
    return f"{len(runs)} seed" + ("s" if len(runs) != 1 else "")


def shown_groups(record: Record) -> dict[str, str]:
    """Return for each group the name it is shown under: its own, or its set's if there are many."""
    groups = list(record.test.group_accuracy)
    dataset = load_datasets().get(record.job.dataset)
    if len(groups) <= MANY_GROUPS or dataset is None:
        return {group: group for group in groups}
    sets = dataset.facts(dataset.config_type()).group_sets
    of = {groups[number]: name for name, own in sets.items() for number in own}
    return {group: of.get(group, group) for group in groups}


def escape_mathtext(text: object) -> str:
    """Return text that matplotlib does not read as a formula."""
    return str(text).replace("$", r"\$")


def palette(count: int) -> list[Any]:
    """Return colours that a colour-blind reader can tell apart."""
    import seaborn

    return list(seaborn.color_palette("colorblind", max(count, 1)))


def house_style() -> AbstractContextManager[None]:
    """Apply the style for a while."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    """Return a figure that pyplot does not know of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def grid(count: int, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure of `count` panels in rows of three, and its axes in order."""
    columns, rows = min(3, count), -(-count // 3)
    figure = new_figure(WIDTH * max(columns / 3, 0.62), height * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def draw_pareto(shown: FigureInput) -> Drawn:
    """Draw one panel a dataset, one marker a method, a paper's hollow beside ours."""
    datasets = shown.by_dataset()
    if not datasets:
        raise SkippedFigure(NO_RUNS)
    methods = names.methods_in_order({run.job.method for runs in datasets.values() for run in runs})
    styles = {
        name: {"color": colour, "marker": MARKERS[place % len(MARKERS)]}
        for place, (name, colour) in enumerate(zip(methods, palette(len(methods)), strict=True))
    }
    figure, panels = grid(len(datasets), 2.5)
    for axes, (label, runs) in zip(panels, datasets.items(), strict=True):
        _pareto_panel(axes, runs, styles, shown.reference)
        axes.set_title(label)
    handles = [
        panels[0].plot([], [], ls="", label=escape_mathtext(names.method_title(name)), **style)[0]
        for name, style in styles.items()
    ]
    hollow = ""
    if shown.reference:
        handles += panels[0].plot([], [], "o", color="0.4", mfc="none", label="hollow: paper")
        hollow = " Hollow markers: the paper's own means, not measured here."
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    others = []
    for name in names.dataset_names():
        across, up = _axis_titles(name)
        if metrics_of(name) != USUAL:
            kind = " AUROC" if across.endswith(" AUROC") else ""
            others.append(f"{names.dataset_title(name)}: {up.removesuffix(kind)} against {across}")
    exceptions = f" ({'; '.join(others)})" if others else ""
    return Drawn(
        figure,
        f"Worst-group against average test accuracy{exceptions}. "
        "Markers: mean over seeds; bars: 95% t-interval of the mean over seeds, absent with a "
        f"single seed.{hollow}",
        shown.missing(list(datasets)),
    )


def metrics_of(dataset: str) -> tuple[str, str]:
    """Return the metrics across and up: average and worst group, or its first two in tables."""
    own = names.table_metrics(dataset)
    return USUAL if own[0] == "wga" or len(own) < 2 else (own[0], own[1])


def _axis_titles(dataset: str) -> tuple[str, str]:
    """Return the titles across and up, as they stand inside a sentence."""
    if metrics_of(dataset) == USUAL:
        return "average accuracy (%)", "worst-group accuracy (%)"
    words = (names.metric_words(dataset, metric).lower() for metric in metrics_of(dataset))
    across, up = (word.replace(" auroc", " AUROC") for word in words)
    return across, up


def _pareto_panel(
    axes: Any, runs: list[Run], styles: dict[str, dict[str, Any]], reference: Reference
) -> None:
    dataset = runs[0].job.dataset
    metrics = metrics_of(dataset)
    for method, style in styles.items():
        tests = [run.record.test for run in runs if run.job.method == method]
        both = [(test.get(metrics[0]), test.get(metrics[1])) for test in tests]
        pairs = [(x, y) for x, y in both if x is not None and y is not None]
        if pairs:
            sides = zip(*pairs, strict=True)
            ours = [CellKey().averaged([(value, "") for value in side]) for side in sides]
            bars = dict(zip(("xerr", "yerr"), map(_arms, ours), strict=True))
            look = {"ms": 6, "mec": "white", "mew": 0.5, "elinewidth": 0.8}
            axes.errorbar(*(one.mean for one in ours), **bars, **look, **style)
        reported = [reference.cell(CellKey(method, dataset, metric)) for metric in metrics]
        means = [cell.mean for cell in reported if cell is not None and cell.mean is not None]
        if len(means) == len(reported):
            axes.plot(*means, mfc="none", mew=1.0, ms=5, **style)
    across, up = _axis_titles(dataset)
    axes.set(xlabel=across, ylabel=up)
    axes.margins(0.12)


def _arms(cell: Cell) -> list[list[float]] | None:
    """Return how far an interval reaches below and above its mean."""
    mean, low, high = cell.mean, cell.ci_low, cell.ci_high
    return None if mean is None or low is None or high is None else [[mean - low], [high - mean]]


def draw_training_time(shown: FigureInput) -> Drawn:
    """Draw one panel a dataset: a bar a method, its shared first stages and its own part apart."""
    runs = tuple(run for run in shown.runs if run.record.cost.cpu() is not None)
    datasets = replace(shown, runs=runs).by_dataset()
    if not datasets:
        raise SkippedFigure(f"{NO_RUNS} of which the processor's seconds are known")
    figure, panels = grid(len(datasets), 2.5)
    colours = palette(2)
    for axes, (label, own) in zip(panels, datasets.items(), strict=True):
        methods = names.methods_in_order({run.job.method for run in own})
        for place, method in enumerate(methods):
            parts = np.array([_parts(run) for run in own if run.job.method == method])
            means = parts.mean(axis=0).tolist()
            for part, name in enumerate(("first stages", "the method's own part")):
                look = {"color": colours[part], "hatch": HATCHES[part], "edgecolor": INK}
                look |= {"linewidth": 0.5, "label": name if place == 0 else None}
                axes.barh(place, means[part], 0.7, sum(means[:part]), **look)
            if len(parts) > 1:
                spread = float(np.std(parts.sum(axis=1), ddof=1))
                axes.errorbar(sum(means), place, xerr=spread, color=INK, lw=0.8)
        titles = [escape_mathtext(names.method_title(name)) for name in methods]
        axes.set_yticks(range(len(methods)), titles)
        axes.set_ylim(max(len(methods), 3) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set(title=label, xlabel="CPU-seconds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    kinds = sorted({run.record.provenance.hardware() for run in runs})
    return Drawn(
        figure,
        "Processor seconds of one run by itself, as if nothing were shared between methods: stages "
        "that other methods can share (such as a first ERM) and the method's own part; mean over "
        "seeds, whiskers: standard deviation. Auditing and evaluation are not counted.",
        (f"Measured on: {'; '.join(kinds)}.", *shown.missing(list(datasets))),
    )


def _parts(run: Run) -> tuple[float, float]:
    """Return a run's stand-alone processor seconds in shared stages and in its own part."""
    cost = run.record.cost
    own = sum(stage.cpu_seconds or 0.0 for stage in cost.stages if stage.name == "fit")
    return (cost.cpu() or 0.0) - own, own


def draw_boards(shown: FigureInput) -> Drawn:
    """Draw the first screen of the page: one panel a dataset, methods by their worst group."""
    given = ReportInput(Collection(shown.runs), Path(), shown.reference)
    boards = leaderboard(given)
    if not boards:
        raise SkippedFigure(NO_RUNS)
    columns = min(2, len(boards))
    rows = -(-len(boards) // columns)
    most = max(len(board.entries) for board in boards)
    figure = new_figure(WIDTH, rows * (0.75 + 0.2 * most))
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    figure.set_layout_engine("constrained", wspace=0.1)
    for spare in axes[len(boards) :]:
        spare.set_axis_off()
    colours, markers = palette(5), ("s", "D", "o")
    looks = [(colours[place], markers[tier]) for tier, place in enumerate((3, 4, 0))]
    for axis, board in zip(axes, boards, strict=False):
        for y, entry in enumerate(board.entries):
            colour, marker = looks[entry.labels]
            axis.errorbar(entry.mean, y, xerr=_arms(entry.cell), color=colour)
            axis.plot(entry.mean, y, color=colour, marker=marker, ms=5, clip_on=False, zorder=3)
            if entry.paper is not None and entry.paper.mean is not None:
                hollow = {"mfc": "none", "mec": INK, "ms": 5.5, "mew": 0.8, "zorder": 4}
                axis.plot(entry.paper.mean, y, "o", clip_on=False, **hollow)
            number = entry.cell.number(entry.mean)
            place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 7.5}
            axis.annotate(number, (1.02, y), annotation_clip=False, **place)
        titles = [escape_mathtext(entry.title) for entry in board.entries]
        axis.set_yticks(range(len(titles)), titles)
        for label, entry in zip(axis.get_yticklabels(), board.entries, strict=True):
            label.set_fontweight("bold" if entry.featured else "normal")
        axis.set(ylim=(len(titles) - 0.5, -0.5), xlim=(board.scale.low, board.scale.high))
        axis.grid(False, axis="y")
        unit = " (%)" if board.unit else ""
        axis.set(title=f"{board.title}, {board.seeds}", xlabel=f"{board.metric}{unit}")
    tiers = sorted({entry.labels for board in boards for entry in board.entries}, reverse=True)
    handles = [
        axes[0].plot(
            [], [], ls="", color=looks[t][0], marker=looks[t][1], label=f"sees {LABELS[t]}"
        )
        for t in tiers
    ]
    if shown.reference:
        hollow = {"mfc": "none", "mec": INK}
        title = f"{shown.reference.title}'s own number"
        handles.append(axes[0].plot([], [], "o", label=title, **hollow))
    lines = [handle for (handle,) in handles]
    figure.legend(handles=lines, loc="outside lower center", ncols=2)
    return Drawn(
        figure,
        "Methods by their worst group on the test sets, mean over seeds; bars: 95% t-interval of "
        "the mean. Numbers at the right are measured.",
    )


PARETO = FigureSpec(
    *("pareto", "Worst group against average", draw_pareto),
    look="The upper right corner is best; a method far below others of its average learnt the "
    "shortcut.",
)
TRAINING_TIME = FigureSpec(
    *("training_time", "Training time", draw_training_time),
    look="Shorter is cheaper; the shared part is paid once where several methods are run.",
)
BOARDS = FigureSpec(
    *("worst_groups", "Worst groups", draw_boards),
    look="The further right, the better a method does on the group that the shortcut hurts most; "
    "where bars overlap, the seeds at hand may not tell two methods apart.",
    first=True,
)
