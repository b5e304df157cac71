"""The primary test of a comparison: what it is made for, tested first and without a correction."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import optimize, stats

from .conditions import Test, Weights, interaction_weights, weighted_sum
from .config import Axis, ComparisonConfig
from .inference import Analysis, Interval, Losses, smallest_difference
from .trend import Estimate, slope_weights


ALPHA = 0.05


class PrimaryVerdict(StrEnum):
    """What the primary test says of its value."""

    BELOW = "below 0"
    ABOVE = "above 0"
    EQUIVALENT = "equivalent"
    CANNOT_TELL = "cannot tell"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Primary:
    """The primary test. Values are in percent of the baseline's loss; of a trend, per decade of compute."""

    test: str  # in words
    verdict: PrimaryVerdict
    note: str = ""  # why there is no test
    value: float | None = None
    interval: Interval | None = None  # of 95 %
    p: float | None = None
    margin: float | None = None
    margin_interval: Interval | None = None  # of 90 %, which must lie within the margin


@dataclass(frozen=True)
class PrimaryTest:
    """A primary test as a weighted sum of losses in percent."""

    words: str
    weights: Weights
    is_paired: bool = True  # over all scales or conditions, else at each scale alone
    alone: Test | None = None  # the same test in `Findings`


def primary_test(config: ComparisonConfig, flops: Mapping[str, float]) -> PrimaryTest:
    """Returns the weights of a primary test. `flops` are those of the baseline, by scale or condition, in order.

    A contrast is the mean over conditions, and in a ladder that of the largest scale.
    """
    primary, baseline = config.primary, config.baseline
    if primary.contrast is not None:
        words = " ".join(f"{weight:+g} {model}" for model, weight in primary.contrast.items())
        names = list(flops) if config.axis is Axis.CONDITIONS else list(flops)[-1:]
        mean = {model: weight / len(names) for model, weight in primary.contrast.items()}
        return PrimaryTest(f"contrast of losses, {words}", dict.fromkeys(names, mean))
    if (chosen := primary.interaction) is not None:
        pair = tuple(chosen.conditions)
        words = f"improvement of {chosen.model} under {pair[1]} minus that under {pair[0]}"
        # `Findings` has every pair in the order of the file
        in_order = tuple(name for name in flops if name in pair)
        weights = interaction_weights(chosen.model, pair, baseline)
        return PrimaryTest(words, weights, alone=(chosen.model, in_order))
    slope = zip(flops, slope_weights(flops.values()))
    weights = {name: {baseline: float(weight), primary.trend: -float(weight)} for name, weight in slope}
    return PrimaryTest(f"trend of {primary.trend}", weights, is_paired=False, alone=(primary.trend, None))


def analyse_primary(
    test: PrimaryTest,
    margin: float | None,
    losses: Mapping[str, Mapping[str, Losses]],
    analyses: Mapping[str, Analysis],
) -> Primary:
    """Tests the value at 5 % without a correction, and with a margin tests equivalence too.

    Equivalence goes before a difference that is smaller than the margin. At most one of the two can be wrong: there is
    no difference, or one beyond the margin. So neither needs a correction.
    """
    estimate, note = weighted_sum(losses, analyses, test.weights, test.is_paired)
    if estimate is None:
        return Primary(test.words, PrimaryVerdict.NOT_TESTED, note, margin=margin)
    p, verdict = estimate.p(), PrimaryVerdict.CANNOT_TELL
    if margin is not None and is_equivalent(estimate, margin):
        verdict = PrimaryVerdict.EQUIVALENT
    elif p < ALPHA:
        verdict = PrimaryVerdict.ABOVE if estimate.value > 0 else PrimaryVerdict.BELOW
    narrow = None if margin is None else estimate.interval(1 - 2 * ALPHA)
    return Primary(test.words, verdict, "", estimate.value, estimate.interval(1 - ALPHA), p, margin, narrow)


def is_equivalent(estimate: Estimate, margin: float) -> bool:
    """Makes two one-sided tests at 5 %: the 90 % interval must lie within the margin (Schuirmann 1987)."""
    low, high = estimate.interval(1 - 2 * ALPHA)
    return -margin < low and high < margin


def smallest_value(test: PrimaryTest, seeds: Mapping[str, int], power: float) -> tuple[float, float]:
    """Returns what a plan finds with probability `power`, in noise floors, if runs share no noise.

    The first number is the smallest value whose difference from 0 is found. The second is the smallest margin within
    which a value of 0 is found to be equivalent.
    """
    squares = {name: sum(weight**2 for weight in entry.values()) for name, entry in test.weights.items()}
    groups = [squares] if test.is_paired else [{name: square} for name, square in squares.items()]
    runs = np.array([min(seeds[name] for name in group) for group in groups])
    variances = np.array([sum(group.values()) for group in groups]) / runs
    # As in `welch_sum`
    freedom = (variances.sum() ** 2 / (variances**2 / (runs - 1)).sum() + runs.min() - 1) / 2
    error = math.sqrt(variances.sum())
    difference = smallest_difference(freedom + 1, 1, 1.0, ALPHA, power) / math.sqrt(2 / (freedom + 1))
    # Over the noise that a plan may estimate, in thousand steps of equal probability
    noise = np.sqrt(stats.chi2.ppf((np.arange(1000) + 0.5) / 1000, freedom) / freedom)
    half = stats.t.isf(ALPHA, freedom) * noise

    def missing(margin: float) -> float:
        return power - np.mean(np.clip(2 * stats.norm.cdf(margin - half) - 1, 0, None))

    return difference * error, optimize.brentq(missing, 0, 2 * half.max() + 10) * error
