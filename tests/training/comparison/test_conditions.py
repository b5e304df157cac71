"""Comparisons under several conditions, and primary tests: the plan, the runs, the statistics and the refusals."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import brentq
from support.inline_engine import InlineEngine
from support.planted import Interrupted, PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.conditions import (
    PrimaryPlan,
    SumVerdict,
    analyse_interactions,
    correct,
    planned_noise,
    sum_test,
)
from modeling_nlq.training.comparison.estimate import describe_estimate
from modeling_nlq.training.comparison.inference import Verdict, analyse
from modeling_nlq.training.comparison.report import describe, read_for_card
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_and_report, run_comparison
from modeling_nlq.training.comparison.sentences import warning_sentences
from modeling_nlq.training.comparison.tables import p_value
from modeling_nlq.training.files import read_json, read_yaml
from nlq import main


# One of the conditions has Muon
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs PyTorch 2.9")

CONDITIONS = {"adamw": {}, "muon": {"optimizer": "muon"}, "long": {"training": {"max_steps": 24}}}
CROSSED = {"conditions": CONDITIONS}
MODELS = dict.fromkeys(("base", "good", "twin"))
WIDTHS = {"small": 16, "middle": 32, "large": 48}
LADDER = {"scales": {name: {"switches": {"hidden_size": size}} for name, size in WIDTHS.items()}}
GOOD = {"contrast": {"good": 1, "base": -1}}
# The models of a factorial design, with the levels of its factors
FACTORS = ("gelu", "factor", "matrix")
CELLS = {
    " ".join(itertools.compress(FACTORS, levels)) or "base": levels for levels in itertools.product((0, 1), repeat=3)
}
MAIN_EFFECTS = {
    factor: {cell: 0.25 if levels[index] else -0.25 for cell, levels in CELLS.items()}
    for index, factor in enumerate(FACTORS)
}


def planted(scale, run) -> float | None:
    """`good` improves by 2 %, but under muon by 4 %, and by more at larger scales."""
    condition = scale.name.split(", ")[-1]
    random = np.random.default_rng([run.seed, *f"{condition}{run.model}".encode()])
    gain = {"muon": 0.04, "middle": 0.025, "large": 0.03}.get(condition, 0.02) * (run.model == "good")
    loss = {"muon": 3.0}.get(condition, 4.0) + 0.05 * run.seed
    return loss * (1 - gain) + random.normal(0, 0.01) + 0.02 * abs(math.log2(run.learning_rate / 0.004))


@pytest.fixture(scope="module")
def make(make_file):
    return lambda **fields: make_file(**{"models": MODELS, "learning_rates": 4e-3, "seeds": list(range(5)), **fields})


@pytest.fixture(scope="module")
def crossed(make, tmp_path_factory):
    file = make(**CROSSED, learning_rates={"start": 4e-3})
    folder = tmp_path_factory.mktemp("conditions") / "results"
    return file, run_and_report(load_plan(file), folder, PlantedEngine(planted))


def in_percent(outcome) -> dict[tuple[str, str], np.ndarray]:
    """The losses of a scale and a model in percent of the mean of the baseline's, in order of seeds."""
    losses = {
        (name, model): np.array([runs[seed] for seed in scale.seeds])
        for name, scale in outcome.scales.items()
        for model, runs in scale.losses.items()
    }
    return {(name, model): 100 * runs / losses[name, "base"].mean() for (name, model), runs in losses.items()}


def is_family(tests: list) -> bool:
    """Holm (1979): corrected p is the largest of (m - j) p_(j) up to its own, for p_(0) the smallest of m."""
    ordered = sorted(test.p for test in tests)
    steps = np.maximum.accumulate([min(1.0, (len(tests) - rank) * p) for rank, p in enumerate(ordered)])
    return [test.holm_p for test in tests] == pytest.approx([steps[ordered.index(test.p)] for test in tests])


def effects_of(outcome) -> list:
    return [effect for scale in outcome.scales.values() for effect in scale.statistics.effects.values()]


