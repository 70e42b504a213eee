"""What is measured for the paper's claims: a quantity of runs, by seed, or one that is computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.paper.ablations import selected_by_rule
from bench.paper.campaigns import sweep_variant
from bench.paper.leaves import captured_share
from bench.paper.numbers import paper_by
from bench.paper.theory import enrichment
from bench.paper.trees import METHOD, TreeIteration, TreeRecord
from bench.reporting.collection import Collection, Run
from bench.reporting.names import headline
from datasets.base import BackboneSpec, Facts
from datasets.catalogue import get_dataset

NOT_RECORDED = "no published run has recorded it yet"
MINORITY = {
    "waterbirds": ("landbird_on_water", "LB:H"),
    "celeba": ("blond_male", "B:H"),
    "isic": ("benign_no_patch", "Ben:H"),
    "umnist": ("digit_8", "5-9:H"),
    "cmnist": ("conflicting", "own:H"),
}
"""The group (or set of groups) in the minority, and the hard leaf of its class."""

SweepPoint = tuple[str, int, int]
Read = Callable[[Run], float | None]
"""Takes a quantity from a run; none where the run has no such figure."""


@dataclass(frozen=True)
class Sample:
    """A quantity by seed, with the runs behind it; one that was computed is exact."""

    values: Mapping[int, float]
    run_ids: tuple[str, ...] = ()
    absence: str = ""  # why there are no values
    exact: bool = False


def published(runs: Collection, method: str, dataset: str, read: Read) -> Sample:
    """Take a quantity from the runs of the main table."""
    found = runs.published(method, dataset)
    return _sample(found, read, "" if found else f"{method}: {runs.absence(method, dataset)}")


def of_variant(runs: Collection, campaign: str, variant: str, dataset: str, read: Read) -> Sample:
    """Take a quantity from the runs of a campaign's column."""
    found = runs.variant(campaign, variant, dataset)
    return _sample(found, read, "" if found else f"campaign {campaign}: not run")


def _sample(found: Iterable[Run], read: Read, absence: str) -> Sample:
    known = [(run, value) for run in found if (value := read(run)) is not None]
    values = {run.job.seed: value for run, value in known}
    ids = tuple(run.run_id for run, _ in known)
    return Sample(values, ids, absence or ("" if known else NOT_RECORDED))


def combined(samples: Iterable[Sample], reduce: Callable[[list[float]], float]) -> Sample:
    """Reduce several samples to one, seed by seed, on the seeds that all have."""
    every = list(samples)
    seeds = sorted(set.intersection(*(set(one.values) for one in every)))
    absence = next((one.absence for one in every if one.absence), "" if seeds else "no shared seed")
    values = {seed: reduce([one.values[seed] for one in every]) for seed in seeds}
    return Sample(values, tuple(name for one in every for name in one.run_ids), absence)


def difference(first: Sample, second: Sample) -> Sample:
    """Return the paired differences."""
    return combined([first, second], lambda pair: pair[0] - pair[1])


# Quantities of one run


def headline_value(run: Run) -> float | None:
    """Return the worst group on test, or the overall AUROC where that is the headline."""
    return run.record.test.get(headline(run.job.dataset))


def of_tree(read: Callable[[TreeRecord], float | None]) -> Read:
    """Return a reader of a value of a run's tree."""
    return lambda run: None if (tree := TreeRecord.of(run.record)) is None else read(tree)


def at(t: int, read: Callable[[Facts, TreeIteration], float | None]) -> Read:
    """Return a reader of a value of one iteration, given the constants of the run's data."""

    def read_run(run: Run) -> float | None:
        tree = TreeRecord.of(run.record)
        found = None if tree is None else tree.at(t)
        return None if found is None else read(_facts(run), found)

    return read_run


def _facts(run: Run) -> Facts:
    return get_dataset(run.job.dataset).facts(run.job.dataset_config())


