"""Comparisons under several conditions: the plan, the runs, interactions and the primary test."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from support.inline_engine import InlineEngine
from support.planted import Interrupted, PlantedEngine
from support.runs import without_times

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.conditions import SumVerdict, analyse_interactions, correct, sum_test
from modeling_nlq.training.comparison.estimate import describe_estimate
from modeling_nlq.training.comparison.inference import Verdict, analyse
from modeling_nlq.training.comparison.report import describe, read_for_card
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_and_report, run_comparison
from modeling_nlq.training.text import printable
from nlq import main


CONDITIONS = {"adamw": {}, "muon": {"optimizer": "muon"}, "long": {"training": {"max_steps": 24}}}
MODELS = dict.fromkeys(("base", "good", "twin"))
SEEDS = [0, 1, 2, 3, 4]


def planted(scale, run) -> float | None:
    """`good` improves by 2 %, but under muon by 4 %."""
    condition = scale.name.split(", ")[-1]
    random = np.random.default_rng([run.seed, *f"{condition}{run.model}".encode()])
    gain = {"good": 0.04 if condition == "muon" else 0.02}.get(run.model, 0.0)
    loss = {"muon": 3.0}.get(condition, 4.0) + 0.05 * run.seed
    return loss * (1 - gain) + random.normal(0, 0.01) + 0.02 * abs(math.log2(run.learning_rate / 0.004))


@pytest.fixture(scope="module")
def crossed(make_file, tmp_path_factory):
    file = make_file(models=MODELS, conditions=CONDITIONS, seeds=SEEDS, learning_rates={"start": 4e-3})
    folder = tmp_path_factory.mktemp("conditions") / "results"
    return file, folder, run_and_report(load_plan(file), folder, PlantedEngine(planted))


def losses_of(outcome) -> dict[str, dict[str, np.ndarray]]:
    """Test losses in order of seeds."""
    return {
        name: {model: np.array([runs[seed] for seed in scale.seeds]) for model, runs in scale.losses.items()}
        for name, scale in outcome.scales.items()
    }


def holm(p_values: list[float]) -> list[float]:
    """Holm (1979): the largest of (m - j) p_(j) over the j-th smallest p up to its own."""
    ordered = sorted(p_values)
    steps = [min(1.0, (len(ordered) - rank) * p) for rank, p in enumerate(ordered)]
    return [max(steps[: ordered.index(p) + 1]) for p in p_values]


class TestConditions:
    def test_plan(self, crossed):
        plan = load_plan(crossed[0])
        assert list(plan.scales) == list(CONDITIONS)
        muon, long = plan.scales["muon"].variants["good"].recipe, plan.scales["long"].variants["good"].recipe
        assert (muon.optimizer, long.optimizer, long.training["max_steps"]) == ("muon", "adamw", 24)
        text = "\n".join(plan.describe())
        assert "condition muon" in text and "3 FLOPs" not in text

    def test_families(self, crossed):
        """One of all models times conditions, and one of all interactions, recomputed by SciPy."""
        outcome, losses = crossed[2], losses_of(crossed[2])
        tests = list(itertools.product(CONDITIONS, ("good", "twin")))
        p = [stats.ttest_rel(losses[name][model], losses[name]["base"]).pvalue for name, model in tests]
        for (name, model), corrected in zip(tests, holm(p)):
            effect = outcome.scales[name].statistics.effects[model]
            assert effect.holm_p == pytest.approx(corrected)
            assert effect.verdict is (Verdict.BETTER if corrected < 0.05 else Verdict.WITHIN_NOISE)
        percent = {
            (name, model): 100 * (of["base"] - of[model]) / of["base"].mean()
            for name, of in losses.items()
            for model in ("good", "twin")
        }
        found = outcome.interactions.tests
        assert [each.conditions for each in found[::2]] == list(itertools.combinations(CONDITIONS, 2))
        expected = [
            stats.ttest_rel(percent[each.conditions[1], each.model], percent[each.conditions[0], each.model])
            for each in found
        ]
        for each, test, corrected in zip(found, expected, holm([test.pvalue for test in expected])):
            values = (each.test.p, each.test.holm_p, *each.test.interval)
            assert values == pytest.approx((test.pvalue, corrected, *test.confidence_interval()), rel=1e-6)
        verdicts = {(each.model, each.conditions): each.test.verdict for each in found}
        assert verdicts.pop(("good", ("adamw", "muon"))) is SumVerdict.ABOVE
        assert verdicts.pop(("good", ("muon", "long"))) is SumVerdict.BELOW
        assert set(verdicts.values()) == {SumVerdict.CANNOT_TELL}
