"""Predictions made elsewhere: every form of them, their metrics and their intervals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

import bench
from bench.record import Record
from bench.reporting.statistics import worst_group_interval
from bench.scoring import Evaluation
from bench.store import Store
from datasets.catalogue import get_dataset
from datasets.errors import BenchError, UsageError

SMALL = "umnist"


@pytest.fixture(scope="module")
def kept(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Record]:
    """A quick run whose model was kept."""
    grid = bench.run(
        "nct",
        SMALL,
        1,
        quick=True,
        keep_models=True,
        isolate=False,
        audit="off",
        data_root=digits_root,
        results=tmp_path_factory.mktemp("scored"),
    )
    (record,) = grid.records()
    return grid.store, record


@pytest.fixture(scope="module")
def table(kept: tuple[Store, Record]) -> pd.DataFrame:
    found = kept[0].predictions(kept[1].run_id)
    assert found is not None
    return found


@pytest.fixture
def score(digits_root: Path) -> Callable[..., Evaluation]:
    def call(given: Any, dataset: Any = SMALL, **options: Any) -> Evaluation:
        return bench.evaluate(given, dataset, data_root=digits_root, **options)

    return call


def test_a_runs_own_predictions_give_its_metrics(
    kept: tuple[Store, Record], table: pd.DataFrame, score: Any, tmp_path: Path
) -> None:
    store, record = kept
    assert score(store.runs / record.run_id / "predictions.parquet").metrics == record.test
    assert score(table, split="val").metrics == record.val
    table[table["split"] == "test"].sample(frac=1, random_state=0).to_csv(tmp_path / "p.csv")
    assert score(tmp_path / "p.csv").metrics == record.test


def test_a_kept_model_gives_the_metrics_of_its_run(kept: tuple[Store, Record], score: Any) -> None:
    store, record = kept
    assert score(store.runs / record.run_id).metrics == record.test
    model = bench.load_model(record.run_id, store.root)
    found = score(model)
    assert found.metrics == record.test and found.name == "nct"


def test_forms_of_one_prediction_agree(table: pd.DataFrame, score: Any) -> None:
    test = table[table["split"] == "test"].reset_index(drop=True)
    names = np.array(get_dataset(SMALL).facts(get_dataset(SMALL).config_type()).classes)
    scores = test[["score_0", "score_1"]].astype(float)
    by_name = scores.rename(columns=lambda column: f"prob_{names[int(column[-1])]}")
    forms = {
        "numbers": test["pred"].to_numpy(),
        "tensor": torch.tensor(test["pred"].to_numpy()),
        "names": names[test["pred"]],
        "table of names": pd.DataFrame({"class": names[test["pred"]]}),
        "table with ids": test.sample(frac=1, random_state=1)[["id", "pred"]],
        "scores": scores.to_numpy(),
        "scores by name": by_name.assign(pred=test["pred"]),
    }
    found = {form: score(given) for form, given in forms.items()}
    exact = {form: one for form, one in found.items() if form != "scores"}  # has ties of rounding
    assert len({str(one.metrics) for one in exact.values()}) == 1
    assert found["scores"].metrics.avg == pytest.approx(found["numbers"].metrics.avg, abs=2)


def test_function_and_module_see_the_evaluation_transform(score: Any) -> None:
    seen: list[Any] = []

    def by_light(batch: torch.Tensor) -> torch.Tensor:
        seen.append((batch.shape[1:], batch.requires_grad))
        return (batch.mean(dim=(1, 2, 3)) > 0).long()

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.drop = torch.nn.Dropout(0.9)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            light = self.drop(batch.mean(dim=(1, 2, 3)) * self.scale)
            return torch.stack([-light, light], dim=1)

    network = Network().train()
    called, scored = score(by_light), score(network)
    assert called.metrics == scored.metrics
    assert set(seen) == {(torch.Size([1, 32, 32]), False)}
    assert network.training and network.drop.training


def test_own_transform_is_given_pictures(score: Any) -> None:
    def transform(picture: Any) -> torch.Tensor:
        assert picture.mode == "L" and picture.size == (28, 28)
        return torch.tensor([float(np.asarray(picture).mean())])

    bright = score(lambda batch: (batch[:, 0] > 33).long(), transform=transform)
    assert 0 < bright.metrics.avg < 100


@pytest.mark.parametrize("size", ["batch", 1, 7])
def test_onnx_goes_through_its_first_input(
    size: object, score: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the interface of onnxruntime, which need not be installed."""

    class InferenceSession:
        def __init__(self, path: str, providers: list[str]) -> None:
            assert Path(path).name == "net.onnx" and providers
            if not Path(path).read_text():
                raise RuntimeError("no graph was found\nand more")

        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name="pixels", shape=[size, 1, 32, 32])]

        def run(self, outputs: None, feed: dict[str, Any]) -> list[Any]:
            light = feed["pixels"].mean(axis=(1, 2, 3))
            assert feed["pixels"].dtype == np.float32
            assert size in ("batch", len(light))
            if feed["pixels"].shape[2:] != (32, 32):
                raise RuntimeError("invalid dimensions\nfor the input")
            return [np.stack([-light, light], axis=1)]

    (tmp_path / "net.onnx").write_text("a network")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="onnxruntime"):
        score(tmp_path / "net.onnx")
    monkeypatch.setitem(
        sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=InferenceSession)
    )  # type: ignore[arg-type]
    expected = score(lambda batch: (batch.mean(dim=(1, 2, 3)) > 0).long())
    assert score(tmp_path / "net.onnx").metrics == expected.metrics
    with pytest.raises(UsageError, match=r"batches of \(64, 1, 8, 8\): invalid dimensions\n"):
        score(tmp_path / "net.onnx", transform=lambda image: torch.zeros(1, 8, 8))
    (tmp_path / "net.onnx").write_text("")
    with pytest.raises(UsageError, match=r"net\.onnx cannot be opened: no graph was found\n"):
        score(tmp_path / "net.onnx")


