"""Frozen dataclasses that check the types of their fields, and their JSON."""

import json
import reprlib
import sys
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import EnumType
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from huggingface_hub.dataclasses import type_validator


# The types that a value of JSON must have, and what messages call it
_KINDS = {bool: (bool, "true or false"), int: (int, "a whole number"), float: ((int, float), "a finite number")}
_KINDS |= {str: (str, "text"), Any: (object, ""), **dict.fromkeys((list, tuple, np.ndarray), (list, "a list"))}


@dataclass(frozen=True)
class Value:
    """A base class that raises `ValueError` for fields that do not have their declared types."""

    def __post_init__(self):
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if type(value) is int and float in (kind, *get_args(kind)):
                object.__setattr__(self, name, value := float(value))
            check_type(name, value, kind)


def check_type(name: str, value: Any, kind: Any) -> None:
    try:
        type_validator(name, value, kind)
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):  # Python takes it for a number
            raise TypeError
    except (TypeError, ValueError):
        raise _wrong(name, value, kind) from None


def _wrong(name: str, value: Any, kind: Any) -> ValueError:
    return ValueError(f"{name}={reprlib.repr(value)} must be {_describe(kind)}")


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal or isinstance(kind, EnumType):
        return " or ".join(repr(str(value)) for value in get_args(kind) or kind)
    if get_origin(kind) in (UnionType, Union):  # the latter with a `Literal`
        return " or ".join("null" if part is type(None) else _describe(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"a list of which each entry is {_describe(get_args(kind)[0])}"
    return _KINDS.get(get_origin(kind) or kind, (dict, "fields and values"))[1]


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns a dataclass as JSON; raises `ValueError` for NaN and infinity."""
    return json.dumps(asdict(value), indent=indent, allow_nan=False, default=np.ndarray.tolist) + "\n"


def from_json(kind: Any, value: Any, path: str = "") -> Any:
    """Converts JSON to a type, which may contain dataclasses.

    Raises `ValueError` for a missing field, another type, or a number that is not finite; the message begins with
    `path`, such as `metrics.json: versions.`
    """
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (UnionType, Union):
        return None if value is None else from_json(parts[0], value, path)
    if isinstance(kind, EnumType) or origin is Literal:
        try:
            return parts[parts.index(value)] if parts else kind(value)  # which may read what older files say
        except ValueError:
            raise _wrong(path[:-1], value, kind) from None
    is_allowed = isinstance(value, _KINDS.get(origin, (dict,))[0])
    if is_allowed and origin in (int, float):
        is_allowed = not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not is_allowed:
        raise _wrong(path[:-1], value, origin)
    if is_dataclass(kind):
        if isinstance(version := value.get("version"), int) and version > getattr(kind, "version", version):
            raise ValueError(f"{path}version={version} must be at most {kind.version}; update nlq to read newer files")
        value = getattr(kind, "fields_in", dict)(value)
        types, given = get_type_hints(kind), {}
        for item in fields(kind):
            name = item.name
            if name in value:
                given[name] = from_json(types[name], value[name], f"{path}{name}.")
            elif item.default is MISSING and item.default_factory is MISSING:
                raise ValueError(f"{path}{name} is missing")
        return kind(**given)
    if origin is dict:
        result = {}
        for name, entry in value.items():
            key = int(name) if parts[0] is int and str(name).isdecimal() else name  # the keys of JSON are texts
            result[from_json(parts[0], key, path)] = from_json(parts[1], entry, f"{path}{name}.")
        return result
    if origin in (list, tuple):
        parts = parts * len(value) if origin is list else parts
        return origin([from_json(*each, f"{path}{index}.") for index, each in enumerate(zip(parts, value))])
    return np.array(value) if kind is np.ndarray else value
