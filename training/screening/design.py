"""The design of a screening: a two-level fractional factorial, in which every factor is a change that is off or on.

So is the learning rate, low or high. Each row of the design is a model, trained with every seed. In a design of resolution IV
no main effect is mixed with another one or with an interaction of two factors (Box, Hunter and Hunter 2005, chapter 6).
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
    """The design of a screening.

    Attributes:
        factors: the names of the columns, the learning rate last.
        rows: `(rows, factors)`, -1 for off or low, 1 for on or high, 0 where another option of its choice is on. The first row
            has all factors off and the low rate.
        choices: the options of each choice, which are factors that exclude each other.
    """

    factors: list[str]
    rows: np.ndarray
    choices: Sequence[Sequence[str]] = ()

    def two_level(self) -> list[int]:
        """The columns that are no options."""
        options = set(itertools.chain.from_iterable(self.choices))
        return [index for index, name in enumerate(self.factors) if name not in options]

    def aliases(self) -> list[list[tuple[str, str]]]:
        """Groups the interactions of two factors that the design cannot tell from each other."""
        groups: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        for pair in itertools.combinations(self.factors, 2):
            if not any(set(pair) <= set(options) for options in self.choices):
                product = self.product(pair)
                groups.setdefault(tuple(product * product[0]), []).append(pair)
        return list(groups.values())

    def product(self, pair: Sequence[str]) -> np.ndarray:
        """The column of an interaction."""
        first, second = map(self.factors.index, pair)
        return self.rows[:, first] * self.rows[:, second]

    def is_of_resolution_4(self) -> bool:
        """Tells whether columns are balanced, and no main effect is mixed with another or with an interaction of two."""
        chosen = itertools.chain.from_iterable(itertools.combinations(self.two_level(), count) for count in (1, 2, 3))
        return all(self.rows[:, indices].prod(axis=1).sum() == 0 for indices in chosen)


def make_design(factors: Sequence[str], fold: bool = False, choices: Sequence[Sequence[str]] = ()) -> Design:
    """Makes the smallest design of resolution IV or more, with the learning rate as one more factor.

    Args:
        factors: the names of those with two levels.
        choices: the options of each choice. The whole design is repeated without any option and with each of them.
        fold: add the fold-over in which the learning rate changes its sign: twice the runs, and no interaction with the rate is
            mixed with another one.

    Raises:
        ImportError: if the package `pydoe` is not installed.
    """
    try:
        from pydoe import fold as fold_over
        from pydoe import fracfact_by_res
    except ImportError as error:
        raise ImportError('factors need the package pydoe: pip install "modeling-nlq[screening]"') from error
    names = [*factors, RATE]
    rows = np.asarray(fracfact_by_res(len(names), RESOLUTION))
    if fold:
        rows = np.unique(np.asarray(fold_over(rows, columns=[len(names) - 1])), axis=0)
    # With other signs the design has the same properties; so one row has all factors off
    rows = (-rows * rows[0]).astype(int)
    rows = rows[np.lexsort(rows.T[::-1])]
    for options in choices:
        # Without any option all of them are off; with one of them the others are no part of the comparison
        levels = np.vstack([np.full(len(options), -1), np.eye(len(options), dtype=int)])
        rows = np.vstack([np.insert(rows, [rows.shape[1] - 1] * len(options), own, axis=1) for own in levels])
    names[-1:-1] = itertools.chain.from_iterable(choices)
    design = Design(names, rows, choices)
    if not design.is_of_resolution_4():
        raise RuntimeError(f"pydoe made no design of resolution IV for {len(names)} factors")
    return design


def runs_one_at_a_time(design: Design, seeds: int) -> int:
    """How many runs a comparison of each factor alone with the baseline takes, for intervals of the same width.

    A difference of means of `m` and `n` runs has the variance `s^2 (1 / m + 1 / n)`, and an effect here has `s^2 (1 / on + 1 /
    off)`. The baseline has as many runs as the factor with most of them.
    """
    on_and_off = [(np.count_nonzero(column > 0), np.count_nonzero(column < 0)) for column in design.rows[:, :-1].T]
    baseline = max(on for on, _ in on_and_off)
    alone = sum(1 / (1 / on + 1 / off - 1 / baseline) for on, off in on_and_off)
    return round((alone + baseline) * seeds)


def merged_change(factors: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The `switches` and `training` of several factors together.

    Raises:
        ValueError: if two of them set one field to different values.
    """
    merged: dict[str, dict[str, Any]] = {"switches": {}, "training": {}}
    owners: dict[tuple[str, str], str] = {}
    for name in names:
        for section, fields in factors[name].items():
            for field, value in fields.items():
                owner = owners.setdefault((section, field), name)
                if merged[section].setdefault(field, value) != value:
                    raise ValueError(
                        f"factors {owner!r} and {name!r} exclude each other: they set {field}={merged[section][field]!r} and "
                        f"{field}={value!r}; make them options of one_of"
                    )
    return {section: fields for section, fields in merged.items() if fields}
