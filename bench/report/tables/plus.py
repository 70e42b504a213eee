"""What the gain of NCT+ is made of, and what it owes to the data.

Parts: NCT+ whole and with one part changed, and the difference on the same seeds. Controls: NCT and
NCT+ on other draws of CMNIST. Where validation is dyed like training, its class labels say nothing
that training does not, so that calibration has nothing of that to gain.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.campaigns import CAMPAIGNS, Variant
from bench.report.cells import DIGITS, About, Cell, averaged, empty
from bench.report.collection import Collection, Run
from bench.report.names import HEADLINE, dataset_name, method_name
from bench.report.statistics import compare_pairs
from bench.report.table import OWN_RULE, SEEDS_SPREAD, Column, Row, Table

PARTS = CAMPAIGNS["plus-parts"]
CONTROLS = CAMPAIGNS["plus-controls"]
UNCERTAINTY = f"{SEEDS_SPREAD}; differences: the 95% t-interval over the shared seeds"


def plus_parts(runs: Collection) -> Table:
    """Take the parts of NCT+ away one by one, and fit its calibration elsewhere."""
    (method,) = PARTS.methods
    whole = PARTS.variants[0]
    rows = []
    for variant in PARTS.variants:
        cells = []
        for dataset in PARTS.only:
            metric = HEADLINE[dataset]
            own, all_parts = (runs.variant(PARTS.name, v.name, dataset) for v in (variant, whole))
            cells.append(_mean(own, About(method, dataset, metric, variant.name)))
            about = About(method, dataset, metric, f"{variant.name}; minus all parts")
            itself = empty(about, "this is the whole")
            cells.append(itself if variant is whole else _gain(own, all_parts, about))
        rows.append(Row((variant.title,), tuple(cells)))
    return Table(
        label=PARTS.table,
        title="Parts of NCT+",
        caption=(
            "NCT+, a variant made here, whole and with one part changed, and the difference to the "
            "whole on the same seeds. Calibration uses validation class labels: all of them, half "
            "(the other half then chooses checkpoint and depth), or those of as many training "
            "images instead."
        ),
        stub=("Variant",),
        columns=tuple(
            Column(title, dataset_name(dataset, HEADLINE[dataset]))
            for dataset in PARTS.only
            for title in ("Mean", "Difference")
        ),
        rows=tuple(rows),
        uncertainty=UNCERTAINTY,
        selection=OWN_RULE,
        notes=(
            "Three seeds where a part is changed, as in the paper's sweeps; five of the whole, and "
            "without calibration.",
        ),
        in_paper=False,
    )


def plus_controls(runs: Collection) -> Table:
    """Compare NCT+ with NCT on other draws of the data."""
    plain, plus = CONTROLS.methods
    rows = [
        Row((dataset_name(dataset), variant.title), tuple(_cells(runs, dataset, variant)))
        for dataset in CONTROLS.only
        for variant in CONTROLS.variants
    ]
    return Table(
        label=CONTROLS.table,
        title="Controls of NCT+",
        caption=(
            "Test worst-group accuracy on the data of the main table, with the training colours of "
            "CnC's generator, and with validation dyed by the rule of training (30 conflicting "
            "images), and the gain of NCT+ over NCT on the same seeds with its 95% t-interval."
        ),
        stub=("Dataset", "Data"),
        columns=(Column(method_name(plain)), Column(method_name(plus)), Column("Gain")),
        rows=tuple(rows),
        uncertainty=UNCERTAINTY,
        selection=OWN_RULE,
        notes=(
            "Biased validation takes more away than the calibration's labels: conflicting cells "
            "have one or two images, too few to count in the cell-pWGA that chooses the checkpoint "
            "of NCT+, and NCT's pWGA2 counts only leaves that some image reaches, so that neither "
            "need notice a tree that tells no conflicting image apart.",
        ),
        in_paper=False,
    )


def _cells(runs: Collection, dataset: str, variant: Variant) -> list[Cell]:
    """Give the worst group of each method, and the gain of the second over the first."""
    found = runs.variant(CONTROLS.name, variant.name, dataset)
    plain, plus = CONTROLS.methods
    plain_runs, plus_runs = (
        [run for run in found if run.record["method"] == method] for method in (plain, plus)
    )
    return [
        _mean(plain_runs, About(plain, dataset, "wga", variant.name)),
        _mean(plus_runs, About(plus, dataset, "wga", variant.name)),
        _gain(plus_runs, plain_runs, About(plus, dataset, "wga", f"{variant.name}; minus {plain}")),
    ]


def _mean(own: Sequence[Run], about: About) -> Cell:
    values = [(_value(run, about), run.run_id) for run in own]
    return averaged(values, about) if values else empty(about, "not run")


def _gain(ours: Sequence[Run], theirs: Sequence[Run], about: About) -> Cell:
    """Average our lead over theirs on the seeds that both have."""
    seeds = {run.record["seed"] for run in ours} & {run.record["seed"] for run in theirs}
    if not seeds:
        return empty(about, "no shared seeds")
    values = {
        side: {int(run.record["seed"]): _value(run, about) for run in own}
        for side, own in (("ours", ours), ("theirs", theirs))
    }
    (gain,) = compare_pairs(values)
    if gain.low is not None and gain.high is not None:
        digits = DIGITS[about.metric]
        note = f"95%: {gain.low:+.{digits}f} to {gain.high:+.{digits}f}"
    else:
        note = "one seed" if gain.n == 1 else "the same on every seed"
    return Cell(
        "measured",
        about,
        mean=gain.difference,
        n=gain.n,
        ci_low=gain.low,
        ci_high=gain.high,
        note=note,
        signed=True,
        digits=DIGITS[about.metric],
        run_ids=tuple(sorted(r.run_id for r in (*ours, *theirs) if r.record["seed"] in seeds)),
    )


def _value(run: Run, about: About) -> float:
    return float(run.record["metrics"]["test"][about.metric])
