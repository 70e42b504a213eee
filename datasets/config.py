"""Frozen dataclasses from plain values: types checked, unknown keys refused with a suggestion.

A config also says what of it makes two runs the same run. Every field counts, with three
declarations for what changes later, so that no stored run is lost:

- `nesterov: bool = added(False)`: a field that came later counts only where it differs from the
  value under which the earlier runs were made. That value is written once and stays, whatever the
  default becomes (`added(False, default=True)`).
- `rate: float = renamed("lr", 0.1)`: a renamed field counts under its first name.
- `retired: ClassVar[Mapping[str, object]] = {"min_group": 1}`: a field that was removed still
  counts, with the one value the code still has. Stored runs with another value stay readable, as
  runs of their own.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from datasets.errors import UsageError, did_you_mean

Config = TypeVar("Config")
LIMIT = 10**18  # of whole numbers, seeds among them: tables keep them in 64 bits
Values = Mapping[str, object]
"""Settings by name, as JSON has them."""


def added(value: Any, *, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that came after runs were stored; `value` is what those runs had.

    Args:
        value: the value that leaves ids as they were; never changed afterwards.
        default: today's default, where it has moved away from `value` since.
    """
    default = value if default is dataclasses.MISSING else default
    return dataclasses.field(default=default, metadata={"added": value})


