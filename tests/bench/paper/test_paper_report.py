"""The paper's tables and figures as a whole, of a store that is empty, partial, or full."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import paper_tex
import pytest
from report_records import jobs, record

from bench import paper
from bench.reporting import GENERIC_FIGURES, ReportInput
from bench.reporting.figure import WrittenFigure, write_figures
from bench.reporting.latex import table_source
from bench.reporting.table import Table

Report = dict[str, Table]
MakeInput = Callable[..., ReportInput]
IMAGES = ("attribution", "attribution_paired")  # these need a model and images
IN_PAPER = {
    *("main_results", "dataset_summary", "group_distributions", "preprocessing", "hyperparams"),
    *("logit_stats", "margins", "training_time", "depth_ablation", "depth_diagnostics"),
    *("pwga_corr", "ablation_trainable", "abl_split", "abl_minsamples", "aux_sweep"),
}


def test_the_fifteen_tables_of_the_paper_are_there(empty_report: Report) -> None:
    assert {label for label, table in empty_report.items() if table.in_paper} == IN_PAPER
    assert len(empty_report) == len(paper.TABLES)


def test_every_table_says_what_its_numbers_mean(empty_report: Report) -> None:
    for table in empty_report.values():
        assert table.caption and table.uncertainty and table.selection


@pytest.mark.parametrize("kind", ["empty_report", "full_report"])
def test_no_cell_is_empty_without_a_reason(kind: str, request: pytest.FixtureRequest) -> None:
    for table in request.getfixturevalue(kind).values():
        for cell in table.cells():
            assert cell.mean is not None or cell.label or cell.reason, (table.label, cell.key)


def numbers_of_the_paper(tex: str) -> dict[tuple[str, int], tuple[str, str, bool]]:
    """Read mean, spread and mark of the shaded rows of a main table rendered here."""
    found = {}
    method = ""
    for line in tex.splitlines():
        parts = [part.strip() for part in line.removesuffix(r"\\").split("&")]
        if len(parts) != 16:
            continue
        method = parts[0].removeprefix(r"\rowcolor{gray!12}").strip() or method
        if parts[4] != "paper":
            continue
        for place, text in enumerate(parts[5:]):
            number = re.match(r"(?:\\textbf\{)?([\d.]+)", text)
            if number:
                spread = re.search(r"pm\$([\d.]+)", text)
                mark = "^{*}" in text
                found[method, place] = (number[1], spread[1] if spread else "", mark)
    return found


def test_the_papers_main_table_is_regenerated_cell_by_cell(empty_report: Report) -> None:
    """From `results/paper` alone, through the LaTeX rendering, against the paper's own source."""
    found = numbers_of_the_paper(table_source(empty_report["main_results"]))
    names = {name: title.removesuffix(" (Ours)") for title, name in paper_tex.METHODS.items()}
    expected = {
        (names[row["method"]], paper_tex.MAIN.index((row["dataset"], row["metric"]))): (
            row["mean"],
            row["std"],
            row["sourced"] == "1",
        )
        for row in paper_tex.main_results(paper_tex.source())
    }
    assert len(found) == 95
    assert found == expected


def test_a_variant_made_here_is_a_row_of_the_papers_table_that_says_so(
    paper_input: MakeInput,
) -> None:
    made = [record(job, 95.0) for job in jobs("nct_plus", "umnist")]
    given = paper_input(*made, *(record(job, 92.0) for job in jobs("nct", "umnist")))
    main_results, main_differences, *_ = (build(given) for build in paper.TABLES[:2])
    own = [row for row in main_results.rows if row.header[0].startswith("NCT+")]
    assert [(row.header[0], row.source) for row in own] == [("NCT+ (not in the paper)", "measured")]
    assert own[0].section == "No group labels"
    notes = main_results.notes
    assert any("NCT+" in note and "validation class labels" in note for note in notes)
    (cell,) = [c for c in own[0].cells if (c.key.dataset, c.key.metric) == ("umnist", "wga")]
    assert cell.mean == 95.0 and cell.best
    names = [row.header[0] for row in main_differences.rows]
    assert "NCT" in names and not any(name.startswith("NCT+") for name in names)


def test_stand_in_and_quick_runs_stay_in_a_section_of_their_own(paper_input: MakeInput) -> None:
    job = jobs("nct", "umnist")[0]
    given = paper_input(
        record(job, 11.0, standin=True, protocol="paper-standin-600-0"),
        record(jobs("erm", "umnist")[0], 22.0, quick=True),
    )
    ids = {run.run_id for run in given.runs.runs}
    shown = {}
    for build in paper.TABLES:
        table = build(given)
        shown[table.label] = {run_id for cell in table.cells() for run_id in cell.run_ids}
    assert shown.pop("smoke_runs") == ids
    assert not any(ids & own for own in shown.values())


def test_every_figure_is_drawn(drawn_figures: tuple[Path, list[WrittenFigure]]) -> None:
    out, figures = drawn_figures
    published = {figure.name: figure for figure in figures if not figure.smoke}
    generic = {spec.name for spec in GENERIC_FIGURES}
    assert set(published) | generic == {spec.name for spec in paper.FIGURES}
    for name, figure in published.items():
        if name in IMAGES:
            assert figure.reason and not (out / f"{name}.svg").exists()
            continue
        assert not figure.reason and figure.caption, name
        assert ET.fromstring((out / f"{name}.svg").read_text()).tag.endswith("svg")


def test_smoke_runs_are_drawn_apart_without_the_papers_numbers(
    drawn_figures: tuple[Path, list[WrittenFigure]],
) -> None:
    smoke = {figure.name: figure for figure in drawn_figures[1] if figure.smoke}
    assert all(name.startswith("smoke_") for name in smoke) and "smoke_theory" not in smoke
    published = {figure.name: figure for figure in drawn_figures[1] if not figure.smoke}
    for name in ("depth_curves", "capture_rates_2"):
        assert "not results" in smoke[f"smoke_{name}"].svg
        assert "the paper" not in smoke[f"smoke_{name}"].svg + smoke[f"smoke_{name}"].caption
    assert "the paper's text" in published["capture_rates_2"].svg
    assert "the paper's" in published["depth_curves"].caption


def test_an_empty_store_gives_reasons(paper_input: MakeInput, tmp_path: Path) -> None:
    (tmp_path / "proxy.svg").write_text("of an earlier report")
    of_runs = [spec for spec in paper.FIGURES if spec.of_runs]
    figures = write_figures(paper_input(), of_runs, tmp_path, ("svg",))
    assert len(figures) == len(paper.FIGURES) - 1  # the theory shows no runs
    assert all(figure.reason and not figure.svg for figure in figures)
    assert list(tmp_path.iterdir()) == []


def test_campaigns_can_be_named_without_torch() -> None:
    code = (
        "import sys, bench.paper; bench.paper.CAMPAIGNS; print({'torch','pandas'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