def check_sum(test, values: np.ndarray, tests: int = 1) -> None:
    """Compares a test with SciPy's, and equivalence with its two one-sided tests (Schuirmann 1987)."""
    expected = stats.ttest_1samp(values, 0)
    interval = expected.confidence_interval()
    assert (test.value, test.p, *test.interval) == pytest.approx((values.mean(), expected.pvalue, *interval), rel=1e-6)
    if test.margin is not None:
        sides = zip((-test.margin, test.margin), ("greater", "less"))
        larger = max(stats.ttest_1samp(values, end, alternative=side).pvalue for end, side in sides)
        assert (test.verdict is SumVerdict.EQUIVALENT) == (larger < 0.05 / tests)


class TestConditions:
    def test_plan(self, crossed, monkeypatch):
        plan = load_plan(crossed[0])
        assert list(plan.scales) == list(CONDITIONS)
        recipes = [scale.variants["good"].recipe for scale in plan.scales.values()]
        changes = [(recipe.optimizer, recipe.training["max_steps"]) for recipe in recipes]
        assert changes == [("adamw", 12), ("muon", 12), ("adamw", 24)]
        monkeypatch.setattr("modeling_nlq.training.comparison.estimate.seconds_of_step", lambda *_: 1.0)
        lines = [*plan.describe(), *describe_estimate(plan, noise_floor=1.0)]
        assert "condition muon" in lines
        assert sum("muon: 3.9 % of the loss, if the noise floor is 1 %" in line for line in lines) == 1

    def test_two_families(self, crossed):
        """One of all models times conditions, and one of all interactions."""
        outcome, losses = crossed[1], in_percent(crossed[1])
        assert is_family(effects_of(outcome)) and is_family([each.test for each in outcome.interactions])
        for effect in effects_of(outcome):
            assert effect.verdict is (Verdict.BETTER if effect.holm_p < 0.05 else Verdict.WITHIN_NOISE)
        verdicts = {}
        for each in outcome.interactions:
            first, second = (losses[name, "base"] - losses[name, each.model] for name in each.conditions)
            check_sum(each.test, second - first)
            verdicts[each.model, each.conditions] = each.test.verdict
        assert list(verdicts) == [
            (m, pair) for pair in itertools.combinations(CONDITIONS, 2) for m in ("good", "twin")
        ]
        assert verdicts.pop(("good", ("adamw", "muon"))) is SumVerdict.ABOVE
        assert verdicts.pop(("good", ("muon", "long"))) is SumVerdict.BELOW
        assert set(verdicts.values()) == {SumVerdict.CANNOT_TELL}

    def test_wrong_interactions_are_rare(self):
        """Equal models under two conditions with unequal noise: at most 6 % find an interaction."""
        random, wrong, repetitions = np.random.default_rng(0), 0, 300
        for _ in range(repetitions):
            losses = {
                name: {model: dict(enumerate(random.normal(40, noise, 5))) for model in ("base", "a", "b")}
                for name, noise in (("one", 0.1), ("two", 0.4))
            }
            analyses = {name: analyse(of_models, "base") for name, of_models in losses.items()}
            found = correct(analyses, None, analyse_interactions(losses, analyses))[2]
            wrong += any(each.test.verdict is not SumVerdict.CANNOT_TELL for each in found)
        assert 0.01 < wrong / repetitions <= 0.06

    def test_interrupted_comparison_goes_on(self, crossed, tmp_path, capsys):
        file, expected = crossed
        for most in (5, 60, None):
            own, engine = tmp_path / "comparison.yaml", PlantedEngine(planted, most)
            try:
                results = run_comparison(load_plan(own if own.is_file() else file), tmp_path, engine)
            except Interrupted:
                assert main(["compare", "any", "--status", "--output_dir", str(tmp_path)]) == 0
        assert results.scales == expected.scales and results.interactions == expected.interactions
        text = capsys.readouterr().out
        assert "condition muon" in text and "waits" not in text and len(engine.made) == 3 * 3 * 3 * 5 - 65
        assert read_outcome(tmp_path / "results.json") == results

    def test_added_seeds_and_card(self, make, tmp_path):
        for seeds in ([0, 1], [0, 1, 2]):
            plan = load_plan(make(**CROSSED, seeds=seeds))
            results = run_and_report(plan, tmp_path, PlantedEngine(planted))
        assert [scale.added_seeds for scale in results.scales.values()] == [[2]] * 3
        run = tmp_path / "conditions" / "muon" / "runs" / "good" / "rate-0.004-seed-2"
        text, _, over_seeds = read_for_card(run, tmp_path)
        effect = results.scales["muon"].statistics.effects["good"]
        ends = ", ".join(f"{end:+.2f}" for end in effect.loss_improvement_interval)
        assert over_seeds.endswith(f" over 3 seeds: {effect.loss_improvement:+.2f} [{ends}] %, {effect.verdict}")
        assert read_for_card(run.parents[1] / "base" / run.name, tmp_path)[2] is None, "the baseline has no verdict"
        assert "**good** (this model)" in text and "This is the condition muon of 3: adamw, muon, long." in text
        for other in (run / "adapter", tmp_path / "best", Path("/model")):
            text, _, over_seeds = read_for_card(other, tmp_path)
            assert over_seeds is None and "(this model)" not in text
        text = (tmp_path / "results.md").read_text()
        for name, changes in {"adamw": "nothing", "muon": "`optimizer: muon`", "long": "`max_steps: 24`"}.items():
            assert f"## Condition {name}\n\nWhat it changes of the recipe: {changes}." in text

    def test_no_interaction_is_tested(self, make, tmp_path):
        """Every best rate is at the boundary. The plan's warning of few seeds is that of the report."""
        plan = load_plan(make(**CROSSED, learning_rates=[4e-3, 8e-3], seeds=[0, 1]))
        outcome = run_and_report(plan, tmp_path, PlantedEngine(planted))
        (found,) = re.findall("Interactions of models and conditions: (.*)", (tmp_path / "results.md").read_text())
        assert found.startswith("none tested (no test: good, adamw: no verdict: the baseline's best rate is at the ")
        warnings, planned = warning_sentences(outcome), plan.largest.power_warning()
        assert planned.startswith("2 seeds and 6 tests may need |t| > 76.4")
        told = [f"Condition {name}: {planned} (of 6 planned tests, 0 could be made)." for name in CONDITIONS]
        assert [text for text in warnings if "|t|" in text] == told

    @pytest.mark.slow
    def test_real_runs(self, make, recipe_file, tmp_path):
        """Each condition has its tokenizer."""
        training = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
        conditions = {"adamw": {"tokenizer": "bpe:300"}, "muon": {"optimizer": "muon"}}
        models = {"base": None, "gated": {"switches": {"attention_gate": "headwise"}}}
        recipe = {**read_yaml(Path(recipe_file)), "max_validation_documents": 8}
        fields = {"recipe": recipe, "models": models, "training": training, "seeds": [0, 1]}
        outcome = run_and_report(load_plan(make(**fields, conditions=conditions)), tmp_path, InlineEngine())
        losses = {tuple(scale.losses["base"].values()) for scale in outcome.scales.values()}
        assert len(losses) == 2 and all(scale.same_tokens for scale in outcome.scales.values())
        sizes = {scale.sample.data.test_tokens for scale in outcome.scales.values()}
        assert len(sizes) == 2 and outcome.interactions[0].test.p is not None


