"""Campaigns: the named sets of runs behind the paper's tables, and behind the extended one.

A campaign names a table, the methods in its rows and the variants in its columns. A variant that
repeats what a dataset's preset says anyway is the default column there: it is the main runs
themselves, under their own ids, so nothing is trained twice. The main table has all published
seeds; ablations keep to the paper's, five in the default column and a sweep of three in others.

Importing this module imports no torch: the command line lists campaigns in its help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from datasets.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from bench.job import Job
    from bench.reporting.collection import VariantSpec

PUBLISHED_SEEDS = tuple(range(10))  # as in `bench.job`, which imports torch
MAIN_SEEDS = PUBLISHED_SEEDS[:5]  # the paper's
SWEEP_SEEDS = (0, 1, 2)
IN_MAIN_TABLE = ("groupdro", "jtt", "cnc", "eiil", "dfr", "erm", "george", "exmap", "nct")
NCT, PLUS = ("nct",), ("nct_plus",)
ALL_METHODS = IN_MAIN_TABLE + PLUS  # which have a row in the report's main table


@dataclass(frozen=True)
class Variant:
    """A column of a campaign's table: what it changes, and on which seeds it is run."""

    name: str  # the label its runs carry; no part of their identity
    overrides: Mapping[str, str]  # the change, as `--set` would make it
    seeds: tuple[int, ...]  # the campaign's `default_seeds` hold where the change is none
    title: str


@dataclass(frozen=True)
class Campaign:
    """The runs of one table."""

    name: str
    table: str  # its label
    methods: tuple[str, ...]
    variants: tuple[Variant, ...]  # the table's columns, in the paper's order
    default_seeds: tuple[int, ...] = MAIN_SEEDS  # the main runs that the default column takes
    datasets: tuple[str, ...] = ()  # those it is about; any if none is named

    def includes(self, dataset: str) -> bool:
        """Return whether it has runs on a dataset: one of its own, or of the main table's."""
        return dataset in self.datasets if self.datasets else not _is_extended(dataset)

    def rows(self) -> tuple[str, ...]:
        """Return the methods in the table's rows."""
        return self.methods

    def columns(self, method: str) -> tuple[Variant, ...]:
        """Return what is run of a method."""
        return self.variants


@dataclass(frozen=True)
class FieldCampaign(Campaign):
    """Runs of the extended table, as the registries have methods and datasets.

    Either the methods without a row in the main table on the datasets of that, or all methods on
    the datasets without a column in it; a method's further rows (`Method.further_rows`) as well.
    """

    on_main_datasets: bool = False

    def includes(self, dataset: str) -> bool:
        """Return whether it has runs on a dataset; a user's own data is in no table."""
        from datasets.dataset import DATASETS

        return _is_extended(dataset) != self.on_main_datasets and dataset in DATASETS

    def rows(self) -> tuple[str, ...]:
        """Return all registered methods, or those without a row in the main table."""
        from bench.reporting.names import all_methods

        left_out = ALL_METHODS if self.on_main_datasets else ()
        return tuple(name for name in all_methods() if name not in left_out)

    def columns(self, method: str) -> tuple[Variant, ...]:
        """Return the method's preset, and a column for each of its further rows."""
        from methods.base import get_method

        further = (
            Variant(
                ", ".join(f"{knob}={value}" for knob, value in settings.items()),
                {f"{method}.{knob}": value for knob, value in settings.items()},
                self.default_seeds,
                title[:1].upper() + title[1:],
            )
            for title, settings in get_method(method).further_rows.items()
        )
        return (*self.variants, *further)


def _is_extended(dataset: str) -> bool:
    """Return whether a dataset has no column in the main table."""
    from datasets.catalogue import load_datasets

    known = load_datasets().get(dataset)
    return known is not None and known.extended


@dataclass(frozen=True)
class CampaignCell:
    """The runs of one method, dataset and column; a default column is the main runs."""

    method: str
    dataset: str
    variant: Variant
    jobs: tuple[Job, ...] = field(repr=False)
    is_default: bool


@dataclass(frozen=True)
class CampaignProgress:
    """How many of a campaign's runs on a dataset are finished."""

    name: str
    dataset: str
    done: int
    total: int


def _variants(
    setting: str, titles: Mapping[str, str], seeds: tuple[int, ...] = SWEEP_SEEDS
) -> tuple[Variant, ...]:
    """Return a column for each value of a setting."""
    name = setting.removeprefix("nct.")
    return tuple(
        Variant(f"{name}={value}", {setting: value}, seeds, title)
        for value, title in titles.items()
    )


