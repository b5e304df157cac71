"""Screening: which of many changes are worth a comparison, from the runs of a two-level fractional factorial design.

Every factor is a change that is off or on, and so is the learning rate, low or high. Each row of the design is a model, trained
with every seed; runs of one seed are a block, for they saw the same tokens in the same order. In a design of resolution IV no
main effect is mixed with another one or with an interaction of two factors (Box, Hunter and Hunter 2005, chapter 6).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from .inference import holm


RESOLUTION = 4
RATE = "learning rate"
ALPHA = 0.05


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


@dataclass(frozen=True)
class MainEffect:
    """The effect of a factor on the loss, averaged over all others and both rates. It is no verdict.

    Attributes:
        effect: mean loss with the factor on minus that with it off, in nats per token; negative is better.
        low, high: its 95 % interval, not corrected for the number of factors.
        improvement, improvement_interval: the same in percent of the mean loss, where positive is better.
        p: of Student's t-test of an effect of 0; `holm_p` is corrected for the number of factors, without the rate.
    """

    effect: float
    low: float
    high: float
    improvement: float
    improvement_interval: list[float]
    p: float
    holm_p: float | None


def analyse_effects(design: Design, losses: np.ndarray) -> dict[str, Any]:
    """Estimates main effects and interactions from the losses of all runs.

    The noise is the mean square of what rows and seeds leave over, `(rows - 1)(seeds - 1)` degrees of freedom. Each effect is a
    difference of the means of two halves of all runs, so its standard error is `2 s / sqrt(rows * seeds)`, also where some rows
    are noisier than others: then it is right on average, and only the degrees of freedom are too many. That of an option is a
    difference of the runs with it and of those without any of its choice.

    Args:
        design: the design.
        losses: `(rows, seeds)` in nats per token, finite, of two seeds or more.

    Returns:
        `main`, the `MainEffect` of each factor as a mapping, `interactions` (a list of `{"aliases": ..., "effect": ..., "p":
        ...}`), `interaction_size` (their root mean square, in nats), `p_of_interactions` (of the test that there are none),
        `noise` (the standard deviation of a run within a seed, in nats), `freedom`, `mean_loss`, and `survivors`, the factors
        that lower the loss with a corrected p below 5 %, and of a choice only the best one.
    """
    rows, seeds = losses.shape
    residuals = losses - losses.mean(axis=1, keepdims=True) - losses.mean(axis=0, keepdims=True) + losses.mean()
    freedom = (rows - 1) * (seeds - 1)
    noise = math.sqrt(float((residuals**2).sum()) / freedom)
    mean_loss, means = float(losses.mean()), losses.mean(axis=1)
    quantile = float(stats.t.ppf(1 - ALPHA / 2, freedom))

    def contrast(column: np.ndarray) -> tuple[float, float, float]:
        """The effect of a column, p, and the half width of the interval."""
        effect = float(means[column > 0].mean() - means[column < 0].mean())
        error = standard_error(column, seeds, noise)
        if not error:
            return effect, 0.0 if effect else 1.0, 0.0
        return effect, float(2 * stats.t.sf(abs(effect) / error, freedom)), quantile * error

    found = {name: contrast(design.rows[:, index]) for index, name in enumerate(design.factors)}
    corrected = dict(zip(design.factors[:-1], holm(found[name][1] for name in design.factors[:-1])))
    main = {}
    for name, (effect, p, margin) in found.items():
        low, high = effect - margin, effect + margin
        improvement, *interval = (-100 * value / mean_loss for value in (effect, high, low))
        main[name] = asdict(MainEffect(effect, low, high, improvement, interval, p, corrected.get(name)))
    interactions = []
    for group in design.aliases():
        effect, p, _ = contrast(design.product(group[0]))
        interactions.append({"aliases": [list(pair) for pair in group], "effect": effect, "p": p})
    size = math.sqrt(float(np.mean([group["effect"] ** 2 for group in interactions])))
    survivors = [name for name, p in corrected.items() if p < ALPHA and found[name][0] < 0]
    for options in design.choices:
        worse = sorted(set(options) & set(survivors), key=lambda name: found[name][0])[1:]
        survivors = [name for name in survivors if name not in worse]
    return {
        "main": main,
        "interactions": interactions,
        "interaction_size": size,
        "p_of_interactions": _p_of_interactions(design, means, noise / math.sqrt(seeds), freedom),
        "noise": noise,
        "freedom": freedom,
        "mean_loss": mean_loss,
        "survivors": survivors,
    }


def standard_error(column: np.ndarray, seeds: int, noise: float) -> float:
    """The standard error of a difference of means, of the runs above 0 in a column of the design and of those below it."""
    return noise * math.sqrt((1 / np.count_nonzero(column > 0) + 1 / np.count_nonzero(column < 0)) / seeds)


def _p_of_interactions(design: Design, means: np.ndarray, error: float, freedom: int) -> float:
    """p of the F test that there are no interactions of two: how much better they fit the means of rows than main effects do.

    Args:
        design, freedom: as in `analyse_effects`.
        means: `(rows,)` in nats.
        error: the standard error of a mean.
    """
    main = np.column_stack([np.ones(len(means)), design.rows, design.rows == 0])
    both = np.column_stack([main, *(design.product(group[0]) for group in design.aliases())])
    left = [means - inputs @ np.linalg.lstsq(inputs, means)[0] for inputs in (main, both)]
    explained = float(left[0] @ left[0] - left[1] @ left[1])
    terms = np.linalg.matrix_rank(both) - np.linalg.matrix_rank(main)
    if not error:
        return float(not explained > 1e-12)
    return float(stats.f.sf(max(explained, 0.0) / terms / error**2, terms, freedom))


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
