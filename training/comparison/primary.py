"""The primary test of a comparison: what it is made for, tested first and without a correction."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .conditions import SumTest, Test, Weights, interaction_weights
from .config import Axis, ComparisonConfig
from .inference import ALPHA, Estimate
from .trend import slope_weights


@dataclass(frozen=True)
class Primary:
    """The primary test. A trend has its slope as value, in percent per decade of compute."""

    about: str  # in words
    test: SumTest


@dataclass(frozen=True)
class PrimaryPlan:
    """A primary test in words, and its weights of losses."""

    about: str
    weights: Weights
    is_paired: bool = True  # over conditions; scales are independent
    alone: Test | None = None  # the same test among the others


def plan_primary(config: ComparisonConfig, heights: Mapping[str, float]) -> PrimaryPlan:
    """Returns a primary test. `heights` are what a ladder climbs, by scale, or any numbers by condition, in order.

    A contrast is the mean over conditions. A ladder tests it at the largest scale.
    """
    primary, baseline = config.primary, config.baseline
    if primary.contrast is not None:
        about = " ".join(f"{weight:+g} {model}" for model, weight in primary.contrast.items())
        names = list(heights) if config.axis is Axis.CONDITIONS else list(heights)[-1:]
        mean = {model: weight / len(names) for model, weight in primary.contrast.items()}
        return PrimaryPlan(f"contrast of losses, {about}", dict.fromkeys(names, mean))
    if primary.interaction is not None:
        (model, pair), *_ = primary.interaction.items()
        about = f"improvement of {model} under {pair[1]} minus that under {pair[0]}"
        in_order = tuple(name for name in heights if name in pair)
        return PrimaryPlan(about, interaction_weights(model, pair, baseline), alone=(model, in_order))
    slope = zip(heights, map(float, slope_weights(heights.values())))
    weights = {name: {baseline: weight, primary.trend: -weight} for name, weight in slope}
    return PrimaryPlan(
        f"slope of the improvement of {primary.trend} per decade", weights, False, (primary.trend, None)
    )


def smallest_value(plan: PrimaryPlan, seeds: Mapping[str, int], power: float) -> float:
    """Returns the smallest value that is found with probability `power`, in noise floors, if runs share no noise."""
    squares = {name: sum(weight**2 for weight in entry.values()) for name, entry in plan.weights.items()}
    groups = [squares] if plan.is_paired else [{name: square} for name, square in squares.items()]
    runs = np.array([min(seeds[name] for name in group) for group in groups])
    variances = np.array([sum(group.values()) for group in groups]) / runs
    # As in `welch_sum`
    freedom = (variances.sum() ** 2 / (variances**2 / (runs - 1)).sum() + runs.min() - 1) / 2
    return Estimate(0.0, math.sqrt(variances.sum()), freedom).smallest(ALPHA, power)
