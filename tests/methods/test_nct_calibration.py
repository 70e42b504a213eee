"""Calibrating leaves: against another solver, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor, nn

from methods.backbones import Backbone
from methods.metrics import class_scores
from methods.nct.calibration import CalibratedTree, Calibration, fit_calibration
from methods.nct.tree import Tree

INF = float("inf")


def leaves(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of three classes with two leaves each, of which the hard ones are far too low."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=generator)
    hard = torch.randint(2, (count,), generator=generator)
    logits = torch.randn(count, 6, generator=generator)
    logits[torch.arange(count), 2 * y + hard] += 3.0
    logits[:, ::2] += 4.0
    return logits, y


def accuracy(outputs: Tensor, y: Tensor) -> float:
    return float((class_scores(outputs, 3).argmax(1) == y).double().mean())


@pytest.mark.parametrize("merged", [(), (3,)])
@pytest.mark.parametrize("penalty", [1e-4, 1e-2])
def test_is_the_optimum_that_another_solver_finds(penalty: float, merged: tuple[int]) -> None:
    logits, y = leaves(200)
    logits[:, list(merged)] = -INF
    kept = [leaf for leaf in range(6) if leaf not in merged]
    values, truth = logits.double().numpy(), y.numpy()

    def loss(parameters: np.ndarray) -> float:
        bias, log_scale = parameters[:6], parameters[6]
        scores = np.stack(
            [
                logsumexp(
                    np.exp(log_scale) * values[:, own] + bias[own],
                    axis=1,
                )
                for own in ([leaf for leaf in kept if leaf // 2 == c] for c in range(3))
            ],
            axis=1,
        )
        right = scores[np.arange(len(truth)), truth]
        size = (parameters**2).sum()
        return float((logsumexp(scores, axis=1) - right).mean() + penalty * size)

    found = fit_calibration(logits, y, 3, penalty)
    ours = np.append(found.bias.double().numpy(), float(found.scale.double().log()))
    theirs = minimize(loss, np.zeros(7), method="BFGS", options={"gtol": 1e-8})
    assert loss(ours) == pytest.approx(theirs.fun, abs=1e-6)
    np.testing.assert_allclose(ours, theirs.x, atol=0.02)
    assert all(ours[leaf] == 0 for leaf in merged)


def test_lifts_leaves_that_were_too_low() -> None:
    logits, y = leaves(2000)
    calibration = fit_calibration(logits, y, 3, 1e-4)
    easy, hard = calibration.bias.view(3, 2).unbind(dim=1)
    assert bool((hard > easy + 1.0).all())
    fresh, truth = leaves(2000, seed=1)
    assert accuracy(calibration(fresh), truth) > accuracy(fresh, truth) + 0.1


def test_class_comes_first_and_then_the_raw_leaf() -> None:
    """Raw, leaf 0 wins. Calibrated, class 1 does, and there by leaf 3; but leaf 2 is raw higher."""
    calibration = Calibration(torch.tensor([0.0, 0.0, 0.0, 9.0]), torch.tensor(1.0), 2)
    raw = torch.tensor([[5.0, 1.0, 3.0, 2.0]])
    outputs = calibration(raw)
    assert int(raw.argmax()) == 0
    assert int((raw + calibration.bias).argmax()) == 3
    assert int(outputs.argmax()) == 2


def test_outputs_by_hand() -> None:
    calibration = Calibration(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor(2.0), 2)
    outputs = calibration(torch.tensor([[0.0, 0.5, 2.0, -INF]]))
    first = np.log(np.exp(1.0) + np.exp(1.0))  # 2 * 0 + 1 and 2 * 0.5 + 0
    assert outputs[0, :3].tolist() == pytest.approx([first - 0.5, first, 4.0])
    assert float(outputs[0, 3]) == -INF
    assert class_scores(outputs, 2)[0].tolist() == pytest.approx([first, 4.0])


def test_ends_where_the_classes_are_told_apart_without_an_error() -> None:
    y = torch.arange(40) % 2
    found = fit_calibration(8.0 * torch.eye(2)[y].repeat_interleave(2, dim=1), y, 2, 1e-4)
    assert bool(found.bias.isfinite().all())
    assert 0 < float(found.scale) < 100


def test_calibrated_tree_is_the_tree_and_then_the_calibration() -> None:
    torch.manual_seed(0)
    tree = Tree(Backbone(nn.Linear(4, 8), 8), 2)
    for _ in range(2):
        tree.grow(4, 0.0, "asymmetric", False)
    tree.leaves.active[3] = False
    tree.eval()
    calibration = Calibration(torch.randn(4), torch.tensor(0.7), 2)
    images = torch.randn(5, 4)
    twin = CalibratedTree(tree, calibration)
    assert torch.equal(twin(images), calibration(tree(images)))
    assert twin.depth == 2
    assert set(twin.state_dict()) - set(tree.state_dict()) == {
        "calibration.bias",
        "calibration.scale",
    }
