"""Tests weighted sums of losses: interactions and primary tests. Corrects tests of scales or conditions together.

Runs of one seed are paired, also under different conditions. An interaction is the difference of a model's paired
differences under two conditions, so it is a weighted sum by seed, and Student's paired t (1908) tests it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from .config import ComparisonConfig
from .inference import ALPHA, Analysis, Estimate, Interval, Losses, holm, verdict_of
from .sections import Axis
from .trend import Trend, judge_slope, slope_weights, welch_sum


FEW_SEEDS = "fewer than two common seeds"
# Weights of losses, by scale or condition and by model
Weights = Mapping[str, Mapping[str, float]]
# A model, and a scale or condition, two conditions, or None for a trend
Test = tuple[str, str | tuple[str, str] | None]


class SumVerdict(StrEnum):
    BELOW = "below 0"
    ABOVE = "above 0"
    EQUIVALENT = "equivalent"  # only with a margin
    CANNOT_TELL = "cannot tell"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class SumTest:
    """A weighted sum of losses, in percent of the mean loss of the baseline at the same scale or condition."""

    verdict: SumVerdict
    note: str = ""  # the reason if it is not tested
    value: float | None = None
    interval: Interval | None = None  # of 95 %
    p: float | None = None  # two-sided, over the seeds that all its losses have
    holm_p: float | None = None  # None if not corrected
    margin: float | None = None
    margin_interval: Interval | None = None  # of 90 %; of several primary tests by Bonferroni's method

    def judged(self, p: float | None) -> "SumTest":
        """Returns the test with a corrected p; a difference smaller than the margin is called equivalent."""
        if p is None or self.verdict is SumVerdict.EQUIVALENT:
            return replace(self, holm_p=p)
        verdict = SumVerdict.ABOVE if self.value > 0 else SumVerdict.BELOW
        return replace(self, holm_p=p, verdict=verdict if p < ALPHA else SumVerdict.CANNOT_TELL)


@dataclass(frozen=True)
class Interaction:
    """The improvement of a model under the second of two conditions minus that under the first."""

    model: str
    conditions: tuple[str, str]
    test: SumTest


@dataclass(frozen=True)
class PrimaryPlan:
    """A primary test in words, and its weights of losses."""

    about: str
    weights: Weights
    is_paired: bool = True  # over conditions; scales are independent
    alone: Test | None = None  # the same test among the others
    name: str = ""  # of one of several contrasts


def interaction_weights(model: str, conditions: tuple[str, str], baseline: str) -> Weights:
    return {name: {baseline: sign, model: -sign} for name, sign in zip(conditions, (-1.0, 1.0))}


def analyse_interactions(
    losses: Mapping[str, Mapping[str, Losses]], analyses: Mapping[str, Analysis]
) -> list[Interaction]:
    """Tests all models between every two conditions, without a correction, from `losses[condition][model][seed]`."""
    first, *_ = analyses.values()
    return [
        Interaction(model, pair, sum_test(losses, analyses, interaction_weights(model, pair, first.baseline)))
        for pair in itertools.combinations(analyses, 2)
        for model in first.effects
    ]


def sum_test(
    losses: Mapping[str, Mapping[str, Losses]],
    analyses: Mapping[str, Analysis],
    weights: Weights,
    is_paired: bool = True,
    margin: float | None = None,
    tests: int = 1,
) -> SumTest:
    """Tests a weighted sum over seeds that have all of its losses; unpaired, each scale has its own seeds.

    Each model must be tested in the analysis of its scale, and two seeds are needed. A margin in percent adds a test
    of equivalence, corrected for the number of `tests` by Bonferroni's method. It needs no other correction, because
    at most one of the two tests can be wrong.
    """
    parts = []
    for group in [weights] if is_paired else [{name: entry} for name, entry in weights.items()]:
        used = [(name, model) for name, entry in group.items() for model, weight in entry.items() if weight]
        for name, model in used:
            effect = analyses[name].effects.get(model)  # None for the baseline
            if effect is not None and effect.p is None:
                return SumTest(SumVerdict.NOT_TESTED, f"{model}, {name}: {effect.verdict}", margin=margin)
        needed = {*used, *((name, analyses[name].baseline) for name in group)}
        seeds = sorted(set.intersection(*(set(losses[name][model]) for name, model in needed)))
        if len(seeds) < 2:
            return SumTest(SumVerdict.NOT_TESTED, FEW_SEEDS, margin=margin)
        of = {(name, model): np.array([losses[name][model][seed] for seed in seeds]) for name, model in needed}
        if not all(of[name, analyses[name].baseline].any() for name in group):
            return SumTest(SumVerdict.NOT_TESTED, "the baseline's loss is 0", margin=margin)
        percent = {name: 100 / of[name, analyses[name].baseline].mean() for name in group}
        parts.append(sum(group[name][model] * percent[name] * of[name, model] for name, model in used))
    estimate = welch_sum(parts)
    test = SumTest(SumVerdict.CANNOT_TELL, "", estimate.value, estimate.interval(1 - ALPHA), estimate.p())
    if margin is not None:
        # Two one-sided tests at 5 %: the 90 % interval must lie within the margin (Schuirmann 1987)
        low, high = estimate.interval(1 - 2 * ALPHA / tests)
        verdict = SumVerdict.EQUIVALENT if -margin < low and high < margin else test.verdict
        test = replace(test, verdict=verdict, margin=margin, margin_interval=(low, high))
    return test


def correct(
    analyses: dict[str, Analysis],
    trend: Trend | None,
    interactions: list[Interaction] | None,
    primary: Sequence[PrimaryPlan] = (),
) -> tuple[dict[str, Analysis], Trend | None, list[Interaction] | None]:
    """Corrects p of all tests by Holm's method, and judges them again.

    All models times scales or conditions are one family, interactions a second. With primary tests, all others are
    one family.
    """
    of_models = {(model, name): effect.p for name, each in analyses.items() for model, effect in each.effects.items()}
    others = {(each.model, each.conditions): each.test.p for each in interactions or ()}
    others |= {(model, None): each.p for model, each in (trend.models.items() if trend else ())}
    families = [of_models, others]
    if primary:
        together = of_models | others
        families = [together, {plan.alone: together.pop(plan.alone, None) for plan in primary}]
    families = [{test: p for test, p in family.items() if p is not None} for family in families]
    corrected = {test: p for family in families for test, p in zip(family, holm(family.values()))}
    size, judged = len(families[0]), {}
    for name, each in analyses.items():
        effects = dict(each.effects)
        for model, effect in each.effects.items():
            if effect.p is not None:
                effect = replace(effect, holm_p=corrected[model, name])
                effects[model] = replace(effect, verdict=verdict_of(effect, size, ALPHA))
        judged[name] = replace(each, effects=effects, family=size)
    if trend is not None:
        slopes = dict(trend.models)
        for model in [model for model, where in corrected if where is None]:
            p = corrected[model, None]
            verdict, meaning = judge_slope(slopes[model], p)
            slopes[model] = replace(slopes[model], verdict=verdict, meaning=meaning, holm_p=p)
        trend = replace(trend, models=slopes)
    if interactions is not None:
        interactions = [
            replace(each, test=each.test.judged(corrected.get((each.model, each.conditions)))) for each in interactions
        ]
    return judged, trend, interactions


@dataclass(frozen=True)
class Primary:
    """A primary test. A trend has its slope as value, in percent per decade of compute."""

    about: str  # in words
    test: SumTest
    name: str = ""  # of one of several contrasts


def judge_primary(
    plans: Sequence[PrimaryPlan],
    losses: Mapping[str, Mapping[str, Losses]],
    analyses: Mapping[str, Analysis],
    margin: float | None,
) -> list[Primary]:
    """Makes the primary tests, corrected among themselves by Holm's method; arguments as for `sum_test`."""
    tests = [sum_test(losses, analyses, plan.weights, plan.is_paired, margin, len(plans)) for plan in plans]
    corrected = iter(holm(test.p for test in tests if test.p is not None))
    judged = [test if test.p is None else test.judged(next(corrected)) for test in tests]
    return [Primary(plan.about, test, plan.name) for plan, test in zip(plans, judged)]


