"""The sets made of MNIST: every count on the real files, and what the rules promise of any."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import cmnist
from datasets.base import SPLITS, Labels, check_counts, label_digest
from datasets.cmnist import PALETTE, Cmnist, CmnistConfig, dyed
from datasets.cmnist_irm import CmnistIrm, CmnistIrmConfig, coloured
from datasets.config import identity_values
from datasets.errors import DataCorrupt, UsageError
from datasets.idx import on_disk, open_idx, read_idx
from datasets.mnist_source import SHA256
from datasets.umnist import SPLIT_RULES, Umnist, UmnistConfig

UMNIST_CONFIGS = [
    UmnistConfig(protocol=protocol, groups=groups)
    for protocol in ("paper", "george")
    for groups in (3, 10)
]
CMNIST_CONFIGS = [CmnistConfig("nominal"), CmnistConfig("cnc"), CmnistConfig("biased_val")]


def labels_of(dataset: Any, config: Any, root: Path) -> dict[str, Labels]:
    """Read the labels and check counts and pinned digest, as every run does."""
    facts, found, labels = dataset.check(root, config)
    assert found.marker is None, "these tests speak of the real files"
    assert facts.label_digest == label_digest(labels)
    return labels


def folder_in(root: Path) -> Path:
    """Where below the root the four files are: users arrange them in more than one way."""
    return Umnist().require(root).folder


def index_digest(ids: Any) -> str:
    """SHA-256 of sorted little-endian 64-bit indices, the form in which they were published."""
    return hashlib.sha256(np.sort(np.asarray(ids)).astype("<i8").tobytes()).hexdigest()[:16]


def counts(values: torch.Tensor) -> list[int]:
    return torch.bincount(values).tolist()


@pytest.mark.parametrize("config", UMNIST_CONFIGS, ids=str)
def test_umnist_counts(config: UmnistConfig, mnist_root: Path) -> None:
    labels = labels_of(Umnist(), config, mnist_root)
    digits = {split: counts(part.extra_groupings["10digit"]) for split, part in labels.items()}
    three = {split: counts(part.extra_groupings["3group"]) for split, part in labels.items()}
    if config.protocol == "paper":
        assert [len(labels[split]) for split in SPLITS] == [43_542, 12_000, 10_000]
        assert three["train"] == [24_449, 18_859, 234]
        assert digits["val"] == [1193, 1403, 1139, 1223, 1189, 1115, 1162, 1226, 1159, 1191]
        assert index_digest(labels["val"].ids) == "5bf997ecd4aefba6"
    else:
        assert [len(labels[split]) for split in SPLITS] == [43_554, 12_000, 10_000]
        assert three["train"] == [24_477, 18_842, 235]
        assert digits["train"] == [4738, 5394, 4766, 4905, 4674, 4337, 4734, 5012, 235, 4759]
        assert digits["val"][8] == 1170
        assert index_digest(labels["train"].ids) == "73a03ac949ed5940"
        assert index_digest(labels["val"].ids) == "64c598b65509d229"
    assert three["test"] == [5139, 3887, 974]


def test_umnist_paper_split_before_thinning(mnist_root: Path) -> None:
    digits = Umnist.digits(folder_in(mnist_root), "train")
    train, val = SPLIT_RULES["paper"](digits)
    whole = np.setdiff1d(np.arange(60_000), val)
    assert index_digest(whole) == "664334720b16365a"
    dropped = np.setdiff1d(whole, train)
    assert set(digits[dropped]) == {8}
    assert (len(dropped), (digits[whole] == 8).sum()) == (4692 - 234, 4692)


@pytest.mark.parametrize("config", UMNIST_CONFIGS, ids=str)
def test_umnist_labels_agree_with_each_other_and_with_the_digits(
    config: UmnistConfig, mnist_root: Path
) -> None:
    labels = labels_of(Umnist(), config, mnist_root)
    both = [Umnist.digits(folder_in(mnist_root), part) for part in ("train", "t10k")]
    digits = torch.from_numpy(np.concatenate(both))
    facts = Umnist().facts(config)
    for part in labels.values():
        digit = part.extra_groupings["10digit"]
        assert torch.equal(digit, digits[part.ids])
        assert torch.equal(part.y, (digit >= 5).long())
        assert torch.equal(part.extra_groupings["3group"], part.y + (digit == 8).long())
        expected = part.extra_groupings["10digit" if config.groups == 10 else "3group"]
        assert torch.equal(part.groups, expected)
        assert set(part.extra_groupings) == set(facts.extra_groupings)
        for name, values in part.extra_groupings.items():
            assert values.max() < len(facts.extra_groupings[name])


@pytest.mark.parametrize("config", CMNIST_CONFIGS, ids=str)
def test_cmnist_counts(config: CmnistConfig, mnist_root: Path) -> None:
    labels = labels_of(Cmnist(), config, mnist_root)
    assert [len(labels[split]) for split in SPLITS] == [54_000, 6_000, 10_000]
    train = torch.bincount(labels["train"].groups, minlength=25).view(5, 5)
    assert train.sum(dim=1).tolist() == [11_387, 10_928, 10_132, 10_970, 10_583]
    conflicts = train.sum(dim=1) - train.diagonal()
    others = train[~torch.eye(5, dtype=torch.bool)].view(5, 4)
    if config.protocol != "cnc":
        assert conflicts.tolist() == [57, 54, 51, 55, 53]
        assert train.diagonal().sum() == 53_730
        for row in others.tolist():
            assert row == sorted(row, reverse=True) and row[0] - row[-1] <= 1
    else:
        assert conflicts.sum() == 254
        assert (others.min(), others.max()) == (8, 18)
    val, test = (torch.bincount(labels[split].groups, minlength=25) for split in ("val", "test"))
    if config.protocol == "biased_val":
        aligned = val.view(5, 5).diagonal()
        conflicting = val.view(5, 5)[~torch.eye(5, dtype=torch.bool)]
        assert (aligned.sum(), conflicting.sum()) == (5970, 30)
        assert (conflicting.min(), conflicting.max()) == (1, 2)
    else:
        assert (val.min(), val.max()) == (209, 290)
    assert (test.min(), test.max()) == (343, 445)
    assert test.view(5, 5).sum(dim=1).tolist() == [2115, 2042, 1874, 1986, 1983]


@pytest.mark.parametrize(("protocol", "dyed_anew"), [("cnc", "train"), ("biased_val", "val")])
def test_every_cmnist_dyes_one_split_of_the_nominal_one_anew(
    protocol: Any, dyed_anew: str, mnist_root: Path
) -> None:
    nominal = labels_of(Cmnist(), CmnistConfig(), mnist_root)
    other = labels_of(Cmnist(), CmnistConfig(protocol), mnist_root)
    for split in SPLITS:
        assert torch.equal(nominal[split].ids, other[split].ids)
        assert torch.equal(nominal[split].y, other[split].y)
        same = torch.equal(nominal[split].groups, other[split].groups)
        assert same == (split != dyed_anew)


@pytest.mark.parametrize(
    ("dataset", "config"),
    [(Umnist(), config) for config in UMNIST_CONFIGS[::2]]
    + [(Cmnist(), config) for config in CMNIST_CONFIGS],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_splits_are_disjoint_and_ids_name_images(
    dataset: Any, config: Any, mnist_root: Path
) -> None:
    loaded = dataset.load(mnist_root, config)
    ids = torch.cat([loaded.splits[split].labels.ids for split in SPLITS])
    assert len(ids.unique()) == len(ids)
    assert loaded.splits["train"].labels.ids.max() < 60_000
    assert torch.equal(loaded.splits["test"].labels.ids, torch.arange(60_000, 70_000))
    files = [folder_in(mnist_root) / f"{part}-images-idx3-ubyte" for part in ("train", "t10k")]
    grey = torch.from_numpy(np.concatenate([read_idx(file) for file in files]))[ids]
    start = 0
    for split in SPLITS:
        part = loaded.splits[split]
        assert len(part.images) == len(part.labels)
        pick = torch.tensor([0, 17, len(part) - 1])
        pixels, source = part.images.batch(pick).pixels, grey[start + pick]
        # A dyed pixel was bright, and the others are as they were.
        kept = (source < cmnist.DYED_FROM) | (dataset.name == "umnist")
        assert torch.equal(pixels * kept[:, None], (source * kept)[:, None].expand_as(pixels))
        start += len(part)
    assert torch.equal(ids.sort().values[-10_000:], torch.arange(60_000, 70_000))
    assert not loaded.standin


OPTIONS = [
    CmnistConfig(conflicts=0.02),
    CmnistConfig(conflicts=0.05, mark=4),
    CmnistConfig(conflicts=0.05, imbalance=5),
    CmnistConfig(conflicts=0.05, imbalance=20, mark=2),
    CmnistConfig(imbalance=2.5),  # without a pinned digest: the counts alone are checked
]


@pytest.mark.parametrize("config", OPTIONS, ids=lambda config: config.suffix)
def test_cmnist_options_change_training_alone(config: CmnistConfig, mnist_root: Path) -> None:
    facts, _, labels = Cmnist().check(mnist_root, config)  # counts by group, of every split
    nominal = labels_of(Cmnist(), CmnistConfig(), mnist_root)
    if config.conflicts == 0.05:
        assert facts.label_digest == label_digest(labels)
    train = torch.bincount(labels["train"].groups, minlength=25).view(5, 5)
    sizes, whole = train.sum(dim=1), torch.tensor([11_387, 10_928, 10_132, 10_970, 10_583])
    thinned = (whole[1:] / config.imbalance).round().long()
    assert sizes.tolist() == [11_387, *thinned.tolist()]
    conflicts = train.sum() - train.diagonal().sum()
    assert conflicts == round(len(labels["train"]) * config.conflicts)
    others = train[~torch.eye(5, dtype=torch.bool)].view(5, 4)
    assert (others.amax(dim=1) - others.amin(dim=1)).max() <= 1
    assert torch.isin(labels["train"].ids, nominal["train"].ids).all()
    for split in ("val", "test"):
        assert torch.equal(labels[split].groups, nominal[split].groups)
    plain = Cmnist().facts(CmnistConfig())
    assert (facts.protocol, facts.fingerprint()) != (plain.protocol, plain.fingerprint())
    assert facts.protocol == f"nominal{config.suffix}"


def test_cmnist_options_of_the_protocol_itself_change_nothing() -> None:
    assert CmnistConfig().suffix == "" and identity_values(CmnistConfig()) == {
        "protocol": "nominal"
    }
    allotted = cmnist._allotted(np.array(cmnist.TRAIN_SIZES), cmnist.ALIGNED)
    assert tuple(allotted.flatten().tolist()) == cmnist.NOMINAL_COUNTS
    protocols = {Cmnist().facts(config).fingerprint() for config in (CmnistConfig(), *OPTIONS)}
    assert len(protocols) == 1 + len(OPTIONS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"conflicts": 0.0}, "conflicts"),
        ({"imbalance": 0.5}, "imbalance"),
        ({"mark": 17}, "mark"),
        ({"protocol": "cnc", "mark": 2}, "nominal protocol alone"),
    ],
)
def test_cmnist_options_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CmnistConfig(**wrong)


def test_the_mark_is_on_conflicting_images_alone_and_no_crop_cuts_it() -> None:
    groups = torch.arange(25)
    blank = torch.zeros(25, 3, 28, 28, dtype=torch.uint8)
    images = cmnist.marked(blank.clone(), groups, 4)
    for image, group in zip(images, groups.tolist(), strict=True):
        y, colour = divmod(group, 5)
        inside = image[:, 6:10, 6:10].flatten(1)
        assert image.count_nonzero() == inside.count_nonzero()
        expected = torch.tensor(PALETTE[y]) if y != colour else torch.zeros(3)
        assert torch.equal(inside.unique(dim=1)[:, 0].float(), expected.float())
    assert torch.equal(cmnist.marked(blank.clone(), groups, 0), blank)
    first, last = cmnist.MARK_FROM, cmnist.MARK_FROM + cmnist.MARK_LIMIT
    assert first * 40 / 28 >= 40 - 32 and last * 40 / 28 <= 32  # crops of 32 in 40 pixels


def test_cmnist_irm_is_drawn_as_proposed(mnist_root: Path) -> None:
    labels = labels_of(CmnistIrm(), CmnistIrmConfig(), mnist_root)
    published = {"train": "4e272956151eb076", "val": "a69f5d8300937dd8", "test": "dce2bbd125f3ee16"}
    assert torch.equal(labels["train"].ids, torch.arange(50_000))
    assert torch.equal(labels["val"].ids, torch.arange(50_000, 60_000))
    assert torch.equal(labels["test"].ids, torch.arange(60_000, 70_000))
    for split, part in labels.items():
        assert torch.equal(part.groups // 2, part.y)
        content = part.y.numpy().astype("<i8").tobytes()
        content += (part.groups % 2).numpy().astype("<i8").tobytes()
        assert hashlib.sha256(content).hexdigest()[:16] == published[split]
    assert counts(labels["test"].groups) == [495, 4422, 4540, 543]


def test_cmnist_irm_has_the_noise_of_the_paper(mnist_root: Path) -> None:
    labels = labels_of(CmnistIrm(), CmnistIrmConfig(), mnist_root)
    folder = folder_in(mnist_root)
    digits = np.concatenate([Umnist.digits(folder, part) for part in ("train", "t10k")])
    for split, part in labels.items():
        low = torch.from_numpy(digits[part.ids] < 5).long()
        assert float((part.y != low).double().mean()) == pytest.approx(0.25, abs=0.01)
        flipped = (part.groups % 2 != part.y).double()
        expected = (0.9, 0.9) if split == "test" else (0.2, 0.1)
        for parity, noise in enumerate(expected):
            own = flipped[part.ids % 2 == parity]
            assert float(own.mean()) == pytest.approx(noise, abs=0.015), (split, parity)


def test_cmnist_irm_colours_are_channels(mnist_root: Path) -> None:
    grey = torch.tensor([[[0, 7], [255, 1]]], dtype=torch.uint8).repeat(2, 1, 1)
    red, green = coloured(grey, torch.tensor([0, 1]))
    assert torch.equal(red[0], grey[0]) and not red[1:].any()
    assert torch.equal(green[1], grey[0]) and not green[[0, 2]].any()
    data = CmnistIrm().load(mnist_root, CmnistIrmConfig(), splits=("val",))
    own = data.splits["val"]
    channel = own.images.batch(torch.arange(50)).pixels.flatten(2).sum(2).argmax(1)
    assert torch.equal(channel, own.labels.groups[:50] % 2)


def test_the_sums_of_the_real_files_are_demanded(mnist_root: Path, tmp_path: Path) -> None:
    for name in SHA256:
        path = on_disk(folder_in(mnist_root) / name)
        assert path is not None
        with open_idx(path) as file:
            (tmp_path / name).write_bytes(file.read())
    labels = bytearray((tmp_path / "t10k-labels-idx1-ubyte").read_bytes())
    labels[-1] = (labels[-1] + 1) % 10
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(DataCorrupt, match="t10k-labels-idx1-ubyte"):
        Umnist().check(tmp_path, UmnistConfig())


def test_palette_and_dyeing_rule() -> None:
    hsv = [(255, 0, 0), (208, 255, 0), (0, 255, 92), (0, 116, 255), (184, 0, 255)]
    assert list(PALETTE) == hsv
    grey = torch.tensor([[[0, 1, 119], [120, 200, 255]]] * 5, dtype=torch.uint8)
    coloured = dyed(grey, torch.arange(5))
    assert coloured.shape == (5, 3, 2, 3) and coloured.dtype == torch.uint8
    for colour in range(5):
        for channel in range(3):
            shade = hsv[colour][channel]
            assert coloured[colour, channel].tolist() == [[0, 1, 119], [shade] * 3]


def test_a_wrong_count_names_both_numbers(mnist_root: Path) -> None:
    facts = Umnist().facts(UmnistConfig(protocol="george"))
    labels = Umnist().labels(folder_in(mnist_root), UmnistConfig(protocol="paper"))
    with pytest.raises(DataCorrupt, match=r"expected train size 43554, found 43542"):
        check_counts(facts, labels, "here")


digit_arrays = st.integers(0, 400).flatmap(
    lambda size: st.builds(
        lambda seed, eights: np.where(
            np.random.default_rng(seed).random(size) < eights,
            8,
            np.random.default_rng(seed + 1).integers(0, 10, size),
        ).astype(np.int64),
        st.integers(0, 2**20),
        st.sampled_from([0.0, 0.3, 1.0]),
    )
)


@settings(max_examples=60, deadline=None)
@given(digits=digit_arrays, seed=st.integers(0, 2**20))
def test_umnist_rules_hold_for_any_digits(digits: np.ndarray, seed: int) -> None:
    for protocol, rule in SPLIT_RULES.items():
        train, val = rule(digits)
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist()
        again = rule(digits)
        assert all(np.array_equal(one, two) for one, two in zip((train, val), again, strict=True))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        assert train.dtype == val.dtype == np.int64
        assert len(np.intersect1d(train, val)) == 0
        gone = np.setdiff1d(np.arange(len(digits)), np.concatenate([train, val]))
        assert (digits[gone] == 8).all(), "only eights are thinned"
        kept, all_eights = (
            (digits[train] == 8).sum(),
            (digits == 8).sum() - (digits[val] == 8).sum(),
        )
        if protocol == "paper":
            assert len(val) == len(digits) // 5
            assert kept == int(0.05 * all_eights)
        else:
            assert kept == all_eights - int((1 - 0.05) * all_eights)
            for digit in range(10):
                assert (digits[val] == digit).sum() == round(0.2 * int((digits == digit).sum()))


@settings(max_examples=40, deadline=None)
@given(digits=digit_arrays, seed=st.integers(0, 2**20))
def test_cmnist_colours_hold_for_any_classes(digits: np.ndarray, seed: int) -> None:
    y = digits // 2
    for dye in (cmnist._nominal_colours, cmnist._cnc_colours, cmnist._uniform_colours):
        colour = dye(y)
        np.random.seed(seed)
        before = np.random.get_state()[1].tolist()
        assert np.array_equal(colour, dye(y))
        assert np.random.get_state()[1].tolist() == before
        assert colour.shape == y.shape and set(colour) <= set(range(5))
    conflicting = cmnist._nominal_colours(y) != y
    assert conflicting.sum() == round(len(y) * (1 - cmnist.ALIGNED))


@settings(max_examples=40, deadline=None)
@given(digits=digit_arrays, test=digit_arrays)
def test_cmnist_split_partitions_any_digits(digits: np.ndarray, test: np.ndarray) -> None:
    class Given(Cmnist):
        @staticmethod
        def digits(folder: Path, part: str) -> np.ndarray:
            return digits if part == "train" else test

    for config in CMNIST_CONFIGS:
        labels = Given().labels(Path(), config)
        ids = torch.cat([labels[split].ids for split in SPLITS])
        assert torch.equal(ids.sort().values, torch.arange(len(digits) + len(test)))
        assert len(labels["val"]) == len(digits) // 10
        everything = torch.from_numpy(np.concatenate([digits, test]))
        for part in labels.values():
            assert torch.equal(part.y, everything[part.ids] // 2)
            assert torch.equal(part.groups // 5, part.y)
