"""A check of what goes into a `results.json`."""

import json
from collections.abc import Iterator
from typing import Any


def through_json(value: Any) -> Any:
    """What a JSON file gives back of `value`. Asserts that `value` has only plain types, no NaN, and loses nothing."""
    loaded = json.loads(json.dumps(value, allow_nan=False))
    assert all(leaf is None or isinstance(leaf, str | int | float) for leaf in _leaves(value))
    assert list(_leaves(loaded)) == list(_leaves(value))
    return loaded


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value