def _iterations(run: Run) -> list[dict[str, Any]]:
    """Return what the record says of each iteration, also what a tree has no field for."""
    tree: Any = run.record.details.get(METHOD) or {}
    return list(tree.get("iterations", ()))


def after_last_epoch(t: int, read: Callable[[Mapping[str, Any]], float | None]) -> Read:
    """Return a reader of an iteration after its last epoch, or at the kept one if that is all."""

    def read_run(run: Run) -> float | None:
        found = next((one for one in _iterations(run) if one["t"] == t), None)
        return None if found is None else read({**found, **(found.get("end") or {})})

    return read_run


def wga_at(t: int) -> Read:
    """Return a reader of the worst group at one iteration."""
    return at(t, lambda facts, iteration: iteration.test.get("wga"))


def captured(group: str, leaf: str, facts: Facts, iteration: TreeIteration) -> float:
    """Return the percentage of a group that reaches the leaves of a pattern."""
    return captured_share(facts, group, leaf, iteration)


def below_hard_split(facts: Facts, iteration: TreeIteration) -> float:
    """Return the percentage of the minority that reaches a hard leaf as the paper counts it.

    On UMNIST it counts every leaf with a hard split, on CMNIST those below the first split.
    """
    group, leaf = MINORITY[facts.name]
    code, paths = leaf.split(":")[0], ("EH", "HE", "HH") if facts.name == "umnist" else ("H*",)
    return sum(captured_share(facts, group, f"{code}:{path}", iteration) for path in paths)


def _minority(facts: Facts) -> set[str]:
    name = MINORITY[facts.name][0]
    return {facts.groups[g] for g in facts.group_sets.get(name, ())} or {name}


def _routed(facts: Facts, iteration: TreeIteration, leaves: str = "") -> list[int]:
    """Count training samples: minority in hard leaves, all there, all of the minority, all."""
    counts, minority = [0, 0, 0, 0], _minority(facts)
    for leaf, groups in iteration.makeup.items():
        for group, count in groups.items():
            hard, rare = leaf.startswith(leaves) and leaf.endswith("H"), group in minority
            for place, counted in enumerate((hard and rare, hard, rare, True)):
                counts[place] += count * counted
    return counts


def enriched(facts: Facts, iteration: TreeIteration) -> float | None:
    """Return how many times more of the minority hard leaves hold than all training data."""
    inside, hard, rare, everything = _routed(facts, iteration)
    return inside / hard / (rare / everything) if hard else None


def routing_recall(facts: Facts, iteration: TreeIteration) -> float | None:
    """Return the percentage of the minority's training images that are in hard leaves."""
    inside, _, rare, _ = _routed(facts, iteration)
    return 100 * inside / rare if rare else None


def routing_purity(facts: Facts, iteration: TreeIteration, leaves: str = "") -> float | None:
    """Return the percentage of training images in hard leaves that are of the minority."""
    inside, hard, _, _ = _routed(facts, iteration, leaves)
    return 100 * inside / hard if hard else None


def _in_leaves(run: Run) -> dict[str, dict[str, float]]:
    """Count the test images of each group in each leaf of iteration 2."""
    tree, sizes = TreeRecord.of(run.record), run.record.test.group_count
    level = None if tree is None else tree.at(2)
    if level is None or not level.capture:
        return {}
    shares = level.capture
    return {
        leaf: {group: shares[group].get(leaf, 0.0) / 100 * sizes[group] for group in shares}
        for leaf in level.leaves
    }


def hard_purity(run: Run) -> float | None:
    """Return the percentage of test images in the minority's hard leaves that belong to it."""
    wanted, rare = MINORITY[run.job.dataset][1].removeprefix("own"), _minority(_facts(run))
    held = [own.items() for leaf, own in _in_leaves(run).items() if leaf.endswith(wanted)]
    everything = sum(count for own in held for _, count in own)
    inside = sum(count for own in held for group, count in own if group in rare)
    return 100 * inside / everything if everything else None