def test_a_report_has_rows_marked_external(
    kept: tuple[Store, Record], table: pd.DataFrame, score: Any, tmp_path: Path, digits_root: Path
) -> None:
    mine = score(table, name="mine")
    words = {"results": kept[0].root, "data_root": digits_root, "tables": "main_results"}
    page = bench.report(tmp_path / "r", external=[mine], methods="nct", **words)
    rows = pd.read_csv(tmp_path / "r/tables/external_results.csv").set_index("metric")
    assert set(rows["source"]) == {"external"} and set(rows["method"]) == {"mine"}
    assert rows["mean"]["wga"] == pytest.approx(mine.metrics.values["wga"])
    assert (rows["ci_low"]["wga"], rows["ci_high"]["wga"]) == mine.intervals["wga"]
    assert "Predictions made elsewhere" in page.read_text()
    assert "mine" not in (tmp_path / "r/tables/main_results.csv").read_text()
    plain = bench.report(tmp_path / "plain", **words)
    assert not (plain.parent / "tables/external_results.csv").exists()


def test_intervals_are_the_bootstrap_of_the_report(table: pd.DataFrame, score: Any) -> None:
    test = table[table["split"] == "test"]
    found = score(table)
    right = (test["pred"] == test["y"]).to_numpy()
    assert found.intervals["wga"] == worst_group_interval(right[None], test["group"].to_numpy())
    for name, (low, high) in found.intervals.items():
        group = name.removeprefix("group_accuracy/")
        value = found.metrics.group_accuracy[group] if "/" in name else found.metrics.get(name)
        assert value is not None and low <= value <= high, name
    assert "bootstrap over samples" in found.uncertainty


def test_a_function_is_given_rows_as_they_are(score: Any) -> None:
    rows = np.random.default_rng(0).normal(0, 100, (90, 3)).astype(np.float32)
    y = (rows[:, 2] > 0).astype(int)
    assert score(lambda batch: (batch[:, 2] > 0).long(), (rows, y)).metrics.avg == 100
    network = torch.nn.Linear(3, 2, bias=False)
    network.weight.data = torch.tensor([[0.0, 0.0, -1.0], [0.0, 0.0, 1.0]])
    assert score(network, (rows, y)).metrics.avg == 100
    with pytest.raises(BenchError, match="rows of features have no transform"):
        score(network, (rows, y), transform=lambda image: torch.zeros(3))


