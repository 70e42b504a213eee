"""The paper's numbers as transcribed: against the tex where it is, by checksum everywhere."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter

import paper_prose
import paper_tex
import pytest

from bench.resources import paper_folder

READERS = {**paper_tex.TABLES, **paper_prose.TABLES}
CHECKSUMS = {
    "abl_minsamples.csv": "e3ebb2f14cf507144d329686174de3d66c731e12822177a17bce7ecfc9b94ead",
    "abl_split.csv": "1063d7a697b3a5f84dd53d4a88b2fb088685967c37aae161ba92d358835e7a0d",
    "ablation_trainable.csv": "97bf1ab940e84a3c3b5fab4a815b697d6a5005954bdd8aa7bbdd352adbe1726a",
    "aux_sweep.csv": "8ddf1e59702c906fade577cc6a056845072dd5545171e6640301abdab9745d3d",
    "capture_rates.csv": "64e38dfc793e617c1035bc907beeacbb02ae78d654e14bb38da04033eddc315b",
    "claims.csv": "c39a0142b0a3a34a910d8b89737fe0af0e5ed805de3b9787f6d758db5addd887",
    "cmnist_calibration.csv": "641ffc322d6c1dd54abe82e827656bd0c5f754c5409d0e85e3f203b2f7493036",
    "dataset_summary.csv": "4128fb982bf3d31520fc25051fb4d76081fad7b0db355b1fbc43cec1cccbaf0f",
    "depth_ablation.csv": "c2cfb9ee8dda69eca825ac979912c6f068ee97418d83753b8d65527fd71567f8",
    "depth_choice.csv": "14f83cde05f740e4485f793a2d2da98f28184e2d847547b14083050be06763bd",
    "depth_diagnostics.csv": "2627a1aa1a254a96dfa0dfa8c19fd1abbe862356d7d64777244cc657757249bc",
    "group_distributions.csv": "cc698cc46120829974702a5a76afc99229f44fbbd2623c363ff3abd33092eb45",
    "hyperparams.csv": "8a29edcb2a94acccf1bdfdac4003e342fac9c912a52814d9f4427f2565a98273",
    "logit_stats.csv": "576e8bdf3a07db9fb96feb06039c1a84f032becad84ba01f3d31cf80366ec71d",
    "main_results.csv": "688f589889b9921a195c39a786270c36a1168eaba0f7f6a52d1f2d6e17ccddf7",
    "margins.csv": "6cffb01e102e311615e2cd081064a06cacd0517eb0ab40a891274a321e29f4cd",
    "preprocessing.csv": "31fcb3353cbc69474ceda32b4e9552414d817cec2a4b30b39b43ed77f972122e",
    "pwga_corr.csv": "9f1f8c0d5df56b2f0da2423c687edb819c40171d717a80cde8f793c7d501c3fe",
    "training_time.csv": "3f5e776eafbb585ff977f2f2c8e80cd48e2db7720e68ffa788a2ec8051b7c4fd",
}


def transcribed(name: str) -> list[dict[str, str]]:
    with (paper_folder() / f"{name}.csv").open(newline="", encoding="utf-8") as source:
        return list(csv.DictReader(source))


def as_set(rows: list[dict[str, str]]) -> set[tuple[tuple[str, str], ...]]:
    """Compare rows whatever their order and however many zeros end a number."""
    return {tuple(sorted((k, plain(v)) for k, v in row.items())) for row in rows}


def plain(text: str) -> str:
    return str(float(text)) if re.fullmatch(r"-?\d+(\.\d+)?", text) else text


def test_every_file_is_pinned() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paper_folder().glob("*.csv"))
    }
    assert found == CHECKSUMS


def test_the_main_table_has_95_rows() -> None:
    assert len(transcribed("main_results")) == 95


@pytest.mark.parametrize("name", list(READERS))
def test_a_table_equals_the_tex(name: str) -> None:
    expected = READERS[name](paper_tex.source())
    found = transcribed(name)
    assert as_set(found) == as_set(expected)
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    "name",
    [
        *("main_results", "logit_stats", "margins", "training_time", "depth_diagnostics"),
        *("pwga_corr", "ablation_trainable", "abl_split", "abl_minsamples", "aux_sweep"),
    ],
)
def test_no_number_of_a_table_was_missed(name: str) -> None:
    """Count numbers without knowing the table's layout, so that a wrong reading shows."""
    text = paper_tex.body(name, paper_tex.source()).split(r"\midrule", 1)[1]
    text = re.sub(r"\\(multirow|multicolumn)\{\d+\}|cmidrule\(lr\)\{[\d-]+\}|gray!12", "", text)
    expected = Counter(abs(float(match)) for match in re.findall(r"(?<![\w])\d*\.\d+", text))
    found = Counter(
        abs(float(row[key])) for row in transcribed(name) for key in ("mean", "std") if row.get(key)
    )
    assert found == expected


def test_capture_rates_equal_the_prose() -> None:
    rows = transcribed("capture_rates")
    found = {(row["dataset"], row["iteration"], row["mean"], row["std"]) for row in rows}
    assert found == paper_prose.capture_rates(paper_tex.source())


def test_the_headline_rates_are_the_abstracts() -> None:
    """The introduction rounds five of the rates; they tie group and leaf to the number."""
    rates = {
        (r["dataset"], r["group"]): float(r["mean"]) for r in transcribed("capture_rates")[:14]
    }
    assert "82\\% of landbird-on-water, 73\\% of blond-male" in paper_tex.source()
    assert round(rates["waterbirds", "landbird_on_water"]) == 82
    assert round(rates["celeba", "blond_male"]) == 73
    assert round(rates["isic", "benign_no_patch"]) == 47
    assert round(rates["umnist", "digit_8"]) == 71
    assert round(rates["cmnist", "conflicting"]) == 84
