"""Typed values: frozen dataclasses that check the types of their fields, and JSON read as such values."""

import json
import reprlib
import sys
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import EnumType
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from huggingface_hub.dataclasses import type_validator


# The types that a value of JSON must have, and what messages call it
_KINDS = {bool: (bool, "true or false"), int: (int, "a whole number"), float: ((int, float), "a finite number")}
_KINDS |= {str: (str, "text"), Any: (object, ""), **dict.fromkeys((list, tuple, np.ndarray), (list, "a list"))}


@dataclass(frozen=True)
class Value:
    """A base class whose instances have fields of the declared types; `ValueError` names the field otherwise."""

    def __post_init__(self):
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            is_number = type(value) is int and float in (kind, *get_args(kind))
            try:
                type_validator(name, float(value) if is_number else value, kind)
                if isinstance(value, bool) and bool not in (kind, *get_args(kind)):  # which Python takes for a number
                    raise TypeError
            except (TypeError, ValueError):
                raise ValueError(f"{name}={reprlib.repr(value)} must be {_describe(kind)}") from None
            if is_number:
                object.__setattr__(self, name, float(value))


def _describe(kind: Any) -> str:
    """Says in words which values a type allows."""
    if get_origin(kind) is Literal or isinstance(kind, EnumType):
        return " or ".join(repr(str(value)) for value in get_args(kind) or kind)
    if isinstance(kind, UnionType):
        return " or ".join("null" if part is type(None) else _describe(part) for part in get_args(kind))
    return _KINDS.get(get_origin(kind) or kind, (dict, "fields and values"))[1]


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns a dataclass as the text of a JSON file. Raises `ValueError` for NaN and infinity."""
    return json.dumps(asdict(value), indent=indent, allow_nan=False, default=np.ndarray.tolist) + "\n"


def from_json(kind: Any, value: Any, place: str = "") -> Any:
    """Makes a value of a type, in which dataclasses may be anywhere, from one of JSON.

    Raises:
        ValueError: for a missing field, a value of another type, or a number that is not finite. The message begins
            with `place`, the file and the field, such as `metrics.json: versions.`
    """
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return None if value is None else from_json(parts[0], value, place)
    if isinstance(kind, EnumType):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{place[:-1]}={reprlib.repr(value)} must be {_describe(kind)}") from None
    found, allowed = _KINDS.get(origin, (dict, "fields and values"))
    is_number = origin in (int, float)
    if not isinstance(value, found) or (
        is_number and (isinstance(value, bool) or not abs(value) <= sys.float_info.max)
    ):
        raise ValueError(f"{place[:-1]}={reprlib.repr(value)} must be {allowed}")
    if is_dataclass(kind):
        types_of, known, value = get_type_hints(kind), {}, getattr(kind, "fields_in", dict)(value)
        for entry in fields(kind):
            if entry.name in value:
                known[entry.name] = from_json(types_of[entry.name], value[entry.name], f"{place}{entry.name}.")
            elif entry.default is MISSING and entry.default_factory is MISSING:
                raise ValueError(f"{place}{entry.name} is missing")
        return kind(**known)
    if origin is dict:
        # The keys of JSON are texts
        keys = {name: int(name) if parts[0] is int and str(name).isdecimal() else name for name in value}
        return {
            from_json(parts[0], keys[name], place): from_json(parts[1], value[name], f"{place}{name}.")
            for name in value
        }
    if origin in (list, tuple):
        parts = parts * len(value) if origin is list else parts
        return origin(
            from_json(part, entry, f"{place}{index}.") for index, (part, entry) in enumerate(zip(parts, value))
        )
    return np.array(value) if kind is np.ndarray else value