def renamed(old: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that runs were stored with under another name."""
    return dataclasses.field(default=default, metadata={"renamed": old})


def require(condition: bool, message: str) -> None:
    """Raise a `UsageError` with the message unless the condition holds."""
    if not condition:
        raise UsageError(message, "correct the value given with --set or in the preset")


def build_config(kind: type[Config], values: Values, prefix: str) -> Config:
    """Make a config from values by field name; `prefix` names it in messages (`erm`, `umnist`)."""
    known = field_types(typing.cast(Any, kind))
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise UsageError(
                f"unknown setting '{prefix}.{name}'{did_you_mean(name, known, f'{prefix}.')}",
                f"settings of {prefix}: {', '.join(known) or 'none'}",
            )
        checked[name] = coerce(value, known[name], f"{prefix}.{name}")
    try:
        return kind(**checked)
    except UsageError as error:
        raise UsageError(f"{prefix}: {error.message}", error.remedy) from error


def with_overrides(values: Values, overrides: Values) -> dict[str, object]:
    """Replace values by name; `part.name` reaches into a config within the config."""
    merged: dict[str, object] = dict(values)
    for key, value in overrides.items():
        part, dot, name = key.partition(".")
        inner = merged.get(part)
        within = inner if isinstance(inner, Mapping) else {}
        merged[part] = with_overrides(within, {name: value}) if dot else value
    return merged


@functools.cache  # resolving takes longer than all else that reading a record needs
def _field_types(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    resolved = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return types.MappingProxyType(resolved)  # shared by all callers


def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return the resolved type of every field."""
    return _field_types(typing.cast(typing.Hashable, kind))


def coerce(value: Any, wanted: Any, name: str) -> Any:
    """Turn a value, or the text of one, into the wanted type."""
    if wanted is object:
        return value
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Literal:
        for choice in arguments:
            if value == choice or (isinstance(value, str) and value == str(choice)):
                return choice
        raise _refused(name, value, f"one of {', '.join(map(str, arguments))}")
    if origin in (typing.Union, types.UnionType):
        if value is None or value in ("none", "None", ""):
            return None
        return coerce(value, next(a for a in arguments if a is not type(None)), name)
    if origin is tuple:
        if not isinstance(value, str | list | tuple):
            raise _refused(name, value, "a list")
        items = [item for item in value.split(",") if item] if isinstance(value, str) else value
        if Ellipsis in arguments:
            return tuple(coerce(item, arguments[0], name) for item in items)
        if len(items) != len(arguments):
            raise _refused(name, value, f"a list of {len(arguments)}")
        return tuple(coerce(item, kind, name) for item, kind in zip(items, arguments, strict=True))
    if origin in (dict, collections.abc.Mapping):
        if not isinstance(value, Mapping):
            raise _refused(name, value, "a table")
        return {
            str(key): coerce(item, arguments[1], f"{name}.{key}") for key, item in value.items()
        }
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        if value not in [member.value for member in wanted]:
            raise _refused(name, value, f"one of {', '.join(str(m.value) for m in wanted)}")
        return wanted(value)
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        if not isinstance(value, Mapping):
            raise _refused(name, value, f"given knob by knob, as in {name}.KNOB")
        return build_config(wanted, value, name)
    return _scalar(value, wanted, name)


def _scalar(value: Any, wanted: Any, name: str) -> Any:
    if wanted is bool:
        words = {"true": True, "false": False, "1": True, "0": False, "on": True, "off": False}
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise _refused(name, value, "true or false")
    if wanted in (int, float) and not isinstance(value, bool):
        try:
            number = wanted(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        exact = number is not None and (isinstance(value, str) or number == value)
        if exact:
            if abs(number) < (LIMIT if wanted is int else math.inf):  # as NaN is not, either
                return number
            finite = "finite" if wanted is float else "a whole number of at most 18 digits"
            raise _refused(name, value, finite)
    if wanted is str and isinstance(value, str):
        return value
    kinds = {int: "a whole number", float: "a number", str: "text"}
    raise _refused(name, value, kinds.get(wanted, str(wanted)))


def _refused(name: str, value: Any, wanted: str) -> UsageError:
    return UsageError(f"{name} must be {wanted} but got {value!r}")


def as_plain(config: object) -> dict[str, object]:
    """Return a config as JSON-ready values, the form in which it is recorded."""
    return {
        field.name: _plain_value(getattr(config, field.name))
        for field in dataclasses.fields(_instance(config))
    }


def _plain_value(value: Any) -> object:
    if dataclasses.is_dataclass(value):
        return as_plain(value)
    return list(value) if isinstance(value, tuple) else value


def identity_values(config: object) -> dict[str, object]:
    """Return the values of a config by which runs, stages and studies are told apart."""
    values: dict[str, object] = dict(_retired(type(config)))
    for field in dataclasses.fields(_instance(config)):
        value = getattr(config, field.name)
        if "added" in field.metadata and value == field.metadata["added"]:
            continue
        nested = dataclasses.is_dataclass(value)
        values[_first_name(field)] = identity_values(value) if nested else _plain_value(value)
    return values


def read_stored(kind: type[Config], values: Values, prefix: str) -> Config:
    """Build a config from a stored run's values, which an earlier version may have written.

    Renamed fields are found under their old names, retired ones are accepted with the value the
    code still has, and fields added since have the value the run was made under.
    """
    known = dict(values)
    retired = _retired(kind)
    for name, value in retired.items():
        if known.pop(name, value) != value:
            raise UsageError(
                f"{prefix}.{name} was {values[name]!r} in this run, and today's code has only "
                f"{value!r}",
                "the run stays readable; make it again with the version that stored it",
            )
    wanted = field_types(typing.cast(Any, kind))
    for field in dataclasses.fields(typing.cast(Any, kind)):
        first = _first_name(field)
        if first != field.name and first in known:
            known[field.name] = known.pop(first)
        if "added" in field.metadata:
            known.setdefault(field.name, field.metadata["added"])
        inner, part = wanted[field.name], known.get(field.name)
        if (
            dataclasses.is_dataclass(inner)
            and isinstance(inner, type)
            and isinstance(part, Mapping)
        ):
            stored = read_stored(inner, part, f"{prefix}.{field.name}")
            known[field.name] = as_plain(stored)
    return build_config(kind, known, prefix)


def _retired(kind: type[Any]) -> dict[str, object]:
    """Return the retired fields of a config class and of those it inherits from."""
    own = [vars(base).get("retired", {}) for base in reversed(kind.__mro__)]
    return {name: value for fields in own for name, value in fields.items()}


def _first_name(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("renamed", field.name))


def _instance(config: object) -> Any:
    assert dataclasses.is_dataclass(config) and not isinstance(config, type)
    return config