def plan_primary(config: ComparisonConfig, heights: Mapping[str, float]) -> list[PrimaryPlan]:
    """Returns the primary tests. `heights` are what a ladder climbs, by scale, or numbers by condition, in order.

    A contrast is the mean over conditions. A ladder tests it at the largest scale.
    """
    primary, baseline = config.primary, config.baseline
    if primary.by_name:
        names = list(heights) if config.axis is Axis.CONDITIONS else list(heights)[-1:]
        plans = []
        for name, weights in primary.by_name.items():
            about = " ".join(f"{weight:+g} {model}" for model, weight in weights.items())
            mean = {model: weight / len(names) for model, weight in weights.items()}
            plans.append(PrimaryPlan(f"contrast of losses, {about}", dict.fromkeys(names, mean), name=name))
        return plans
    if primary.interaction is not None:
        (model, pair), *_ = primary.interaction.items()
        about = f"improvement of {model} under {pair[1]} minus that under {pair[0]}"
        in_order = tuple(name for name in heights if name in pair)
        return [PrimaryPlan(about, interaction_weights(model, pair, baseline), alone=(model, in_order))]
    slope = zip(heights, map(float, slope_weights(heights.values())))
    weights = {name: {baseline: weight, primary.trend: -weight} for name, weight in slope}
    about = f"slope of the improvement of {primary.trend} per decade"
    return [PrimaryPlan(about, weights, False, (primary.trend, None))]


def planned_noise(plan: PrimaryPlan, seeds: Mapping[str, int]) -> Estimate:
    """Returns the value 0 with the noise of a plan, in noise floors, if runs share no noise."""
    squares = {name: sum(weight**2 for weight in entry.values()) for name, entry in plan.weights.items()}
    groups = [squares] if plan.is_paired else [{name: square} for name, square in squares.items()]
    runs = np.array([min(seeds[name] for name in group) for group in groups])
    variances = np.array([sum(group.values()) for group in groups]) / runs
    # As in `welch_sum`
    freedom = (variances.sum() ** 2 / (variances**2 / (runs - 1)).sum() + runs.min() - 1) / 2
    return Estimate(0.0, math.sqrt(variances.sum()), freedom)
