"""Products of test parameters: a small cover of each product runs in `make test`, a larger one in `make test-all`."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest


def grid(
    axes: Mapping[str, Mapping | Sequence], allowed: Callable[..., bool] = lambda **row: True, strength: int = 2
) -> list:
    """Parameters for the product of some axes, of which most rows are left out.

    The unmarked rows hold every allowed combination of values from `strength` axes. Those marked `slow` add every
    combination from one axis more, where the arguments of a joined axis count as axes of their own. An axis is a
    sequence or a dictionary from ids; one of several arguments is named `"one, other"`, and its values are tuples.
    """
    columns = [_with_ids(values) for values in axes.values()]
    product = itertools.product(*columns)
    rows = [row for row in product if allowed(**{name: value for name, (_, value) in zip(axes, row)})]
    values = [_values(axes, row) for row in rows]
    quick = _cover([[id for id, _ in row] for row in rows], strength)
    slow = _cover([[_key(value) for value in row] for row in values], strength + 1) - quick
    return [
        pytest.param(
            *values[place], id="-".join(id for id, _ in rows[place]), marks=[pytest.mark.slow] if place in slow else []
        )
        for place in sorted(quick | slow)
    ]


def parametrize_grid(axes: Mapping[str, Mapping | Sequence], **options) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with all arguments of `axes` and the parameters of `grid`."""
    return pytest.mark.parametrize(", ".join(axes), grid(axes, **options))


def slow_except(values: Sequence, quick: Sequence) -> list:
    """Parameters for all values, of which only those in `quick` are unmarked."""
    assert set(quick) <= set(values)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else [value]), marks=[] if value in quick else pytest.mark.slow
        )
        for value in values
    ]


def _with_ids(values: Mapping | Sequence) -> list[tuple[str, object]]:
    if isinstance(values, Mapping):
        return [(str(id), value) for id, value in values.items()]
    return [("-".join(map(str, value)) if isinstance(value, tuple) else str(value), value) for value in values]


def _values(axes: Mapping[str, Mapping | Sequence], row: tuple) -> list:
    values = []
    for name, (_, value) in zip(axes, row):
        values.extend(value if "," in name else [value])
    return values


def _key(value: object) -> object:
    try:
        return hash(value), value
    except TypeError:
        return id(value)


def _cover(rows: list[list], strength: int) -> set[int]:
    """Chooses rows greedily that hold every combination of `strength` columns' values."""
    combinations = [set(itertools.combinations(enumerate(row), strength)) for row in rows]
    chosen, covered = set(), set()
    for gain in range(max(map(len, combinations)), 0, -1):
        for place, found in enumerate(combinations):
            if len(found - covered) >= gain:
                chosen.add(place)
                covered |= found
    return chosen
