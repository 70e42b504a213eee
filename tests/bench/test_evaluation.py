"""Every number a record keeps, against scikit-learn or by hand."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, adjusted_mutual_info_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

from bench.evaluation import (
    aurocs,
    descend,
    describe_claims,
    evaluate,
    partition_quality,
    weighted_average,
)
from datasets.base import SPLITS, LabelledSplit, Labels, LoadedData
from datasets.catalogue import get_dataset
from datasets.images import MemoryImages
from methods.base import Fitted

GENERATOR = torch.Generator().manual_seed(3)


def data_of(dataset: str, test: Labels, train: Labels | None = None, **settings: Any) -> LoadedData:
    """The facts of a real dataset over labels of our own."""
    known = get_dataset(dataset)
    labels = {"train": train or test, "val": test, "test": test}
    blank = {name: torch.zeros(len(labels[name]), 1, 1, 1, dtype=torch.uint8) for name in SPLITS}
    splits = {name: LabelledSplit(labels[name], MemoryImages(blank[name])) for name in SPLITS}
    return LoadedData(known.facts(known.config_type(**settings)), splits)


def labels_of(y: Tensor, groups: Tensor, **extra: Tensor) -> Labels:
    return Labels(torch.arange(len(y)), y, groups, extra)


def predicting(pred: Tensor, classes: int) -> Tensor:
    """Logits whose largest entry is the given class."""
    noise = torch.rand(len(pred), classes, generator=GENERATOR)
    return noise + 2 * functional.one_hot(pred, classes)


def by_group(y: Tensor, pred: Tensor, groups: Tensor, count: int) -> list[float]:
    return [
        100 * accuracy_score(y[groups == g], pred[groups == g]) if (groups == g).any() else math.nan
        for g in range(count)
    ]


@pytest.fixture
def birds() -> tuple[LoadedData, Tensor]:
    """Waterbirds with its real training shares, and 200 guesses that are often right."""
    train_groups = torch.arange(4).repeat_interleave(torch.tensor([3498, 184, 56, 1057]))
    groups = torch.randint(0, 4, (200,), generator=GENERATOR)
    y = groups // 2
    right = torch.rand(200, generator=GENERATOR) < torch.tensor([0.95, 0.7, 0.5, 0.8])[groups]
    data = data_of("waterbirds", labels_of(y, groups), labels_of(train_groups // 2, train_groups))
    return data, predicting(torch.where(right, y, 1 - y), 2)


def test_accuracies_agree_with_scikit_learn(birds: tuple[LoadedData, Tensor]) -> None:
    data, logits = birds
    labels, pred = data.splits["test"].labels, logits.argmax(1)
    metrics = evaluate(data, "test", logits)
    expected = by_group(labels.y, pred, labels.groups, 4)
    names = data.facts.groups
    assert metrics.group_accuracy == pytest.approx(dict(zip(names, expected, strict=True)))
    assert list(metrics.group_count.values()) == np.bincount(labels.groups).tolist()
    assert all(isinstance(count, int) for count in metrics.group_count.values())
    assert metrics.values["wga"] == pytest.approx(min(expected))
    assert metrics.values["avg"] == pytest.approx(100 * accuracy_score(labels.y, pred))
    shares = np.array([3498, 184, 56, 1057]) / 4795
    assert metrics.values["avg_train_weighted"] == pytest.approx(float(shares @ np.array(expected)))
    assert abs(metrics.values["avg"] - metrics.values["avg_train_weighted"]) > 1
    assert set(metrics.values) == {"wga", "avg", "worst_class", "avg_train_weighted"}
    by_class = by_group(labels.y, pred, labels.y, 2)
    assert metrics.values["worst_class"] == pytest.approx(min(by_class))


def test_weighted_average_by_hand() -> None:
    groups = torch.arange(4).repeat_interleave(torch.tensor([3498, 184, 56, 1057]))
    accuracies = torch.tensor([99.0, 80.0, 60.0, 95.0], dtype=torch.float64)
    by_hand = (99 * 3498 + 80 * 184 + 60 * 56 + 95 * 1057) / 4795
    assert weighted_average(accuracies, groups) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(96.9337, abs=1e-4)


def test_weighted_average_leaves_out_groups_without_samples() -> None:
    accuracies = torch.tensor([90.0, math.nan, 50.0], dtype=torch.float64)
    train_groups = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    assert weighted_average(accuracies, train_groups) == pytest.approx((3 * 90 + 50) / 4)
    assert math.isnan(weighted_average(accuracies[1:2], torch.tensor([0])))


@pytest.mark.parametrize("count", [3, 10])
def test_umnist_keeps_both_worst_groups(count: int) -> None:
    digit = torch.arange(10).repeat(20)
    y = (digit >= 5).long()
    three = torch.where(digit == 8, 2, y)
    # Every third 3 and every other 8 is wrong: the 3 hides in its group of five digits.
    number = torch.arange(20).repeat_interleave(10)
    wrong = ((digit == 3) & (number % 3 == 0)) | ((digit == 8) & (number % 2 == 0))
    logits = predicting(torch.where(wrong, 1 - y, y), 2)
    groups = three if count == 3 else digit
    labels = labels_of(y, groups, **{"3group": three, "10digit": digit})
    metrics = evaluate(data_of("umnist", labels, groups=count), "test", logits)
    assert metrics.values["wga_3group"] == 50.0
    assert metrics.values["wga_10digit"] == 50.0
    assert len(metrics.group_accuracy) == count
    assert metrics.values["wga"] == 50.0
    only_threes = predicting(torch.where(wrong & (digit == 3), 1 - y, y), 2)
    metrics = evaluate(data_of("umnist", labels, groups=count), "test", only_threes)
    assert metrics.values["wga_3group"] == pytest.approx(93.0)
    assert metrics.values["wga_10digit"] == pytest.approx(65.0)
    assert metrics.values["wga"] == pytest.approx(93.0 if count == 3 else 65.0)


def test_cmnist_has_five_classes() -> None:
    groups = torch.arange(25).repeat(4)
    y = groups // 5
    pred = torch.where(groups == 7, 0, y)
    metrics = evaluate(data_of("cmnist", labels_of(y, groups)), "test", predicting(pred, 5))
    assert (metrics.values["wga"], metrics.values["avg"]) == (0.0, pytest.approx(96.0))


def test_empty_group_is_undefined_and_never_the_worst() -> None:
    groups = torch.tensor([0, 0, 3, 3])
    y = groups // 2
    train = torch.tensor([0, 1, 2, 3])
    data = data_of("waterbirds", labels_of(y, groups), labels_of(train // 2, train))
    metrics = evaluate(data, "test", predicting(torch.tensor([0, 1, 1, 1]), 2))
    values = list(metrics.group_accuracy.values())
    assert values[0] == 50.0 and values[3] == 100.0
    assert values[1] is None and values[2] is None
    assert list(metrics.group_count.values()) == [2, 0, 0, 2]
    assert metrics.values["wga"] == 50.0
    assert metrics.values["avg_train_weighted"] == 75.0


def lesions(size: int = 300) -> tuple[LoadedData, Tensor]:
    y = (torch.rand(size, generator=GENERATOR) < 0.3).long()
    patch = torch.randint(0, 2, (size,), generator=GENERATOR)
    hist = torch.randint(0, 2, (size,), generator=GENERATOR)
    groups, histopath = torch.where(y == 1, 2, patch), torch.where(y == 1, 2, hist)
    # Rounding makes ties; patches make a benign lesion easy, histopathology makes it hard.
    margin = (2 * y - 2 * (groups == 1) + (histopath == 1)).float()
    margin = (margin + torch.randn(size, generator=GENERATOR)).mul(4).round() / 4
    logits = torch.stack([-margin / 2, margin / 2], dim=1)
    return data_of("isic", labels_of(y, groups, histopath=histopath)), logits


def test_isic_aurocs_agree_with_scikit_learn() -> None:
    data, logits = lesions()
    labels = data.splits["test"].labels
    y, score = labels.y, (logits[:, 1] - logits[:, 0]).numpy()

    def against_malignant(benign: Tensor) -> float:
        keep = benign | (y == 1)
        return float(roc_auc_score(y[keep], score[keep]))

    patch, hist = labels.groups, labels.extra_groupings["histopath"]
    pairs = [against_malignant(patch == g) for g in (0, 1)]
    hist_pairs = [against_malignant(hist == g) for g in (0, 1)]
    metrics = evaluate(data, "test", logits)
    assert metrics.values["auroc"] == pytest.approx(roc_auc_score(y, score))
    assert metrics.values["auroc_nonpatch"] == pytest.approx(pairs[0])
    assert metrics.values["auroc_histopath"] == pytest.approx(hist_pairs[1])
    assert metrics.values["auroc_worst_patch_pair"] == pytest.approx(min(pairs))
    assert metrics.values["auroc_worst_histopath_pair"] == pytest.approx(min(hist_pairs))
    assert metrics.values["auroc_nonpatch"] < metrics.values["auroc"]


def test_isic_without_a_subgroup_is_undefined() -> None:
    y, groups = torch.tensor([0, 0, 1]), torch.tensor([1, 1, 2])
    labels = labels_of(y, groups, histopath=groups)
    found = aurocs(data_of("isic", labels).facts, labels, torch.tensor([0.1, 0.2, 0.3]))
    assert math.isnan(found["auroc_nonpatch"])
    assert found["auroc_histopath"] == found["auroc_worst_patch_pair"] == 1.0


class TestPartitionQuality:
    names: ClassVar = {"common": (0,), "seldom": (1,), "rare": (2,)}
    groups = torch.arange(3).repeat_interleave(torch.tensor([60, 30, 10]))

    def test_perfect_partition_under_other_names(self) -> None:
        quality = partition_quality(torch.tensor([7, -1, 3])[self.groups], self.groups, self.names)
        assert (quality.precision, quality.recall) == (1.0, 1.0)
        assert quality.ami == pytest.approx(1.0)
        assert sorted(quality.sizes) == [10, 30, 60]
        assert quality.matched_group == "rare"

    def test_one_part_for_all(self) -> None:
        quality = partition_quality(torch.zeros(100, dtype=torch.long), self.groups, self.names)
        assert (quality.precision, quality.recall) == (pytest.approx(0.1), 1.0)
        assert quality.ami == pytest.approx(0.0)
        assert quality.sizes == (100,)

    def test_error_set_by_hand(self) -> None:
        """A part with 8 of the 10 rare samples and 2 others: the best match, 8/10 both ways."""
        part = torch.zeros(100, dtype=torch.long)
        part[90:98] = 1
        part[:2] = 1
        quality = partition_quality(part, self.groups, self.names)
        assert (quality.precision, quality.recall) == (pytest.approx(0.8), pytest.approx(0.8))
        assert quality.enrichment == pytest.approx(8.0)  # 80% of the part, 10% of all
        assert quality.sizes == (90, 10)
        expected = adjusted_mutual_info_score(self.groups, part)
        assert quality.ami == pytest.approx(expected)

    def test_best_part_need_not_be_the_largest_share(self) -> None:
        """Four rare samples alone match better than six among sixty others."""
        part = torch.zeros(100, dtype=torch.long)
        part[30:90] = 1
        part[90:96] = 1
        part[96:] = 2
        quality = partition_quality(part, self.groups, self.names)
        assert (quality.precision, quality.recall) == (1.0, pytest.approx(0.4))

    def test_unions_are_looked_for_as_one(self) -> None:
        """Groups 1 and 2 together make 40 samples, all of them in one part."""
        named = {"common": (0,), "others": (1, 2)}
        quality = partition_quality((self.groups > 0).long(), self.groups, named)
        assert quality.matched_group == "others"
        assert (quality.precision, quality.recall) == (1.0, 1.0)
        assert quality.enrichment == pytest.approx(2.5)

    def test_groups_without_samples_are_not_the_smallest(self) -> None:
        groups = torch.tensor([0, 0, 0, 2])
        quality = partition_quality(torch.tensor([0, 0, 0, 1]), groups, self.names)
        assert quality.matched_group == "rare"
        assert (quality.precision, quality.recall) == (1.0, 1.0)


def test_descent_goes_from_the_root_to_the_better_child() -> None:
    classes, by_class, twos = [3.0, 1.0], [-1.0, -2.0], [5.0, 4.0]
    # The best leaf of all belongs to the class that the root does not take.
    second = [*by_class, *twos]
    third = [0.0, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0]
    nodes = torch.tensor([[*classes, *second, *third]])
    assert descend(nodes[:, :2], 2).tolist() == [0]
    assert descend(nodes[:, :6], 2).tolist() == [0] and nodes[0, 2:6].argmax() == 2
    assert descend(nodes, 2).tolist() == [1]
    merged = nodes.clone()
    merged[0, [2, 6, 7]] = -math.inf  # the easy child and its leaves take no part
    assert descend(merged, 2).tolist() == [2]


def test_claims_compare_descent_with_the_best_leaf_and_keep_logits_by_group() -> None:
    groups = torch.arange(4).repeat_interleave(5)
    data = data_of("waterbirds", labels_of(groups // 2, groups))
    nodes = torch.zeros(20, 6)
    nodes[:, 0] = 1.0  # the root always takes class 0
    nodes[torch.arange(20), 2 + groups] = torch.arange(20.0)  # leaves know the group
    nodes[:, 3] = nodes[:, 3].masked_fill(groups != 1, -math.inf)

    class Given(Fitted):
        def logits(self, images: Tensor) -> Tensor:
            raise AssertionError("not asked for")

        def level_logits(self, images: Tensor) -> Tensor:
            return nodes[: len(images)]

    test: Any = [torch.zeros(20, 1)]  # one batch
    found: Any = describe_claims(Given(nn.Identity()), data, test, nodes[:, 2:])
    assert found["greedy"]["test"]["avg"] == 50.0 and found["greedy"]["test"]["wga"] == 0.0
    assert found["greedy"]["same_leaf"] == 50.0
    assert found["group_logits"]["waterbird_on_water"] == [0.0, None, 0.0, 17.0]
    shallow: Any = describe_claims(Given(nn.Identity()), data, test, nodes)
    assert "greedy" not in shallow  # of one level, descent is the best class