class TestPrimary:
    @pytest.mark.parametrize(
        "primary, fields, formula, verdict",
        [
            (GOOD, {}, lambda of: of["(single)", "good"] - of["(single)", "base"], "below 0"),
            ({**GOOD, "margin": 1.0}, LADDER, lambda of: of["large", "good"] - of["large", "base"], "below 0"),
            (
                {"contrast": {"good": 1, "twin": -0.5, "base": -0.5}, "margin": 4},
                CROSSED,
                lambda of: sum(of[c, "good"] - (of[c, "twin"] + of[c, "base"]) / 2 for c in CONDITIONS) / 3,
                "equivalent",
            ),
            (
                {"interaction": {"good": ["muon", "adamw"]}, "margin": 1.0},
                CROSSED,
                lambda of: of["adamw", "base"] - of["adamw", "good"] - of["muon", "base"] + of["muon", "good"],
                "below 0",
            ),
        ],
    )
    def test_sums(self, make, tmp_path, primary, fields, formula, verdict):
        """All other tests are one family."""
        file = make(primary=primary, **fields)
        outcome = run_and_report(load_plan(file), tmp_path / "run", PlantedEngine(planted))
        check_sum(outcome.primary[0].test, formula(in_percent(outcome)))
        assert outcome.primary[0].test.verdict == verdict
        rest = [*effects_of(outcome), *(outcome.trend.models.values() if outcome.trend else ())]
        rest += [each.test for each in outcome.interactions] if outcome.interactions else []
        if "interaction" in primary:
            alone = rest.pop(6)  # after two models under three conditions: good, from adamw to muon
            assert alone.holm_p == alone.p == outcome.primary[0].test.p
        assert is_family(rest) and outcome.largest.statistics.family == len(rest) == load_plan(file).config.family

    def test_plan_counts_common_seeds(self, make, monkeypatch):
        monkeypatch.setattr("modeling_nlq.training.comparison.estimate.seconds_of_step", lambda *_: 1.0)
        primary = {"interaction": {"good": ["adamw", "long"]}, "margin": 1.0}
        for seeds, found in ([7, 8, 4, 3], "smallest value found"), ([7, 8, 4], "will not be tested: fewer than two"):
            conditions = {"adamw": {}, "long": {**CONDITIONS["long"], "seeds": seeds}}
            lines = [*describe_estimate(load_plan(make(primary=primary, conditions=conditions)), noise_floor=1.0)]
            assert any(found in line for line in lines)

    @pytest.mark.parametrize("fields", [{"primary": GOOD}, LADDER, CROSSED])
    def test_a_baseline_without_loss(self, make, tmp_path, fields):
        """Nothing is in percent of a loss of 0, which a task may reach."""
        outcome = run_and_report(load_plan(make(**fields)), tmp_path, PlantedEngine(lambda scale, run: 0.0))
        notes = [each.test.note for each in (*outcome.primary, *(outcome.interactions or ()))]
        notes += [trend.meaning for trend in outcome.trend.models.values()] if outcome.trend else []
        assert notes and all("the baseline's loss is 0" in note for note in notes)
        assert "varies by 0 nats from seed to seed (standard deviation)" in (tmp_path / "results.md").read_text()
        assert read_outcome(tmp_path / "results.json") == outcome

    def test_trend(self, make, tmp_path, capsys):
        file = make(primary={"trend": "good", "margin": 0.01}, **LADDER)
        outcome = run_and_report(load_plan(file), tmp_path / "run", PlantedEngine(planted))
        test, trend = outcome.primary[0].test, outcome.trend.models["good"]
        assert (test.value, *test.interval, test.p) == pytest.approx((trend.slope, *trend.slope_interval, trend.p))
        assert trend.holm_p == trend.p and trend.verdict == "grows" and test.verdict is SumVerdict.ABOVE
        assert is_family([*effects_of(outcome), outcome.trend.models["twin"]])
        content = read_json(tmp_path / "run" / "results.json")
        for held, expected in ((content["primary"][0], outcome.primary), (None, [])):  # files of earlier versions
            (old := tmp_path / "old.json").write_text(json.dumps({**content, "primary": held}))
            assert read_outcome(old) == dataclasses.replace(outcome, primary=expected)
        changed = make(primary={"trend": "good", "margin": 0.02}, **LADDER)
        assert main(["compare", changed, "--output_dir", str(tmp_path / "run")]) == 1
        assert "primary.margin: 0.01 there, 0.02 now" in capsys.readouterr().err

    def test_contrasts(self, make, tmp_path):
        """Main effects are those of a regression within each seed, corrected for their number."""

        def losses(scale, run) -> float:
            noise = np.random.default_rng([run.seed, *run.model.encode()]).normal(0, 0.02)
            return 4 + 0.1 * run.seed + noise + np.dot([-0.1, 0.025, 0.0], CELLS[run.model])

        primary = {"contrasts": MAIN_EFFECTS, "margin": 0.7}
        file = make(models=dict.fromkeys(CELLS), primary=primary)
        outcome = run_and_report(load_plan(file), tmp_path, PlantedEngine(losses))
        percent, tests = in_percent(outcome), {each.name: each.test for each in outcome.primary}
        design = [[1, *(2 * level - 1 for level in levels)] for levels in CELLS.values()]
        coefficients, *_ = np.linalg.lstsq(np.array(design), np.stack([percent["(single)", cell] for cell in CELLS]))
        for name, values in zip(FACTORS, 2 * coefficients[1:], strict=True):  # from the low level to the high one
            check_sum(tests[name], values, len(FACTORS))
            confidence = 1 - 2 * 0.05 / 3
            interval = stats.ttest_1samp(values, 0).confidence_interval(confidence)
            assert tests[name].margin_interval == pytest.approx(interval)
        assert is_family([*tests.values()]) and is_family(effects_of(outcome))
        assert outcome.largest.statistics.family == load_plan(file).config.family == 7
        assert {name: test.verdict for name, test in tests.items()} == {
            "gelu": "below 0",
            "factor": "above 0",
            "matrix": "equivalent",
        }
        for text in ((tmp_path / "results.md").read_text(), " ".join(describe(outcome).split())):
            for name, test in tests.items():
                low, high = test.interval
                shown = f"{test.verdict}, {test.value:+.2f} [{low:+.2f}, {high:+.2f}] % of the baseline's loss, p "
                (p_values,) = re.findall(rf"Primary test {name}, [^:]*: {re.escape(shown)}(.*?)\. Equiv", text)
                assert p_values == f"{p_value(test.p)}, Holm p {p_value(test.holm_p)}"
            assert text.count("is within 0.7 %. They count seeds") == 1 and text.count("96.7 % interval") == 3
            assert "corrected among themselves by Holm's method; 7 other tests together are one family." in text
        assert read_outcome(tmp_path / "results.json") == outcome

    def test_plan_of_contrasts(self, make, monkeypatch):
        """One of three tests stands at 5 / 3 %; a main effect of 8 runs has the noise sqrt(8 / 16 / 5)."""
        monkeypatch.setattr("modeling_nlq.training.comparison.estimate.seconds_of_step", lambda *_: 1.0)
        primary = {"contrasts": MAIN_EFFECTS, "margin": 1.0}
        plan = load_plan(make(models=dict.fromkeys(CELLS), primary=primary))
        lines = [line for line in describe_estimate(plan) if line.startswith("primary test")]
        noise, critical = math.sqrt(0.1), stats.t.isf(0.05 / 6, 4)
        value = brentq(lambda size: stats.nct.sf(critical, 4, size / noise) - 0.8, 0, 10)
        floor = 1 / noise / (stats.t.isf(0.05 / 3, 4) + stats.t.isf(0.1, 4))
        assert len(lines) == 9
        for name, (what, found, equivalent) in zip(FACTORS, zip(*[iter(lines)] * 3), strict=True):
            assert what.startswith(f"primary test {name}: contrast of losses, -0.25 base ")
            assert what.endswith("; first, at 5 % corrected for 3 primary tests by Holm's method")
            assert found == (
                f"primary test {name}: smallest value found with probability 80 %: {value:.2g} times the noise floor"
            )
            assert equivalent.endswith(f"noise floor is at most {floor:.2g} %")

    def test_no_test(self, make, tmp_path):
        plan = load_plan(make(primary=GOOD, seeds=[0]))
        outcome = run_comparison(plan, tmp_path, PlantedEngine(planted))
        assert outcome.primary[0].test.note == "good, (single): too few seeds: no verdict"
        losses = {name: {"x": {seed: 1.0, 9: 2.0}, "y": {seed: 2.0, 9: 2.5}} for name, seed in (("a", 0), ("b", 1))}
        analyses = {name: analyse(of_models, "x") for name, of_models in losses.items()}
        (found,) = analyse_interactions(losses, analyses)
        assert (found.test.verdict, found.test.note) == (SumVerdict.NOT_TESTED, "fewer than two common seeds")

    @pytest.mark.slow
    @pytest.mark.parametrize("is_paired", [True, False])
    def test_power(self, is_paired):
        """A plan finds its smallest value, and equivalence within its margin, in 80 % of simulated comparisons."""
        weights = {"one": {"x": 1.0, "base": -1.0}, "two": {"x": -2.0, "base": 2.0}}
        seeds = {"one": 6, "two": 6 if is_paired else 8}
        noise = planned_noise(PrimaryPlan("", weights, is_paired), seeds)
        value, margin = noise.smallest(0.05, 0.8), noise.margin(0.1) + noise.margin(0.2)
        random, found = np.random.default_rng(0), []
        for _ in range(1500):
            losses = {
                name: {model: dict(enumerate(random.normal(100, 1, count))) for model in ("base", "x")}
                for name, count in seeds.items()
            }
            analyses = {name: analyse(of_models, "base") for name, of_models in losses.items()}
            is_equivalent = sum_test(losses, analyses, weights, is_paired, margin).verdict is SumVerdict.EQUIVALENT
            losses["one"]["x"] = {seed: loss + value for seed, loss in losses["one"]["x"].items()}
            found.append((sum_test(losses, analyses, weights, is_paired).p < 0.05, is_equivalent))
        assert np.mean(found, axis=0) == pytest.approx(0.81, abs=0.04)

    def test_margin_of_a_plan(self, make, monkeypatch):
        """The quantiles of t with 4 degrees of freedom, 2.132 and 1.533, times the noise of a pair, sqrt(2 / 5)."""
        monkeypatch.setattr("modeling_nlq.training.comparison.estimate.seconds_of_step", lambda *_: 1.0)
        plan = load_plan(make(primary={**GOOD, "margin": 1.0}))
        for floor, told in ((None, "0.43 %"), (0.3, "0.43 %; it is"), (0.5, "0.43 %; it is not")):
            (line,) = (line for line in describe_estimate(plan, noise_floor=floor) if "equivalence within 1 %" in line)
            assert line.endswith(f"is found in 80 % of cases where the noise floor is at most {told}")


