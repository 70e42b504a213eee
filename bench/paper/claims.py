"""The claims of the paper, each with its number, ours, and a verdict by a rule stated beforehand.

A claim is a row of `results/paper/claims.csv`: one sentence, where it stands, and the paper's
number if it has one. `MEASURES` says what is measured for it and in which region it holds. Where
the 95% interval over seeds lies within the region, it holds here; outside, it does not; across its
border these seeds cannot tell, so that it is not testable here. See `docs/claims.md`.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from bench.paper import evidence as ev
from bench.paper.campaigns import CAMPAIGNS
from bench.paper.numbers import paper_rows
from bench.paper.trees import METHOD
from bench.reporting.collection import Collection, ReportInput
from bench.reporting.names import dataset_title, headline
from bench.reporting.table import CSV_COLUMNS, Cell, CellKey, Column, Row, Table

TEXTS = ("Verdict", "Holds if")
HOLDS, FAILS = "holds here", "does not hold here"
UNTESTABLE, UNMEASURED = "not testable here", "not measured yet"
TONES: Mapping[str, Literal["good", "bad"]] = {HOLDS: "good", FAILS: "bad"}
TIMED = (
    "george",
    "jtt",
    "cnc",
    "dfr",
    "eiil",
    "exmap",
)  # whose times the paper gives beside its own
SUPERVISED = {"umnist": ("jtt", "cnc", "eiil", "dfr"), "cmnist": ("jtt", "cnc", "eiil")}
"""The methods that choose by validation groups and have a number in the paper's table."""

Take = Callable[[Collection, str], ev.Sample]


@dataclass(frozen=True)
class Rule:
    """When a claim holds: where the quantity lies from `low` to `high`.

    Attributes:
        lenient: whether it also holds across a border, as a claim that there is no effect does
            as long as none is shown.
        by_mean: whether the mean decides, as for counts of seeds and what is no estimate.
    """

    low: float = -math.inf
    high: float = math.inf
    lenient: bool = False
    by_mean: bool = False

    def text(self, unit: str) -> str:
        """Return the rule in words."""
        bounds = [f"{bound:g}{unit}" for bound in (self.low, self.high)]
        if self.low == self.high:
            return f"{bounds[0]}, or not shown to differ from it"
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"between {bounds[0]} and {bounds[1]}"
        word = f"above {bounds[0]}" if math.isinf(self.high) else f"at most {bounds[1]}"
        return f"{word}, or not shown to be otherwise" if self.lenient else word

    def verdict(self, mean: float, low: float | None, high: float | None) -> tuple[str, str]:
        """Return the verdict on a mean and its interval, and why where they cannot tell."""
        if self.by_mean:
            return (HOLDS if self.low <= mean <= self.high else FAILS), ""
        if low is None or high is None:
            return UNTESTABLE, "one run has no interval"
        if high < self.low or low > self.high:
            return FAILS, ""
        if self.lenient or (low > self.low and high < self.high):
            return HOLDS, ""
        if low == high:  # the same on every seed, and at the border
            return FAILS, ""
        return UNTESTABLE, "the interval reaches across the border: these seeds cannot tell"


@dataclass(frozen=True)
class Measure:
    """What is measured for a claim, and when it holds; given the runs and the dataset."""

    quantity: str
    unit: str  # of the quantity, as it follows a number
    rule: Rule
    take: Take
    digits: int = 1


def _runs(read: ev.Read) -> Take:
    """Take a quantity from NCT's main runs."""
    return lambda runs, dataset: ev.published(runs, METHOD, dataset, read)


def _over(campaign: str, *names: str) -> Take:
    return partial(ev.over_variants, campaign=campaign, names=names)


def _lead(*others: str, method: str = METHOD) -> Take:
    return partial(ev.lead, method=method, others=others)


def _time(method: str, *others: str) -> Take:
    return partial(ev.time_ratio, method=method, others=sorted(others))


