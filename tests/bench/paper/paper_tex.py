"""The paper's tables, read from its LaTeX source into the rows of `results/paper/*.csv`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

TEX = Path(__file__).resolve().parents[3].parent / "shared" / "paper" / "nct.tex"
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
MAIN = [
    *(("waterbirds", "wga"), ("waterbirds", "avg"), ("celeba", "wga"), ("celeba", "avg")),
    *(("isic", "auroc"), ("isic", "auroc_nonpatch"), ("isic", "auroc_histopath")),
    *(("umnist", "wga"), ("umnist", "avg"), ("cmnist", "wga"), ("cmnist", "avg")),
]
DATASETS = ("waterbirds", "celeba", "isic", "umnist", "cmnist")
Rows = list[dict[str, str]]


def source() -> str:
    """Read the paper's source; skip where it is not at hand, fail where it ought to be."""
    if TEX.is_file():
        return TEX.read_text(encoding="utf-8")
    reason = f"the paper's source is not at {TEX}"
    if os.environ.get("CI") and TEX.parents[1].is_dir():
        pytest.fail(reason)
    pytest.skip(reason)


def body(label: str, tex: str) -> str:
    """Cut out what stands between a table's rules."""
    table = tex.split(rf"\label{{tab:{label}}}")[1].split(r"\bottomrule")[0]
    return table.split(r"\toprule")[1]


def lines(label: str, tex: str) -> list[list[str]]:
    """Split a table into its cells, without macros that only dress them up."""
    found = []
    for line in body(label, tex).replace("\n", " ").split(r"\\"):
        cells = [undress(part) for part in line.split("&")]
        if len(cells) > 1:
            found.append(cells)
    return found


def undress(text: str) -> str:
    text = re.sub(r"\\(midrule|cmidrule\(lr\)\{[\d-]+\}|rowcolor\{[^}]*\})", "", text)
    text = re.sub(r"\\multirow\{\d+\}\{\*\}\{(.*)\}\s*$", r"\1", text.strip())
    text = re.sub(r"\\gls\{(\w+)\}", lambda name: name[1].upper(), text)
    for _ in range(2):
        text = re.sub(r"\\(textbf|textit|mathbf|emph)\{((?:[^{}]|\{[^{}]*\})*)\}", r"\2", text)
    return text.strip().replace("0--4", "0-4").replace("5--9", "5-9").replace("s--c", "s-c")


def number(text: str) -> str:
    """Write a number as the CSV does: a zero before the point, no plus."""
    text = text.replace("{", "").replace("}", "").replace(",", "").strip("$ +")
    sign, text = ("-", text[1:]) if text.startswith("-") else ("", text)
    return sign + ("0" + text if text.startswith(".") else text)


def measured(text: str) -> dict[str, str]:
    """Split `mean +- std`."""
    mean = re.match(r"\$?\{?([+-]?[\d.]+)", text)
    std = re.search(r"pm\$([\d.]+)", text)
    assert mean is not None, text
    return {"mean": number(mean[1]), "std": number(std[1]) if std else ""}


def dataset_of(text: str) -> str:
    return text.split()[0].lower()


def main_results(tex: str) -> Rows:
    rows = []
    for cells in lines("main_results", tex):
        if cells[0] in METHODS:
            for (dataset, metric), text in zip(MAIN, cells[4:], strict=True):
                if text != "--":
                    key = {"method": METHODS[cells[0]], "dataset": dataset, "metric": metric}
                    sourced = str(int("^{*}" in text))
                    rows.append({**key, **measured(text), "sourced": sourced})
    return rows


def dataset_summary(tex: str) -> Rows:
    names = ("task", "spurious", "train", "val", "test")
    rows = []
    for cells in lines("dataset_summary", tex)[1:]:
        values = dict(zip(names, cells[1:], strict=True))
        counts = {split: number(values[split]) for split in ("train", "val", "test")}
        rows.append({"dataset": dataset_of(cells[0]), **values, **counts})
    return rows


def group_distributions(tex: str) -> Rows:
    rows: Rows = []
    text = body("group_distributions", tex).replace("\n", " ")
    for raw, cells in zip(
        [line for line in text.split(r"\\") if "&" in line],
        lines("group_distributions", tex),
        strict=True,
    ):
        if cells[0] == "Dataset":
            continue
        dataset = dataset_of(cells[0]) if cells[0] else rows[-1]["dataset"]
        rows.append(
            {
                "dataset": dataset,
                "group": cells[1],
                "count": number(cells[2]),
                "percent": number(cells[3]),
                "minority": str(int(r"\textit" in raw)),
            }
        )
    return rows


