"""Accuracy on synthetic tasks, which is often all or nothing: how many seeds learn a task, and how soon."""

import statistics

import numpy as np
from scipy import stats

from .inference import holm
from .results import MASTERED, ScaleOutcome
from .trend import welch_sum


# Between these a t interval has a meaning
_LOW, _HIGH = 0.05, 0.95
_NOTHING = "\N{EN DASH}"

NOTE = (
    f"A seed learns a task if its accuracy in the test is {MASTERED:.0%} or more. Fisher's exact test compares the "
    "number of such seeds with the baseline's, corrected by Holm's method. Steps to 99 % are the median over seeds "
    "whose evaluations while training reached it. Differences in accuracy have 95 % t intervals where every seed lies "
    f"between {_LOW:.0%} and {_HIGH:.0%}."
)


def accuracy_cells(results: ScaleOutcome) -> dict[str, dict[str, str]]:
    """Returns what a report says of accuracies, by model and column; nothing for text."""
    if results.objective.has_parts:
        return {}
    of_models = {
        name: [0.0 if run.diverged else run.result.losses.test.token_accuracy or 0.0 for run in model.runs]
        for name, model in results.models.items()
    }
    base = of_models[results.baseline]
    p_values = {name: learned_p(base, values) for name, values in of_models.items() if name != results.baseline}
    corrected, cells = dict(zip(p_values, holm(p_values.values()))), {}
    for name, values in of_models.items():
        steps = [run.history.mastered_at for run in results.models[name].runs if run.history.mastered_at is not None]
        ends = f"{100 * min(values):.1f} to {100 * max(values):.1f}"
        cells[name] = {
            "accuracy (%)": f"{100 * statistics.fmean(values):.1f} ({ends})",
            "accuracy gain (points)": _NOTHING if name == results.baseline else _gain(base, values),
            "seeds at 99 %": f"{sum(value >= MASTERED for value in values)} of {len(values)}",
            "Fisher p": f"{corrected[name]:.2g}" if name in corrected else _NOTHING,
            "steps to 99 %": f"{statistics.median(steps):,.0f}" if steps else _NOTHING,
        }
    return cells


def learned_p(base: list[float], values: list[float]) -> float:
    """Returns the two-sided p of Fisher's exact test (1922) on the numbers of seeds that learn the task."""
    table = [
        [sum(value >= MASTERED for value in row), sum(value < MASTERED for value in row)] for row in (base, values)
    ]
    return float(stats.fisher_exact(table).pvalue)


def _gain(base: list[float], values: list[float]) -> str:
    if len(base) != len(values) or not all(_LOW <= value <= _HIGH for value in (*base, *values)):
        return _NOTHING
    estimate = welch_sum([100 * (np.array(values) - np.array(base))])
    low, high = estimate.interval(0.95)
    return f"{estimate.value:+.1f} [{low:+.1f}, {high:+.1f}]"
