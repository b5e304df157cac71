"""Comparisons under several conditions, and primary tests: the plan, the runs, the statistics and the refusals."""

import itertools
import math
from pathlib import Path

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
from modeling_nlq.training.comparison.primary import PrimaryPlan, smallest_value
from modeling_nlq.training.comparison.report import read_for_card
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_and_report, run_comparison
from modeling_nlq.training.files import read_yaml
from nlq import main


CONDITIONS = {"adamw": {}, "muon": {"optimizer": "muon"}, "long": {"training": {"max_steps": 24}}}
MODELS = dict.fromkeys(("base", "good", "twin"))
SEEDS = [0, 1, 2, 3, 4]
WIDTHS = {"small": 16, "middle": 32, "large": 48}
SCALES = {name: {"switches": {"hidden_size": width, "intermediate_size": 64}} for name, width in WIDTHS.items()}


def planted(scale, run) -> float | None:
    """`good` improves by 2 %, but under muon by 4 %, and by more at larger scales."""
    condition = scale.name.split(", ")[-1]
    random = np.random.default_rng([run.seed, *f"{condition}{run.model}".encode()])
    gain = {"muon": 0.04, "middle": 0.025, "large": 0.03}.get(condition, 0.02) * (run.model == "good")
    loss = {"muon": 3.0}.get(condition, 4.0) + 0.05 * run.seed
    return loss * (1 - gain) + random.normal(0, 0.01) + 0.02 * abs(math.log2(run.learning_rate / 0.004))


@pytest.fixture(scope="module")
def make(make_file):
    def make(**fields) -> str:
        return make_file(**{"models": MODELS, "learning_rates": 4e-3, "seeds": SEEDS, **fields})

    return make


@pytest.fixture(scope="module")
def crossed(make, tmp_path_factory):
    file = make(conditions=CONDITIONS, learning_rates={"start": 4e-3})
    folder = tmp_path_factory.mktemp("conditions") / "results"
    return file, folder, run_and_report(load_plan(file), folder, PlantedEngine(planted))


def losses_of(outcome) -> dict[str, dict[str, np.ndarray]]:
    """Test losses in order of seeds."""
    return {
        name: {model: np.array([runs[seed] for seed in scale.seeds]) for model, runs in scale.losses.items()}
        for name, scale in outcome.scales.items()
    }


def holm(p_values: list[float]) -> list[float]:
    """Holm (1979): the largest of (m - j) p_(j) up to its own, for p_(0) the smallest of m."""
    ordered = sorted(p_values)
    steps = [min(1.0, (len(ordered) - rank) * p) for rank, p in enumerate(ordered)]
    return [max(steps[: ordered.index(p) + 1]) for p in p_values]


