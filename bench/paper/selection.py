"""What methods owe to how their model is chosen: by other rules, and on biased validation data.

The panel of selection rules trains nothing. It reads, from the stored histories of the runs, the
test worst group of the epoch that each rule would have kept. Its epochs are those of the training
that yields the model; of a tree, those of the phase in which it was kept (phase 2 if the tree does
not say otherwise) of the iteration that the depth rule chose. The first of equally good epochs is
taken, as runs do. The audit looks at a tree before it is calibrated, so that rules are compared
before that, and what was reported stands beside them.

The control on validation is trained: every method where validation is dyed like training.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import pandas as pd

from bench.paper.campaigns import CAMPAIGNS
from bench.paper.trees import TreeRecord
from bench.reporting import figure as plots
from bench.reporting.collection import ReportInput, Run, grouped, metric_by_seed, metric_values
from bench.reporting.figure import Drawn, FigureInput, SkippedFigure, escape_mathtext
from bench.reporting.main_table import tiers
from bench.reporting.names import (
    dataset_names,
    dataset_title,
    headline,
    method_title,
    methods_in_order,
)
from bench.reporting.table import Cell, CellKey, Column, Row, Table, columns
from methods.base import load_methods

TEST = "audit_test_wga"
BEST_BY = {
    "val_avg": "audit_val_avg",
    "worst_class": "audit_val_worst_class",
    "val_wga": "audit_val_wga",
    "oracle": TEST,
}
"""The column of a history whose best epoch a rule keeps."""

RULES = {
    "own": "Own rule",
    "val_avg": "Validation average",
    "worst_class": "Worst class",
    "val_wga": "Worst group",
    "last": "Last epoch",
    "oracle": "Oracle (best on test)",
}
REPORTED = "reported"
NO_EPOCHS = "not applicable: the model is no epoch of a training (its last layer is fitted after)"
NOT_AUDITED = "not audited in these runs"
PAIRED = f"{Table.uncertainty}; of a difference, of the differences by seed"


@dataclass(frozen=True)
class Choices:
    """The test worst group of a run under each rule that its history can answer."""

    run: Run
    values: Mapping[str, float]
    epochs: int = 0  # of the training that yields its model
    audited: int = 0  # epochs at which the audit looked

    @staticmethod
    def of(run: Run) -> Choices:
        """Apply every rule to the history of a run."""
        reported = run.record.test.wga
        values = {} if reported is None else {REPORTED: reported}
        epochs, kept = final_training(run), run.record.selection
        seen = epochs[epochs[TEST].notna()]
        if seen.empty:
            return Choices(run, values, len(epochs))
        test = seen[TEST].astype(float)
        for rule, column in BEST_BY.items():
            if column in seen and seen[column].notna().all():
                values[rule] = float(test.iloc[int(seen[column].astype(float).argmax())])
        values["last"] = float(test.iloc[-1])
        tree = TreeRecord.of(run.record)
        if kept is not None and (seen["epoch"] == kept.epoch).any():
            values["own"] = float(test[seen["epoch"] == kept.epoch].iloc[0])
        elif reported is not None and (tree is None or tree.chosen.calibration is None):
            values["own"] = reported  # the same model, which the audit happened not to look at
        return Choices(run, values, len(epochs), len(seen))


def final_training(run: Run) -> pd.DataFrame:
    """Return the epochs of the training that yields a run's model; none if it ends with none."""
    history, kept = run.history(), run.record.selection
    if history is None:
        return pd.DataFrame(columns=["epoch", TEST])
    tree, method = TreeRecord.of(run.record), load_methods().get(run.job.method)
    if tree is None:
        return history[history["stage"] == (method.training_name if method else run.job.method)]
    own = history[history["iteration"] == tree.chosen_iteration]
    chosen = [rows for _, rows in own.groupby("phase")] or [own]
    if kept is not None:
        here = (own["epoch"] == kept.epoch) & (own["selection"] == kept.value)
        chosen = [rows for rows in chosen if here[rows.index].any()] or chosen
    return chosen[-1]