_rank = _runs(ev.of_tree(lambda tree: tree.spearman_test))


def _by_dataset(read: Callable[[str], ev.Read]) -> Take:
    return lambda runs, dataset: ev.published(runs, METHOD, dataset, read(dataset))


MAJORITY = {"umnist": ("digits_5_9_not_8", "5-9:E"), "cmnist": ("aligned", "own:E")}
PT, PC = " points", "%"
SWEEP = "training images, iteration 2 of the sweep with 5% conflicts"
LOSS = "worst group of the default less the variant's, as the depth rule chose"
MEASURES: dict[str, Measure] = {
    "enrichment_theory": Measure(
        "the theorem's share under the least epsilon that the paper's Table 9 allows",
        *(PC, Rule(low=72, by_mean=True), ev.theory_share),
    ),
    "enrichment": Measure(
        "share of the minority among the errors of iteration 1 over its share of training",
        *("x", Rule(low=1), _runs(ev.at(2, ev.enriched))),
    ),
    "gap": Measure(
        "worst-group risk of one classifier less that of the best of four ideal heads, simulated",
        *(PT, Rule(low=7.3, by_mean=True), ev.gap_closed),  # half of the gap
    ),
    "no_compounding": Measure(
        "worst group by the best leaf less that by descent from the root, last iteration",
        *(PT, Rule(low=0), _runs(ev.over_descent)),
    ),
    "over_erm": Measure(
        "worst group (ISIC: overall AUROC) of NCT less ERM's", PT, Rule(low=0), _lead("erm")
    ),
    "over_george": Measure("worst group of NCT less GEORGE's", PT, Rule(low=0), _lead("george")),
    "behind_supervised": Measure(
        "worst group of NCT less their mean",
        *(PT, Rule(high=0), lambda runs, d: ev.lead(runs, d, METHOD, SUPERVISED[d])),
    ),
    "near_supervised": Measure(
        "worst group of NCT less their mean",
        *(PT, Rule(-5, 5), lambda runs, d: ev.lead(runs, d, METHOD, SUPERVISED[d])),
    ),
    "isic_leads": Measure("overall AUROC less Group DRO's", "", Rule(low=0), _lead("groupdro")),
    "erm_robust": Measure(
        "worst group of ERM less the mean of JTT and CnC",
        *(PT, Rule(low=0), _lead("jtt", "cnc", method="erm")),
    ),
    "minority_hard": Measure(
        "share of the group's test images in that leaf",
        *(PC, Rule(low=50)),
        _by_dataset(lambda d: ev.at(2, partial(ev.captured, *ev.MINORITY[d]))),
    ),
    "majority_easy": Measure(
        "share of the group's test images in that leaf",
        *(PC, Rule(low=50), _by_dataset(lambda d: ev.at(2, partial(ev.captured, *MAJORITY[d])))),
    ),
    "hard_isolates": Measure(
        "share of test images in hard leaves of the minority's classes that belong to it",
        *(PC, Rule(low=50), _runs(ev.hard_purity)),
    ),
    "minority_hard_3": Measure(
        "share of the group's test images in the hard leaves",
        *(PC, Rule(low=50), _runs(ev.at(3, ev.below_hard_split))),
    ),
    "majority_branch_3": Measure(
        "share of the group's test images in leaves of the class",
        *(PC, Rule(low=50), _runs(ev.at(3, partial(ev.captured, "aligned", "own:*")))),
    ),
    "colours_equal": Measure(
        "largest less smallest part of a colour (equal parts are 25%), over the five hard leaves",
        *(PT, Rule(high=10), _runs(ev.at(2, ev.colour_spread))),
    ),
    "sparse_leaf": Measure(
        "share of test images in the smallest leaf (an even share is 25%, the minority has 9.7%)",
        *(PC, Rule(high=5), _runs(ev.smallest_leaf)),
    ),
    "hard_reads_class": Measure(
        "class's part of the effects of class and colour on the hard leaves' logits",
        *(PC, Rule(low=50), _runs(partial(ev.class_dependence, 1))),
    ),
    "easy_reads_cue": Measure(
        "class's part of the effects of class and colour on the easy leaves' logits",
        *(PC, Rule(high=50), _runs(partial(ev.class_dependence, 0))),
    ),
    "easy_minority": Measure(
        f"share of marked conflicting images that are in hard leaves ({SWEEP})",
        *(PC, Rule(high=50)),
        partial(ev.sweep, point=("0.05", 1, 4), read=ev.routing_recall),
    ),
    "imbalance": Measure(
        f"share of conflicting images in the largest class's hard leaf ({SWEEP}, classes 20 to 1)",
        *(PC, Rule(high=50)),
        partial(ev.sweep, point=("0.05", 20, 0), read=partial(ev.routing_purity, leaves="0-1:")),
    ),
    "imbalance_amplifies": Measure(
        f"that share at 20 to 1 less that at equal classes ({SWEEP})",
        *(PT, Rule(high=0), ev.purity_drop),
    ),
    "phase1_share": Measure(
        "share of the parameters, counted", PC, Rule(high=2, by_mean=True), ev.phase1_share, 2
    ),
    "cheapest": Measure(
        "processor seconds of NCT over those of the cheapest other",
        *("x", Rule(high=1), _time(METHOD, *TIMED), 2),
    ),
    "george_doubles": Measure(
        "processor seconds of GEORGE over those of ERM",
        "x",
        Rule(1.5, 3),
        _time("george", "erm"),
        2,
    ),
    "dfr_free": Measure(
        "processor seconds of DFR over those of ERM", "x", Rule(high=1.2), _time("dfr", "erm"), 2
    ),
    "second_helps": Measure(
        "worst group at iteration 2 less that at iteration 1",
        *(PT, Rule(low=0)),
        lambda runs, d: ev.difference(*(_runs(ev.wga_at(t))(runs, d) for t in (2, 1))),
    ),
    "third_does_not": Measure(
        "worst group at iteration 3 less that at iteration 2",
        *(PT, Rule(high=0, lenient=True)),
        lambda runs, d: ev.difference(*(_runs(ev.wga_at(t))(runs, d) for t in (3, 2))),
    ),
    "depth_rule_2": Measure(
        "share of seeds that keep iteration 2",
        *(PC, Rule(low=50.001, by_mean=True)),
        _runs(ev.of_tree(lambda tree: 100.0 * (tree.chosen_iteration == 2))),
    ),
    "depth_rule_3": Measure(
        "share of seeds that keep iteration 3",
        *(PC, Rule(low=50.001, by_mean=True)),
        _runs(ev.of_tree(lambda tree: 100.0 * (tree.chosen_iteration == 3))),
    ),
    "proxy": Measure(
        "correlation over epochs of iterations 2 and 3, held-out worst group",
        *("", Rule(low=0.5), _rank, 2),
    ),
    "proxy_weakest": Measure(
        "that correlation less the one on CMNIST",
        *("", Rule(high=0)),
        lambda runs, d: ev.difference(*(_rank(runs, name) for name in (d, "cmnist"))),
        2,
    ),
    "wilson": Measure(
        "excess of the tolerance over the distance to Wilson's lower bound",
        *(PC, Rule(-1, 1, by_mean=True), ev.wilson_excess),
    ),
    "logits_overlap": Measure(
        "mean spread of a head's logits over the distance of the extreme means",
        *("x", Rule(low=1), _runs(ev.after_last_epoch(2, ev.overlap)), 2),
    ),
    "margins": Measure(
        "smallest mean margin of a leaf (positive by its definition)",
        *("", Rule(low=0), _runs(ev.after_last_epoch(2, ev.smallest_margin)), 2),
    ),
    "head_only": Measure(LOSS, PT, Rule(low=20), _over("ablation-scope", "scope=head_only")),
    "full_competitive": Measure(LOSS, PT, Rule(-5, 5), _over("ablation-scope", "scope=full")),
    "full_loses": Measure(LOSS, PT, Rule(low=5), _over("ablation-scope", "scope=full")),
    "asymmetric_best": Measure(
        "worst group of the default less that of the variant with the highest mean",
        *(PT, Rule(low=0)),
        _over("ablation-heads", "heads=linear", "heads=mlp", "heads=reversed"),
    ),
    "reversed": Measure(
        LOSS, PT, Rule(low=0, lenient=True), _over("ablation-heads", "heads=reversed")
    ),
    "merging": Measure(
        "share of seeds with a merged node",
        *(PC, Rule(high=0, by_mean=True)),
        _runs(ev.of_tree(lambda tree: 100.0 * any(one.merged for one in tree.iterations))),
    ),
    "aux_costs": Measure(LOSS, PT, Rule(low=0), _over("ablation-aux", "aux_weight=0.0")),
    "aux_noise": Measure(
        LOSS, PT, Rule(0, 0, lenient=True), _over("ablation-aux", "aux_weight=0.0")
    ),
    "first_misses": Measure("worst group at iteration 1", PC, Rule(high=5), _runs(ev.wga_at(1))),
    "first_knows": Measure("worst group at iteration 1", PC, Rule(low=50), _runs(ev.wga_at(1))),
}
"""What is measured for each claim, by its id. Where a claim is a size, half of it is the border."""