class TestConditions:
    def test_plan(self, crossed, monkeypatch):
        plan = load_plan(crossed[0])
        assert list(plan.scales) == list(CONDITIONS)  # no order
        recipes = [scale.variants["good"].recipe for scale in plan.scales.values()]
        assert [(recipe.optimizer, recipe.training["max_steps"]) for recipe in recipes] == [
            ("adamw", 12),
            ("muon", 12),
            ("adamw", 24),
        ]
        monkeypatch.setattr("modeling_nlq.training.comparison.estimate.seconds_of_step", lambda *_: 1.0)
        lines = [*plan.describe(), *describe_estimate(plan, noise_floor=1.0)]
        assert "condition muon" in lines
        # Six tests are one family
        assert sum(line.endswith("muon: 3.9 % of the loss, if the noise floor is 1 %") for line in lines) == 1

    def test_two_families(self, crossed):
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
        expected = [stats.ttest_rel(*(percent[name, each.model] for name in each.conditions[::-1])) for each in found]
        for each, test, corrected in zip(found, expected, holm([test.pvalue for test in expected])):
            values = (each.test.p, each.test.holm_p, *each.test.interval)
            assert values == pytest.approx((test.pvalue, corrected, *test.confidence_interval()), rel=1e-6)
        verdicts = {(each.model, each.conditions): each.test.verdict for each in found}
        assert verdicts.pop(("good", ("adamw", "muon"))) is SumVerdict.ABOVE
        assert verdicts.pop(("good", ("muon", "long"))) is SumVerdict.BELOW
        assert set(verdicts.values()) == {SumVerdict.CANNOT_TELL}

    def test_wrong_interactions_are_rare(self):
        """Equal models under two conditions, also with other noise there: at most 6 % find an interaction."""
        random, wrong, repetitions = np.random.default_rng(0), 0, 600
        for _ in range(repetitions):
            losses = {
                name: {
                    model: dict(enumerate(mean + random.normal(0, noise, 5) + np.arange(5)))
                    for model in ("base", *"abc")
                }
                for name, mean, noise in (("one", 40, 0.1), ("two", 30, 0.4))
            }
            analyses = {name: analyse(of_models, "base") for name, of_models in losses.items()}
            _, _, found = correct(analyses, None, analyse_interactions(losses, analyses))
            wrong += any(each.test.verdict is not SumVerdict.CANNOT_TELL for each in found.tests)
        assert 0.01 < wrong / repetitions <= 0.06

    def test_interrupted_comparison_goes_on(self, crossed, tmp_path, capsys):
        file, _, expected = crossed
        for most in (5, 60, None):
            own = tmp_path / "comparison.yaml"
            try:
                plan = load_plan(own if own.is_file() else file)
                results = run_comparison(plan, tmp_path, engine := PlantedEngine(planted, most))
            except Interrupted:
                assert main(["compare", "any", "--status", "--output_dir", str(tmp_path)]) == 0
        assert results.scales == expected.scales and results.interactions == expected.interactions
        text = capsys.readouterr().out
        assert "condition muon" in text and "waits" not in text and len(engine.made) == 3 * 3 * 3 * 5 - 65
        assert read_outcome(tmp_path / "results.json") == results

    def test_added_seeds_and_card(self, make, tmp_path):
        for seeds in ([0, 1], SEEDS):
            file = make(conditions=CONDITIONS, seeds=seeds)
            results = run_and_report(load_plan(file), tmp_path, PlantedEngine(planted))
        assert [scale.added_seeds for scale in results.scales.values()] == [[2, 3, 4]] * 3
        run = tmp_path / "conditions" / "muon" / "runs" / "good" / "rate-0.004-seed-4"
        text, _ = read_for_card(run, tmp_path)
        assert "**good** (this model)" in text and "This is the condition muon of 3: adamw, muon, long." in text
        other, _ = read_for_card(tmp_path, tmp_path)
        assert "(this model)" not in other

    @pytest.mark.slow
    def test_real_runs(self, make, recipe_file, tmp_path):
        """Data are prepared once for each tokenizer, and an interrupted comparison ends as a whole one."""
        recipe = {**read_yaml(Path(recipe_file)), "max_validation_documents": 8}
        training = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
        conditions = {"adamw": {}, "muon": {"optimizer": "muon"}, "bytes": {"tokenizer": "bpe:300"}}
        models = {"base": None, "gated": {"switches": {"attention_gate": "headwise"}}}
        file = make(recipe=recipe, models=models, conditions=conditions, training=training, seeds=[0, 1])
        whole = run_and_report(load_plan(file), tmp_path / "whole", InlineEngine())
        tokenizers = sorted(path.parent.parent.name for path in (tmp_path / "whole").rglob("tokenizer.json"))
        assert [name for name in tokenizers if name in conditions] == ["adamw", "bytes"]
        losses = losses_of(whole)
        assert len({tuple(losses[name]["base"]) for name in conditions}) == 3
        assert all(scale.same_tokens for scale in whole.scales.values())


def primary(make, tmp_path, test: dict, **fields):
    """The outcome of a primary test, and its losses in percent of the mean of the baseline's, by scale and model."""
    outcome = run_and_report(load_plan(make(primary=test, **fields)), tmp_path / "run", PlantedEngine(planted))
    losses = {
        name: {model: 100 * runs / of["base"].mean() for model, runs in of.items()}
        for name, of in losses_of(outcome).items()
    }
    assert outcome.primary.about in (tmp_path / "run" / "results.md").read_text()
    return outcome, losses


