"""Settings from plain values: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets.catalogue import DATASETS, get_dataset
from datasets.config import as_plain, build_config, coerce, field_types
from datasets.errors import UsageError
from datasets.waterbirds import WaterbirdsConfig


@dataclass(frozen=True)
class Settings:
    epochs: int = 1
    rate: float = 0.1
    nesterov: bool = False
    name: str = "sgd"
    kind: Literal["a", "b"] = "a"
    groups: Literal[3, 10] = 3
    depths: tuple[int, ...] = (1, 2)
    scale: tuple[float, float] = (0.7, 1.0)
    weights: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UsageError(f"epochs must be at least 1 but got {self.epochs}", "give 1 or more")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("epochs", 3, 3),
        ("epochs", "3", 3),
        ("epochs", 3.0, 3),
        ("rate", "1e-3", 0.001),
        ("rate", 1, 1.0),
        ("rate", "inf", float("inf")),
        ("nesterov", True, True),
        ("nesterov", "true", True),
        ("nesterov", "Off", False),
        ("nesterov", "0", False),
        ("name", "adam", "adam"),
        ("name", "3", "3"),
        ("kind", "b", "b"),
        ("groups", 10, 10),
        ("groups", "10", 10),
        ("depths", "4,5", (4, 5)),
        ("depths", "4", (4,)),
        ("depths", [4, 5], (4, 5)),
        ("depths", "", ()),
        ("depths", [], ()),
        ("scale", "0.5,1", (0.5, 1.0)),
        ("weights", "none", None),
        ("weights", None, None),
        ("weights", "file.pth", "file.pth"),
        ("limit", "7", 7),
        ("limit", "None", None),
    ],
)
def test_values_and_their_text_become_the_fields_type(name: str, given: Any, expected: Any) -> None:
    value = getattr(build_config(Settings, {name: given}, "sgd"), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("epochs", "three", "a whole number"),
        ("epochs", 2.5, "a whole number"),
        ("epochs", "2.5", "a whole number"),
        ("epochs", True, "a whole number"),
        ("epochs", None, "a whole number"),
        ("epochs", float("inf"), "a whole number"),
        ("epochs", [1], "a whole number"),
        ("rate", "fast", "a number"),
        ("rate", float("nan"), "a number"),
        ("rate", "nan", "a number"),
        ("rate", 10**400, "a number"),
        ("nesterov", "maybe", "true or false"),
        ("nesterov", 2, "true or false"),
        ("name", 3, "text"),
        ("kind", "c", "one of a, b"),
        ("groups", 4, "one of 3, 10"),
        ("depths", "1,x", "a whole number"),
        ("depths", 5, "a list"),
        ("scale", "0.5", "a list of 2"),
        ("scale", [0.5, 0.6, 0.7], "a list of 2"),
        ("limit", "x", "a whole number"),
    ],
)
def test_other_values_are_refused_by_name(name: str, given: Any, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_config(Settings, {name: given}, "sgd")
    assert caught.value.message == f"sgd.{name} must be {wanted} but got {given!r}" or (
        name == "depths" and caught.value.message == "sgd.depths must be a whole number but got 'x'"
    )


def test_an_unknown_setting_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown setting 'sgd\.epoch'.*'sgd\.epochs'") as caught:
        build_config(Settings, {"epoch": 3}, "sgd")
    assert "settings of sgd: epochs, rate" in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        build_config(Settings, {"zzz": 3}, "sgd")
    assert "did you mean" not in caught.value.message


def test_a_value_out_of_range_names_the_config() -> None:
    with pytest.raises(UsageError, match="sgd: epochs must be at least 1 but got 0") as caught:
        build_config(Settings, {"epochs": "0"}, "sgd")
    assert caught.value.remedy == "give 1 or more"
    with pytest.raises(UsageError, match="birds: resolution must be at least 32 but got 8"):
        build_config(WaterbirdsConfig, {"resolution": 8}, "birds")


def test_plain_values_survive_json_and_build_the_same_config() -> None:
    config = Settings(epochs=3, depths=(7,), weights="w", kind="b")
    plain = as_plain(config)
    assert plain["depths"] == [7]
    assert build_config(Settings, json.loads(json.dumps(plain)), "sgd") == config


@given(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text()))
)
def test_any_value_is_taken_or_refused_but_never_crashes(value: Any) -> None:
    for name, wanted in field_types(Settings).items():
        try:
            coerce(value, wanted, name)
        except UsageError as error:
            assert error.message.startswith(f"{name} must be ")


def test_every_dataset_builds_its_default_and_is_found_by_name() -> None:
    for name, dataset in DATASETS.items():
        assert get_dataset(name) is dataset
        config = build_config(dataset.config_type, {}, name)
        assert build_config(dataset.config_type, as_plain(config), name) == config
        facts = dataset.facts(config)
        assert facts.name == name and len(facts.fingerprint()) == 16
    with pytest.raises(UsageError, match="did you mean 'waterbirds'"):
        get_dataset("waterbird")
