"""What every method owes the harness: the built-in ones, and each plug-in that is installed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest

from bench.context import RunContext
from bench.execute import load_data
from bench.launch.arrays import shared_stage
from bench.plan import backbone_spec
from bench.store import Store
from datasets.base import Task
from datasets.catalogue import DATASETS
from datasets.config import as_plain, build_config
from methods.base import Fitted, Method, load_methods
from methods.presets import preset_config, read_presets
from methods.training import Training

METHODS = dict(load_methods())
BUILT_IN = [name for name, m in METHODS.items() if type(m).__module__.startswith("methods.")]
DIGITS = ("umnist", "cmnist")
RECORD = {
    *("schema_version", "run_id", "status", "method", "method_version", "supervision", "dataset"),
    *("protocol", "data_fingerprint", "standin", "quick", "preset", "overrides", "variant"),
    *("config", "seed", "seed_tree", "selection", "stages", "peak_memory_bytes", "device"),
    *("threads", "environment", "git", "metrics"),
}
STAGE = {"name", "key", "seconds_standalone", "seconds_marginal", "image_passes", "reused"}
METRICS = {"wga", "avg", "avg_train_weighted", "group_accuracy", "group_count"}
HISTORY = ["stage", "iteration", "phase", "epoch", "loss", "selection"]
AUDITED = ["audit_val_wga", "audit_test_wga"]

every_method = pytest.mark.parametrize("name", METHODS)
built_in_methods = pytest.mark.parametrize("name", BUILT_IN)
on_digits = pytest.mark.parametrize("dataset", DIGITS)
on_all_datasets = pytest.mark.parametrize("dataset", DATASETS)


class Killed(BaseException):
    """What no `except Exception` stops, as with Ctrl-C."""


@contextmanager
def killed_after(saves: int) -> Iterator[None]:
    """End the run once it has written that many checkpoints."""
    original, written = RunContext.save, []

    def save(self: RunContext, name: str, state: dict[str, Any]) -> None:
        original(self, name, state)
        written.append(name)
        if len(written) == saves:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunContext, "save", save)
        yield


@contextmanager
def counting(owner: type, name: str) -> Iterator[list[None]]:
    """Count the calls of a method while letting it work."""
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        yield calls


def counted_run(runs: Any, name: str, dataset: str) -> tuple[Any, int, int]:
    """Run without interruption; give the run, its checkpoints and its epochs.

    In a folder of its own, where no other method has left a stage that it could share.
    """
    key = ("counted", name, dataset)
    if key not in runs.made:
        with counting(RunContext, "save") as saves, counting(Training, "_one_epoch") as epochs:
            run = runs.execute(runs.job(name, dataset), f"counted-{name}")
        runs.made[key] = run, len(saves), len(epochs)
    counted: tuple[Any, int, int] = runs.made[key]
    return counted


def digits_task(runs: Any, name: str, dataset: str) -> Task:
    job = runs.job(name, dataset)
    tier = {key: job.supervision[key] for key in ("train_groups", "val_groups")}
    return load_data(job, runs.data_root).task(backbone_spec(job.config["backbone"]), **tier)


@every_method
@on_digits
class TestRun:
    def test_record_is_done_and_complete(self, runs: Any, name: str, dataset: str) -> None:
        run = runs.run(name, dataset)
        assert run.record["status"] == "done", run.record.get("failure")
        stored = Store(runs.home / "first").record(run.job.run_id)
        assert stored is not None
        assert set(stored) >= RECORD
        assert {"rule", "value", "epoch"} <= set(stored["selection"])
        assert stored["stages"] and all(set(stage) >= STAGE for stage in stored["stages"])
        assert set(stored["git"]) >= {"commit", "dirty"}
        assert stored["standin"] and stored["quick"]
        assert stored["peak_memory_bytes"] > 0
        assert sum(stage["image_passes"] for stage in stored["stages"]) > 0
        for split in ("val", "test"):
            assert set(stored["metrics"][split]) >= METRICS
            assert ("wga_10digit" in stored["metrics"][split]) == (dataset == "umnist")
        if "partition" in stored:
            quality = stored["partition"]
            assert set(quality) >= {"precision", "recall", "enrichment", "ami", "sizes"}
            table = pd.read_parquet(run.folder / "partition.parquet")
            labels = load_data(run.job, runs.data_root).splits[quality["split"]].labels
            order = labels.ids.argsort()
            np.testing.assert_array_equal(table["id"], labels.ids[order])
            np.testing.assert_array_equal(table["group"], labels.groups[order])
            assert sorted(table["part"].value_counts()) == sorted(n for n in quality["sizes"] if n)

    def test_declared_supervision_is_the_recorded_one(
        self, runs: Any, name: str, dataset: str
    ) -> None:
        run, method = runs.run(name, dataset), METHODS[name]
        config = build_config(method.config_type, run.job.config["method"], name)
        assert run.record["supervision"] == dataclasses.asdict(method.supervision(config))

    def test_declared_shared_stage_is_one_it_asks_for(
        self, runs: Any, name: str, dataset: str
    ) -> None:
        run = runs.run(name, dataset)
        declared = shared_stage(run.job, run.record["label_digest"])
        asked_for = [f"{s['name']}-{s['key']}" for s in run.record["stages"] if s["name"] != "fit"]
        assert declared in asked_for if asked_for else declared is None

    def test_predictions_cover_validation_and_test(
        self, runs: Any, name: str, dataset: str
    ) -> None:
        run = runs.run(name, dataset)
        data, table = load_data(run.job, runs.data_root), run.predictions
        scores = [f"score_{c}" for c in range(len(data.facts.classes))]
        assert {"id", "split", "y", "group", "pred", "leaf", *scores} <= set(table)
        assert f"score_{len(scores)}" not in table
        for split in ("val", "test"):
            rows, labels = table[table["split"] == split], data.splits[split].labels
            for column, truth in (("id", labels.ids), ("y", labels.y), ("group", labels.groups)):
                np.testing.assert_array_equal(rows[column], truth)
        values = table[scores].to_numpy()
        assert np.isfinite(values).all()
        chosen = values[np.arange(len(values)), table["pred"]]
        np.testing.assert_array_equal(chosen, values.max(axis=1))  # ties may arise from float16
        assert (table["pred"] == table["y"]).mean() * 100 == pytest.approx(
            np.average(
                [run.record["metrics"][s]["avg"] for s in ("val", "test")],
                weights=[len(data.splits[s]) for s in ("val", "test")],
            )
        )

    def test_history_has_a_row_for_every_epoch(self, runs: Any, name: str, dataset: str) -> None:
        table = runs.run(name, dataset).history
        assert list(table.columns)[:8] == [*HISTORY, *AUDITED]
        assert len(table) > 0
        assert not table.duplicated(["stage", "iteration", "phase", "epoch"]).any()
        assert table[["loss", *AUDITED]].notna().all(axis=None)

    def test_same_seed_gives_the_same_run(self, runs: Any, name: str, dataset: str) -> None:
        first, again = runs.run(name, dataset), runs.run(name, dataset, results="again")
        pd.testing.assert_frame_equal(first.predictions, again.predictions, check_exact=True)
        pd.testing.assert_frame_equal(first.history, again.history, check_exact=True)
        stages = [[stage["key"] for stage in run.record["stages"]] for run in (first, again)]
        assert stages[0] == stages[1]

    def test_another_seed_gives_another_run(self, runs: Any, name: str, dataset: str) -> None:
        first, other = runs.run(name, dataset), runs.run(name, dataset, seed=1)
        scores = [column for column in first.predictions if column.startswith("score_")]
        assert not np.array_equal(first.predictions[scores], other.predictions[scores])
        keys = [{stage["key"] for stage in run.record["stages"]} for run in (first, other)]
        assert not keys[0] & keys[1]

    @pytest.mark.parametrize("when", ["middle", "last"])
    def test_resumed_run_equals_an_uninterrupted_one(
        self, runs: Any, name: str, dataset: str, when: str
    ) -> None:
        job = runs.job(name, dataset)
        whole, saves, epochs = counted_run(runs, name, dataset)
        if not saves:
            pytest.skip(f"{name} writes no checkpoints, so there is nothing to resume from")
        place = f"killed-{when}-{name}"
        stop = {"middle": (saves + 1) // 2, "last": saves}[when]
        with counting(Training, "_one_epoch") as resumed_epochs:
            with killed_after(stop), pytest.raises(Killed):
                runs.execute(job, place)
            assert Store(runs.home / place).status(job.run_id) == "preempted"
            resumed = runs.execute(job, place)
        assert len(resumed_epochs) == epochs
        pd.testing.assert_frame_equal(whole.predictions, resumed.predictions, check_exact=True)
        pd.testing.assert_frame_equal(whole.history, resumed.history, check_exact=True)
        assert resumed.record["selection"] == whole.record["selection"]
        passes = [[s["image_passes"] for s in run.record["stages"]] for run in (whole, resumed)]
        assert passes[0] == passes[1]


@every_method
class TestDeclarations:
    def test_module_says_where_it_comes_from(self, name: str) -> None:
        text = sys.modules[type(METHODS[name]).__module__].__doc__ or ""
        for heading in ("Paper:", "Supervision:", "Deviations:"):
            assert heading in text, f"the docstring of {name}'s module lacks '{heading}'"

    @on_all_datasets
    def test_search_space_gives_valid_configs(self, runs: Any, name: str, dataset: str) -> None:
        method = METHODS[name]
        task = dataclasses.replace(digits_task(runs, name, "umnist"), name=dataset)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        trials = [study.ask() for _ in range(3)]
        configs = [method.search_space(trial, task) for trial in trials]
        for trial, config in zip(trials, configs, strict=True):
            assert trial.params
            assert type(config) is method.config_type
            assert build_config(method.config_type, as_plain(config), name) == config
            fixed = optuna.trial.FixedTrial(trial.params)
            assert method.search_space(fixed, task) == config
        assert configs[0] != configs[1]

    @on_all_datasets
    def test_quick_shortens(self, name: str, dataset: str) -> None:
        config = preset_config(METHODS[name], dataset)
        quick = config.quick()
        assert type(quick) is type(config)
        assert quick.quick() == quick
        shortened = [
            field.name
            for field in dataclasses.fields(config)
            if getattr(quick, field.name) != getattr(config, field.name)
        ]
        assert shortened
        for field in shortened:
            before, after = getattr(config, field), getattr(quick, field)
            if isinstance(before, int | float) and not isinstance(before, bool):
                assert after < before, f"quick() raises {field} from {before} to {after}"

    def test_every_option_is_part_of_the_run_id(self, runs: Any, name: str) -> None:
        """A flag that changes nothing is a flag that is dead (SubpopBench's label noise)."""
        job = runs.job(name, "umnist")
        for owner in ("method", "dataset"):
            for knob, value in job.config[owner].items():
                changed = {**job.config, owner: {**job.config[owner], knob: [value, "other"]}}
                assert dataclasses.replace(job, config=changed).run_id != job.run_id, knob


@built_in_methods
@on_all_datasets
def test_preset_names_the_source_of_every_value(name: str, dataset: str) -> None:
    preset = read_presets(dataset).get(name)
    assert preset, f"methods/presets/{dataset}.toml has no [{name}]"
    for knob, entry in preset.items():
        assert entry.source.strip(), f"{dataset}.toml: {name}.{knob} has no source"
    config = preset_config(METHODS[name], dataset)
    assert isinstance(config, METHODS[name].config_type)


class TestTheContractItself:
    """The tests above can fail: methods that break a promise are caught."""

    def test_unseeded_method_is_not_deterministic(self, runs: Any, add_method: Any) -> None:
        class Unseeded(type(METHODS["erm"])):  # type: ignore[misc]
            def fit(self, task: Task, config: Any, ctx: Any) -> Fitted:
                fitted = super().fit(task, config, ctx)
                for weights in fitted.module.parameters():
                    weights.data.normal_()
                return fitted

        name = add_method(Unseeded, METHODS["erm"].config_type)
        first, again = (runs.run(name, "umnist", results=r) for r in ("first", "again"))
        assert not first.predictions.equals(again.predictions)

    def test_crash_becomes_a_failed_record(self, runs: Any, add_method: Any) -> None:
        class Crashing(Method):
            def fit(self, task: Task, config: Any, ctx: Any) -> Fitted:
                raise ZeroDivisionError("by design")

            def search_space(self, trial: Any, task: Task) -> Any:
                raise NotImplementedError

        record = runs.run(add_method(Crashing, METHODS["erm"].config_type), "umnist").record
        assert record["status"] == "failed"
        failure = record["failure"]
        assert set(failure) >= {"kind", "message", "remedy", "command", "stderr_tail"}
        assert failure["message"] == "ZeroDivisionError: by design"
        assert "by design" in failure["stderr_tail"]
        assert "--methods crashing --datasets umnist" in failure["command"]
