"""Figures: drawn from whatever the store holds, or a reason; and nothing else is touched."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from report_records import collection, facts_of, given, jobs, record, stage

from bench.reporting import GENERIC_FIGURES, Reference
from bench.reporting.collection import Collection
from bench.reporting.figure import (
    Drawn,
    FigureInput,
    FigureSpec,
    SkippedFigure,
    WrittenFigure,
    draw_pareto,
    draw_training_time,
    house_style,
    metrics_of,
    new_figure,
    shown_groups,
    write_figures,
)

Figures = tuple[Path, list[WrittenFigure]]


def input_of(runs: Collection, **changes: Any) -> FigureInput:
    return FigureInput(tuple(runs.of_kind("published")), **changes)


def test_every_figure_is_drawn(drawn_figures: Figures) -> None:
    out, figures = drawn_figures
    published = {figure.name: figure for figure in figures if not figure.smoke}
    assert set(published) == {spec.name for spec in GENERIC_FIGURES}
    for name, figure in published.items():
        assert not figure.reason and figure.caption
        svg = (out / f"{name}.svg").read_text()
        assert ET.fromstring(svg).tag.endswith("svg") and svg == figure.svg


def test_figures_are_written_as_pdf_as_well(tmp_path: Path) -> None:
    spec = FigureSpec("bare", "Bare", lambda shown: Drawn(new_figure(1, 1), "Nothing."))
    (figure,) = write_figures(given(collection()), [spec], tmp_path)
    assert (tmp_path / "bare.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "bare.svg").read_text() == figure.svg


def test_smoke_runs_are_drawn_apart_and_say_so(drawn_figures: Figures) -> None:
    smoke = [figure for figure in drawn_figures[1] if figure.smoke]
    assert smoke and all(figure.name.startswith("smoke_") for figure in smoke)
    pictures = {figure.name: figure.svg for figure in smoke if not figure.reason}
    assert "smoke_pareto" in pictures
    for svg in pictures.values():
        assert "not results" in svg and "paper" not in svg
    assert all("stand-in" not in figure.svg for figure in drawn_figures[1] if not figure.smoke)


def test_an_empty_store_gives_reasons(tmp_path: Path) -> None:
    (tmp_path / "pareto.pdf").write_text("of an earlier report")

    def skip(shown: FigureInput) -> Drawn:
        raise SkippedFigure("fixed")

    of_no_runs = FigureSpec("fixed", "Fixed", skip, of_runs=False)
    figures = write_figures(given(collection()), [*GENERIC_FIGURES, of_no_runs], tmp_path)
    assert [figure.name for figure in figures] == [
        *(spec.name for spec in GENERIC_FIGURES),
        "fixed",
    ]
    assert all(figure.reason and not figure.svg for figure in figures)
    assert list(tmp_path.iterdir()) == []


def test_drawing_changes_nothing_for_others(stored: Collection) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with house_style():
        draw_pareto(input_of(stored))
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_a_papers_numbers_are_hollow_and_named(stored: Collection, reference: Reference) -> None:
    beside = draw_pareto(input_of(stored, reference=reference))
    hollow = [
        tuple(map(float, (line.get_xdata()[0], line.get_ydata()[0])))
        for axes in beside.figure.axes
        for line in axes.lines
        if line.get_markerfacecolor() == "none" and len(line.get_xdata())
    ]
    assert hollow == [(95.0, 93.5)] and "Hollow" in beside.caption
    assert "Hollow" not in draw_pareto(input_of(stored)).caption


def test_axes_follow_the_metrics_of_a_dataset(stored: Collection) -> None:
    assert metrics_of("umnist") == ("avg", "wga")
    assert metrics_of("isic") == ("auroc", "auroc_nonpatch")
    result = draw_pareto(input_of(stored))
    titles = {axes.get_title(): axes.get_ylabel() for axes in result.figure.axes}
    assert titles["UMNIST"] == "worst-group accuracy (%)"
    assert titles["ISIC"] == "non-patch AUROC"
    assert "(ISIC: non-patch against overall AUROC)" in result.caption


def test_many_groups_are_shown_by_their_sets() -> None:
    made = record(jobs("erm", "cmnist", 1)[0], 90.0)
    assert set(shown_groups(made).values()) == set(facts_of("cmnist").group_sets)
    few = record(jobs("erm", "umnist", 1)[0], 90.0)
    assert set(shown_groups(few).values()) == set(few.test.group_accuracy)


def test_times_are_stand_alone_and_split_by_sharing(stored: Collection) -> None:
    result = draw_training_time(input_of(stored))
    axes = result.figure.axes[0]
    assert {round(patch.get_width(), 6) for patch in axes.patches} == {30.0, 15.0}
    assert "made up, 1 thread" in result.notes[0]


def test_times_that_are_not_known_are_not_drawn() -> None:
    bare = record(jobs("erm", "umnist")[0], 90.0, stages=[stage("fit", "a", 1.0, cpu_seconds=None)])
    with pytest.raises(SkippedFigure, match="processor's seconds"):
        draw_training_time(input_of(collection(bare)))


def test_bars_of_the_means_are_t_intervals(stored: Collection) -> None:
    result = draw_pareto(input_of(stored))
    panel = next(axes for axes in result.figure.axes if axes.get_title() == "UMNIST")
    across = panel.containers[0].lines[2][0].get_segments()[0]
    # Two seeds, 1 apart: a standard error of 0.5 and a t-quantile of 12.7.
    assert across[1][0] - across[0][0] == pytest.approx(12.706, abs=1e-3)
    assert "95% t-interval" in result.caption


def test_names_are_text_not_formulas() -> None:
    made = record(jobs("erm", "umnist", 1)[0], 90.0, method="a$_{b}<script>&$", standin=True)
    result = draw_pareto(FigureInput(collection(made).runs, smoke=True))
    texts = [text.get_text() for text in result.figure.legends[0].get_texts()]
    assert r"a\$_{b}<script>&\$" in texts
    result.figure.savefig(io.BytesIO(), format="svg")
