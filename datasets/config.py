"""Frozen dataclasses from plain values: types checked, unknown keys refused with a suggestion."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from datasets.errors import UsageError, did_you_mean

Config = TypeVar("Config")


def build_config(kind: type[Config], values: Mapping[str, Any], prefix: str) -> Config:
    """Make a config from values by field name; `prefix` names it in messages (`erm`, `umnist`)."""
    known = field_types(kind)
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


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values by name; `part.name` reaches into a config within the config."""
    merged = dict(values)
    for key, value in overrides.items():
        part, dot, name = key.partition(".")
        inner = merged.get(part)
        within = inner if isinstance(inner, Mapping) else {}
        merged[part] = with_overrides(within, {name: value}) if dot else value
    return merged


def field_types(kind: type[Any]) -> dict[str, Any]:
    """Give the resolved type of every field."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def coerce(value: Any, wanted: Any, name: str) -> Any:
    """Turn a value, or the text of one, into the wanted type."""
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
        if exact and number == number:  # NaN is not a setting
            return number
    if wanted is str and isinstance(value, str):
        return value
    kinds = {int: "a whole number", float: "a number", str: "text"}
    raise _refused(name, value, kinds.get(wanted, str(wanted)))


def _refused(name: str, value: Any, wanted: str) -> UsageError:
    return UsageError(f"{name} must be {wanted} but got {value!r}")


def as_plain(config: Any) -> dict[str, Any]:
    """Give a config as JSON-ready values, the form in which it is hashed and recorded."""
    return {
        field.name: _plain_value(getattr(config, field.name))
        for field in dataclasses.fields(config)
    }


def _plain_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_plain(value)
    return list(value) if isinstance(value, tuple) else value
