"""The NCT paper as a guest of the harness: its numbers, campaigns, tables and figures.

`api.report` passes what is here to `reporting.build`; nothing else of `bench` but the command line
imports it. Tables and figures are imported when they are asked for, so that a campaign's name can
be looked up without torch and pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.paper.campaigns import CAMPAIGNS, variant_specs

if TYPE_CHECKING:
    from bench.reporting import FigureSpec, Outline, Reference, TableBuilder

    TABLES: tuple[TableBuilder, ...]
    FIGURES: tuple[FigureSpec, ...]

__all__ = ["CAMPAIGNS", "FIGURES", "TABLES", "outline", "reference", "variant_specs"]

TOPICS = {
    "Results": (
        *("main_results", "extended_results", "main_differences", "worst_group_uncertainty"),
        *("paired_tests", "control_validation", "selection_rules", "class_calibration"),
    ),
    "Claims of the paper": ("claims", "claims_sweep"),
    "Costs": ("training_time",),
    "Trees: what leaves hold, how deep": (
        *("capture_rates", "logit_stats", "margins", "cmnist_calibration"),
        *("depth_ablation", "depth_choice", "depth_diagnostics", "pwga_corr"),
    ),
    "Ablations": (
        *("ablation_trainable", "abl_split", "abl_minsamples", "aux_sweep", "abl_sampling"),
        *("abl_checkpoint", "abl_pwga", "plus_parts", "plus_controls"),
    ),
    "Data and settings": (
        *("dataset_summary", "group_distributions", "preprocessing", "hyperparams"),
        "retraining",
    ),
}
LINKS = {"main_results": "Results", "claims": "Claims", "training_time": "Costs"}


def reference() -> Reference:
    """Return the paper's numbers that stand beside ours in tables which are not its own."""
    from bench.paper import numbers

    return numbers.reference()


def outline() -> Outline:
    """Return how a report of the paper leads its reader."""
    from bench.paper.findings import findings
    from bench.reporting import Outline
    from bench.reporting.leaderboard import leaders

    return Outline((leaders, findings), TOPICS, LINKS)


def __getattr__(name: str) -> object:
    """Return TABLES, in the paper's order with what joins them, or FIGURES."""
    if name == "TABLES":
        return _tables()
    if name == "FIGURES":
        return _figures()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _tables() -> tuple[TableBuilder, ...]:
    from bench.paper import ablations, claims, depth, leaves, protocol, retraining, selection
    from bench.reporting import comparisons, extended, main_table

    return (
        *(main_table.main_results, main_table.main_differences, extended.extended_results),
        *(comparisons.worst_group_uncertainty, comparisons.paired_tests),
        *(claims.claims, claims.claims_sweep),
        *(ablations.class_calibration, leaves.capture_rates),
        *(protocol.dataset_summary, protocol.group_distributions),
        *(protocol.preprocessing, protocol.hyperparams, retraining.retraining),
        *(leaves.logit_stats, leaves.margins, leaves.cmnist_calibration),
        comparisons.training_time,
        *(depth.depth_ablation, depth.depth_choice, depth.depth_diagnostics, depth.pwga_corr),
        *(ablations.ablation_trainable, ablations.abl_split, ablations.abl_minsamples),
        *(ablations.aux_sweep, ablations.abl_sampling),
        *(ablations.abl_checkpoint, ablations.abl_pwga),
        *(ablations.plus_parts, ablations.plus_controls),
        *(selection.selection_panel, selection.control_validation),
        *(main_table.smoke_runs, main_table.left_out),
    )


def _figures() -> tuple[FigureSpec, ...]:
    from bench.paper import architecture, attribution, depth, leaves, selection, theory
    from bench.reporting import PARETO, TRAINING_TIME, FigureSpec

    return (
        FigureSpec(
            *("architecture", "Inference through a tree", architecture.draw_architecture),
            look="Follow an image from the backbone through the heads: the leaf with the highest "
            "logit gives the class.",
        ),
        FigureSpec(
            *("routing", "Routing", architecture.draw_routing),
            look="Where routing works, hard nodes fill with the minority.",
        ),
        *leaves.CAPTURE_FIGURES,
        FigureSpec(
            *("attribution", "LayerGradCAM by leaf", attribution.draw_leaves),
            look="Compare what easy and hard leaves look at.",
        ),
        FigureSpec(
            *("attribution_paired", "LayerGradCAM, same images", attribution.draw_paired),
            look="The same images by two leaves: what one looks at and the other does not.",
        ),
        PARETO,
        FigureSpec(
            *("depth_curves", "Impact of depth", depth.draw_depth_curves),
            look="Where the worst group stops rising, a deeper tree does not help; crosses that "
            "turn at the same iteration let the depth rule stop there.",
        ),
        FigureSpec(
            *("proxy", "The proxy against the truth", depth.draw_proxy),
            look="Where both curves rise and fall together, the proxy can stand for the truth.",
        ),
        FigureSpec(
            *("selection_rules", "Rules of selection", selection.draw_selection),
            look="A dot right of zero is a rule that helps; a wide row is a method that depends on "
            "its rule.",
        ),
        TRAINING_TIME,
        FigureSpec(
            *("theory", "Enrichment and gap", theory.draw_theory, False),
            look="Points on their lines are formulas that simulation confirms.",
        ),
    )
