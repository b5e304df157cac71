"""The design of a screening: a two-level fractional factorial of changes that are off or on, and a low or high rate.

Each row of the design is a model, trained with every seed. In a design of resolution IV no main effect is mixed with
another one or with an interaction of two factors (Box, Hunter and Hunter 2005, chapter 6).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


RESOLUTION = 4
RATE = "learning rate"


@dataclass(frozen=True)
class Design:
    """Columns, the learning rate last, and rows; -1 is off or low, 1 on or high. All of the first row is -1."""

    factors: list[str]
    rows: np.ndarray

    def aliases(self) -> list[list[tuple[str, str]]]:
        """Groups the interactions of two factors that the design cannot tell from each other."""
        groups: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for pair in itertools.combinations(self.factors, 2):
            product = self.product(pair)
            groups.setdefault(tuple(product * product[0]), []).append(pair)
        return list(groups.values())

    def product(self, pair: Sequence[str]) -> np.ndarray:
        first, second = map(self.factors.index, pair)
        return self.rows[:, first] * self.rows[:, second]


def make_design(factors: Sequence[str]) -> Design:
    """Makes the smallest design of resolution IV or more, with the learning rate as one more factor."""
    try:
        from pydoe import fracfact_by_res
    except ImportError as error:
        raise ImportError('factors need the package pydoe: pip install "modeling-nlq[screening]"') from error
    names = [*factors, RATE]
    rows = np.asarray(fracfact_by_res(len(names), RESOLUTION))
    # With other signs the design has the same properties; so one row has all factors off
    rows = (-rows * rows[0]).astype(int)
    return Design(names, rows[np.lexsort(rows.T[::-1])])


def merged_change(factors: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the `switches` and `training` of several factors together."""
    merged: dict[str, dict[str, Any]] = {"switches": {}, "training": {}}
    owners: dict[tuple[str, str], str] = {}
    for name in names:
        for section, fields in factors[name].items():
            for field, value in fields.items():
                owner = owners.setdefault((section, field), name)
                if merged[section].setdefault(field, value) != value:
                    values = f"{field}={merged[section][field]!r} and {field}={value!r}"
                    raise ValueError(f"factors {owner!r} and {name!r} exclude each other: they set {values}")
    return {section: fields for section, fields in merged.items() if fields}
