"""The page: one well-formed file, with data as text, and nothing that asks for a network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from report_records import collection, failed, given, jobs, record, tree

from bench.job import NO_DATA, Request, expand
from bench.record import Unreadable
from bench.reporting import GENERIC_TABLES, Reference
from bench.reporting.collection import Collection, Run
from bench.reporting.figure import WrittenFigure
from bench.reporting.html import (
    CURVE_POINTS,
    TableView,
    confusion,
    curves,
    html_page,
    leaf_samples,
    run_blobs,
    run_details,
    run_index,
    run_numbers,
    run_row,
    script_json,
    slices,
    standalone_svg,
    tree_details,
)
from bench.reporting.table import Cell, CellKey, Column, Row, Table
from bench.store import Store
from datasets.catalogue import get_dataset

HOSTILE = "<script>alert(1)</script>&\"'</style>"
VOID = {"meta", "link", "input", "br", "img", "circle", "line", "path"}
SVG = (
    '<?xml version="1.0"?>\n<svg width="72pt" height="36pt" viewBox="0 0 72 36">'
    "<metadata>x</metadata><defs><style>*{x:y}</style></defs>"
    '<g id="a"><use href="#a" clip-path="url(#a)"/></g></svg>'
)


class Reader(HTMLParser):
    """Checks that elements close in order, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.update([found["id"]] if found.get("id") else [])
        self.links += [str(found[name]) for name in ("src", "href", "xlink:href") if name in found]
        assert not any(name.startswith("on") for name in found)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((found, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)


def inflated(reader: Reader, prefix: str) -> list[Any]:
    """What the page inflates: the details of its runs, or its drawings."""
    texts = [
        gzip.decompress(base64.b64decode(text)).decode()
        for found, text in reader.scripts
        if str(found.get("data-blob", "")).startswith(prefix)
    ]
    return [one for text in texts for one in json.loads(text)] if prefix == "runs-" else texts


@pytest.fixture(scope="module")
def runs() -> Collection:
    """A tree, a method with a hostile name, a hostile failure, and a damaged record."""
    made = [record(job, 90.0) for job in jobs("nct", "cmnist", 2)]
    hostile = record(
        jobs("erm", "umnist", 1)[0], 88.0, method=HOSTILE, run_id="hostile-s0", standin=True
    )
    broken = Unreadable("broken-s0", Path("record.json"), HOSTILE)
    return collection(*made, hostile, failed(jobs("jtt", "umnist", 1)[0], "error", HOSTILE), broken)


@pytest.fixture(scope="module")
def page(runs: Collection, reference: Reference) -> str:
    figures = [
        WrittenFigure("one", "One", False, "caption", ("note",), SVG),
        WrittenFigure("smoke_one", "One", True, "caption", (), SVG),
        WrittenFigure("none", "None", False, reason=HOSTILE),
    ]
    shown = given(runs, reference)
    return html_page(shown, [build(shown) for build in GENERIC_TABLES], figures)


def test_page_is_well_formed(page: str) -> None:
    reader = Reader(page)
    assert not reader.open
    assert {id_: n for id_, n in reader.ids.items() if n > 1} == {}


def test_page_asks_for_nothing(page: str) -> None:
    links = Reader(page).links
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_only_the_pages_own_script_may_run(page: str) -> None:
    reader = Reader(page)
    running = [text for found, text in reader.scripts if "type" not in found]
    assert len(running) == 1
    digest = base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy[1] and "default-src 'none'" in policy[1]


def test_data_is_text(page: str, runs: Collection) -> None:
    assert HOSTILE not in page and "<script>alert" not in page
    reader = Reader(page)
    assert HOSTILE in "".join(reader.text)  # escaped in the table, text once it is read
    details = {one["run_id"]: one for one in inflated(reader, "runs-")}
    assert set(details) == {run.run_id for run in runs.runs}
    assert details["hostile-s0"]["method"] == HOSTILE
    lost = next(run.run_id for run in runs.runs if not run.record.done)
    assert details[lost]["failure"]["message"] == HOSTILE
    assert "broken-s0" in "".join(reader.text) and "#run=broken-s0" not in reader.links
    index = next(json.loads(text) for found, text in reader.scripts if found.get("id") == "index")
    assert [row[0] for row in index["runs"]] == [run.run_id for run in runs.runs]
    assert HOSTILE in index["methods"]


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&amp;", "\u2028", 'a"b\\', "é"])
def test_json_cannot_end_its_element(text: str) -> None:
    written = script_json({"x": text})
    assert not set("<>&\u2028") & set(written)
    assert json.loads(written) == {"x": text}


def test_drawings_wait_compressed_until_they_are_opened(page: str) -> None:
    reader = Reader(page)
    (first,) = inflated(reader, "one")
    assert first == standalone_svg(WrittenFigure("one", "One", False, svg=SVG))
    assert first.startswith("<svg") and "<metadata" not in first
    assert "<use" not in page and 'data-drawing="smoke_one"' in page
    assert [found["data-blob"] for found, _ in reader.scripts if "data-blob" in found] == [
        *("runs-0", "one", "smoke_one")
    ]


def test_what_runs_share_is_written_once(tmp_path: Path) -> None:
    """Twelve runs differ by their seed and numbers alone: together they take little more room."""
    alone, together = (
        sum(map(len, run_blobs(given(collection(*made)))))
        for made in (
            [record(jobs("erm", "umnist", 1)[0], 80.0)],
            [record(job, 80.0 + job.seed) for job in jobs("erm", "umnist", 10)],
        )
    )
    assert together < 2.5 * alone


def test_a_cell_names_its_runs_by_number() -> None:
    place = {f"r{number}": number for number in range(12)}
    cell = CellKey().averaged([(1.0, f"r{number}") for number in (3, 1, 2, 9, 11, 10, 5)])
    assert run_numbers(cell, place) == "1-3 5 9-11"
    assert run_numbers(replace(cell, run_ids=("not here", "r0")), place) == "0"


def test_the_index_writes_common_texts_once() -> None:
    made = [record(job, 80.123456789) for job in jobs("nct", "umnist", 3)]
    index = run_index(collection(*made).runs)
    assert index["methods"] == ["NCT"] and index["datasets"] == ["UMNIST"]
    assert [row[1:4] for row in index["runs"]] == [[0, 0, seed] for seed in range(3)]
    assert index["runs"][0][4] == 80.1235 and index["runs"][0][10] == 1


def view(*columns: tuple[str, float | None], **changes: Any) -> TableView:
    """A table of one row with a column for each dataset and number."""
    cells = tuple(
        Cell("measured", CellKey("erm", name, "wga"), mean=mean, reason="" if mean else "not run")
        for name, mean in columns
    )
    titles = tuple(Column("WGA", name) for name, _ in columns)
    return TableView.of(Table("t", "T", "c", ("Method",), titles, (Row(("ERM",), cells),)))


def test_datasets_without_runs_are_folded_away() -> None:
    found = view(("umnist", 90.0), ("celeba", None), ("isic", None))
    assert found.folded_columns == (False, True, True) and not found.empty
    assert found.folded == ("CelebA", "ISIC")
    assert found.heads == [("umnist", False, 1), ("celeba", True, 1), ("isic", True, 1)]
    assert view(("umnist", 90.0), ("cmnist", 1.0)).folded == ()


def test_a_table_without_any_run_is_shown_whole_and_marked() -> None:
    found = view(("umnist", None), ("celeba", None))
    assert found.empty and found.folded_columns == (False, False)


def test_rows_of_datasets_without_runs_are_folded_away() -> None:
    rows = tuple(
        Row((name,), (CellKey("nct", name, "wga").averaged([(9.0, "r")]),), name)
        if name == "umnist"
        else Row((name,), (CellKey("nct", name, "wga").empty("not run"),), name)
        for name in ("waterbirds", "umnist")
    )
    found = TableView.of(Table("t", "T", "c", ("Dataset",), (Column("WGA"),), rows))
    assert [(name, folded) for name, folded, _ in found.sections] == [
        *(("waterbirds", True), ("umnist", False))
    ]


def test_slices_have_sizes_and_accuracies_by_split() -> None:
    rows = [("val", 0, 0, 1), ("val", 1, 0, 1), ("test", 0, 0, 1), ("test", 1, 1, 3)]
    table = pd.DataFrame(rows, columns=["split", "y", "pred", "leaf"])
    assert slices(table) == [[1, 2, 50.0, 1, 100.0], [3, 0, None, 1, 100.0]]
    assert slices(table.assign(leaf=-1)) == [] and slices(table.drop(columns="leaf")) == []


def test_curves_are_thinned_and_keep_their_end() -> None:
    count = 5 * CURVE_POINTS + 3
    table = pd.DataFrame({"stage": ["a"] * 10 + ["b"] * (count - 10), "loss": range(count)})
    table["selection"] = None
    found = curves(table)
    assert len(found["epochs"]) <= CURVE_POINTS + 1
    assert found["epochs"][0] == 1 and found["epochs"][-1] == count
    assert found["series"] == {"loss": [float(e - 1) for e in found["epochs"]]}
    assert found["stages"] == [(0, "a"), (10, "b")]


def test_confusion_counts_predictions_by_true_group() -> None:
    made = record(jobs("erm", "umnist", 1)[0], 90.0)
    rows = [("test", 0, 0, 0), ("test", 0, 0, 1), ("test", 1, 2, 1), ("val", 1, 1, 0)]
    table = pd.DataFrame(rows, columns=["split", "y", "group", "pred"])
    found = confusion(table, made)
    assert found["test"] == [["digits_0_4", 0, [1, 1]], ["digit_8", 1, [0, 1]]]
    assert found["val"] == [["digits_5_9_not_8", 1, [1, 0]]]


def test_a_tree_keeps_what_was_captured_by_node() -> None:
    job = jobs("nct", "umnist", 1)[0]
    grown = tree(job, (40.0, 90.0))
    grown["iterations"][1]["capture"] = {"digit_8": {"5-9:H": 75.0, "5-9:E": 25.0}}
    found: Any = tree_details(record(job, 90.0, details={"any_key": grown}))
    assert found["levels"][1]["captured"] == [[], [], [(2, 25.0)], [(2, 75.0)]]
    assert found["groups"][2] == "digit_8" and found["chosen_iteration"] == 2


def test_a_tree_that_says_less_is_shown_with_what_it_says() -> None:
    levels = [{"leaves": ["a", "b"], "node_counts": [1, 2]}]
    made = record(jobs("erm", "umnist", 1)[0], 9.0, details={"mine": {"iterations": levels}})
    found: Any = tree_details(made)
    assert found["levels"][0]["logit"] == [(None, None)] * 2
    assert found["levels"][0]["wga"] is None and found["chosen_iteration"] == 1


@pytest.mark.parametrize(
    "details",
    [
        {},
        {"x": 1},
        {"x": {"iterations": [3]}},
        {"x": {"iterations": [{"leaves": ["a"], "node_counts": "many"}]}},
        {"x": {"iterations": [{"leaves": ["a"], "node_counts": [1], "capture": {"no": {"a": 1}}}]}},
    ],
)
def test_other_details_are_no_tree(details: dict[str, Any]) -> None:
    assert tree_details(record(jobs("erm", "umnist", 1)[0], 9.0, details=details)) is None


def test_a_failed_run_has_details_without_metrics(runs: Collection) -> None:
    lost = next(run for run in runs.runs if not run.record.done)
    details: Any = run_details(lost)
    assert details["failure"]["message"] == HOSTILE and "metrics" not in details


def test_the_list_shows_no_test_figure_of_a_development_seed(tmp_path: Path) -> None:
    job = jobs("erm", "isic", 1)[0]
    row = run_row(Run(record(job, 90.0), tmp_path, "published"))
    assert (row["worst"], row["average"], row["digits"]) == (0.9, 92.0, 3)
    developed = run_row(Run(record(job, 90.0, seed=100), tmp_path, "left out"))
    assert (developed["worst"], developed["average"]) == (None, None)


def test_the_list_of_runs_shows_none_either() -> None:
    (job,) = expand(Request(("erm",), ("umnist",), (100,), NO_DATA))
    found = collection(record(jobs("erm", "umnist", 1)[0], 62.0), record(job, 62.0))
    rows = map(run_row, found.runs)
    shown = {row["seed"]: (row["worst"], row["average"], row["kind"]) for row in rows}
    assert shown == {0: (62.0, 64.0, "published"), 100: (None, None, "left out")}


def test_a_page_without_a_paper_mentions_none() -> None:
    shown = given(collection())
    page = html_page(shown, [build(shown) for build in GENERIC_TABLES], [])
    assert "of the paper" not in page and "not in the paper" not in page


def test_leaves_show_images_of_the_run_they_belong_to(digits_root: Path, tmp_path: Path) -> None:
    job = expand(Request(("nct",), ("cmnist",), (0,), digits_root))[0]
    dataset = get_dataset("cmnist")
    labels = dataset.load(digits_root, dataset.config_type()).splits["test"].labels
    predictions = pd.DataFrame(
        {"id": labels.ids, "split": "test", "group": labels.groups, "leaf": labels.y * 2}
    )
    store = Store(tmp_path)
    made = record(job, 50.0)
    store.write(made, predictions=predictions)
    run = Run(made, store.runs / made.run_id, "smoke")
    found = leaf_samples([run], digits_root)[run.run_id]
    assert set(found) <= {0, 2, 4, 6, 8}
    url, sample, group = found[4][0]
    assert group.startswith("digits_4_5/")
    assert int(labels.y[labels.ids == sample][0]) == 2
    with Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) as image:
        assert image.size == (28, 28) and image.mode == "RGB"
    other = replace(made, job=replace(job, fingerprint="another"))
    assert leaf_samples([Run(other, run.folder, "smoke")], digits_root) == {}
    assert leaf_samples([run], None) == {}