def smallest_leaf(run: Run) -> float | None:
    """Return the percentage of test images in the emptiest leaf of iteration 2."""
    sizes = [sum(own.values()) for own in _in_leaves(run).values()]
    return 100 * min(sizes) / sum(sizes) if sizes else None


def colour_spread(facts: Facts, iteration: TreeIteration) -> float | None:
    """Return by how many points the four colours' parts of a hard leaf's stack differ."""
    spreads, count = [], len(facts.classes)
    for c, code in enumerate(facts.codes):
        groups = [facts.groups[count * c + k] for k in range(count) if k != c]
        shares = [iteration.capture.get(group, {}).get(f"{code}:H", 0.0) for group in groups]
        if total := sum(shares):
            spreads.append(100 * (max(shares) - min(shares)) / total)
    return statistics.fmean(spreads) if spreads else None


def class_dependence(child: int, run: Run) -> float | None:
    """Return how far logits of easy (0) or hard (1) leaves depend on class rather than colour.

    An effect is the mean logit of the leaf's own class (or colour) less that of the others, the
    other factor averaged; the figure is the class's part of both sizes, in percent, over leaves.
    """
    entry = next((one for one in _iterations(run) if one["t"] == 2), {})
    if "group_logits" not in entry:
        return None
    count, parts = len(_facts(run).classes), []
    logits = np.array(list(entry["group_logits"].values()), dtype=float).reshape(count, count, -1)
    for c in range(count):
        leaf = logits[:, :, 2 * c + child]  # by class and colour
        sizes = [abs(m[c] - np.delete(m, c).mean()) for m in (leaf.mean(1), leaf.mean(0))]
        if np.isfinite(sizes).all() and sum(sizes):  # a merged leaf has no logits
            parts.append(float(100 * sizes[0] / sum(sizes)))
    return statistics.fmean(parts) if parts else None


def over_descent(run: Run) -> float | None:
    """Return the worst group by the best leaf less that by descent, at the last iteration."""
    last = max(_iterations(run), key=lambda one: int(one["t"]), default={})
    if "greedy" not in last:
        return None
    return float(last["test"]["wga"] - last["greedy"]["test"]["wga"])


def overlap(entry: Mapping[str, Any]) -> float | None:
    """Return the mean spread of the heads' logits over the distance of their extreme means."""
    means, spreads = ([v for v in entry[f"logit_{k}"] if v is not None] for k in ("mean", "std"))
    reach = max(means) - min(means) if means else 0.0
    return statistics.fmean(spreads) / reach if reach else None


def smallest_margin(entry: Mapping[str, Any]) -> float | None:
    """Return the smallest mean margin of a leaf."""
    return min((value for value in entry["margin_mean"] if value is not None), default=None)


# Quantities of several runs


def lead(runs: Collection, dataset: str, method: str, others: Iterable[str]) -> Sample:
    """Return a method's headline less the mean of the others'."""
    theirs = [published(runs, name, dataset, headline_value) for name in others]
    ours = published(runs, method, dataset, headline_value)
    return difference(ours, combined(theirs, statistics.fmean))


def over_variants(runs: Collection, dataset: str, campaign: str, names: Iterable[str]) -> Sample:
    """Return the default's headline less that of the variant with the highest mean.

    Of both the iteration that the depth rule chose, so that none is chosen on test.
    """
    chosen = of_tree(selected_by_rule)
    found = [of_variant(runs, campaign, name, dataset, chosen) for name in names]
    best = max(found, key=lambda one: statistics.fmean(one.values.values() or [-math.inf]))
    return difference(published(runs, METHOD, dataset, chosen), best)


def time_ratio(runs: Collection, dataset: str, method: str, others: Iterable[str]) -> Sample:
    """Return a method's processor seconds over those of the cheapest of the others."""

    def seconds(run: Run) -> float | None:
        return run.record.cost.cpu()

    ours, *theirs = (published(runs, name, dataset, seconds) for name in (method, *others))
    cheapest = combined([one for one in theirs if one.values] or theirs, min)
    return combined([ours, cheapest], lambda pair: pair[0] / pair[1])