class TestPrimary:
    """Each sum is computed from its formula, and tested by SciPy."""

    def check(self, test, values, level=0.95):
        expected = stats.ttest_1samp(values, 0)
        found = (test.value, test.p, *test.interval)
        assert found == pytest.approx((np.mean(values), expected.pvalue, *expected.confidence_interval()), rel=1e-6)
        if test.margin is not None:
            # Schuirmann (1987): both one-sided tests must reject
            sides = zip((-test.margin, test.margin), ("greater", "less"))
            larger = max(stats.ttest_1samp(values, end, alternative=side).pvalue for end, side in sides)
            assert (test.verdict is SumVerdict.EQUIVALENT) == (larger < 0.05)

    @pytest.mark.parametrize("margin, verdict", [(None, "below 0"), (1.0, "below 0"), (3.0, "equivalent")])
    def test_contrast(self, make, tmp_path, margin, verdict):
        contrast = {"good": 1, "twin": -0.5, "base": -0.5}
        outcome, losses = primary(make, tmp_path, {"contrast": contrast, "margin": margin})
        (of,) = losses.values()
        self.check(outcome.primary.test, sum(weight * of[model] for model, weight in contrast.items()))
        assert outcome.primary.test.verdict == verdict
        effects = outcome.largest.statistics.effects.values()
        assert [effect.holm_p for effect in effects] == pytest.approx(holm([effect.p for effect in effects]))

    def test_contrast_over_conditions(self, make, tmp_path):
        """It is the mean over the conditions, and all other tests are one family."""
        outcome, losses = primary(make, tmp_path, {"contrast": {"twin": 1, "base": -1}}, conditions=CONDITIONS)
        self.check(outcome.primary.test, np.mean([of["twin"] - of["base"] for of in losses.values()], axis=0))
        effects = [effect for scale in outcome.scales.values() for effect in scale.statistics.effects.values()]
        tests = [*effects, *(each.test for each in outcome.interactions.tests)]
        assert [test.holm_p for test in tests] == pytest.approx(holm([test.p for test in tests]))

    def test_interaction(self, make, tmp_path):
        test = {"interaction": {"good": ["muon", "adamw"]}, "margin": 1.0}
        outcome, losses = primary(make, tmp_path, test, conditions=CONDITIONS)
        gains = {name: of["base"] - of["good"] for name, of in losses.items()}
        self.check(outcome.primary.test, gains["adamw"] - gains["muon"])
        alone, *rest = [each.test for each in outcome.interactions.tests]  # good, from adamw to muon
        assert alone.holm_p == alone.p == outcome.primary.test.p
        rest += [effect for scale in outcome.scales.values() for effect in scale.statistics.effects.values()]
        assert [test.holm_p for test in rest] == pytest.approx(holm([test.p for test in rest]))

    def test_trend(self, make, tmp_path):
        outcome, _ = primary(make, tmp_path, {"trend": "good", "margin": 0.01}, scales=SCALES)
        test, trend = outcome.primary.test, outcome.trend.models["good"]
        assert (test.value, *test.interval, test.p) == pytest.approx((trend.slope, *trend.slope_interval, trend.p))
        assert trend.holm_p == trend.p and trend.verdict == "grows" and test.verdict is SumVerdict.ABOVE
        rest = [effect for scale in outcome.scales.values() for effect in scale.statistics.effects.values()]
        rest.append(outcome.trend.models["twin"])
        assert [test.holm_p for test in rest] == pytest.approx(holm([test.p for test in rest]))

    def test_no_test(self, make, tmp_path):
        """Of a model that diverged, or without common seeds."""
        file = make(primary={"contrast": {"good": 1, "base": -1}}, seeds=[0])
        outcome = run_comparison(load_plan(file), tmp_path, PlantedEngine(planted))
        assert outcome.primary.test.note == "good, (single): too few seeds: no verdict"
        losses = {
            "a": {"x": {0: 1.0, 1: 1.5}, "y": {0: 1.0, 1: 2.0}},
            "b": {"x": {2: 1.0, 3: 2.0}, "y": {2: 1, 3: 1.5}},
        }
        analyses = {name: analyse(of, "x") for name, of in losses.items()}
        (found,) = analyse_interactions(losses, analyses).tests
        assert (found.test.verdict, found.test.note) == (SumVerdict.NOT_TESTED, "fewer than two common seeds")

    @pytest.mark.parametrize("is_paired", [True, False])
    def test_power(self, is_paired):
        """A plan finds its smallest value, and its smallest margin, in 80 % of simulated comparisons."""
        weights = {"one": {"x": 1.0, "base": -1.0}, "two": {"x": -2.0, "base": 2.0}}
        plan, seeds = PrimaryPlan("", weights, is_paired), {"one": 6, "two": 6 if is_paired else 8}
        value, margin = smallest_value(plan, seeds, 0.8)
        random, found = np.random.default_rng(0), []
        for _ in range(1500):
            losses = {
                name: {model: dict(enumerate(100 + random.normal(size=count))) for model in ("base", "x")}
                for name, count in seeds.items()
            }
            equal = sum_test(
                losses, analyses := {n: analyse(o, "base") for n, o in losses.items()}, weights, is_paired, margin
            )
            losses["one"]["x"] = {seed: loss + value for seed, loss in losses["one"]["x"].items()}
            found.append((sum_test(losses, analyses, weights, is_paired).p < 0.05, equal.verdict == "equivalent"))
        assert np.mean(found, axis=0) == pytest.approx(0.8, abs=0.04)

    def test_it_does_not_change(self, make, tmp_path, capsys):
        test = {"contrast": {"good": 1, "base": -1}}
        primary(make, tmp_path, test)
        changed = make(primary={**test, "margin": 1.0})
        assert main(["compare", changed, "--output_dir", str(tmp_path / "run")]) == 1
        assert "primary.margin: None there, 1.0 now" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"conditions": {"a": {}}}, "conditions holds only 'a'; models are crossed with two or more"),
        ({"conditions": {"a": {}, "b": {}}}, "the conditions 'a' and 'b' have the same recipe"),
        ({"conditions": CONDITIONS, "stop": "early"}, "conditions and stop exclude each other"),
        ({"conditions": CONDITIONS, "scales": SCALES}, "conditions and scales exclude each other"),
        ({"conditions": CONDITIONS, "factors": {"a": {}, "b": {}}}, "conditions and factors exclude each other"),
        (
            {"conditions": {"a": {}, "b": {"optimiser": "muon"}}},
            "condition 'b': unknown field 'optimiser'; did you mean",
        ),
        ({"conditions": {"a": {}, "b": {"optimizer": "sgd"}}}, "condition 'b': optimizer='sgd' must be 'adamw' or"),
        ({"conditions": {"a": {}, "b": {"parts": {"a.py": ""}}}}, "condition 'b': unknown field 'parts'"),
        ({"conditions": {"a": {}, "b": {"models": {"x": {}}}}}, "condition 'b': models: unknown field 'x'"),
        ({"primary": {}}, "primary holds no test; here it must be one contrast"),
        ({"primary": {"trend": "good"}}, "primary holds trend; here it must be one contrast"),
        ({"primary": {"contrast": {"good": 1, "base": -2}}}, "contrast={'good': 1.0, 'base': -2.0} must have weights"),
        ({"primary": {"contrast": {"x": 1, "base": -1}}}, "primary: contrast: unknown field 'x'"),
        (
            {"primary": {"trend": "base"}, "scales": SCALES},
            "primary: trend: base must be one model besides the baseline",
        ),
        (
            {"primary": {"interaction": {"good": ["a", "muon"]}}, "conditions": CONDITIONS},
            "primary: interaction: ['a', 'muon'] must be two of adamw, muon, long",
        ),
        ({"primary": {"contrast": {"good": 1, "base": -1}}, "stop": "early"}, "primary and stop exclude each other"),
    ],
)
def test_one_line(make, fields, message, capsys, tmp_path):
    assert main(["compare", make(**fields), "--output_dir", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line and not (tmp_path / "out").exists()


def test_field_of_the_command_line_that_a_condition_sets_is_refused(make):
    with pytest.raises(ValueError, match="command line: optimizer: .*condition 'muon' sets that"):
        load_plan(make(conditions=CONDITIONS), {"optimizer": "adamw"})
