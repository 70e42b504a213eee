"""Settings from plain values: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets.catalogue import load_datasets
from datasets.config import (
    added,
    as_plain,
    build_config,
    coerce,
    field_types,
    identity_values,
    read_stored,
    renamed,
    require,
    with_overrides,
)
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
        ("rate", "nan", "finite"),
        ("rate", "inf", "finite"),
        ("rate", float("-inf"), "finite"),
        ("epochs", 10**18, "a whole number of at most 18 digits"),
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


def test_every_dataset_builds_its_default() -> None:
    for name, dataset in load_datasets().items():
        config = build_config(dataset.config_type, {}, name)
        assert build_config(dataset.config_type, as_plain(config), name) == config
        assert read_stored(dataset.config_type, as_plain(config), name) == config
        fields = dataset.config_type.__dataclass_fields__
        first = {
            field: value
            for field, value in as_plain(config).items()
            if fields[field].metadata.get("added", value) != value
            or "added" not in fields[field].metadata
        }
        assert identity_values(config) == first, "no field was renamed yet"
        facts = dataset.facts(config)
        assert facts.name == name and len(facts.fingerprint()) == 16


@dataclass(frozen=True)
class First:
    """The settings with which runs were stored."""

    lr: float = 0.1
    epochs: int = 10
    min_group: int = 1


@dataclass(frozen=True)
class Inner:
    """The same settings later: one renamed, two added, one removed."""

    retired: ClassVar[Mapping[str, object]] = {"min_group": 1}
    rate: float = renamed("lr", 0.1)
    epochs: int = 10
    nesterov: bool = added(False)
    depths: tuple[int, ...] = added((1, 2), default=(3,))


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    name: str = "a"
    extra: Inner | None = added(None)


def test_an_added_field_counts_only_where_it_differs_from_the_declared_value() -> None:
    same = Inner(depths=(1, 2))
    assert identity_values(same) == as_plain(First())
    assert identity_values(Inner(nesterov=True, depths=(1, 2)))["nesterov"] is True
    today = identity_values(Inner())
    assert today["depths"] == [3], "the declared value stays when the default moves away from it"
    assert "nesterov" not in today


def test_a_renamed_field_counts_under_its_first_name_and_a_retired_one_still_counts() -> None:
    values = identity_values(Inner(rate=0.5))
    assert values["lr"] == 0.5 and "rate" not in values
    assert values["min_group"] == 1
    assert as_plain(Inner())["rate"] == 0.1 and "min_group" not in as_plain(Inner())


def test_a_config_within_a_config_follows_its_own_declarations() -> None:
    outer = Outer(Inner(depths=(1, 2)))
    assert identity_values(outer) == {"inner": as_plain(First()), "name": "a"}
    assert identity_values(Outer(extra=Inner()))["extra"] == identity_values(Inner())
    assert as_plain(outer)["inner"] == {
        "rate": 0.1,
        "epochs": 10,
        "nesterov": False,
        "depths": [1, 2],
    }


def test_retired_fields_of_a_base_class_count_too() -> None:
    @dataclass(frozen=True)
    class Later(Inner):
        retired: ClassVar[Mapping[str, object]] = {"patience": 5}

    assert identity_values(Later()) == identity_values(Inner()) | {"patience": 5}


def test_a_stored_run_is_read_as_the_code_was_when_it_was_made() -> None:
    stored = as_plain(First(lr=0.5, epochs=3))
    config = read_stored(Inner, stored, "sgd")
    assert config == Inner(rate=0.5, epochs=3, nesterov=False, depths=(1, 2))
    assert identity_values(config) == stored, "so its id is the one it was stored under"
    outer = read_stored(Outer, {"inner": stored, "name": "b"}, "tree")
    assert outer == Outer(config, "b")
    assert read_stored(Outer, as_plain(outer), "tree") == outer, "today's own form as well"


def test_a_stored_run_that_the_code_cannot_make_any_more_says_so() -> None:
    with pytest.raises(UsageError, match=r"sgd\.min_group was 5 .* has only 1"):
        read_stored(Inner, as_plain(First(min_group=5)), "sgd")
    with pytest.raises(UsageError, match=r"tree\.inner\.min_group was 5"):
        read_stored(Outer, {"inner": as_plain(First(min_group=5))}, "tree")
    with pytest.raises(UsageError, match=r"unknown setting 'sgd\.momentum'"):
        read_stored(Inner, {"momentum": 0.9}, "sgd")
    with pytest.raises(UsageError, match=r"unknown setting 'sgd\.lr'"):
        build_config(Inner, {"lr": 0.5}, "sgd")  # only stored runs know the old name


def test_overrides_reach_into_a_config_within_a_config() -> None:
    values = {"inner": {"rate": 0.1, "epochs": 3}, "name": "a"}
    merged = with_overrides(values, {"inner.rate": "0.5", "name": "b"})
    assert merged == {"inner": {"rate": "0.5", "epochs": 3}, "name": "b"}
    assert build_config(Outer, merged, "tree") == Outer(Inner(rate=0.5, epochs=3), "b")
    assert values["inner"] == {"rate": 0.1, "epochs": 3}, "the values themselves stay"


class Colour(enum.Enum):
    RED = "red"


def test_further_types_of_a_record() -> None:
    assert coerce("red", Colour, "colour") is Colour.RED
    with pytest.raises(UsageError, match="colour must be one of red but got 'blue'"):
        coerce("blue", Colour, "colour")
    assert coerce({"a": "1"}, Mapping[str, int], "counts") == {"a": 1}
    with pytest.raises(UsageError, match=r"counts\.a must be a whole number"):
        coerce({"a": "x"}, dict[str, int], "counts")
    with pytest.raises(UsageError, match="counts must be a table"):
        coerce([1], dict[str, int], "counts")
    anything = object()
    assert coerce(anything, object, "details") is anything


def test_require() -> None:
    require(True, "never said")
    with pytest.raises(UsageError, match="epochs must be at least 1"):
        require(False, "epochs must be at least 1")
