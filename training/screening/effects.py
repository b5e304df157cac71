"""The effects of a screening's factors on the loss, from the runs of its design.

Runs of one seed are a block, for they saw the same tokens in the same order.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..comparison.inference import holm
from .design import Design


ALPHA = 0.05


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


@dataclass(frozen=True)
class Interaction:
    """The sum of the interactions that the design cannot tell from each other.

    Attributes:
        aliases: the pairs of factors.
        effect: in nats; positive if the loss is higher where both are on or both off.
        p: of an effect of 0.
    """

    aliases: list[list[str]]
    effect: float
    p: float


@dataclass(frozen=True)
class Effects:
    """What the runs of a design say.

    Attributes:
        main: the effect of each factor, and of the rate.
        interactions: those of two factors.
        interaction_size: their root mean square, in nats.
        p_of_interactions: of the test that there are none.
        noise: the standard deviation of a run within a seed, in nats.
        freedom: its degrees of freedom.
        mean_loss: of all runs, in nats.
        survivors: the factors that lower the loss with a corrected p below `ALPHA`, and of a choice only the best one.
    """

    main: dict[str, MainEffect]
    interactions: list[Interaction]
    interaction_size: float
    p_of_interactions: float
    noise: float
    freedom: int
    mean_loss: float
    survivors: list[str]


def analyse_effects(design: Design, losses: np.ndarray) -> Effects:
    """Estimates main effects and interactions from the losses of all runs.

    The noise is the mean square of what rows and seeds leave over, `(rows - 1)(seeds - 1)` degrees of freedom. Each effect is a
    difference of the means of two halves of all runs, so its standard error is `2 s / sqrt(rows * seeds)`, also where some rows
    are noisier than others: then it is right on average, and only the degrees of freedom are too many. That of an option is a
    difference of the runs with it and of those without any of its choice.

    Args:
        design: the design.
        losses: `(rows, seeds)` in nats per token, finite, of two seeds or more.
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
        main[name] = MainEffect(effect, low, high, improvement, interval, p, corrected.get(name))
    interactions = []
    for group in design.aliases():
        effect, p, _ = contrast(design.product(group[0]))
        interactions.append(Interaction([list(pair) for pair in group], effect, p))
    survivors = [name for name, p in corrected.items() if p < ALPHA and found[name][0] < 0]
    for options in design.choices:
        worse = sorted(set(options) & set(survivors), key=lambda name: found[name][0])[1:]
        survivors = [name for name in survivors if name not in worse]
    return Effects(
        main=main,
        interactions=interactions,
        interaction_size=math.sqrt(float(np.mean([group.effect**2 for group in interactions]))),
        p_of_interactions=_p_of_interactions(design, means, noise / math.sqrt(seeds), freedom),
        noise=noise,
        freedom=freedom,
        mean_loss=mean_loss,
        survivors=survivors,
    )


def standard_error(column: np.ndarray, seeds: int, noise: float) -> float:
    """The standard error of a difference of means, of the runs above 0 in a column of the design and of those below it."""
    return noise * math.sqrt((1 / np.count_nonzero(column > 0) + 1 / np.count_nonzero(column < 0)) / seeds)


def _p_of_interactions(design: Design, means: np.ndarray, error: float, freedom: int) -> float:
    """p of the F test that there are no interactions of two: how much better they fit the means of rows than main effects do.

    The means are `(rows,)` in nats, and `error` is the standard error of each.
    """
    main = np.column_stack([np.ones(len(means)), design.rows, design.rows == 0])
    both = np.column_stack([main, *(design.product(group[0]) for group in design.aliases())])
    left = [means - inputs @ np.linalg.lstsq(inputs, means)[0] for inputs in (main, both)]
    explained = float(left[0] @ left[0] - left[1] @ left[1])
    terms = np.linalg.matrix_rank(both) - np.linalg.matrix_rank(main)
    if not error:
        return float(not explained > 1e-12)
    return float(stats.f.sf(max(explained, 0.0) / terms / error**2, terms, freedom))
