"""A control for NCT+: what a calibration on validation class labels gives to every other method.

One bias for each class and a common scale, fitted to the stored validation scores of a run by the
same code that calibrates the leaves of NCT+, and applied to its stored test scores. Nothing is
trained again. What the leaves add beyond this is not owed to the labels alone.
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from bench.report.cells import About, Cell, averaged, empty
from bench.report.collection import Collection, Run
from bench.report.names import HEADLINE, dataset_name, method_name
from bench.report.table import OWN_RULE, SEEDS_SPREAD, Column, Row, Table
from bench.report.tiers import tiers
from methods.metrics import worst_case
from methods.nct.calibration import fit_calibration
from methods.nct.plus import PlusConfig

DATASETS = tuple(name for name, metric in HEADLINE.items() if metric == "wga")


def class_calibration(runs: Collection) -> Table:
    """Give worst-group accuracy with calibrated classes, and how much more that is."""
    rows = []
    for tier in tiers():
        cells: list[Cell] = []
        for name in DATASETS:
            cells += _both(runs, tier.method, name)
        rows.append(Row((method_name(tier.method),), tuple(cells), section=tier.section))
    return Table(
        label="class_calibration",
        title="Calibrated classes",
        caption=(
            "Test worst-group accuracy of the main runs after a bias for each class and a common "
            "scale were fitted to the run's validation scores on class labels alone, and its "
            "difference from the main table. A control for NCT+, which calibrates leaves."
        ),
        stub=("Method",),
        columns=tuple(
            Column(title, dataset_name(name))
            for name in DATASETS
            for title in ("Calibrated", "Gain")
        ),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=OWN_RULE,
        notes=("Scores are kept in half precision. DFR and ExMap were fitted on validation too.",),
        in_paper=False,
        section_titles=True,
    )


def _both(runs: Collection, method: str, dataset: str) -> list[Cell]:
    abouts = [About(method, dataset, "wga", kind) for kind in ("calibrated", "gain")]
    found = runs.published(method, dataset)
    pairs = [(value, run) for run in found if (value := calibrated_wga(run)) is not None]
    if not pairs:
        reason = "no scores kept" if found else runs.absence(method, dataset)
        return [empty(about, reason) for about in abouts]
    after = [(value, run.run_id) for value, run in pairs]
    gain = [(value - run.record["metrics"]["test"]["wga"], run.run_id) for value, run in pairs]
    return [averaged(after, abouts[0]), averaged(gain, abouts[1])]


def calibrated_wga(run: Run) -> float | None:
    """Calibrate a run's classes on its validation scores and give the test worst group."""
    table = run.predictions()
    if table is None:
        return None
    val, test = (table[table["split"] == split] for split in ("val", "test"))
    if val.empty or test.empty or "score_0" not in table:
        return None
    scores, y = _scores(val), _column(val, "y")
    calibration = fit_calibration(scores, y, scores.shape[1], PlusConfig.penalty)
    return worst_case(calibration(_scores(test)), _column(test, "y"), _column(test, "group"), "wga")


def _scores(table: pd.DataFrame) -> Tensor:
    count = sum(str(name).startswith("score_") for name in table)
    names = [f"score_{c}" for c in range(count)]
    return torch.tensor(table[names].to_numpy("float32"))


def _column(table: pd.DataFrame, name: str) -> Tensor:
    return torch.tensor(table[name].to_numpy("int64"))