def selection_panel(given: ReportInput) -> Table:
    """Show the test worst group of every method under its own and under other rules."""
    found: dict[str, dict[str, list[Choices]]] = {}
    rows = []
    for dataset in (name for name in dataset_names() if headline(name) == "wga"):
        by_method = {name: given.runs.published(name, dataset) for name in methods_in_order()}
        for method, runs in by_method.items() if any(by_method.values()) else ():
            own = found.setdefault(dataset, {})[method] = list(map(Choices.of, runs))
            key, absence = CellKey(method, dataset, "wga"), given.runs.absence(method, dataset)
            cells = [_under(own, replace(key, variant=r), absence) for r in (REPORTED, *RULES)]
            chosen = [run.record.selection for run in runs]
            rule = ", ".join(dict.fromkeys(one.rule for one in chosen if one is not None))
            title = dataset_title(dataset)
            rows.append(Row((title, method_title(method), rule), tuple(cells), title))
    return Table(
        label="selection_rules",
        title="Rules of selection",
        caption=(
            "Test worst-group accuracy of the epoch that each rule keeps of the same training: "
            "what a method owes to how its epoch is chosen. Rules read validation data; worst "
            "group needs its group labels, average and worst class do not. The oracle reads test "
            "data: a bound, not a result."
        ),
        row_headers=("Dataset", "Method", "Own rule is"),
        columns=(Column("Reported"), *map(Column, RULES.values())),
        rows=tuple(rows),
        selection="as each column says, computed from stored histories; reported: its own",
        notes=(
            *_sentence("Its own rule instead of the last epoch", found, "own", "last"),
            *_sentence(
                "Validation's worst group instead of its average", found, "val_wga", "val_avg"
            ),
            *_remarks([one for of in found.values() for own in of.values() for one in own]),
        ),
        in_paper=False,
    )


def _under(own: Sequence[Choices], key: CellKey, absence: str) -> Cell:
    values = [(c.values[key.variant], c.run.run_id) for c in own if key.variant in c.values]
    if not values:
        missing = NOT_AUDITED if any(c.epochs for c in own) else NO_EPOCHS
        return key.empty(missing if own else absence)
    note = f"{len(values)} of {len(own)} seeds" if len(values) < len(own) else ""
    return replace(key.averaged(values), note=note)


def _gain(own: Sequence[Choices], rule: str, other: str) -> float | None:
    """Return the mean lead of one rule over another, on the seeds that have both."""
    both = [c.values for c in own if {rule, other} <= c.values.keys()]
    return statistics.fmean(one[rule] - one[other] for one in both) if both else None


def _sentence(
    what: str, found: Mapping[str, Mapping[str, list[Choices]]], rule: str, other: str
) -> tuple[str, ...]:
    """Return, for each dataset, to which methods one rule gives least and most over another."""
    parts = []
    for dataset, by_method in found.items():
        gains = [(_gain(own, rule, other), method) for method, own in by_method.items()]
        known = [(gain, method_title(method)) for gain, method in gains if gain is not None]
        if known:
            ends = (f"{gain:+z.1f} ({method})" for gain, method in (min(known), max(known)))
            parts.append(f"{' to '.join(ends)} points on {dataset_title(dataset)}")
    return (f"{what} changes a method's worst group by {'; '.join(parts)}.",) if parts else ()


def _remarks(found: Sequence[Choices]) -> tuple[str, ...]:
    """Return what the numbers of these runs leave out."""
    trees = any(TreeRecord.of(c.run.record) is not None for c in found)
    thinned = [c for c in found if c.audited and c.audited < c.epochs]
    older = any(c.audited and "worst_class" not in c.values for c in found)
    remarks = {
        "Trees: the phase in which the model was kept, of the iteration that the depth rule "
        "chose. Where a tree is calibrated, all rules are compared before that.": trees,
        f"The audit of {len(thinned)} of {len(found)} runs left out epochs: rules then choose "
        "among those it saw, and the last epoch is the last it saw.": bool(thinned),
        "Older runs did not audit the worst class: its column has the seeds of newer ones.": older,
        "None in this store.": not found,
    }
    return tuple(text for text, holds in remarks.items() if holds)


