"""`slices` from the command line, on published runs whose data is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from records import published_run

Cli = Callable[..., Any]
NOWHERE = ("--data-root", os.devnull)
TREE, CLUSTERS = published_run("nct-umnist-s0"), published_run("george-umnist-s1")


def test_page_table_and_json(cli: Cli, tmp_path: Path) -> None:
    told = cli("slices", TREE, "--out", tmp_path / "page", "--json", *NOWHERE)
    assert told.code == 0 and told.json["split"] == "val"
    first = told.json["slices"][0]
    assert told.json["worst"] == (first["name"] if first["worse"] else None)
    page = Path(told.json["page"]).read_text("utf-8")
    assert page.startswith("<!doctype html>") and first["name"] in page
    table = pd.read_csv(told.json["csv"])
    assert table["name"].tolist() == [one["name"] for one in told.json["slices"]]
    assert table["accuracy"][0] == first["accuracy"]["accuracy"]
    assert table["test_n"].sum() == 10_000


def test_the_terminal_shows_the_worst_first(cli: Cli, tmp_path: Path) -> None:
    told = cli("slices", TREE, "--out", tmp_path, *NOWHERE)
    first, *_, last = pd.read_csv(tmp_path / "slices.csv")["name"]
    assert told.code == 0 and "points worse" in told.out and "index.html" in told.err
    assert told.out.index(first) < told.out.index(last)
    told = cli("slices", CLUSTERS, "--out", tmp_path, *NOWHERE)
    assert told.code == 0 and "--keep-models" in told.err


def test_a_slice_is_exported(cli: Cli, tmp_path: Path) -> None:
    ids, table = tmp_path / "ids.txt", tmp_path / "new" / "table.csv"
    for file in (ids, table):
        told = cli("slices", TREE, "--export", "worst", file, *NOWHERE)
        assert (told.code, told.out) == (0, "") and "ids of slice" in told.err
    members = pd.read_csv(table)
    assert ids.read_text().split() == members["id"].astype(str).tolist()
    assert {*members["split"]} == {"train", "val", "test"}
    assert {"y", "pred", "confidence"} <= set(members)


def test_wrong_use_says_what_to_do(cli: Cli, tmp_path: Path) -> None:
    wrong = {
        ("erm-umnist-s0",): "has no slices",
        (TREE, "--export", "north", tmp_path / "x"): "choose from ",
        ("exmap-umnist-s0", "--split", "test"): "give --split val",
        ("nothing-like-this",): "no run matches",
    }
    for words, reason in wrong.items():
        told = cli("slices", *words, *NOWHERE)
        assert told.code == 2 and reason in told.err, words
    assert list(tmp_path.iterdir()) == []