def sweep(
    runs: Collection, dataset: str, point: SweepPoint, read: Callable[..., float | None]
) -> Sample:
    """Take a quantity of iteration 2 from the runs of one point of the sweep."""
    name = sweep_variant(*point).name
    return of_variant(runs, "claims-sweep", name, dataset, at(2, read))


def purity_drop(runs: Collection, dataset: str) -> Sample:
    """Return the purity of the first class's hard leaf at 20 to 1 less that at equal classes."""
    read = partial(routing_purity, leaves="0-1:")
    unequal, equal = (sweep(runs, dataset, ("0.05", ratio, 0), read) for ratio in (20, 1))
    return difference(unequal, equal)


# Quantities that are computed


def exact(value: float) -> Sample:
    """Return a quantity that is no estimate."""
    return Sample({0: value}, exact=True)


def theory_share(runs: Collection, dataset: str) -> Sample:
    """Return the theorem's share under the smallest epsilon that the paper's own table allows.

    The test set being balanced, an average of A at iteration 1 leaves the minority at least
    2 A - 1, so that at least A - 1/2 of all images are not predicted as their attribute says.
    """
    row = paper_by("depth_ablation", "dataset", "metric", "iteration")[dataset, "avg", "1"]
    return exact(100 * enrichment(0.95, float(row["mean"]) / 100 - 0.5))


def gap_closed(runs: Collection, dataset: str) -> Sample:
    """Return what ideal heads gain on one classifier in the Gaussian example, in points of risk.

    The heads know the densities of the four groups, equally frequent, and the best of all gives the
    class; simulated with a fixed generator. One classifier's worst group has Phi(-mu_c).
    """
    spurious, core = 2.0, 1.0
    means = np.array([[a * spurious, y * core] for y in (-1, 1) for a in (-1, 1)])
    images = means[2] + np.random.default_rng(0).standard_normal((200_000, 2))  # y = 1, a = -1
    nearest = ((images[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    single = 0.5 * math.erfc(core / math.sqrt(2))
    return exact(100 * (single - float((nearest < 2).mean())))


def wilson_excess(runs: Collection, dataset: str) -> Sample:
    """Return by how much the rule's tolerance exceeds Wilson's, in percent of that.

    For the paper's proxy on CMNIST, in a group of a tenth of its 6,000 validation images.
    """
    row = paper_by("depth_diagnostics", "dataset", "iteration")["cmnist", "2"]
    p, n, z = float(row["mean"]), 600, 1.96
    wald = z * math.sqrt(p * (1 - p) / n)
    reach = z * math.sqrt(p * (1 - p) / n + (z / n / 2) ** 2)
    lower = (p + z * z / (2 * n) - reach) / (1 + z * z / n)
    return exact(100 * (wald / (p - lower) - 1))


def phase1_share(runs: Collection, dataset: str) -> Sample:
    """Return the percentage of parameters that the new heads of iteration 2 have."""
    import torch

    from methods.backbones import build_backbone
    from methods.base import get_method
    from methods.nct.config import NctConfig
    from methods.nct.tree import Tree
    from methods.presets import preset_config

    known = get_dataset(dataset)
    facts, config = known.facts(known.config_type()), preset_config(get_method(METHOD), dataset)
    assert isinstance(config, NctConfig)
    with torch.device("meta"):
        tree = Tree(build_backbone(BackboneSpec(facts.backbone), facts.channels), len(facts.codes))
        grow = partial(tree.grow, config.hidden, config.dropout, config.heads)
        _, heads = (grow(first_mlp=config.first_head == "mlp") for _ in range(2))
    new, every = (sum(p.numel() for p in part.parameters()) for part in (heads, tree))
    return exact(100 * new / every)