MAIN_VARIANT = Variant("", {}, MAIN_SEEDS, "")
AS_PRESET = replace(MAIN_VARIANT, title="Preset")
SCOPES = {"standard": "Standard", "head_only": "Head-Only", "full": "Full FT"}
HEADS = {"linear": "Linear", "mlp": "MLP", "asymmetric": "Asymmetric", "reversed": "Reversed"}
MERGING = _variants("nct.min_samples", {"0": "Disabled", "20": "Default"})
AUX_WEIGHTS = {value: value for value in ("0.0", "0.3", "0.5", "0.7", "1.0", "2.0")}
CHECKPOINTS = {"phase": "Best of phase 2", "iteration": "Best of both phases"}
PWGA = {"routed": "By routed label", "predicted": "By predicted leaf"}
SAMPLING = {"class_weights": "Class weights", "downsample": "Downsample", "geomean": "Geomean"}
PARTS = (
    replace(MAIN_VARIANT, title="All parts"),
    # The gain is said to come from calibration, so that it gets all five seeds.
    *_variants("nct_plus.calibration", {"none": "No calibration"}, MAIN_SEEDS),
    *_variants("nct_plus.calibration", {"half": "Calibrated on half"}),
    *_variants("nct_plus.calibration", {"train": "On training images"}),
    *_variants("nct_plus.proxy", {"pwga2": "Chosen by pWGA2"}),
    *_variants("nct_plus.ema", {"0.0": "No averaging"}),
    *_variants("nct_plus.mixup", {"0.0": "No mixup"}),
    *_variants("nct_plus.iterations", {"3": "Three iterations"}),
)
COLOURS = (
    *_variants("cmnist.protocol", {"nominal": "As in the main table"}, MAIN_SEEDS),
    *_variants("cmnist.protocol", {"cnc": "CnC's draw of colours"}, MAIN_SEEDS),
    *_variants("cmnist.protocol", {"biased_val": "Validation as biased as training"}, MAIN_SEEDS),
)
# How routing ends, by the share of conflicting images, how easy they are, and the classes' sizes.
# Routing needs iteration 1 alone, so that iteration 2 is short and there is no third.
SHORT = {"nct.iterations": "2", "nct.epochs": "2,20"}
SWEEP_POINTS = (
    *((share, 1, mark) for share in ("0.005", "0.02", "0.05") for mark in (0, 2, 4)),
    *(("0.05", 5, 0), ("0.05", 20, 0), ("0.05", 20, 4)),
)
"""Share of conflicts, imbalance of classes, side of the mark that makes conflicts easy."""


def sweep_variant(share: str, imbalance: int, mark: int) -> Variant:
    """Return the column of one point of the sweep."""
    changed = {"conflicts": share, "imbalance": str(imbalance), "mark": str(mark)}
    overrides = {f"cmnist.{name}": value for name, value in changed.items()}
    classes = "equal classes" if imbalance == 1 else f"classes {imbalance} to 1"
    marks = f"mark of {mark} pixels" if mark else "no mark"
    title = f"{100 * float(share):g}% conflicts, {classes}, {marks}"
    name = ", ".join(f"{name}={value}" for name, value in changed.items())
    return Variant(name, {**SHORT, **overrides}, SWEEP_SEEDS, title)


BALANCE = _variants(
    "cmnist.protocol",
    {"nominal": "Balanced validation", "biased_val": "Validation as biased as training"},
)

