"""The tables of the report: the paper's fifteen by their labels, then what joins them."""

from __future__ import annotations

from pathlib import Path

from bench.report.collection import Collection
from bench.report.recount import recount
from bench.report.table import Table
from bench.report.tables.ablations import (
    abl_minsamples,
    abl_sampling,
    abl_split,
    ablation_trainable,
    aux_sweep,
)
from bench.report.tables.calibration import cmnist_calibration, logit_stats, margins
from bench.report.tables.captures import capture_rates
from bench.report.tables.class_calibration import class_calibration
from bench.report.tables.data_facts import dataset_summary, group_distributions
from bench.report.tables.depth import depth_ablation, depth_choice, depth_diagnostics, pwga_corr
from bench.report.tables.main_results import main_differences, main_results
from bench.report.tables.others import left_out, trials
from bench.report.tables.plus import plus_controls, plus_parts
from bench.report.tables.settings import hyperparams, preprocessing
from bench.report.tables.timing import training_time
from bench.report.tables.uncertainty import paired_tests, worst_group_uncertainty


def all_tables(runs: Collection, data_root: Path) -> list[Table]:
    """Build every table, in the paper's order.

    Args:
        runs: the store.
        data_root: where datasets are counted again, if they are there.
    """
    counted = recount(data_root)
    return [
        main_results(runs),
        main_differences(runs),
        worst_group_uncertainty(runs),
        paired_tests(runs),
        class_calibration(runs),
        capture_rates(runs),
        dataset_summary(counted),
        group_distributions(counted),
        preprocessing(),
        hyperparams(),
        logit_stats(runs),
        margins(runs),
        cmnist_calibration(runs),
        training_time(runs),
        depth_ablation(runs),
        depth_choice(runs),
        depth_diagnostics(runs),
        pwga_corr(runs),
        ablation_trainable(runs),
        abl_split(runs),
        abl_minsamples(runs),
        aux_sweep(runs),
        abl_sampling(runs),
        plus_parts(runs),
        plus_controls(runs),
        trials(runs),
        left_out(runs),
    ]
