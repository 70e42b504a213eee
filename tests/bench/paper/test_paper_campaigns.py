"""The job sets of the campaigns, against what the paper says of its tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_records import record

import methods.base
from bench.job import NO_DATA, PUBLISHED_SEEDS, Job, Request, expand
from bench.paper.campaigns import (
    CAMPAIGNS,
    CampaignProgress,
    campaign_cells,
    campaign_jobs,
    campaign_progress,
    get_campaign,
    variant_specs,
)
from bench.store import Store
from datasets.dataset import DATASETS
from datasets.errors import UsageError
from methods.base import get_method, load_methods

Cli = Callable[..., Any]
ALL = ("waterbirds", "celeba", "isic", "umnist", "cmnist")
MAIN, SWEEP = [0, 1, 2, 3, 4], [0, 1, 2]
# The default column of each dataset, from the paper's table of hyperparameters and its text.
AUX = {"waterbirds": "1.0", "celeba": "2.0", "isic": "1.0", "umnist": "0.5", "cmnist": "1.0"}
SAMPLING = {
    "waterbirds": "class_weights",
    "celeba": "downsample",
    "isic": "class_weights",
    "umnist": "geomean",
    "cmnist": "geomean",
}


def columns(name: str, dataset: str) -> dict[str, tuple[list[int], bool]]:
    """The seeds of each column of a campaign on a dataset, and whether it is the default one."""
    cells = campaign_cells(CAMPAIGNS[name], [dataset], NO_DATA)
    return {c.variant.title: ([job.seed for job in c.jobs], c.is_default) for c in cells}


def jobs_of(*what: Any, **more: Any) -> list[Job]:
    """The runs of a campaign, each once."""
    return campaign_jobs(campaign_cells(*what, **more))


def main_runs(dataset: str, seeds: list[int]) -> set[str]:
    return {job.run_id for job in expand(Request(("nct",), (dataset,), tuple(seeds), NO_DATA))}


@pytest.mark.parametrize("dataset", ALL)
def test_the_columns_are_the_papers(dataset: str) -> None:
    assert columns("ablation-scope", dataset) == {
        "Standard": (MAIN, True),
        "Head-Only": (SWEEP, False),
        "Full FT": (SWEEP, False),
    }
    assert columns("ablation-heads", dataset) == {
        "Linear": (SWEEP, False),
        "MLP": (SWEEP, False),
        "Asymmetric": (MAIN, True),
        "Reversed": (SWEEP, False),
    }
    assert columns("ablation-merging", dataset) == {
        "Disabled": (SWEEP, False),
        "Default": (SWEEP, True),  # "3-seed mean" in the caption
    }
    assert columns("ablation-aux", dataset) == {
        value: (MAIN, True) if value == AUX[dataset] else (SWEEP, False)
        for value in ("0.0", "0.3", "0.5", "0.7", "1.0", "2.0")
    }
    titles = {"class_weights": "Class weights", "downsample": "Downsample", "geomean": "Geomean"}
    assert columns("ablation-sampling", dataset) == {
        title: (MAIN, True) if value == SAMPLING[dataset] else (SWEEP, False)
        for value, title in titles.items()
    }


@pytest.mark.parametrize("name", [n for n in CAMPAIGNS if n.startswith("ablation")])
def test_the_default_column_is_the_main_runs(name: str) -> None:
    (default,) = [c for c in campaign_cells(CAMPAIGNS[name], ["cmnist"], NO_DATA) if c.is_default]
    assert {job.run_id for job in default.jobs} <= main_runs("cmnist", MAIN)
    assert all(job.variant == "" and not job.overrides for job in default.jobs)


def test_a_variant_is_a_label_and_its_overrides_are_in_the_job() -> None:
    jobs = jobs_of(CAMPAIGNS["ablation-aux"], ["umnist"], NO_DATA)
    (job,) = [job for job in jobs if job.variant == "aux_weight=0.3" and job.seed == 0]
    assert job.overrides == {"nct.aux_weight": "0.3"}
    request = Request(("nct",), ("umnist",), (0,), NO_DATA, overrides={"nct.aux_weight": "0.3"})
    assert job.run_id == expand(request)[0].run_id


def test_the_main_and_the_timing_campaign_are_the_same_runs() -> None:
    main = {job.run_id: job for job in jobs_of(CAMPAIGNS["main"], ALL, NO_DATA)}
    timing = jobs_of(CAMPAIGNS["timing"], ALL, NO_DATA)
    assert {job.run_id for job in timing} == main.keys()
    paper = {"groupdro", "jtt", "cnc", "eiil", "dfr", "erm", "george", "exmap", "nct"}
    assert {job.method for job in main.values()} == paper | {"nct_plus"}
    assert {job.seed for job in main.values()} == set(PUBLISHED_SEEDS) == set(range(10))
    assert {job.variant for job in main.values()} == {""}


def test_parts_of_the_variant_are_one_change_each() -> None:
    cells = campaign_cells(CAMPAIGNS["plus-parts"], ["cmnist"], NO_DATA)
    whole, *changed = cells
    assert whole.is_default and not any(cell.is_default for cell in changed)
    assert {job.method for cell in cells for job in cell.jobs} == {"nct_plus"}
    seeds = [[job.seed for job in cell.jobs] for cell in cells]
    assert seeds == [MAIN, MAIN, *[SWEEP] * 6]  # whole, without calibration, the rest
    assert all(len(cell.variant.overrides) == 1 for cell in changed)
    assert len({job.run_id for cell in cells for job in cell.jobs}) == sum(map(len, seeds))


def test_controls_of_the_variant_are_about_one_dataset_and_pair_it_with_nct() -> None:
    cells = campaign_cells(CAMPAIGNS["plus-controls"], ALL, NO_DATA)
    assert {cell.dataset for cell in cells} == {"cmnist"}
    assert [(c.method, c.is_default) for c in cells] == [
        (method, default) for method in ("nct", "nct_plus") for default in (True, False, False)
    ]
    assert all([job.seed for job in cell.jobs] == MAIN for cell in cells)
    assert {job.protocol for cell in cells for job in cell.jobs} == {"nominal", "cnc", "biased_val"}
    main = set(main_runs("cmnist", MAIN))
    assert main <= {job.run_id for cell in cells for job in cell.jobs}


@pytest.mark.parametrize("more", [(), ("--plan",)])
def test_a_campaign_refuses_datasets_it_is_not_about(
    cli: Cli, more: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("campaign", "plus-controls", "--datasets", "waterbirds", "--data-root", tmp_path)
    seen = cli(*words, *more)
    assert seen.code == 2
    assert "plus-controls has no runs on waterbirds" in seen.err
    assert "--datasets cmnist" in seen.err and "not on disk" not in seen.err


def test_a_campaign_about_one_dataset_does_not_ask_for_others(cli: Cli, digits_root: Path) -> None:
    words = ("campaign", "plus-controls", "--plan", "--json", "--data-root", digits_root)
    for datasets in ("all", "cmnist,waterbirds"):
        planned = cli(*words, "--datasets", datasets).json
        assert {run["dataset"] for run in planned["runs"]} == {"cmnist"}
        assert planned["total"] == 30 and planned["skipped_datasets"] == []


def test_an_override_of_one_method_leaves_the_others_alone() -> None:
    shorter = {"nct.iterations": "2"}
    jobs = jobs_of(CAMPAIGNS["plus-controls"], ["cmnist"], NO_DATA, [7], overrides=shorter)
    changed = {job.method for job in jobs if "nct.iterations" in job.overrides}
    assert changed == {"nct"} and {job.method for job in jobs} == {"nct", "nct_plus"}


def test_the_seeds_can_be_replaced_and_runs_come_once() -> None:
    jobs = jobs_of(CAMPAIGNS["ablation-aux"], ["umnist"], NO_DATA, seeds=[7])
    assert [job.seed for job in jobs] == [7] * 6
    assert len({job.run_id for job in jobs}) == 6


def test_further_overrides_show_in_every_run() -> None:
    slower = {"nct.iterations": "2"}
    jobs = jobs_of(CAMPAIGNS["ablation-aux"], ["umnist"], NO_DATA, [7], overrides=slower)
    assert all(job.overrides["nct.iterations"] == "2" for job in jobs)
    assert sum(job.variant == "" for job in jobs) == 1


def test_progress_counts_the_papers_runs_and_no_others() -> None:
    main = jobs_of(CAMPAIGNS["main"], ["umnist"], NO_DATA)
    others = {job.run_id for job in main if job.method != "nct"}
    changed = expand(Request(("nct",), ("umnist",), (0,), NO_DATA, overrides={"nct.z": "1.0"}))
    done = {*others, *main_runs("umnist", [0, 3]), changed[0].run_id}
    counts = {one.name: one for one in campaign_progress(done, ["umnist", "isic"])}
    assert counts["main"] == CampaignProgress("main", "umnist", 92, 100)
    assert counts["ablation-aux"] == CampaignProgress("ablation-aux", "umnist", 2, 5 + 5 * 3)
    merging = counts["ablation-merging"]  # its default column has seeds 0-2
    assert (merging.done, merging.total) == (1, 3 + 3)
    assert "plus-parts" not in counts and "plus-controls" not in counts


def test_columns_are_described_to_the_report_as_they_are_run() -> None:
    specs = {(s.campaign, s.variant, s.method, s.dataset): s for s in variant_specs()}
    assert not any(campaign in ("main", "timing") for campaign, *_ in specs)
    for name in ("ablation-aux", "ablation-merging", "plus-parts", "plus-controls"):
        for cell in campaign_cells(CAMPAIGNS[name], ("cmnist",), NO_DATA):
            spec = specs[name, cell.variant.name, cell.method, "cmnist"]
            seeds = spec.default_seeds if cell.is_default else spec.seeds
            assert seeds == tuple(job.seed for job in cell.jobs)
            assert spec.overrides == cell.variant.overrides
    assert ("plus-parts", "", "nct_plus", "umnist") not in specs


def test_status_tells_how_far_campaigns_are(cli: Cli, tmp_path: Path) -> None:
    for job in jobs_of(CAMPAIGNS["ablation-merging"], ["cmnist"], NO_DATA)[:4]:
        Store(tmp_path).write(record(job, 70.0))
    shown = cli("status", "--results", tmp_path, "--json").json
    merging = {"name": "ablation-merging", "dataset": "cmnist", "done": 4, "total": 6}
    assert merging in shown["campaigns"]
    assert "4 of 6" in cli("status", "--results", tmp_path).out


@pytest.mark.parametrize("content", ["def fit(", "raise SystemExit('not now')", "import nowhere"])
def test_status_needs_no_method_that_can_be_loaded(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Somebody may be editing a method while runs of it go on."""
    (job,) = expand(Request(("erm",), ("cmnist",), (0,), NO_DATA))
    Store(tmp_path).write(record(job, 70.0))
    (tmp_path / "half_edited.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(methods.base, "BUILT_IN", (*methods.base.BUILT_IN, "half_edited"))
    seen = cli("status", "--results", tmp_path, "--json")
    assert (seen.code, seen.json["done"], seen.json["campaigns"]) == (0, 1, [])
    assert "campaigns are not counted" in seen.err


EXTENDED = {name for name, method in load_methods().items() if method.extended}


def test_extended_methods_are_run_on_the_papers_datasets() -> None:
    cells = campaign_cells(CAMPAIGNS["extended-methods"], (*ALL, "dominoes", "cmnist_irm"), NO_DATA)
    assert {cell.dataset for cell in cells} == set(ALL)
    assert {cell.method for cell in cells} == EXTENDED >= {"rwy", "xrm"}
    assert {len(cell.jobs) for cell in cells} == {5}
    assert all([job.seed for job in cell.jobs] == MAIN for cell in cells)


def test_extended_datasets_are_run_with_every_method() -> None:
    campaign = CAMPAIGNS["extended-datasets"]
    cells = campaign_cells(campaign, (*ALL, "dominoes", "cmnist_irm"), NO_DATA)
    assert {cell.dataset for cell in cells} == {"dominoes", "cmnist_irm"}
    assert {cell.method for cell in cells} == set(load_methods())
    assert all([job.seed for job in cell.jobs] == SWEEP for cell in cells)
    protocols = {job.protocol for cell in cells for job in cell.jobs}
    assert protocols == {"correlation-95", "two-environments"}


@pytest.mark.parametrize("name", ["extended-methods", "extended-datasets"])
def test_further_rows_are_run_beside_the_preset(name: str) -> None:
    dataset = "cmnist" if name == "extended-methods" else "cmnist_irm"
    for cell in campaign_cells(CAMPAIGNS[name], [dataset], NO_DATA):
        further = get_method(cell.method).further_rows.values()
        expected = [{f"{cell.method}.{k}": v for k, v in own.items()} for own in further]
        assert cell.is_default == (not cell.variant.overrides)
        assert cell.is_default or cell.variant.overrides in expected
        assert all(job.overrides == cell.variant.overrides for job in cell.jobs)
    found = campaign_cells(CAMPAIGNS[name], [dataset], NO_DATA)
    rwy = [cell.variant.title for cell in found if cell.method == "rwy"]
    assert rwy == ["Preset", "No validation groups"]


def test_a_newly_registered_method_and_dataset_are_in_the_campaigns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods.base.load_methods()
    erm = methods.base.METHODS["erm"]
    plugged = type("Plugged", (type(erm),), {"name": "plugged"})()
    monkeypatch.setitem(methods.base.METHODS, "plugged", plugged)
    for name, dataset in (("extended-methods", "umnist"), ("extended-datasets", "dominoes")):
        cells = campaign_cells(CAMPAIGNS[name], [dataset], NO_DATA)
        assert "plugged" in {cell.method for cell in cells}
    kind = type(DATASETS["cmnist_irm"])
    monkeypatch.setitem(DATASETS, "novel", type("Novel", (kind,), {"name": "novel"})())
    assert CAMPAIGNS["extended-datasets"].includes("novel")
    assert not CAMPAIGNS["extended-methods"].includes("novel")
    assert not CAMPAIGNS["main"].includes("novel")


@pytest.mark.parametrize("name", ["main", "timing", "ablation-aux"])
def test_the_papers_campaigns_are_about_its_datasets(cli: Cli, name: str, tmp_path: Path) -> None:
    assert campaign_cells(CAMPAIGNS[name], ["dominoes", "cmnist_irm"], NO_DATA) == []
    words = ("campaign", name, "--datasets", "dominoes", "--plan", "--data-root", tmp_path)
    seen = cli(*words)
    assert seen.code == 2 and f"{name} has no runs on dominoes" in seen.err
    assert f"--datasets {','.join(ALL)}" in seen.err


def test_the_plan_of_an_extended_campaign_leaves_other_datasets_out(
    cli: Cli, tmp_path: Path
) -> None:
    words = ("campaign", "extended-datasets", "--plan", "--json", "--data-root", tmp_path)
    planned = cli(*words).json
    assert {run["dataset"] for run in planned["runs"]} == {"dominoes", "cmnist_irm"}
    assert {own["name"] for own in planned["skipped_datasets"]} == {"dominoes", "cmnist_irm"}


def test_an_unknown_campaign_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="ablation-aux"):
        get_campaign("ablation-axu")


