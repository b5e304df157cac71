"""The covers of products that run in `make test` and in `make test-all`."""

import itertools

import pytest
from support.grids import grid


AXES = {
    "letter": ("a", "b", "c"),
    "digit": {"one": 1, "two": 2},
    "pair, other": [(True, "x"), (False, "y")],
    "last": (0.5, 1.5),
}


def is_allowed(letter, digit, last, **others):
    return not (letter == "a" and digit == 2)


def values_of(parameters, quick):
    return [parameter.values for parameter in parameters if quick is None or bool(parameter.marks) is not quick]


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("allowed", [None, is_allowed], ids=["all", "some"])
def test_covers_hold_every_combination(strength, allowed):
    options = {} if allowed is None else {"allowed": allowed}
    parameters = grid(AXES, strength=strength, **options)
    product = [
        (letter, digit, *pair, last)
        for letter, digit, pair, last in itertools.product("abc", (1, 2), ((True, "x"), (False, "y")), (0.5, 1.5))
        if allowed is None or (letter, digit) != ("a", 2)
    ]
    quick, every = values_of(parameters, quick=True), values_of(parameters, quick=None)
    assert len(quick) < len(product) / 2 and len(quick) < len(every) < len(product)
    assert every == [row for row in product if row in every]
    for rows, width in ((quick, strength), (every, strength + 1)):
        for columns in itertools.combinations(range(5), width):
            assert {tuple(row[column] for column in columns) for row in rows} == {
                tuple(row[column] for column in columns) for row in product
            }
    assert all(mark.name == "slow" for parameter in parameters for mark in parameter.marks)
