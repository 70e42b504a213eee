"""Campaigns: the named sets of runs behind the paper's tables.

A campaign names a table, the methods in its rows and the variants in its columns. A variant that
says what a dataset's preset says anyway is the default column there: it is the main runs
themselves, under their own ids, so nothing is trained twice. The paper runs the default column on
its five main seeds and every other column on a sweep of three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.arguments import overrides_without
from bench.plan import NOWHERE, Job, Request, expand
from datasets.catalogue import DATASETS
from datasets.errors import UsageError, did_you_mean
from methods.base import load_methods

MAIN_SEEDS = (0, 1, 2, 3, 4)
SWEEP_SEEDS = (0, 1, 2)
IN_MAIN_TABLE = ("groupdro", "jtt", "cnc", "eiil", "dfr", "erm", "george", "exmap", "nct")
IN_TIMING_TABLE = ("george", "jtt", "cnc", "dfr", "eiil", "exmap", "nct")


@dataclass(frozen=True)
class Variant:
    """A column of a campaign's table: what it changes, and on which seeds it is run.

    Attributes:
        name: the label its runs carry; no part of what they mean.
        overrides: the change, as `--set` would make it.
        seeds: where the change is none on a dataset, the campaign's `default_seeds` hold instead.
        title: the heading of the column.
    """

    name: str
    overrides: Mapping[str, str]
    seeds: tuple[int, ...]
    title: str


@dataclass(frozen=True)
class Campaign:
    """The runs of one table.

    Attributes:
        table: the label of the paper's table.
        variants: its columns, in the paper's order.
        default_seeds: the main runs that the default column takes.
        only: the datasets it is about; any if none is named.
    """

    name: str
    table: str
    methods: tuple[str, ...]
    variants: tuple[Variant, ...]
    default_seeds: tuple[int, ...] = MAIN_SEEDS
    only: tuple[str, ...] = ()

    def covers(self, dataset: str) -> bool:
        """Tell whether it has runs on a dataset."""
        return not self.only or dataset in self.only


@dataclass(frozen=True)
class Cell:
    """The runs of one row, one dataset and one column."""

    method: str
    dataset: str
    variant: Variant
    jobs: tuple[Job, ...] = field(repr=False)

    @property
    def is_default(self) -> bool:
        """Tell whether this is the default column, that is, the main runs."""
        return not any(job.variant for job in self.jobs)


def _columns(knob: str, titles: Mapping[str, str]) -> tuple[Variant, ...]:
    """Make a column for each value of one of NCT's knobs."""
    return tuple(
        Variant(f"{knob}={value}", {f"nct.{knob}": value}, SWEEP_SEEDS, title)
        for value, title in titles.items()
    )


def _parts(titles: Mapping[str, str]) -> tuple[Variant, ...]:
    """Make a column for NCT+ as it is, and one for each `knob=value` by which a part is changed."""
    changed = (
        Variant(
            f"nct_plus.{change}",
            {f"nct_plus.{knob}": value},
            MAIN_SEEDS if change == CLAIMED else SWEEP_SEEDS,
            title,
        )
        for change, title in titles.items()
        for knob, _, value in [change.partition("=")]
    )
    return (Variant("", {}, MAIN_SEEDS, "All parts"), *changed)


PLAIN = Variant("", {}, MAIN_SEEDS, "")
SCOPES = {"standard": "Standard", "head_only": "Head-Only", "full": "Full FT"}
HEADS = {"linear": "Linear", "mlp": "MLP", "asymmetric": "Asymmetric", "reversed": "Reversed"}
MERGING = {"0": "Disabled", "20": "Default"}
AUX_WEIGHTS = {value: value for value in ("0.0", "0.3", "0.5", "0.7", "1.0", "2.0")}
SAMPLING = {"class_weights": "Class weights", "downsample": "Downsample", "geomean": "Geomean"}
CLAIMED = "calibration=none"  # the gain is said to come from it, so that it gets all five seeds
PARTS = {
    "calibration=none": "No calibration",
    "calibration=half": "Calibrated on half",
    "calibration=train": "On training images",
    "proxy=pwga2": "Chosen by pWGA2",
    "ema=0.0": "No averaging",
    "mixup=0.0": "No mixup",
    "iterations=3": "Three iterations",
}
COLOURS = {
    "nominal": "As in the main table",
    "cnc": "CnC's draw of colours",
    "biased_val": "Validation as biased as training",
}

