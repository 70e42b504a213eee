"""The paper's main table as transcribed: against the tex where it is, by checksum elsewhere."""

from __future__ import annotations

import csv
import hashlib
import os
import re
from pathlib import Path

import pytest

from bench.resources import paper_folder

TEX = Path(__file__).resolve().parents[2].parent / "shared" / "paper" / "nct.tex"
METHODS = {
    "Group DRO": "groupdro",
    "JTT": "jtt",
    "CnC": "cnc",
    "EIIL": "eiil",
    "DFR": "dfr",
    "ERM": "erm",
    "GEORGE": "george",
    "ExMap": "exmap",
    "NCT (Ours)": "nct",
}
CELLS = [
    *(("waterbirds", "wga"), ("waterbirds", "avg"), ("celeba", "wga"), ("celeba", "avg")),
    *(("isic", "auroc"), ("isic", "auroc_nonpatch"), ("isic", "auroc_histopath")),
    *(("umnist", "wga"), ("umnist", "avg"), ("cmnist", "wga"), ("cmnist", "avg")),
]


def transcription() -> dict[tuple[str, str, str], tuple[float, float | None, int]]:
    with (paper_folder() / "main_results.csv").open(newline="") as source:
        return {
            (row["method"], row["dataset"], row["metric"]): (
                float(row["mean"]),
                float(row["std"]) if row["std"] else None,
                int(row["sourced"]),
            )
            for row in csv.DictReader(source)
        }


def test_checksum_is_pinned() -> None:
    content = (paper_folder() / "main_results.csv").read_bytes()
    assert hashlib.sha256(content).hexdigest() == (
        "688f589889b9921a195c39a786270c36a1168eaba0f7f6a52d1f2d6e17ccddf7"
    )


def test_main_table_equals_the_tex() -> None:
    if not TEX.is_file():
        reason = f"the paper's source is not at {TEX}"
        if os.environ.get("CI") and TEX.parents[1].is_dir():
            pytest.fail(reason)
        pytest.skip(reason)
    table = TEX.read_text().split(r"\label{tab:main_results}")[1].split(r"\bottomrule")[0]
    found = {}
    for line in table.split(r"\\"):
        line = re.sub(r"\\(midrule|rowcolor\{[^}]*\})", "", line.replace("\n", " "))
        parts = [part.strip() for part in line.split("&")]
        if parts[0] not in METHODS:
            continue
        for (dataset, metric), text in zip(CELLS, parts[4:], strict=True):
            if text != "--":
                mean = re.match(r"[\d.]+", text)
                std = re.search(r"pm\$([\d.]+)", text)
                assert mean is not None
                found[METHODS[parts[0]], dataset, metric] = (
                    float(mean[0]),
                    float(std[1]) if std else None,
                    int("^{*}" in text),
                )
    assert len(found) == 95
    assert transcription() == found
