"""The effects of a screening's factors on the loss. Runs of one seed saw the same tokens, so they are a block."""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from ..comparison.inference import ALPHA, holm, mean_squares
from .design import Design


@dataclass(frozen=True)
class MainEffect:
    """The mean loss with a factor on minus that with it off, in nats per token, over all others and both rates."""

    effect: float
    low: float  # of the 95 % interval, not corrected for the number of factors
    high: float
    improvement: float  # in percent of the mean loss; positive is better
    improvement_interval: list[float]
    p: float  # of Student's t-test
    holm_p: float | None  # corrected for all factors; the rate has none


@dataclass(frozen=True)
class Interaction:
    """The sum, in nats, of interactions that cannot be told apart: positive if both on or both off is worse."""

    aliases: list[list[str]]
    effect: float
    p: float


@dataclass(frozen=True)
class Effects:
    """What the runs of a design say, in nats."""

    main: dict[str, MainEffect]
    interactions: list[Interaction]
    interaction_size: float  # root mean square
    p_of_interactions: float  # of the F test
    noise: float  # standard deviation of a run within a seed
    freedom: float
    mean_loss: float
    survivors: list[str]  # they lower the loss with a corrected p below `ALPHA`


def analyse_effects(design: Design, losses: np.ndarray) -> Effects:
    """Estimates main effects and interactions from the losses of all runs.

    The noise s is the root mean square of what rows and seeds leave over. An effect is the difference of two halves,
    so its standard error is `2 s / sqrt(rows * seeds)`. Rows may differ in noise. With the variance v of each row over
    seeds, its degrees of freedom are `sum(v)^2 / sum(v^2 / (seeds + 1)) - 2` (Welch 1947), and at most
    `(rows - 1)(seeds - 1)`. `losses` are `(rows, seeds)` in nats per token, finite, of two seeds or more.
    """
    rows, seeds = losses.shape
    means, mean_loss = losses.mean(axis=1), float(losses.mean())
    variances = (losses - losses.mean(axis=0)).var(axis=1, ddof=1)
    freedom = (rows - 1) * (seeds - 1)
    if variances.any():
        freedom = min(freedom, float(variances.sum() ** 2 / (variances**2 / (seeds + 1)).sum() - 2))
    noise = math.sqrt(mean_squares(losses)[-1])
    error = noise * math.sqrt(4 / rows / seeds)

    def contrast(column: np.ndarray) -> tuple[float, float]:
        effect = float(means[column > 0].mean() - means[column < 0].mean())
        if not error:
            return effect, 0.0 if effect else 1.0
        return effect, float(2 * stats.t.sf(abs(effect) / error, freedom))

    contrasts = {name: contrast(design.rows[:, index]) for index, name in enumerate(design.factors)}
    corrected = dict(zip(design.factors[:-1], holm(contrasts[name][1] for name in design.factors[:-1])))
    margin = float(stats.t.ppf(1 - ALPHA / 2, freedom)) * error
    main = {}
    for name, (effect, p) in contrasts.items():
        low, high = effect - margin, effect + margin
        improvement, *interval = (-100 * value / mean_loss for value in (effect, high, low))
        main[name] = MainEffect(effect, low, high, improvement, interval, p, corrected.get(name))
    interactions = [
        Interaction([list(pair) for pair in group], *contrast(design.product(group[0]))) for group in design.aliases()
    ]
    survivors = [name for name, p in corrected.items() if p < ALPHA and main[name].effect < 0]
    size = math.sqrt(float(np.mean([group.effect**2 for group in interactions])))
    no_noise = float(not size > 1e-12)
    return Effects(
        main=main,
        interactions=interactions,
        interaction_size=size,
        p_of_interactions=float(stats.f.sf((size / error) ** 2, len(interactions), freedom)) if error else no_noise,
        noise=noise,
        freedom=freedom,
        mean_loss=mean_loss,
        survivors=survivors,
    )