CAMPAIGNS: dict[str, Campaign] = {
    campaign.name: campaign
    for campaign in (
        Campaign("main", "main_results", IN_MAIN_TABLE, (PLAIN,)),
        Campaign("ablation-scope", "ablation_trainable", ("nct",), _columns("scope", SCOPES)),
        Campaign("ablation-heads", "abl_split", ("nct",), _columns("heads", HEADS)),
        # The caption of this table says three seeds, for both columns.
        Campaign(
            "ablation-merging",
            "abl_minsamples",
            ("nct",),
            _columns("min_samples", MERGING),
            default_seeds=SWEEP_SEEDS,
        ),
        Campaign("ablation-aux", "aux_sweep", ("nct",), _columns("aux_weight", AUX_WEIGHTS)),
        # The paper's appendix announces this comparison but shows no table; the label is ours.
        Campaign("ablation-sampling", "abl_sampling", ("nct",), _columns("sampling", SAMPLING)),
        # A variant made here: its parts taken away one by one, and the controls of its calibration,
        # where it gains; on UMNIST its gain is within the seeds' noise, with nothing to take apart.
        Campaign("plus-parts", "plus_parts", ("nct_plus",), _parts(PARTS), only=("cmnist",)),
        # What its gain owes to the data: other training colours, validation as biased as training.
        Campaign(
            "plus-controls",
            "plus_controls",
            ("nct", "nct_plus"),
            tuple(
                Variant(f"cmnist.protocol={value}", {"cmnist.protocol": value}, MAIN_SEEDS, title)
                for value, title in COLOURS.items()
            ),
            only=("cmnist",),
        ),
        # Times are read from the main runs, not measured again.
        Campaign("timing", "training_time", IN_TIMING_TABLE, (PLAIN,)),
    )
}


def get_campaign(name: str) -> Campaign:
    """Find a campaign, or suggest the nearest name."""
    if name in CAMPAIGNS:
        return CAMPAIGNS[name]
    raise UsageError(
        f"unknown campaign '{name}'{did_you_mean(name, CAMPAIGNS)}",
        f"choose from {', '.join(CAMPAIGNS)}",
    )


def campaign_cells(
    campaign: Campaign,
    datasets: Sequence[str],
    data_root: Path,
    seeds: Sequence[int] | None = None,
    *,
    quick: bool = False,
    overrides: Mapping[str, str] | None = None,
) -> list[Cell]:
    """Expand a campaign, cell by cell; `seeds` replaces every column's.

    Datasets that it is not about are passed over. Further overrides apply to every run of their
    method or dataset and show in its record, which keeps it out of the paper's tables.
    """
    further = dict(overrides or {})
    owners = {*load_methods(), *DATASETS}
    cells = []
    for dataset in filter(campaign.covers, datasets):
        for method in campaign.methods:
            for variant in campaign.variants:
                request = Request((method,), (dataset,), (0,), data_root, quick=quick)
                given = overrides_without(further, owners - {method, dataset})
                own = {**given, **variant.overrides}
                (plain,) = expand(replace(request, overrides=given))
                (changed,) = expand(replace(request, overrides=own))
                is_default = changed.run_id == plain.run_id
                usual = campaign.default_seeds if is_default else variant.seeds
                name = "" if is_default else variant.name
                jobs = expand(
                    replace(
                        request,
                        seeds=tuple(usual if seeds is None else seeds),
                        overrides=given if is_default else own,
                    )
                )
                labelled = tuple(replace(job, variant=name) for job in jobs)
                cells.append(Cell(method, dataset, variant, labelled))
    return cells


def campaign_jobs(
    campaign: Campaign,
    datasets: Sequence[str],
    data_root: Path,
    seeds: Sequence[int] | None = None,
    *,
    quick: bool = False,
    overrides: Mapping[str, str] | None = None,
) -> list[Job]:
    """List a campaign's runs, each once."""
    cells = campaign_cells(campaign, datasets, data_root, seeds, quick=quick, overrides=overrides)
    return list({job.run_id: job for cell in cells for job in cell.jobs}.values())


def campaign_progress(done: Set[str], datasets: Sequence[str]) -> list[tuple[str, str, int, int]]:
    """Count, of every campaign with finished runs on a dataset, those runs and all of its runs."""
    counts = []
    for campaign in CAMPAIGNS.values():
        for dataset in datasets:
            jobs = campaign_jobs(campaign, [dataset], NOWHERE)
            finished = sum(job.run_id in done for job in jobs)
            if finished:
                counts.append((campaign.name, dataset, finished, len(jobs)))
    return counts


def variant_overrides(name: str) -> Mapping[str, str]:
    """Give what a variant changes: the only overrides that the paper's tables accept of a run."""
    for campaign in CAMPAIGNS.values():
        for variant in campaign.variants:
            if variant.name == name:
                return variant.overrides
    return {}
