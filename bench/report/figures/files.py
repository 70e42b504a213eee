"""Drawing every figure and writing it as PDF and SVG."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.files import atomic_file
from bench.report.collection import Collection
from bench.report.figures import FIGURES, FigureKind
from bench.report.figures.drawing import NotDrawn, View, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_DATE = {"pdf": {"CreationDate": None, "ModDate": None}, "svg": {"Date": None}}
TRIAL_PREFIX = "trial_"


@dataclass(frozen=True)
class WrittenFigure:
    """One figure as the page and the document show it.

    Attributes:
        name: of its files, without their endings.
        trial: whether it shows stand-in data or quick runs, which are not results.
        reason: why it was not drawn, if there are no files.
    """

    name: str
    title: str
    trial: bool
    caption: str = ""
    notes: tuple[str, ...] = ()
    svg: str = ""
    reason: str = ""


def write_figures(
    runs: Collection, out: Path, data_root: Path | None = None
) -> list[WrittenFigure]:
    """Draw all figures of published runs, and apart from them those of trials if there are any.

    Files go to `out`; a figure that cannot be drawn has none, and any older one is removed: it
    would show other runs than the report beside it.
    """
    views = [View(tuple(runs.of_kind("published")), data_root=data_root)]
    trials = tuple(runs.of_kind("trial"))
    if trials:
        views.append(View(trials, trial=True, data_root=data_root))
    return [
        _write(kind, view, out)
        for view in views
        for kind in FIGURES
        if kind.of_runs or not view.trial
    ]


def _write(kind: FigureKind, view: View, out: Path) -> WrittenFigure:
    name = TRIAL_PREFIX * view.trial + kind.name
    paths = {ending: out / f"{name}.{ending}" for ending in ("pdf", "svg")}
    with house_style():
        drawn = kind.draw(view)
        if isinstance(drawn, NotDrawn):
            for path in paths.values():
                path.unlink(missing_ok=True)
            return WrittenFigure(name, kind.title, view.trial, reason=drawn.reason)
        if view.trial:
            drawn.figure.suptitle(
                "stand-in data or quick runs: not results", fontsize=8, color="0.35", style="italic"
            )
        for ending, path in paths.items():
            with atomic_file(path) as draft:
                draft.write_bytes(_bytes(drawn.figure, ending))
    svg = paths["svg"].read_text(encoding="utf-8")
    return WrittenFigure(name, kind.title, view.trial, drawn.caption, drawn.notes, svg)


def _bytes(figure: Figure, ending: str) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=ending, metadata=NO_DATE[ending])
    return content.getvalue()