CAMPAIGNS: dict[str, Campaign] = {
    campaign.name: campaign
    for campaign in (
        Campaign("main", "main_results", ALL_METHODS, (MAIN_VARIANT,), PUBLISHED_SEEDS),
        Campaign("ablation-scope", "ablation_trainable", NCT, _variants("nct.scope", SCOPES)),
        Campaign("ablation-heads", "abl_split", NCT, _variants("nct.heads", HEADS)),
        # The caption of this table says three seeds, for both columns.
        Campaign("ablation-merging", "abl_minsamples", NCT, MERGING, SWEEP_SEEDS),
        Campaign("ablation-aux", "aux_sweep", NCT, _variants("nct.aux_weight", AUX_WEIGHTS)),
        # The paper's appendix announces this comparison but shows no table; the label is ours.
        Campaign("ablation-sampling", "abl_sampling", NCT, _variants("nct.sampling", SAMPLING)),
        # Readings of the paper that could have been taken instead; the paper has no such tables.
        Campaign(
            "ablation-checkpoint", "abl_checkpoint", NCT, _variants("nct.checkpoint", CHECKPOINTS)
        ),
        Campaign("ablation-pwga", "abl_pwga", NCT, _variants("nct.pwga", PWGA)),
        # A variant made here: its parts taken away one by one, and the controls of its calibration,
        # where it gains; on UMNIST its gain is within the seeds' noise, with nothing to take apart.
        Campaign("plus-parts", "plus_parts", PLUS, PARTS, datasets=("cmnist",)),
        # What its gain owes to the data: other training colours, validation as biased as training.
        Campaign("plus-controls", "plus_controls", NCT + PLUS, COLOURS, datasets=("cmnist",)),
        # Two conditions that the paper's conclusion sets itself; 36 runs.
        Campaign(
            "claims-sweep",
            "claims_sweep",
            NCT,
            tuple(sweep_variant(*point) for point in SWEEP_POINTS),
            datasets=("cmnist",),
        ),
        # What every method owes to a balanced validation set.
        Campaign(
            *("control-validation", "control_validation", IN_MAIN_TABLE + PLUS, BALANCE),
            *(SWEEP_SEEDS, ("cmnist",)),
        ),
        # Beside the paper's, apart from its table: new methods, and all of them on new datasets.
        FieldCampaign(
            *("extended-methods", "extended_results", (), (AS_PRESET,), MAIN_SEEDS),
            on_main_datasets=True,
        ),
        FieldCampaign("extended-datasets", "extended_results", (), (AS_PRESET,), SWEEP_SEEDS),
        # Times are read from the main runs, not measured again.
        Campaign("timing", "training_time", ALL_METHODS, (MAIN_VARIANT,), PUBLISHED_SEEDS),
    )
}


def get_campaign(name: str) -> Campaign:
    """Return a campaign by name; an unknown name is an error that suggests the nearest one."""
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
) -> list[CampaignCell]:
    """Expand a campaign, cell by cell, on the given datasets that it is about.

    `seeds` replace those of every column. `overrides` are applied to every run of their method or
    dataset; they show in its record, which keeps it out of the paper's tables.
    """
    from bench.job import Request, expand, identity_changes, locate, overrides_without
    from datasets.catalogue import load_datasets
    from methods.base import load_methods

    owners = {*load_methods(), *load_datasets()}
    cells = []
    for dataset in filter(campaign.includes, datasets):
        found = locate(Request((), (dataset,), (), data_root))
        for method in campaign.rows():
            given = overrides_without(overrides or {}, owners - {method, dataset})
            request = Request(
                *((method,), (dataset,), tuple(seeds or campaign.default_seeds), data_root),
                overrides=given,
                quick=quick,
            )
            main = expand(request, found)
            for variant in campaign.columns(method):
                jobs = main
                if variant.overrides:
                    own = {**given, **variant.overrides}
                    asked = replace(request, overrides=own, seeds=tuple(seeds or variant.seeds))
                    jobs = [replace(job, variant=variant.name) for job in expand(asked, found)]
                changed = identity_changes(main[0].identity, jobs[0].identity).keys() - {"seed"}
                chosen = tuple(jobs if changed else main)
                cells.append(CampaignCell(method, dataset, variant, chosen, not changed))
    return cells


def campaign_jobs(cells: Iterable[CampaignCell]) -> list[Job]:
    """Return the runs of a campaign's cells, each once."""
    return list({job.run_id: job for cell in cells for job in cell.jobs}.values())


def campaign_progress(done: Set[str], datasets: Sequence[str]) -> list[CampaignProgress]:
    """Count the finished runs, given by their ids, of every campaign that has some on a dataset."""
    from bench.job import NO_DATA

    counts = []
    for campaign, dataset in product(CAMPAIGNS.values(), datasets):
        jobs = campaign_jobs(campaign_cells(campaign, [dataset], NO_DATA))
        if finished := sum(job.run_id in done for job in jobs):
            counts.append(CampaignProgress(campaign.name, dataset, finished, len(jobs)))
    return counts


def variant_specs() -> tuple[VariantSpec, ...]:
    """Return every column of every ablation, on every dataset, for `reporting.collect`."""
    from bench.reporting.collection import VariantSpec
    from datasets.catalogue import load_datasets

    return tuple(
        VariantSpec(
            *(campaign.name, variant.name, method, dataset),
            overrides=variant.overrides,
            seeds=variant.seeds,
            default_seeds=campaign.default_seeds,
        )
        for campaign in CAMPAIGNS.values()
        if len(campaign.variants) > 1  # the extended table finds its further rows by itself
        for dataset in filter(campaign.includes, load_datasets())
        for method in campaign.methods
        for variant in campaign.variants
    )