def preprocessing(tex: str) -> Rows:
    names = ("resolution", "train", "eval", "normalization")
    return [
        {
            "dataset": dataset_of(cells[0]),
            **{
                name: text.replace("$", "").replace(r"\to", "->").replace("  ", " ")
                for name, text in zip(names, cells[1:], strict=True)
            },
        }
        for cells in lines("preprocessing", tex)[1:]
    ]


def hyperparams(tex: str) -> Rows:
    rows = []
    for cells in lines("hyperparams", tex)[1:]:
        name = cells[0].replace(r" ($\lambda_{\text{aux}}$)", "")
        for dataset, text in zip(DATASETS, cells[1:], strict=True):
            power = re.fullmatch(r"\$([\d.]+) \\times 10\^\{(-?\d+)\}\$", text)
            value = f"{power[1]}e{power[2]}" if power else text.strip("$")
            rows.append({"parameter": name, "dataset": dataset, "value": value})
    return rows


def heads(label: str) -> Callable[[str], Rows]:
    def read(tex: str) -> Rows:
        places = [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1"), ("2", "2"), ("2", "3")]
        return [
            {
                "dataset": dataset_of(cells[0]),
                "iteration": iteration,
                "head": head,
                **measured(text),
            }
            for cells in lines(label, tex)
            if cells[0].lower() in DATASETS
            for (iteration, head), text in zip(places, cells[1:], strict=True)
        ]

    return read


def training_time(tex: str) -> Rows:
    return [
        {"method": METHODS[cells[0]], "dataset": dataset, "mean": number(text)}
        for cells in lines("training_time", tex)
        if cells[0] in METHODS
        for dataset, text in zip(DATASETS, cells[1:], strict=True)
        if text != "--"
    ]


def depth_ablation(tex: str) -> Rows:
    rows = []
    for cells in lines("depth_ablation", tex):
        if cells[0].split() and dataset_of(cells[0]) in DATASETS:
            dataset, worst, average = dataset_of(cells[0]), "wga", "avg"
            if dataset == "isic":
                worst = "auroc_nonpatch" if "Non-Patch" in cells[0] else "auroc_histopath"
                average = "auroc"
            for place, text in enumerate(cells[1:]):
                metric = (worst, average)[place % 2]
                key = {"dataset": dataset, "metric": metric, "iteration": str(place // 2 + 1)}
                row = {**key, **measured(text)}
                if row not in rows:  # ISIC's average stands in both of its lines
                    rows.append(row)
    return rows


def depth_diagnostics(tex: str) -> Rows:
    return [
        {"dataset": dataset_of(cells[0]), "iteration": str(iteration), **measured(text)}
        for cells in lines("depth_diagnostics", tex)[1:]
        for iteration, text in enumerate(cells[1:], start=2)
    ]


def pwga_corr(tex: str) -> Rows:
    return [
        {"dataset": dataset_of(cells[0]), **measured(cells[1])}
        for cells in lines("pwga_corr", tex)[1:]
    ]


def ablation(label: str, variants: tuple[str, ...]) -> Callable[[str], Rows]:
    def read(tex: str) -> Rows:
        rows = []
        for cells in lines(label, tex):
            if cells[0].split() and dataset_of(cells[0]) in DATASETS:
                metric = "auroc" if "AUROC" in cells[0] else "wga"
                for variant, text in zip(variants, cells[1:], strict=True):
                    *iteration, name = variant.split("/")
                    where = {"iteration": iteration[0]} if iteration else {}
                    key = {"dataset": dataset_of(cells[0]), "metric": metric, **where}
                    rows.append({**key, "variant": name, **measured(text)})
        return rows

    return read


TABLES: dict[str, Callable[[str], Rows]] = {
    "main_results": main_results,
    "dataset_summary": dataset_summary,
    "group_distributions": group_distributions,
    "preprocessing": preprocessing,
    "hyperparams": hyperparams,
    "logit_stats": heads("logit_stats"),
    "margins": heads("margins"),
    "training_time": training_time,
    "depth_ablation": depth_ablation,
    "depth_diagnostics": depth_diagnostics,
    "pwga_corr": pwga_corr,
    "ablation_trainable": ablation("ablation_trainable", ("standard", "head_only", "full")),
    "abl_split": ablation("abl_split", ("linear", "mlp", "asymmetric", "reversed")),
    "abl_minsamples": ablation(
        "abl_minsamples", ("2/disabled", "2/default", "3/disabled", "3/default")
    ),
    "aux_sweep": ablation("aux_sweep", ("0.0", "0.3", "0.5", "0.7", "1.0", "2.0")),
}
