"""The report under results/ is what today's code makes of the runs beside it."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from bench import paper
from bench.paper.campaigns import CAMPAIGNS
from bench.reporting import ReportInput, collect, make_tables
from bench.reporting.collection import Collection
from bench.reporting.latex import table_source
from bench.reporting.names import dataset_title, method_title
from bench.resources import published_folder
from bench.store import Store

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[3] / "results"
REPORT = published_folder() / "report"
PAPER_ABLATIONS = {
    "ablation_trainable": "Scope",
    "abl_split": "Heads",
    "abl_minsamples": "Merging",
    "aux_sweep": "Auxiliary loss",
}
COUNTED = {"dataset_summary", "group_distributions"}  # say what is on disk, which differs


@pytest.fixture(scope="module")
def runs() -> Collection:
    return collect(Store(published_folder()), paper.variant_specs())


def test_the_committed_tables_are_rendered_again_from_the_committed_runs(
    runs: Collection, tmp_path: Path
) -> None:
    given = ReportInput(runs, tmp_path, paper.reference())
    tables = make_tables(given, paper.TABLES)
    committed = REPORT / "tables"
    assert {path.stem for path in committed.iterdir()} == {table.label for table in tables}
    for table in tables:
        if table.label not in COUNTED:
            assert (committed / f"{table.label}.csv").read_text() == table.to_csv()
            assert (committed / f"{table.label}.tex").read_text() == table_source(table)


def test_the_committed_page_shows_every_published_run(runs: Collection) -> None:
    page = (REPORT / "index.html").read_text()
    published = runs.of_kind("published")
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
    states = {r.run_id: r.provenance.git for r in Store(published_folder()).records()}
    assert states
    lost = [name for name, git in states.items() if git.commit not in history or git.dirty]
    assert lost == []


def committed(table: str) -> list[dict[str, str]]:
    """Read a table of the committed report, cell by cell."""
    with (REPORT / "tables" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page_rows() -> list[str]:
    """What the results page has to show: ours, the paper's and the verdict, for every cell."""
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
            words = [dataset_title(dataset), method_title(method), ours[0]["n"]]
            for cell in ours:
                paper = cells.get((dataset, method, cell["metric"], "paper"), {})
                known = bool(paper.get("mean"))
                verdict = verdicts.get((dataset, method, cell["metric"]), "") if known else ""
                words += [cell["text"], paper["text"] if known else "-", verdict]
            rows.append(f"| {' | '.join(words)} |")
    return rows


def ablation_rows() -> list[str]:
    """The same of the ablations, and what the depth rule chose beside what the test set did."""
    rows = []
    for campaign in CAMPAIGNS.values():
        if campaign.table not in PAPER_ABLATIONS:
            continue
        cells = committed(campaign.table)
        for dataset in ("umnist", "cmnist"):
            own = [cell for cell in cells if cell["dataset"] == dataset]
            for reported in (cell for cell in own if cell["source"] == "paper"):
                name, ours = reported["variant"], [c for c in own if c["source"] == "measured"]
                as_published, *by_rule = [
                    cell for cell in ours if cell["variant"].split(";")[0] == name
                ]
                words = [
                    *(PAPER_ABLATIONS[campaign.table], dataset_title(dataset), f"`{name}`"),
                    *(as_published["n"], as_published["text"], reported["text"]),
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
