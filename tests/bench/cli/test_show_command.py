"""`show` and `explain` print for people, numbers first; `--json` is for programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench.cli.explain import route_in_words

Cli = Callable[..., Any]
NCT = "nct-cmnist-s0"  # a published run that keeps its model


def rows_of(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_show_begins_with_what_it_is_and_what_came_of_it(cli: Cli) -> None:
    record = cli("show", NCT, "--json").json
    told = cli("show", NCT)
    name, first, second, *_ = told.out.splitlines()
    assert name == f"{record['run_id']} (published)"
    assert first == (
        f"NCT, version {record['method_version']}, on CMNIST, seed 0; it sees no group labels."
    )
    test = record["metrics"]["test"]
    worst = min(test["group_accuracy"], key=test["group_accuracy"].get)
    assert second.startswith(f"On test images: worst group {test['wga']:.1f} ({worst}), ")
    groups = told.out.partition("Groups, worst first")[2].partition("Last")[0]
    assert rows_of(groups)[0][:2] == [worst, str(test["group_count"][worst])]
    assert "seen by the harness alone" in told.out


def test_show_of_a_method_that_sees_groups_says_so(cli: Cli) -> None:
    told = cli("show", "groupdro-cmnist-s0")
    assert "it sees the groups of training and validation images." in told.out


def test_explain_shows_truth_route_and_margin(cli: Cli, mnist_root: Path) -> None:
    told = cli("explain", NCT, "--data-root", mnist_root, "--index", "60000,60005")
    assert told.code == 0, told.err
    found = cli("explain", NCT, "--data-root", mnist_root, "--index", "60000,60005", "--json")
    rows = [row for row in rows_of(told.out) if row[0]]  # the others go on with the one above
    for image, row in zip(found.json["images"], rows, strict=True):
        right = image["class"] == image["true_class"]
        assert row[:3] == [str(image["id"]), image["true_class"], image["group"]]
        assert row[3] == image["class"] + ("" if right else "  (wrong)")
        assert row[4:6] == [image["path"], route_in_words(image["path"])]
        assert row[6].startswith(f"{image['margin']:.2f} over ")
    assert "easy if the tree so far was right" in told.err


def test_explain_of_a_file_has_no_truth(cli: Cli, tmp_path: Path) -> None:
    Image.new("RGB", (28, 28), (200, 20, 20)).save(tmp_path / "red.png")
    told = cli("explain", NCT, "--images", tmp_path / "red.png")
    assert told.code == 0, told.err
    assert "true class" not in told.out and str(tmp_path / "red.png")[:20] in told.out


@pytest.mark.parametrize(
    ("leaf", "words"), [("6-7:HE", "hard, then easy"), ("a:", ""), ("0", ""), ("b:E", "easy")]
)
def test_routes_in_words(leaf: str, words: str) -> None:
    assert route_in_words(leaf) == words


def test_a_picture_of_no_known_kind(cli: Cli, tmp_path: Path) -> None:
    told = cli("explain", NCT, "--picture", tmp_path / "tree.txt")
    assert told.code == 2 and "-> end its name with .png, .svg, .pdf" in told.err
    assert not [*tmp_path.iterdir()]


def test_images_that_are_not_there_or_are_none(cli: Cli, tmp_path: Path) -> None:
    told = cli("explain", NCT, "--images", tmp_path / "missing.png")
    assert told.code == 2 and "there is no image" in told.err and "data verify" not in told.err
    (tmp_path / "text.png").write_text("text")
    told = cli("explain", NCT, "--images", tmp_path / "text.png")
    assert told.code == 2 and "-> give an image that a viewer opens" in told.err