def condition(**fields) -> dict:
    return {"conditions": {"a": {}, "b": fields}}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"conditions": {"a": {}}}, "conditions holds only 'a'; models are crossed with two or more"),
        (condition(), "the conditions 'a' and 'b' have the same recipe"),
        ({**CROSSED, "stop": "early"}, "conditions and stop exclude each other"),
        ({**CROSSED, **LADDER}, "conditions and scales exclude each other"),
        ({**CROSSED, "factors": {"a": {}, "b": {}}}, "conditions and factors exclude each other"),
        (condition(optimiser="muon"), "condition 'b': unknown field 'optimiser'; did you mean"),
        (condition(optimizer="sgd"), "optimizer='sgd' must be 'adamw' or 'muon'"),
        (condition(parts={"a.py": ""}), "condition 'b': unknown field 'parts'"),
        (condition(models={"x": {}}), "condition 'b': models: unknown field 'x'"),
        ({"primary": {}}, "primary holds no test; here it must be one of contrast, contrasts"),
        ({"primary": {"trend": "good"}}, "primary holds trend; here it must be one of contrast, contrasts"),
        ({"primary": {"contrast": {"good": 1}}}, "contrast={'good': 1.0} must have weights that sum to 0"),
        ({"primary": {"contrasts": {}}}, "primary: contrasts holds nothing"),
        ({"primary": {**GOOD, "contrasts": {"a": {}}}}, "holds contrast and contrasts; here it must be one of"),
        ({"primary": {"contrasts": {"a": {"good": 1}}}}, "contrasts: a={'good': 1.0} must have weights that sum to 0"),
        ({"primary": {"contrasts": {"a": {"x": 1}}}}, "primary: contrasts: a: unknown field 'x'"),
        ({"primary": {"contrasts": {"a": 1}}}, "primary: contrasts: a must hold fields and values, not 1"),
        ({"primary": {"contrast": {"x": 1, "base": -1}}}, "primary: contrast: unknown field 'x'"),
        ({"primary": {"trend": "base"}, **LADDER}, "primary: trend: base must be one model besides the baseline"),
        ({"primary": {"interaction": {"good": ["a"]}}, **CROSSED}, "interaction: ['a'] must be two of adamw, muon"),
        ({"primary": {**GOOD, "margin": -1}}, "primary: margin=-1.0 must be at least 0"),
        ({"primary": GOOD, "stop": "early"}, "primary and stop exclude each other"),
    ],
)
def test_one_line(make, fields, message, capsys, tmp_path):
    assert main(["compare", make(**fields), "--output_dir", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line and not (tmp_path / "out").exists()


def test_field_of_the_command_line_that_a_condition_sets_is_refused(make):
    with pytest.raises(ValueError, match=r"command line: optimizer: .*condition 'muon' sets that"):
        load_plan(make(**CROSSED), {"optimizer": "adamw"})
