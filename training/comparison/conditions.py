"""Compares how much models improve under several conditions, and corrects all tests of a comparison together.

Runs of one seed are paired, also under different conditions. An interaction is the difference of a model's paired
differences under two conditions. It is a weighted sum of losses by seed, and Student's paired t (1908) tests it.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from .inference import Analysis, Effect, Interval, Losses, holm, verdict_of
from .trend import Estimate, Trend, judge_slope, welch_sum


# Of losses, by scale or condition and by model
Weights = Mapping[str, Mapping[str, float]]
# The model of a test, and where it is tested: a scale or condition, two conditions, or None for a trend
Test = tuple[str, str | tuple[str, str] | None]


class InteractionVerdict(StrEnum):
    """How the improvement of a model changes from one condition to another."""

    MORE = "improves more"
    LESS = "improves less"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Interaction:
    """The improvement of a model under the second of two conditions minus that under the first.

    Each improvement is in percent of the mean loss that the baseline has under the same condition.
    """

    model: str
    conditions: tuple[str, str]
    verdict: InteractionVerdict = InteractionVerdict.CANNOT_TELL
    note: str = ""  # why there is no test
    change: float | None = None
    interval: Interval | None = None
    p: float | None = None  # two-sided, over the seeds that both conditions have
    holm_p: float | None = None


@dataclass(frozen=True)
class Interactions:
    """The interactions of all models and pairs of conditions."""

    alpha: float  # the nominal probability that any of them wrongly improves more or less
    tests: list[Interaction]


def interaction_weights(model: str, conditions: tuple[str, str], baseline: str) -> Weights:
    return {name: {baseline: sign, model: -sign} for name, sign in zip(conditions, (-1.0, 1.0))}


def analyse_interactions(
    losses: Mapping[str, Mapping[str, Losses]], analyses: Mapping[str, Analysis], alpha: float = 0.05
) -> Interactions:
    """Tests every model between every two conditions, without a correction. `losses[condition][model][seed]`."""
    tests, baseline = [], next(iter(analyses.values())).baseline
    for pair in itertools.combinations(analyses, 2):
        for model in analyses[pair[0]].effects:
            weights = interaction_weights(model, pair, baseline)
            estimate, note = weighted_sum(losses, analyses, weights)
            test = Interaction(model, pair, note=note)
            if estimate is not None:
                test = replace(test, change=estimate.value, interval=estimate.interval(1 - alpha), p=estimate.p())
            tests.append(test)
    return Interactions(alpha, tests)


def weighted_sum(
    losses: Mapping[str, Mapping[str, Losses]],
    analyses: Mapping[str, Analysis],
    weights: Weights,
    is_paired: bool = True,
) -> tuple[Estimate | None, str]:
    """Adds losses in percent of the baseline's mean loss at the same scale or under the same condition.

    Seeds are those that all losses of a sum have: of the whole sum, or of each scale if it is not paired. Without an
    estimate there is a reason: a model that the analysis of its scale did not test, or fewer than two seeds.
    """
    weights = {name: {model: weight for model, weight in entry.items() if weight} for name, entry in weights.items()}
    for name, entry in weights.items():
        for model in entry.keys() & analyses[name].effects.keys():
            if (effect := analyses[name].effects[model]).p is None:
                return None, f"{model}, {name}: {effect.verdict}"
    parts = []
    for group in [weights] if is_paired else [{name: entry} for name, entry in weights.items()]:
        runs = {name: {model: losses[name][model] for model in entry} for name, entry in group.items()}
        references = {name: losses[name][analyses[name].baseline] for name in group}
        seeds = set.intersection(*(set(each) for each in references.values()))
        seeds = sorted(seeds.intersection(*(each for entry in runs.values() for each in entry.values())))
        if len(seeds) < 2:
            return None, "fewer than two common seeds"
        total = np.zeros(len(seeds))
        for name, entry in group.items():
            percent = 100 / np.mean([references[name][seed] for seed in seeds])
            for model, weight in entry.items():
                total += weight * percent * np.array([runs[name][model][seed] for seed in seeds])
        parts.append(total)
    return welch_sum(parts), ""


@dataclass(frozen=True)
class Findings:
    """All tests of a comparison, by scale or condition and over them."""

    analyses: dict[str, Analysis]
    trend: Trend | None = None
    interactions: Interactions | None = None

    def correct(self, has_primary: bool = False, alone: Test | None = None) -> "Findings":
        """Corrects p by Holm's method, and judges again.

        All models times scales or conditions are one family, interactions a second. After a primary test there is one
        family, without the test that stands `alone`.
        """
        of_models: dict[Test, float] = {
            (model, name): effect.p for name, analysis in self.analyses.items() for model, effect in _tested(analysis)
        }
        others: dict[Test, float] = {
            (test.model, test.conditions): test.p
            for test in (self.interactions.tests if self.interactions else ())
            if test.p is not None
        }
        if self.trend is not None:
            others |= {(name, None): model.p for name, model in self.trend.models.items() if model.p is not None}
        families = [of_models, others]
        if has_primary:
            together = of_models | others
            first = {alone: together.pop(alone)} if alone in together else {}
            families = [together, first]
        corrected = {test: p for family in families for test, p in zip(family, holm(family.values()))}
        count = len(families[0])
        analyses = {name: _judge_again(entry, name, corrected, count) for name, entry in self.analyses.items()}
        trend, interactions = self.trend, self.interactions
        if trend is not None:
            models = {
                name: judge_slope(model, corrected[name, None], trend.alpha) if (name, None) in corrected else model
                for name, model in trend.models.items()
            }
            trend = replace(trend, models=models)
        if interactions is not None:
            tests = [_judge(test, corrected.get((test.model, test.conditions))) for test in interactions.tests]
            interactions = replace(interactions, tests=tests)
        return Findings(analyses, trend, interactions)


def _tested(analysis: Analysis) -> list[tuple[str, Effect]]:
    return [(model, effect) for model, effect in analysis.effects.items() if effect.p is not None]


def _judge_again(analysis: Analysis, name: str, corrected: Mapping[Test, float], tests: int) -> Analysis:
    effects = dict(analysis.effects)
    for model, effect in _tested(analysis):
        effect = replace(effect, holm_p=corrected[model, name])
        effects[model] = replace(effect, verdict=verdict_of(effect, tests, analysis.alpha))
    return replace(analysis, effects=effects, family=tests)


def _judge(test: Interaction, p: float | None, alpha: float = 0.05) -> Interaction:
    verdict = InteractionVerdict.CANNOT_TELL
    if p is not None and p < alpha:
        verdict = InteractionVerdict.MORE if test.change > 0 else InteractionVerdict.LESS
    return replace(test, holm_p=p, verdict=verdict)