REASONS = {
    "sample_efficiency": (
        "the paper defines no flat mixture and reports no figure; one made here would be judged by "
        "our own design and tuning of it"
    ),
    "maps_on_photos": (
        "the maps are judged by eye, no figure is given, and the data has no mask of the bird; "
        "with photo runs at hand the report draws the same maps, and on the same images"
    ),
}
"""Why nothing is measured for a claim."""

OF_HEADLINE = ("over_erm", "isic_leads")  # in the unit of the dataset's headline
ROUTING: dict[str, ev.Read] = {
    "Minority found": ev.at(2, ev.routing_recall),
    "Minority among hard": ev.at(2, ev.routing_purity),
    "WGA, iteration 1": ev.wga_at(1),
    "WGA, iteration 2": ev.wga_at(2),
}
"""What the table of the sweep shows of each point."""


class ClaimTable(Table):
    """A table whose CSV has a row a claim, to be read without the paper at hand."""

    def to_csv(self) -> str:
        """Return one row a claim: the paper's number, ours as in every table, and the verdict."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("claim", "where", "paper", "verdict", "holds_if", *CSV_COLUMNS))
        for row in self.rows:
            paper, ours, verdict, rule = row.cells
            value = "" if paper.mean is None else f"{paper.mean:g}"
            own = replace(ours, reason=verdict.reason, note="").csv_row(self.label)
            writer.writerow((row.section, row.header[1], value, verdict.label, rule.label, *own))
        return text.getvalue()


def claims(given: ReportInput) -> Table:
    """Judge every claim by the runs at hand."""
    rows = [_judged(given.runs, claim) for claim in paper_rows("claims")]
    count = Counter(row.cells[2].label for row in rows)
    return ClaimTable(
        label="claims",
        title="Claims of the paper",
        caption=(
            "What the paper says, its number, ours, and a verdict for these datasets and settings. "
            + "; ".join(f"{v}: {count[v]}" for v in (HOLDS, FAILS, UNTESTABLE, UNMEASURED))
            + "."
        ),
        row_headers=("Dataset", "Where"),
        columns=(Column("Paper"), Column("Here"), *(Column(t, align="l") for t in TEXTS)),
        rows=tuple(rows),
        uncertainty="mean ± standard deviation over seeds, and the 95% t-interval of the mean",
        selection="the method's own rules; where iterations are compared, each at its checkpoint",
        notes=(
            "Easy leaves take the training images that the node above got right, hard leaves the "
            "others; iteration 2 has one of each for each class. Worst group: the lowest accuracy "
            "of a group on test images.",
            "Rules were written before the runs of NCT's second version, with those of the first "
            "in sight; nothing is corrected for the number of claims. A verdict speaks of this "
            "implementation on these datasets and not of the authors' code. Where an interval "
            "reaches across a rule's border, the seeds at hand cannot tell.",
        ),
        in_paper=False,
        section_titles=True,
    )


def _judged(runs: Collection, claim: Mapping[str, str]) -> Row:
    """Return a claim's row: the paper's number, ours, the verdict, and the rule."""
    name, dataset = claim["id"], claim["dataset"]
    measure, key = MEASURES.get(name), CellKey(METHOD, dataset, name)
    digits = 1 if measure is None else measure.digits
    if name in OF_HEADLINE:
        digits = CellKey(metric=headline(dataset)).digits
    paper = key.empty("the paper gives no number", "paper")
    if claim["value"]:
        paper = Cell("paper", key, mean=float(claim["value"]), digits=digits)
    if measure is None:
        ours, verdict, rule = (
            key.empty(REASONS[name]),
            (UNTESTABLE, REASONS[name]),
            "nothing is measured",
        )
    else:
        rule = f"{measure.quantity}: {measure.rule.text(measure.unit)}"
        sample = measure.take(runs, dataset)
        ours, verdict = key.empty(sample.absence), (UNMEASURED, sample.absence)
        if sample.values:
            ours = key.averaged([(value, "") for value in sample.values.values()], digits)
            ours = replace(ours, run_ids=tuple(sorted(set(sample.run_ids))))
            assert ours.mean is not None
            verdict = measure.rule.verdict(ours.mean, ours.ci_low, ours.ci_high)
            if sample.exact:
                ours = replace(ours, n=None, note="computed")
            elif measure.rule.by_mean:
                ours = replace(ours, std=None, ci_low=None, ci_high=None, note="a count of seeds")
            elif ours.ci_low is not None and ours.ci_high is not None:
                ends = (ours.number(end) for end in (ours.ci_low, ours.ci_high))
                ours = replace(ours, note=f"95%: {' to '.join(ends)}")
    texts = (
        Cell("measured", key, label=verdict[0], reason=verdict[1], tone=TONES.get(verdict[0], "")),
        Cell("measured", key, label=rule),
    )
    where = (dataset_title(dataset) if dataset else "any", claim["where"])
    return Row(where, (paper, ours, *texts), section=claim["claim"])


def claims_sweep(given: ReportInput) -> Table:
    """Show where routing by correctness ends, by share, ease and imbalance of the minority."""
    campaign, rows = CAMPAIGNS["claims-sweep"], []
    (dataset,) = campaign.datasets
    for variant in campaign.variants:
        cells = []
        for title, read in ROUTING.items():
            key = CellKey(METHOD, dataset, title, variant.name)
            sample = ev.of_variant(given.runs, campaign.name, variant.name, dataset, read)
            pairs = list(zip(sample.values.values(), sample.run_ids, strict=True))
            cells.append(key.averaged(pairs) if pairs else key.empty(sample.absence))
        rows.append(Row((variant.title,), tuple(cells)))
    return Table(
        label=campaign.table,
        title="Where routing ends",
        caption=(
            "CMNIST with more conflicting images, with images that bear a mark in the colour of "
            "their class if their own colour is another's (the larger, the easier they are), and "
            "with a first class larger than the others. Percentages: of the conflicting training "
            "images that are in hard leaves; of the training images there that are conflicting; "
            "and test worst-group accuracy. Iteration 2 is short (20 epochs) and the last one."
        ),
        row_headers=("Training data",),
        columns=tuple(Column(title) for title in ROUTING),
        rows=tuple(rows),
        selection="each iteration at its best checkpoint on validation data; none chosen on test",
        notes=("Validation and test have equal classes throughout; marks are on them as well.",),
        in_paper=False,
    )
