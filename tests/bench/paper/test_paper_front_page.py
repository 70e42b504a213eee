"""README, results page and lab notes say what the published runs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_records import jobs, record

from bench.paper import front_page
from bench.paper.front_picture import draw
from bench.store import Store

REMEDY = "run: python -m bench.paper.front_page"


def test_pages_are_not_stale() -> None:
    assert front_page.stale_pages() == [], REMEDY
    assert not front_page.picture_is_stale(), REMEDY


def test_a_stale_page_is_noticed_and_refreshed(tmp_path: Path) -> None:
    for name in front_page.BLOCKS:
        text = (front_page.TREE / name).read_text(encoding="utf-8")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace(" ± ", " ± 9"), encoding="utf-8")
    assert front_page.stale_pages(tmp_path) == [
        "README.md",
        "results/README.md",
        "docs/lab-notes.md",
    ]
    front_page.refresh(tmp_path)
    assert front_page.stale_pages(tmp_path) == []
    assert not front_page.picture_is_stale(tmp_path)


def test_a_page_without_its_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="'short' is there 0 times"):
        front_page.with_blocks("nothing", front_page.BLOCKS["README.md"])


def test_wins_and_losses_are_both_named() -> None:
    scores = front_page.scores("umnist")
    first, *_, last = scores.values()
    assert first.mean >= last.mean
    text = "\n".join(front_page.findings())
    place = [*scores].index("nct") + 1
    rank = f"the lowest of {len(scores)}" if place == len(scores) else f"number {place} of"
    assert f"NCT {scores['nct'].text}, {rank}" in text
    biased = front_page.scores("cmnist", front_page.BIASED)
    assert all(score.text in text for score in biased.values())


def test_runs_are_counted_by_their_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    made = (*jobs("erm", "umnist", 3), *jobs("erm", "cmnist", 2))
    records = [record(job, 50.0) for job in made]
    first = records[0].provenance
    pinned = replace(first.environment, numerics={"choice": "pinned"})
    records[0] = replace(records[0], provenance=replace(first, environment=pinned))
    shown = " ".join(one.run_id for one in records[:4])  # the last is in no table
    monkeypatch.setattr(front_page, "committed_table", lambda name: [{"run_ids": shown}])
    monkeypatch.setattr(Store, "records", lambda store: iter(records))
    pinned_line, native_line = front_page.arithmetic()
    assert "1 of 3 on UMNIST, 0 of 1 on CMNIST" in pinned_line
    assert "native kernels" in native_line


def test_readme_is_short_and_its_pictures_are_there() -> None:
    text = (front_page.TREE / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 250
    assert any(line.startswith("pip install -e . && python -m bench run") for line in lines)
    assert any(line.startswith("pip install -e '.[test]' && python -m pytest") for line in lines)


def test_the_picture_says_its_numbers(tmp_path: Path) -> None:
    draw(tmp_path / "picture.svg")
    assert front_page.picture_text() in (tmp_path / "picture.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("low", "high", "verb"),
    [(1.0, 3.0, "beats"), (-3.0, -1.0, "loses to"), (-1.0, 3.0, "is within seed noise of")],
)
def test_a_lead_is_called_one_where_the_seeds_show_it(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float, verb: str
) -> None:
    gap = SimpleNamespace(low=low, high=high)
    monkeypatch.setattr(front_page, "compare", lambda ours, plain: gap)
    assert f"on CMNIST it {verb} ERM" in front_page.in_short()[0]
