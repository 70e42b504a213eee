"""The report under results/ is what today's code makes of the runs beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import paper
from bench.reporting import ReportInput, collect, make_tables
from bench.reporting.collection import Collection
from bench.reporting.latex import table_source
from bench.resources import published_folder
from bench.store import Store

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[3] / "results"
REPORT = published_folder() / "report"
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