def test_average_interval_is_as_wide_as_theory_says(score: Any) -> None:
    draws = np.random.default_rng(0)
    y = np.arange(2000) % 2
    guess = np.where(draws.random(2000) < 0.8, y, 1 - y)
    x = np.zeros((2000, 8, 8), np.uint8)
    found = score(guess, (x, y))
    low, high = found.intervals["avg"]
    expected = 2 * 1.96 * 100 * np.sqrt(0.16 / 2000)
    assert high - low == pytest.approx(expected, rel=0.1)
    assert "wga" not in found.metrics.values and "auroc" not in found.metrics.values
    assert found.metrics.values["balanced"] == pytest.approx(100 * (guess == y).mean())


def test_auroc_and_its_interval(score: Any) -> None:
    draws = np.random.default_rng(1)
    y = (np.arange(600) % 3 == 0).astype(int)
    one = np.round(y + draws.normal(0, 1, 600), 1)  # rounded: with ties
    found = score(np.stack([-one, one], axis=1), (np.zeros((600, 8, 8), np.uint8), y))
    assert found.metrics.values["auroc"] == pytest.approx(roc_auc_score(y, one))
    low, high = found.intervals["auroc"]
    again = []
    for _ in range(1000):
        pick = draws.integers(0, 600, 600)
        again.append(roc_auc_score(y[pick], one[pick]))
    np.testing.assert_allclose((low, high), np.quantile(again, [0.025, 0.975]), atol=0.01)


def test_model_of_arrays_is_scored_on_arrays() -> None:
    draws = np.random.default_rng(2)
    y = np.arange(120) % 2
    rows = (draws.normal(0, 1, (120, 4)) + y[:, None]).astype(np.float32)
    names = np.array(["no", "yes"])[y]
    model = bench.fit("erm", (rows, names), (rows, names), epochs=3)
    found = bench.evaluate(model, (rows, names, draws.integers(0, 2, 120)))
    assert found.metrics.avg == pytest.approx(100 * model.score(rows, names))
    assert set(found.metrics.group_accuracy) == {"0", "1"} and "wga" in found.intervals
    with pytest.raises(UsageError, match="the model knows the classes no, yes"):
        bench.evaluate(model, (rows, y))


def test_rows_are_marked_external(table: pd.DataFrame, score: Any) -> None:
    frame = score(table, name="theirs").to_frame()
    assert set(frame["source"]) == {"external"} and set(frame["method"]) == {"theirs"}
    assert set(frame["data_kind"]) == {"standin"}
    wga = frame.set_index("metric").loc["wga"]
    assert wga["ci_low"] <= wga["value"] <= wga["ci_high"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop(columns=["pred", "score_0", "score_1"]), "no predictions"),
        (lambda t: t[t["id"] != t["id"].iloc[-1]], "have no prediction"),
        (lambda t: pd.concat([t, t.iloc[-1:]]), "predicted twice"),
        (lambda t: t.assign(id=t["id"] + 1), "have no prediction"),
        (lambda t: pd.concat([t, t.iloc[-1:].assign(id=10**6)]), "are of no sample"),
        (lambda t: t.drop(columns="id").iloc[:-1], "has 150 samples"),
        (lambda t: t.assign(pred=2).drop(columns=["score_0", "score_1"]), "class 2"),
        (lambda t: t.assign(pred="x").drop(columns=["score_0", "score_1"]), "unknown"),
        (lambda t: t.assign(pred=1 - t["pred"]), "not the one with the highest score"),
        (lambda t: t.assign(score_0=np.nan), "not finite"),
        (lambda t: t["pred"].to_numpy()[:3], "3 predictions"),
        (lambda t: np.zeros((150, 3)), "have the shape"),
        (lambda t: "nothing.csv", "there is no file"),
        (lambda t: "nothing.safetensors", "there is no"),
        (lambda t: lambda batch: torch.zeros(1, dtype=torch.int64), "predictions of 150 images"),
    ],
)
def test_wrong_predictions_are_one_message(
    change: Any, said: str, table: pd.DataFrame, score: Any
) -> None:
    with pytest.raises(BenchError, match=said) as error:
        score(change(table[table["split"] == "test"]))
    assert error.value.remedy


def test_unknown_split_and_dataset(score: Any) -> None:
    with pytest.raises(UsageError, match="no split 'dev'"):
        score([0], split="dev")
    with pytest.raises(UsageError, match="did you mean 'umnist'"):
        score([0], "umnst")
