"""Preset files: complete, sourced, and equal to the recipes they cite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from datasets.base import BackboneSpec
from datasets.catalogue import get_dataset, load_datasets
from datasets.config import as_plain
from datasets.errors import UsageError
from methods.backbones import build_backbone
from methods.base import METHODS, load_methods
from methods.erm import Erm
from methods.optimisation import TrainConfig
from methods.presets import has_preset, preset_config, preset_values, read_presets

load_methods()
ERM = METHODS["erm"]
assert isinstance(ERM, Erm)


@pytest.mark.parametrize("dataset", load_datasets())
def test_every_method_has_a_table_that_builds_a_config(dataset: str) -> None:
    presets = read_presets(dataset)
    own = {n for n, method in METHODS.items() if type(method).__module__.startswith("methods.")}
    assert set(presets) == own  # none is left to defaults, whose sources nothing says
    for name, values in presets.items():
        config = preset_config(METHODS[name], dataset)
        for knob, entry in values.items():
            value = as_plain(config)[knob]
            if isinstance(value, dict):  # of a first stage, the preset may leave some at default
                value = {name: value[name] for name in entry.value}
            assert value == entry.value
            assert entry.source.strip()


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("waterbirds", TrainConfig(300, 128, "sgd", 1e-5, 1.0, 0.9)),
        ("celeba", TrainConfig(50, 128, "sgd", 1e-5, 0.1, 0.9)),
        (
            "isic",
            TrainConfig(20, 16, "sgd", 1e-3, 1e-3, 0.9, "step", (15,), 0.1, selection="val_auroc"),
        ),
        ("umnist", TrainConfig(100, 128, "adam", 2e-3, 1e-5, 0.9, "step", (50, 75), 0.1)),
        ("cmnist", TrainConfig(5, 32, "sgd", 1e-3, 5e-4, 0.9, selection="last")),
        ("dominoes", TrainConfig(100, 128, "adam", 2e-3, 1e-5, 0.9, "step", (50, 75), 0.1)),
        ("cmnist_irm", TrainConfig(5, 32, "sgd", 1e-3, 5e-4, 0.9, selection="last")),
    ],
)
def test_erm_is_trained_as_the_authors_do(dataset: str, expected: TrainConfig) -> None:
    """The table of the facts file, written out a second time: a slip in one of them shows."""
    config = preset_config(ERM, dataset)
    assert vars(config) == vars(expected)


@pytest.mark.parametrize(
    ("dataset", "epochs", "batch"), [("waterbirds", 50, 32), ("celeba", 20, 100)]
)
def test_afrs_base_model_has_the_constant_rate_that_its_authors_hardly_leave(
    dataset: str, epochs: int, batch: int
) -> None:
    """Their cosine is stepped at checkpoints alone, twice in CelebA's 20 epochs."""
    own = preset_config(METHODS["afr"], dataset)
    expected = TrainConfig(epochs, batch, "sgd", 3e-3, 1e-4, 0.9, "none", selection="last")
    assert vars(own.base) == vars(expected)
    descent = {"waterbirds": (1e-2, 500), "celeba": (2e-2, 1000)}
    assert (own.head_lr, own.head_steps) == descent[dataset]


@pytest.mark.parametrize(
    ("dataset", "epochs", "batch"), [("waterbirds", 100, 32), ("celeba", 20, 100)]
)
def test_selfs_base_model_has_no_momentum_as_in_its_authors_code(
    dataset: str, epochs: int, batch: int
) -> None:
    """Theirs is set where the optimiser does not read it."""
    expected = TrainConfig(epochs, batch, "sgd", 3e-3, 1e-4, 0.0, "cosine", selection="last")
    for name in ("self", "cbllr"):
        own = preset_config(METHODS[name], dataset)
        assert vars(own.base) == vars(expected) and own.batch_size == batch


def test_what_was_published_on_frozen_networks_is_trained_so() -> None:
    """XRM's twins on photos, its second phase on Waterbirds, and LfF on CelebA."""
    own = {name: preset_config(METHODS["xrm"], name) for name in ("waterbirds", "celeba")}
    assert all(one.twins.frozen for one in own.values())
    assert own["waterbirds"].head_only and not own["celeba"].head_only
    assert not any(one.balanced or one.adjustment for one in own.values())
    found = preset_config(METHODS["lff"], "celeba")
    assert found.head_only and found.selection == "last"
    assert (found.epochs, found.batch_size, found.lr, found.weight_decay) == (200, 256, 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("dataset", "nearest", "differs"),
    [
        ("dominoes", "umnist", {}),
        ("cmnist_irm", "cmnist", {("jtt", "upweight"): 20, ("exmap", "max_clusters"): 10}),
    ],
)
def test_the_papers_methods_keep_the_recipe_of_the_nearest_digit_set(
    dataset: str, nearest: str, differs: dict[tuple[str, str], object]
) -> None:
    found = {}
    for name in (name for name, method in METHODS.items() if not method.extended):
        own, other = (as_plain(preset_config(METHODS[name], on)) for on in (dataset, nearest))
        found |= {(name, knob): own[knob] for knob in own if own[knob] != other[knob]}
    assert found == differs


@pytest.mark.parametrize("dataset", ["umnist", "cmnist", "dominoes", "cmnist_irm"])
def test_dpes_penalty_goes_with_the_length_of_the_features(dataset: str) -> None:
    """The authors' 5e4 is for 2,048; a penalty's gradient is a prototype over that length."""
    known = get_dataset(dataset)
    facts = known.facts(known.config_type())
    length = build_backbone(BackboneSpec(facts.backbone), facts.channels).dim
    own = preset_config(METHODS["dpe"], dataset).diversity
    assert own == pytest.approx(5e4 * length / 2048, rel=0.05)


@pytest.mark.parametrize("dataset", ["umnist", "cmnist", "dominoes", "cmnist_irm"])
def test_pairs_of_networks_take_thousands_of_steps_on_every_digit_set(dataset: str) -> None:
    """The sets differ sixfold in size; XRM's authors take 1,000 to 10,000 steps, LfF's 23,500."""
    known = get_dataset(dataset)
    images = known.facts(known.config_type()).counts["train"]
    for config in (
        preset_config(METHODS["lff"], dataset),
        preset_config(METHODS["xrm"], dataset).twins,
    ):
        assert config.epochs * images / config.batch_size > 2_400


def test_a_first_stage_may_start_from_another_table() -> None:
    shared, own = (preset_config(METHODS[name], "umnist") for name in ("erm", "eiil"))
    assert own.erm == replace(shared, epochs=1)


def test_cnc_on_umnist_errs_first_as_its_authors_do_on_cmnist() -> None:
    own = preset_config(METHODS["cnc"], "umnist")
    assert own.erm == replace(preset_config(ERM, "cmnist"), epochs=1)


def test_unknown_preset_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown preset 'papre'"):
        preset_values(ERM, "umnist", "papre")


def test_dataset_without_presets_leaves_the_defaults() -> None:
    assert not has_preset(ERM, "another_dataset")
    assert preset_values(ERM, "another_dataset") == {}
    assert preset_config(ERM, "another_dataset") == ERM.config_type()


def test_whether_a_method_has_a_preset(tmp_path: Path) -> None:
    assert has_preset(ERM, "umnist")
    assert not has_preset(ERM, "umnist", "tuned", folder=tmp_path)
    (tmp_path / "erm-umnist.toml").write_text('[erm]\nlr = { value = 0.1, source = "a study" }\n')
    assert has_preset(ERM, "umnist", "tuned", folder=tmp_path)
    assert not has_preset(ERM, "umnist", "tuned", folder=tmp_path, quick=True)