def draw_selection(given: FigureInput) -> Drawn:
    """Draw one panel a dataset: a row a method, a dot a rule, at its gain over the last epoch."""
    panels: dict[str, dict[str, list[Choices]]] = {}
    without: dict[str, None] = {}
    for label, runs in given.by_dataset().items():
        for method, own in grouped(runs, lambda run: run.job.method).items():
            choices = list(map(Choices.of, own))
            if headline(own[0].job.dataset) == "wga" and any(c.audited for c in choices):
                panels.setdefault(label, {})[method] = choices
            else:
                without[f"{method_title(method)} on {label}"] = None
    if not panels:
        raise SkippedFigure("no finished run with an audited training")
    figure, axes = plots.grid(len(panels), 1.4 + 0.24 * max(map(len, panels.values())))
    everything = [own for by_method in panels.values() for own in by_method.values()]
    known = {rule for own in everything for one in own for rule in one.values}
    rules = [rule for rule in RULES if rule in known - {"last"}]
    for axis, (label, by_method) in zip(axes, panels.items(), strict=True):
        methods = methods_in_order(by_method)
        for place, (rule, colour) in enumerate(zip(rules, plots.palette(len(rules)), strict=True)):
            gains = [(_gain(by_method[m], rule, "last"), y) for y, m in enumerate(methods)]
            dots = [(x, y + 0.14 * (place - len(rules) // 2)) for x, y in gains if x is not None]
            look = {"color": colour, "marker": plots.MARKERS[place], "label": RULES[rule]}
            look |= {"mfc": "none", "color": plots.INK} if rule == "oracle" else {}
            axis.plot([x for x, _ in dots], [y for _, y in dots], ls="", **look)
        axis.axvline(0, color=plots.INK, lw=0.8, zorder=0)
        axis.set_yticks(range(len(methods)), [escape_mathtext(method_title(m)) for m in methods])
        axis.set_ylim(max(len(methods), 3) - 0.5, -0.5)
        axis.set(title=label, xlabel="gain over the last epoch (points)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Drawn(
        figure,
        "What a method owes to how its epoch is chosen: test worst-group accuracy of the epoch "
        "that each rule keeps, over that of the last epoch of the same training, mean over the "
        "seeds that have both. Hollow: the best epoch on test, a bound and not a result.",
        (
            *([f"No epoch to choose, or none audited: {', '.join(without)}."] if without else []),
            *given.missing(list(given.by_dataset())),
        ),
    )


CONTROL = CAMPAIGNS["control-validation"]
MORE_SEEDS = CAMPAIGNS["plus-controls"]  # of the same columns, for some methods


def control_runs(given: ReportInput) -> tuple[list[Run], list[Run]]:
    """Return the runs on balanced and those on biased validation data, by seed.

    All seeds of any campaign count, so that no two places give two means of the same thing; but
    where a method has runs of today's version, those of an earlier one do not.
    """
    (dataset,), (balanced, biased) = CONTROL.datasets, CONTROL.variants

    def of(variant: str) -> list[Run]:
        own = (given.runs.variant(one.name, variant, dataset) for one in (CONTROL, MORE_SEEDS))
        runs = {run.run_id: run for run in chain(*own)}
        today = {run.job.method for run in runs.values() if not run.outdated}
        return sorted(r for r in runs.values() if not r.outdated or r.job.method not in today)

    return of(balanced.name), of(biased.name)


def control_validation(given: ReportInput) -> Table:
    """Compare every method on balanced validation data with itself where they are biased."""
    (dataset,), both = CONTROL.datasets, control_runs(given)
    rows = []
    for tier in tiers(given.reference):
        own = [[run for run in runs if run.job.method == tier.method] for runs in both]
        if tier.method in CONTROL.methods:
            keys = [CellKey(tier.method, dataset, metric) for metric in ("wga", "avg")]
            cells = tuple(cell for key in keys for cell in _side_by_side(key, *own))
            rows.append(Row((method_title(tier.method), *tier.marks[:2]), cells, tier.section))
    title = dataset_title(dataset)
    return Table(
        label=CONTROL.table,
        title="Control: biased validation",
        caption=(
            f"Test accuracy on {title} with validation balanced over colours, as in the main "
            "table, and with validation as biased as training; the difference (biased minus "
            "balanced, by seed) is what a method owes to a balanced validation set. T, V: uses "
            "training, validation group labels."
        ),
        row_headers=("Method", "T", "V"),
        columns=columns(("Worst group", "Average"), ("Balanced", "Biased", "Difference")),
        rows=tuple(rows),
        uncertainty=PAIRED,
        notes=(
            "Training and test data are the same. Of biased validation a conflicting group has one "
            "or two images, so that a worst group over them says little to rules that read it.",
            "DFR and ExMap fit on validation, and NCT+ calibrates on it; the others choose by it.",
        ),
        in_paper=False,
        section_titles=True,
    )


def _side_by_side(key: CellKey, ours: Sequence[Run], theirs: Sequence[Run]) -> list[Cell]:
    """Return a metric on balanced and on biased validation, and the second less the first."""
    cells = []
    for runs, variant in zip((ours, theirs), CONTROL.variants, strict=True):
        own, values = replace(key, variant=variant.name), metric_values(runs, key.metric)
        cells.append(own.averaged(values) if values else own.empty("not run"))
    before, after = (metric_by_seed(runs, key.metric) for runs in (ours, theirs))
    ids = {run.job.seed: run.run_id for run in theirs}
    gaps = [(after[s] - before[s], ids[s]) for s in sorted(before.keys() & after.keys())]
    own = replace(key, variant="biased minus balanced")
    if not gaps:
        return [*cells, own.empty("no shared seeds")]
    return [*cells, replace(own.averaged(gaps), signed=True)]
