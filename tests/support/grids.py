"""Products of test parameters: a small cover of each runs in `make test`, and the rest in `make test-all`."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest


try:
    from allpairspy import AllPairs
except ImportError:  # on a GPU machine without a package index; its covers are larger
    AllPairs = None


def grid(
    axes: Mapping[str, Mapping | Sequence],
    allowed: Callable[..., bool] = lambda **row: True,
    strength: int = 2,
    is_whole: bool = True,
) -> list:
    """Parameters for the product of some axes.

    The unmarked parameters hold every allowed combination of values from `strength` axes at least once. All others are marked
    `slow`. The choice depends on nothing but the arguments.

    Args:
        axes: the values of each argument of the test, as a sequence of strings and numbers or as a dictionary from ids. An axis
            of several arguments is named `"one, other"`, and its values are tuples.
        allowed: takes a row's values by the names of their axes; the rows that it refuses are left out.
        strength: 2 for every pair of values, 1 for every value.
        is_whole: whether the other combinations are there too, for tests that take little time.
    """
    columns = [_with_ids(values) for values in axes.values()]

    def is_allowed(places) -> bool:
        if len(places) < len(columns):  # allpairspy asks about the beginnings of rows too
            return True
        return allowed(**{name: column[place][1] for name, column, place in zip(axes, columns, places)})

    rows = [row for row in itertools.product(*map(range, map(len, columns))) if is_allowed(row)]
    quick = _cover(rows, [list(range(len(column))) for column in columns], is_allowed, strength)
    parameters = []
    for row in rows if is_whole else sorted(quick):
        values = []
        for name, column, place in zip(axes, columns, row):
            value = column[place][1]
            values.extend(value if "," in name else [value])
        id = "-".join(column[place][0] for column, place in zip(columns, row))
        parameters.append(pytest.param(*values, id=id, marks=[] if row in quick else pytest.mark.slow))
    return parameters


def parametrize_grid(axes: Mapping[str, Mapping | Sequence], **options) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with all arguments of `axes` and the parameters of `grid`."""
    return pytest.mark.parametrize(", ".join(axes), grid(axes, **options))


def slow_except(values: Sequence, quick: Sequence) -> list:
    """Parameters for all values, of which only those in `quick` are unmarked."""
    assert set(quick) <= set(values)
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=[] if value in quick else pytest.mark.slow)
        for value in values
    ]


def _with_ids(values: Mapping | Sequence) -> list[tuple[str, object]]:
    if isinstance(values, Mapping):
        return [(str(id), value) for id, value in values.items()]
    return [("-".join(map(str, value)) if isinstance(value, tuple) else str(value), value) for value in values]


def _cover(rows: list[tuple], choices: list[list[int]], is_allowed: Callable, strength: int) -> set[tuple]:
    """Some of the rows, with every combination of `strength` columns' values that occurs in `rows`."""

    def combinations(row):
        return set(itertools.combinations(enumerate(row), strength))

    chosen = [tuple(row) for row in AllPairs(choices, filter_func=is_allowed, n=strength)] if AllPairs else []
    covered = set().union(*map(combinations, chosen))
    for row in rows:  # allpairspy may stop early where rows are refused
        if not combinations(row) <= covered:
            chosen.append(row)
            covered |= combinations(row)
    return set(chosen)
