"""How the report spells what the store calls by short names; unknown names stay as they are."""

from __future__ import annotations

import re

METHODS = {
    "groupdro": "Group DRO",
    "jtt": "JTT",
    "cnc": "CnC",
    "eiil": "EIIL",
    "dfr": "DFR",
    "erm": "ERM",
    "george": "GEORGE",
    "exmap": "ExMap",
    "nct": "NCT",
}
"""The paper's methods."""

VARIANTS = {"nct_plus": "NCT+"}
"""Made here, and not in the paper; the paper's tables show them as rows of their own."""

DATASETS = {
    "waterbirds": "Waterbirds",
    "celeba": "CelebA",
    "isic": "ISIC",
    "umnist": "UMNIST",
    "cmnist": "CMNIST",
}
METRICS = {
    "wga": "WGA",
    "avg": "Avg",
    "auroc": "Overall",
    "auroc_nonpatch": "Non-Patch",
    "auroc_histopath": "Histopath.",
}
MAIN_COLUMNS = {
    "waterbirds": ("wga", "avg"),
    "celeba": ("wga", "avg"),
    "isic": ("auroc", "auroc_nonpatch", "auroc_histopath"),
    "umnist": ("wga", "avg"),
    "cmnist": ("wga", "avg"),
}
"""The paper's main table: which metrics it shows of which dataset."""

HEADLINE = {dataset: metrics[0] for dataset, metrics in MAIN_COLUMNS.items()}
"""The one metric by which the paper's ablations judge a dataset."""


def group_name(name: str) -> str:
    """Spell a group: what is an identifier in the data is words here, and a range has a dash."""
    return re.sub(r"(?<=\d)_(?=\d)", "-", name).replace("_", " ")


def method_name(name: str) -> str:
    """Spell a method as the paper does."""
    return (METHODS | VARIANTS).get(name, name)


def dataset_name(name: str, metric: str = "") -> str:
    """Spell a dataset, and in brackets what is measured on it."""
    spelt = DATASETS.get(name, name)
    kind = {"wga": "WGA", "auroc": "Overall AUROC"}.get(metric, metric)
    return f"{spelt} ({kind})" if metric else spelt
