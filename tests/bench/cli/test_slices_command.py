"""`slices` from the command line, on published runs whose data is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

Cli = Callable[..., Any]
NOWHERE = ("--data-root", os.devnull)


def test_page_table_and_json(cli: Cli, tmp_path: Path) -> None:
    told = cli("slices", "nct-umnist-s0", "--out", tmp_path / "page", "--json", *NOWHERE)
    assert told.code == 0 and told.json["worst"] == "5-9:H" and told.json["split"] == "val"
    page = Path(told.json["page"]).read_text("utf-8")
    assert page.startswith("<!doctype html>") and "5-9:H" in page
    table = pd.read_csv(told.json["csv"])
    assert table["name"].tolist() == [one["name"] for one in told.json["slices"]]
    first = told.json["slices"][0]
    assert table["accuracy"][0] == first["accuracy"]["accuracy"]
    assert first["worse"] and first["confirmed"] and first["test"]["difference"] < 0


def test_the_terminal_shows_the_worst_first(cli: Cli, tmp_path: Path) -> None:
    told = cli("slices", "nct-umnist-s0", "--out", tmp_path, *NOWHERE)
    assert told.code == 0
    assert told.out.index("5-9:H") < told.out.index("0-4:E") and "points worse" in told.out
    assert "index.html" in told.err
    told = cli("slices", "george-umnist-s0", "--out", tmp_path, *NOWHERE)
    assert told.code == 0 and "--keep-models" in told.err


def test_a_slice_is_exported(cli: Cli, tmp_path: Path) -> None:
    ids, table = tmp_path / "ids.txt", tmp_path / "new" / "table.csv"
    for file in (ids, table):
        told = cli("slices", "nct-umnist-s0", "--export", "worst", file, *NOWHERE)
        assert (told.code, told.out) == (0, "") and "ids of slice 5-9:H" in told.err
    members = pd.read_csv(table)
    assert ids.read_text().split() == members["id"].astype(str).tolist()
    assert len(members) == 465 + 1743 + 1365 and {"split", "y", "pred"} <= set(members)


def test_wrong_use_says_what_to_do(cli: Cli, tmp_path: Path) -> None:
    wrong = {
        ("erm-umnist-s0",): "has no slices",
        ("nct-umnist-s0", "--export", "north", tmp_path / "x"): "choose from 5-9:H",
        ("exmap-umnist-s0", "--split", "test"): "give --split val",
        ("nothing-like-this",): "no run matches",
    }
    for words, reason in wrong.items():
        told = cli("slices", *words, *NOWHERE)
        assert told.code == 2 and reason in told.err, words
    assert list(tmp_path.iterdir()) == []
