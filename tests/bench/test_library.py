"""Models fitted on arrays: what goes in, what comes out, and what is kept of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bench
from bench.models import FittedModel
from datasets.base import BackboneSpec
from datasets.errors import BenchError, UsageError
from datasets.files import Damaged

FEW = {"epochs": 2}
COUNT = 240


def planted(seed: int = 0, count: int = COUNT) -> tuple[Any, Any, Any]:
    """Colour images whose class is a square, and whose tint is the class's in nine of ten."""
    draws = np.random.default_rng(seed)
    y = np.arange(count) % 2
    tint = np.where(draws.random(count) < 0.9, y, 1 - y)
    images = draws.integers(0, 60, (count, 28, 28, 3)).astype(np.uint8)
    images[np.arange(count), :, :, tint] += 80
    images[y == 1, 8:20, 8:20] += 100
    return images, np.array(["plain", "square"])[y], 2 * y + tint


X, Y, G = planted()
TRAIN, VAL = (X[:160], Y[:160]), (X[160:], Y[160:])


@pytest.fixture(scope="module")
def erm() -> FittedModel:
    return bench.fit("erm", TRAIN, VAL, epochs=4)


@pytest.fixture(scope="module")
def nct() -> FittedModel:
    return bench.fit("nct", TRAIN, VAL, epochs=(1, 2), iterations=2)


def test_labels_come_back_as_they_were_given(erm: FittedModel) -> None:
    assert erm.classes_.tolist() == ["plain", "square"]
    assert set(erm.predict(X)) <= {"plain", "square"}
    numbered = bench.fit(
        "erm", (X, np.where(Y == "square", 7, 3)), (X, np.where(Y == "square", 7, 3)), **FEW
    )
    assert numbered.predict(X[:5]).dtype.kind == "i" and set(numbered.predict(X)) <= {3, 7}


def test_probabilities_and_score_agree_with_the_classes(erm: FittedModel) -> None:
    probabilities = erm.predict_proba(X)
    assert probabilities.shape == (COUNT, 2)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    predicted = erm.classes_[probabilities.argmax(axis=1)]
    np.testing.assert_array_equal(predicted, erm.predict(X))
    assert erm.score(X, Y) == (predicted == Y).mean() > 0.6


def test_every_layout_is_the_same_images(erm: FittedModel) -> None:
    expected = erm.logits(X)
    for same in (
        X.transpose(0, 3, 1, 2),
        torch.from_numpy(X),
        torch.from_numpy(X).permute(0, 3, 1, 2) / 255,
        X.astype(np.int64),
    ):
        assert torch.equal(erm.logits(same), expected)


def test_torch_dataset_is_what_its_items_are(erm: FittedModel) -> None:
    class Items(torch.utils.data.Dataset[Any]):
        def __init__(self, start: int, stop: int) -> None:
            self.places = range(start, stop)

        def __len__(self) -> int:
            return len(self.places)

        def __getitem__(self, place: int) -> Any:
            image = torch.from_numpy(X[self.places[place]]).permute(2, 0, 1) / 255
            return image, str(Y[self.places[place]])

    same = bench.fit("erm", Items(0, 160), Items(160, COUNT), epochs=4)
    assert torch.equal(same.logits(X), erm.logits(X))


def test_the_seed_decides(erm: FittedModel) -> None:
    again, other = (bench.fit("erm", TRAIN, VAL, seed=s, epochs=4).logits(X) for s in (0, 1))
    assert torch.equal(again, erm.logits(X))
    assert not torch.equal(other, again)