def stored_quick_runs(root: Path, results: Path, seeds: list[int]) -> list[Job]:
    """Both columns of a campaign on quick data; the default one as if it had been run."""
    merging = CAMPAIGNS["ablation-merging"]
    changed, default = jobs_of(merging, ["umnist"], root, seeds, quick=True)
    Store(results).write(record(default, 70.0))
    return [changed, default]


def test_a_campaign_runs_skips_what_exists_and_prints_its_table(
    cli: Cli, digits_root: Path, tmp_path: Path
) -> None:
    words = ("campaign", "ablation-merging", "--datasets", "umnist", "--seeds", "1", "--quick")
    places = ("--data-root", digits_root, "--results", tmp_path, "--workers", "1")
    planned = cli(*words, *places, "--plan", "--json").json
    assert (planned["total"], planned["missing"]) == (2, 2)
    assert [run["variant"] for run in planned["runs"]] == ["min_samples=0", ""]
    changed, _ = stored_quick_runs(digits_root, tmp_path, [0])
    seen = cli(*words, *places)
    assert seen.code == 0 and "1 not to be run, 1 to run" in seen.err
    assert "Disabled" in seen.out and "Default (default)" in seen.out
    assert "test-selected, as published" in " ".join(seen.out.replace("┃", " ").split())
    again = cli(*words, *places, "--json")
    assert again.json["done"] == 2 and "2 not to be run, 0 to run" in again.err
    stored = Store(tmp_path).record(changed.run_id)
    assert stored is not None
    assert stored.job.variant == "min_samples=0"
    assert stored.job.overrides == {"nct.min_samples": "0"}


def test_a_campaign_on_development_seeds_shows_validation_figures(
    cli: Cli, digits_root: Path, tmp_path: Path
) -> None:
    changed, _ = stored_quick_runs(digits_root, tmp_path, [100])
    Store(tmp_path).write(record(changed, 60.0))
    words = ("campaign", "ablation-merging", "--datasets", "umnist", "--seeds", "100,", "--quick")
    seen = cli(*words, "--data-root", digits_root, "--results", tmp_path, "--workers", "1")
    assert seen.code == 0
    assert "Validation set" in seen.out and "min_samples=0" in seen.out
    assert "test-selected" not in seen.out and "Test set" not in seen.out
