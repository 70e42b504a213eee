"""The report under results/ is what today's code makes of the runs beside it."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from bench.campaigns import CAMPAIGNS
from bench.report.collection import collect
from bench.report.latex import table_source
from bench.report.names import dataset_name, method_name
from bench.report.tables import all_tables
from bench.store import Store

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "results"
PAPER_ABLATIONS = {
    "ablation_trainable": "Scope",
    "abl_split": "Heads",
    "abl_minsamples": "Merging",
    "aux_sweep": "Auxiliary loss",
}
COUNTED = {"dataset_summary", "group_distributions"}  # say what is on disk, which differs


def test_the_committed_tables_are_rendered_again_from_the_committed_runs(tmp_path: Path) -> None:
    tables = all_tables(collect(Store(RESULTS)), tmp_path)
    committed = RESULTS / "report" / "tables"
    assert {path.stem for path in committed.iterdir()} == {table.label for table in tables}
    for table in tables:
        if table.label not in COUNTED:
            assert (committed / f"{table.label}.csv").read_text() == table.to_csv()
            assert (committed / f"{table.label}.tex").read_text() == table_source(table)


def test_the_committed_page_shows_every_published_run() -> None:
    page = (RESULTS / "report" / "index.html").read_text()
    published = collect(Store(RESULTS)).of_kind("published")
    assert published
    assert [run.run_id for run in published if run.run_id not in page] == []


def git(*words: str) -> str:
    """Ask git about this repository."""
    done = subprocess.run(
        ["git", "-C", RESULTS, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.skipif(not (RESULTS.parent / ".git").exists(), reason="not a git checkout")
def test_the_code_of_every_committed_run_is_in_the_history() -> None:
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a shallow clone does not have the history")
    history = set(git("rev-list", "HEAD").split())
    records = list(Store(RESULTS).records())
    assert records
    lost = [r["run_id"] for r in records if r["git"]["commit"] not in history or r["git"]["dirty"]]
    assert lost == []


def committed(table: str) -> list[dict[str, str]]:
    """Read a table of the committed report, cell by cell."""
    with (RESULTS / "report" / "tables" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page_rows() -> list[str]:
    """Say what the results page has to show: ours, the paper's and the verdict, for every cell."""
    cells = {
        (cell["dataset"], cell["method"], cell["metric"], cell["source"]): cell
        for cell in committed("main_results")
    }
    verdicts = {
        (cell["dataset"], cell["method"], cell["metric"]): cell["reason"]
        for cell in committed("main_differences")
    }
    rows = []
    for dataset in ("umnist", "cmnist"):
        for method in dict.fromkeys(key[1] for key in cells):
            ours = [cells.get((dataset, method, metric, "measured")) for metric in ("wga", "avg")]
            if not all(cell and cell["mean"] for cell in ours):
                continue
            words = [dataset_name(dataset), method_name(method), ours[0]["n"]]
            for cell in ours:
                paper = cells.get((dataset, method, cell["metric"], "paper"), {})
                known = bool(paper.get("mean"))
                verdict = verdicts.get((dataset, method, cell["metric"]), "") if known else ""
                words += [cell["text"], paper["text"] if known else "-", verdict]
            rows.append(f"| {' | '.join(words)} |")
    return rows


def ablation_rows() -> list[str]:
    """Say the same of the ablations, and what the depth rule chose beside what the test set did."""
    rows = []
    for campaign in CAMPAIGNS.values():
        if campaign.table not in PAPER_ABLATIONS:
            continue
        cells = committed(campaign.table)
        for dataset in ("umnist", "cmnist"):
            own = [cell for cell in cells if cell["dataset"] == dataset]
            for told in (cell for cell in own if cell["source"] == "paper"):
                name, ours = told["variant"], [c for c in own if c["source"] == "measured"]
                as_published, *by_rule = [
                    cell for cell in ours if cell["variant"].split(";")[0] == name
                ]
                words = [
                    *(PAPER_ABLATIONS[campaign.table], dataset_name(dataset), f"`{name}`"),
                    *(as_published["n"], as_published["text"], told["text"]),
                    *(as_published["reason"], by_rule[0]["text"] if by_rule else ""),
                ]
                rows.append(f"| {' | '.join(words)} |")
    return rows


def test_the_results_page_shows_every_cell_beside_the_papers() -> None:
    page = (RESULTS / "README.md").read_text().splitlines()
    shown = [line for line in page if line.startswith(("| UMNIST |", "| CMNIST |"))]
    assert shown == page_rows()


def test_the_results_page_shows_every_ablation_beside_the_papers() -> None:
    page = (RESULTS / "README.md").read_text().splitlines()
    starts = tuple(f"| {name} |" for name in PAPER_ABLATIONS.values())
    shown = [line for line in page if line.startswith(starts)]
    assert shown == ablation_rows()