def test_torch_keeps_its_threads_and_its_random_state() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    bench.fit("erm", TRAIN, VAL, epochs=1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tree_says_where_images_went(nct: FittedModel) -> None:
    leaves, routes = nct.leaf(X), nct.route(X)
    assert leaves is not None and routes is not None
    names = nct.fitted.leaf_names()
    assert routes.tolist() == [names[leaf] for leaf in leaves]
    assert {route.split(":")[0] for route in routes} <= {"plain", "square"}
    assert [route.split(":")[0] for route in routes] == nct.predict(X).tolist()


def test_other_methods_have_no_leaves(erm: FittedModel) -> None:
    assert erm.leaf(X) is None and erm.route(X) is None


def test_saved_model_predicts_the_same_elsewhere(nct: FittedModel, tmp_path: Path) -> None:
    """In another process, which has nothing but the file."""
    path = nct.save(tmp_path / "deep" / "model.safetensors")
    np.save(tmp_path / "x.npy", X)
    code = (
        "import bench, numpy as np\n"
        f"m = bench.load_model({str(path)!r})\n"
        "x = np.load('x.npy')\n"
        "np.savez('out.npz', p=m.predict_proba(x), c=m.predict(x), r=m.route(x))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    found = np.load(tmp_path / "out.npz")
    np.testing.assert_array_equal(found["c"], nct.predict(X))
    np.testing.assert_array_equal(found["r"], nct.route(X))
    np.testing.assert_allclose(found["p"], nct.predict_proba(X), rtol=1e-6)


def test_saving_keeps_the_labels_and_the_method(erm: FittedModel, tmp_path: Path) -> None:
    numbers = np.where(Y == "square", 9, 4)
    model = bench.fit("nct_plus", (X, numbers), (X, numbers), epochs=(1, 1), iterations=2)
    again = bench.load_model(model.save(tmp_path / "m.safetensors"))
    assert again.classes_.tolist() == [4, 9] and again.card == model.card
    assert torch.equal(again.logits(X), model.logits(X))


def test_damaged_or_foreign_model_is_refused(erm: FittedModel, tmp_path: Path) -> None:
    path = erm.save(tmp_path / "m.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(Damaged, match="cannot be read"):
        bench.load_model(path)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(BenchError, match="says nothing"):
        bench.load_model(tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="folder"):
        erm.save(tmp_path)


def test_rows_of_features_go_the_same_way(tmp_path: Path) -> None:
    rows = X.reshape(COUNT, -1, 3).mean(axis=1)
    model = bench.fit("erm", (rows[:160], Y[:160]), (rows[160:], Y[160:]), **FEW)
    assert model.card.backbone == {"name": "mlp"} and model.card.channels == 3
    again = bench.load_model(model.save(tmp_path / "rows.safetensors"))
    assert torch.equal(again.logits(rows), model.logits(rows))
    with pytest.raises(UsageError, match="shape"):
        model.predict(X)
    with pytest.raises(UsageError, match="the model takes 3"):
        model.predict(rows[:, :2])


def test_groups_are_for_those_that_may_see_them() -> None:
    train, val = (*TRAIN, G[:160]), (*VAL, G[160:])
    assert bench.fit("groupdro", train, val, **FEW).score(X, Y) > 0
    with pytest.raises(UsageError, match="needs the groups of train and val") as refused:
        bench.fit("groupdro", TRAIN, VAL, **FEW)
    assert "erm" in refused.value.remedy and "groupdro" not in refused.value.remedy
    with pytest.raises(UsageError, match="the groups of val"):
        bench.fit("jtt", train, VAL, **FEW)
    # Groups that a method's tier hides change nothing.
    plain, grouped = (bench.fit("erm", *data, **FEW) for data in ((TRAIN, VAL), (train, val)))
    assert torch.equal(plain.logits(X), grouped.logits(X))


def test_hidden_groups_are_not_in_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.base import GroupLabelsHidden
    from methods.erm import Erm

    def peek(self: Erm, task: Any, config: Any, ctx: Any) -> Any:
        return task.train.groups

    monkeypatch.setattr(Erm, "fit", peek)
    with pytest.raises(GroupLabelsHidden):
        bench.fit("erm", (*TRAIN, G[:160]), (*VAL, G[160:]), **FEW)


def test_settings_reach_the_method_and_its_stages() -> None:
    rows = X.reshape(COUNT, -1, 3).mean(axis=1)
    data = (rows, Y, G), (rows, Y, G)
    lines: list[str] = []
    bench.fit("dfr", *data, erm__epochs=3, splits=1, retrains=1, log=lines.append)
    assert sum(line.startswith("erm: epoch") for line in lines) == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: bench.fit("erm", (X, Y[:-1]), VAL), "labels have the shape"),
        (lambda: bench.fit("erm", (X[:0], Y[:0]), VAL), "no samples"),
        (lambda: bench.fit("erm", X, VAL), "must be"),
        (lambda: bench.fit("erm", (X, Y, G, G), VAL), "must be"),
        (lambda: bench.fit("erm", (X[:, :, :, :2], Y), VAL), "shape"),
        (lambda: bench.fit("erm", (X / 10.0, Y), VAL), "pixels of train lie between"),
        (lambda: bench.fit("erm", (X, np.full(COUNT, "a")), (X, np.full(COUNT, "a"))), "one class"),
        (
            lambda: bench.fit("erm", (X, Y), (X[Y == "plain"], Y[Y == "plain"])),
            "no sample of class",
        ),
        (lambda: bench.fit("erm", (X, G), VAL), "numbers in one split"),
        (lambda: bench.fit("erm", (X, G + 0.5), VAL), "whole numbers or text"),
        (lambda: bench.fit("erm", (X, np.where(G > 0, G, np.nan)), VAL), "whole numbers or text"),
        (lambda: bench.fit("emr", TRAIN, VAL), "did you mean 'erm'"),
        (lambda: bench.fit("erm", TRAIN, VAL, epoch=2), "did you mean 'erm.epochs'"),
        (lambda: bench.fit("erm", TRAIN, VAL, backbone="resnet"), "unknown backbone"),
        (lambda: bench.fit("erm", TRAIN, VAL, backbone="mlp"), "does not take images"),
        (lambda: bench.fit("erm", TRAIN, VAL, resolution=64), "32 x 32"),
        (lambda: bench.fit("erm", TRAIN, VAL, preset="paper"), "unknown preset"),
        (lambda: bench.fit("erm", (np.array([[np.nan]] * 4), G[:4]), VAL), "not finite"),
        (lambda: bench.fit("erm", TRAIN, VAL, backbone=BackboneSpec("resnet18", True)), "weights"),
    ],
)
def test_wrong_input_is_one_message(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(BenchError, match=said) as error:
        wrong()
    assert error.value.remedy
