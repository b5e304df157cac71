"""`tune`: the points against a reference, planted searches and verdicts, and the rate of wrong verdicts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inline_engine import InlineEngine
from support.planted import Interrupted, PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.inference import analyse
from modeling_nlq.training.comparison.lr_search import Range, Rates, tune
from modeling_nlq.training.comparison.report import describe, write_report
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.comparison.sections import TuneConfig
from modeling_nlq.training.comparison.status import describe_status
from modeling_nlq.training.result import Evaluation, Losses


SCALE = {"initializer_scale": [0.1, 2.0]}
FIELDS = {"learning_rate": [1e-3, 6.4e-2], "weight_decay": {"values": [0.0, 0.1, 0.3]}, **SCALE}


def radical_inverse(number: int, base: int) -> float:
    """The digits of a number, mirrored at the point: van der Corput's sequence, of which Halton's consists."""
    share, unit = 0.0, 1.0
    while number:
        unit /= base
        number, digit = divmod(number, base)
        share += digit * unit
    return share


def test_points_are_those_of_halton():
    points = TuneConfig(16, FIELDS).points
    assert points[0] == {} and len(points) == 16
    for number, point in enumerate(points[1:], start=1):
        rate, decay, scale = (radical_inverse(number, base) for base in (2, 3, 5))
        assert point["learning_rate"] == pytest.approx(1e-3 * 64**rate, rel=5e-3)
        assert point["weight_decay"] == [0.0, 0.1, 0.3][int(3 * decay + 1e-9)]
        assert point["initializer_scale"] == pytest.approx(0.1 * 20**scale, rel=5e-3)


@given(
    low=st.floats(1e-6, 1e3),
    times=st.floats(1.1, 1e4),
    share=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from(["logarithmic", "linear"]),
)
def test_values_lie_in_their_range(low, times, share, kind):
    ends = [low, low * times]
    values = Range.read("field", ends if kind == "logarithmic" else {"linear": ends})
    value = values.at(share)
    assert low * 0.995 <= value <= low * times * 1.005
    end = values.end_near(value)
    assert end in ((None,) if 0.11 < share < 0.89 and times > 2 else (None, *ends))
    assert type(Range.read("field", {"linear": [1, 8]}).at(share)) is int


def test_ends_of_listed_numbers():
    """Below 0 there may be nothing, and of two values each is an end."""
    for values, ends in (([0.0, 0.1, 0.3], [None, None, 0.3]), ([3, 1, 2], [3, 1, None]), ([1, 2], [None, None])):
        assert list(map(Range.read("field", {"values": values}).end_near, values)) == ends


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tune": {"fields": SCALE}}, "tune: trials is missing; it must be a whole number, at least 2"),
        ({"tune": {"trials": 1, "fields": SCALE}}, "trials=1 must be at least 2"),
        ({"tune": {"trials": 4}}, "fields holds nothing to tune"),
        (
            {"tune": {"trials": 4, "fields": {"weight_decay": [0.0, 0.1]}}},
            r"weight_decay=\[0.0, 0.1\] must be \[low, ",
        ),
        ({"learning_rates": [1e-3, 1e-2]}, "with tune, learning_rates must be a search, {start: RATE} or one rate"),
        ({"models": {"base": None, "twin": {"training": {"weight_decay": 0.0}}}}, "weight_decay: model 'twin' sets"),
        (
            {"tune": {"trials": 2, "fields": {**SCALE, "weight_decay": {"values": [0.0, 0.1]}}}},
            "trials=2 leaves out weight_decay=0.1; set trials: 3",
        ),
        ({"tune": {"trials": 4, "fields": {"learning_rat": [0.1, 1.0]}}}, "'learning_rat' is unknown; did you mean"),
        ({"tune": {"trials": 4, "fields": {"no_field": [0.1, 1.0]}}}, "tune: no_field=.* has no field 'no_field'"),
        ({"tune": {"trials": 4, "fields": {"max_steps": [5, 10]}}}, "tune: max_steps=7 changes the data"),
        (
            {"tune": {"trials": 3, "fields": {"num_hidden_layers": [1, 4]}}},
            "num_hidden_layers=. changes the number of parameters",
        ),
        ({"tune": {"trials": 4, "fields": {"seed": {"values": [1, 2]}}}}, "seed: set seeds and learning_rates in"),
        ({"tune": {"trials": 4, "fields": {"output_dir": {"values": ["a", "b"]}}}}, "output_dir: folders and names"),
        (
            {"tune": {"trials": 4, "fields": {"weight_decay": {"values": ["a", 0.1]}}}},
            "weight_decay='a' must be a finite",
        ),
        ({"tune": {"trials": 4, "fields": {"learning_rate": {"values": [-1.0, 0.1]}}}}, "must be numbers above 0"),
        (
            {"conditions": {"a": {}, "b": {"training": {"weight_decay": 1.0}}}},
            "tune: fields: weight_decay: condition 'b' sets that",
        ),
        ({"switches": {"initializer_range": 0.1}}, "initializer_scale and the switch initializer_range exclude"),
    ],
)
def test_bad_input(make_file, fields, message):
    tuned = {"trials": 4, "fields": {**SCALE, "weight_decay": {"values": [0.0, 0.1]}}}
    with pytest.raises(ValueError, match=message):
        load_plan(make_file(**{"learning_rates": {"start": 1e-2}, "seeds": [0, 1, 2], "tune": tuned, **fields}))


def needy(scale, run):
    """The baseline is best with the scale 1, which the recipe does not have; the twin does not care."""
    tuned = scale.config.tune
    wanted = tuned.points[run.trial].get("initializer_scale", 0.16) if tuned else 0.16
    loss = 3.0 + 0.05 * math.log2(run.learning_rate / 1e-2) ** 2 + 0.01 * math.sin(7 * run.seed + len(run.model))
    return loss + (0.1 * math.log(wanted) ** 2 if run.model == "base" else 0.15)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_gain_that_hangs_on_the_recipe_goes(make_file, tmp_path, tuned):
    fields = {"learning_rates": {"start": 1e-2}, "seeds": [0, 1, 2, 3]}
    fields |= {"tune": {"trials": 8, "fields": SCALE}} if tuned else {}
    outcome = run_comparison(load_plan(make_file(**fields)), tmp_path, PlantedEngine(needy))
    assert outcome.largest.statistics.effects["twin"].verdict == ("worse" if tuned else "better")
    write_report(outcome, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert ("other nuisance parameters" in text.lower()) is not tuned
    if tuned:
        assert "## Tuning" in text and "own values, at the learning rate where the search began, by: base 10." in text
        assert {run.trial for run in outcome.largest.models["base"].runs} != {0}
        assert describe(read_outcome(tmp_path / "results.json")) == describe(outcome)


def own_best(scale, run):
    """Each seed has a point of its own that is best, and a larger scale a smaller rate."""
    rate = 1e-2 * 2.0 ** -(scale.name.count("large"))
    best = 1 + (run.seed if "small" in scale.name else 0)
    return 3.0 + 0.1 * (run.trial != best) + 0.05 * math.log2(run.learning_rate / rate) ** 2


@pytest.mark.parametrize("at", ["first", "each"])
def test_a_ladder_takes_over_the_points_of_its_smallest_scale(make_file, tmp_path, at):
    sizes = {"small": 16, "large": 32}
    scales = {name: {"switches": {"hidden_size": size, "intermediate_size": size}} for name, size in sizes.items()}
    tuned = {"trials": 5, "fields": {**SCALE, "weight_decay": {"values": [0.0, 0.1]}}, "at": at}
    file = make_file(learning_rates={"start": 1e-2}, seeds=[0, 1, 2], tune=tuned, scales=scales)
    plan = load_plan(file)
    with pytest.raises(Interrupted):
        run_comparison(plan, tmp_path, PlantedEngine(own_best, most_runs=23))
    assert "each seed" in "\n".join(plan.describe()) and any("23 of " in line for line in describe_status(tmp_path))
    engine = PlantedEngine(own_best)
    outcome = run_comparison(plan, tmp_path, engine)
    assert len(engine.made) + 23 == sum(scale.runs for scale in plan.scales.values()) + 6
    for name, scale in outcome.scales.items():
        for model in scale.models.values():
            chosen = 1 if at == "each" and name == "large" else None
            assert {run.seed: run.trial for run in model.runs} == {seed: chosen or 1 + seed for seed in range(3)}
            assert {run.learning_rate for run in model.runs} == {1e-2 if name == "small" else 5e-3}
            assert all(run.point == plan.scales[name].config.tune.points[run.trial] for run in model.runs)


LADDER = {name: {"switches": {"hidden_size": size}} for name, size in (("small", 16), ("large", 32), ("larger", 64))}


@pytest.mark.parametrize("tuned", [True, False])
def test_seeds_keep_the_rates_that_they_chose_last(make_file, tmp_path, tuned):
    """`twin` searches another grid, and ends at its boundary."""
    other = {"learning_rates": {"start": 3e-3, "factor": 3, "limit": 3}}
    scales = {**LADDER, "large": {**LADDER["large"], "models": {"twin": other}}}
    scales["larger"] = {**LADDER["larger"], "keep_learning_rates": True}
    fields = {"tune": {"trials": 5, "fields": {**SCALE, "learning_rate": [2.5e-3, 4e-2]}}} if tuned else {}
    plan = load_plan(make_file(learning_rates={"start": 1e-2}, seeds=[0, 1, 2], scales=scales, **fields))
    large, larger = list(plan.scales.values())[1:]
    assert "keeps the learning rate that it chose last" in larger.describe_tuning()
    assert larger.runs == 6 and not larger.or_more and large.or_more

    def loss(scale, run):  # at the last scale other rates are best
        best = (
            1e-3 if "larger" in scale.name else 1e-2 * 2.0**run.seed if run.model == "base" else 3e-3 * 3.0**run.seed
        )
        return 3.0 + 0.05 * math.log2(run.learning_rate / best) ** 2 + 0.01 * run.seed

    outcome = run_comparison(plan, tmp_path, PlantedEngine(loss))
    _, before, last = outcome.scales.values()
    for name, model in last.models.items():
        assert not model.tried and len(model.learning_rates) > 1 and not model.has_choice
        chosen = [(run.seed, run.trial, run.learning_rate) for run in before.models[name].runs]
        assert [(run.seed, run.trial, run.learning_rate) for run in model.runs] == chosen
        assert model.boundaries == before.models[name].boundaries
    assert tuned or last.models["twin"].boundaries == {1: "largest", 2: "largest"}
    assert last.statistics.effects["twin"].verdict.startswith("no verdict") or not last.models["twin"].boundaries
    write_report(outcome, tmp_path)
    text = (tmp_path / "results.md").read_text().partition("## Scale larger")[2]
    assert text.count("Each seed kept the learning rate that it chose last") == 1
    assert "Each model has one learning rate" not in text and "tried" not in text.partition("Every run")[0]
    assert describe(read_outcome(tmp_path / "results.json")) == describe(outcome)


def test_a_seed_without_a_choice_searches(make_file, tmp_path):
    """Seed 1 of `twin` diverged at every rate of the scale before."""
    scales = {**LADDER, "large": {**LADDER["large"], "keep_learning_rates": True}}
    del scales["larger"]
    plan = load_plan(make_file(learning_rates={"start": 1e-2, "limit": 3}, seeds=[0, 1], scales=scales))

    def loss(scale, run):
        return None if (run.model, run.seed) == ("twin", 1) and "small" in scale.name else own_best(scale, run)

    outcome = run_comparison(plan, tmp_path, PlantedEngine(loss))
    tried = {name: len(model.tried) for name, model in outcome.scales["large"].models.items()}
    assert tried == {"base": 0, "twin": 2}


@pytest.mark.parametrize(
    ("scale", "changes", "message"),
    [
        ("small", {}, "scale 'small': keep_learning_rates: no smaller scale has the seeds 0, 1"),
        ("large", {"seeds": [1, 2]}, "scale 'large': keep_learning_rates: no smaller scale has the seeds 2"),
        ("large", {"models": {"twin": {"learning_rates": [1e-2]}}}, "keep_learning_rates excludes the learning_rates"),
        ("large", {"keep_learning_rates": "yes"}, "keep_learning_rates='yes' must be true or false"),
    ],
)
def test_rates_that_cannot_be_kept(make_file, scale, changes, message):
    scales = {**LADDER, scale: {**LADDER[scale], "keep_learning_rates": True, **changes}}
    with pytest.raises(ValueError, match=message):
        load_plan(make_file(learning_rates={"start": 1e-2}, seeds=[0, 1], scales=scales))


@pytest.mark.parametrize("at", ["each", "baseline"])
def test_rates_are_not_kept_where_no_choice_is_taken_over(make_file, at):
    scales = {**LADDER, "large": {**LADDER["large"], "keep_learning_rates": True}}
    tuned = {"trials": 2, "fields": SCALE, "at": at}
    with pytest.raises(ValueError, match=f"scale 'large': keep_learning_rates excludes tune: at: {at}"):
        load_plan(make_file(learning_rates={"start": 1e-2}, seeds=[0, 1], scales=scales, tune=tuned))


def test_a_point_of_trial_0_that_was_taken_over_is_no_gain(make_file, tmp_path):
    """Here no rates are searched, and neither plan nor report says so."""
    scales = {name: {"switches": {"hidden_size": size}} for name, size in (("small", 16), ("large", 32))}
    fields = {"learning_rates": [8e-3], "seeds": [0, 1], "tune": {"trials": 3, "fields": SCALE}}
    plan = load_plan(make_file(**fields, scales=scales))
    first, other = (scale.describe_tuning() for scale in plan.scales.values())
    assert first == "each seed tries 3 points for each model: initializer_scale 0.1 to 2"
    assert other == "each seed takes over its point of the first scale"
    outcome = run_comparison(plan, tmp_path, PlantedEngine(lambda scale, run: 3.0 + run.trial + 0.01 * run.seed))
    write_report(outcome, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert text.count("recipe's own values by: base 0.0 % ± 0.0, twin 0.0 % ± 0.0. A verdict") == 1
    assert "no gain of tuning is measured here" in text and "searched" not in text
    assert text.count("took its point for each model over") == text.count("Each model has one learning rate") == 1


@pytest.mark.slow
def test_real_runs_have_the_values_of_their_points(make_file, tmp_path):
    tuned = {"trials": 2, "fields": {**SCALE, "warmup_steps": [0.1, 0.5]}}
    file = make_file(learning_rates=1e-2, seeds=[0], tune=tuned)
    plan = load_plan(file)
    run_comparison(plan, tmp_path, InlineEngine())
    outcome = read_outcome(tmp_path / "results.json").largest
    assert outcome.same_tokens
    for model in outcome.models.values():
        assert len({run.validation_loss for run in (*model.tried, *model.runs)}) == 2  # each point is another run
        assert model.untuned[0].validation_loss >= model.runs[0].validation_loss


@pytest.mark.slow
def test_equal_models_are_told_apart_in_one_of_twenty_comparisons():
    """The validation and the test loss of a run share its noise, and runs of a seed share some of theirs."""
    random, seeds, points, wrong = np.random.default_rng(0), range(5), TuneConfig(16, {"scale": [0.1, 2.0]}).points, 0

    class Planted(dict):
        def __missing__(self, name):
            rate, seed = float(name.split("rate-")[1].split("-seed")[0]), int(name.rsplit("-", 1)[1])
            trial = int(name.split("trial-")[1].split("-")[0])
            center = 3 + 0.03 * math.log2(rate / 0.01) ** 2 + 0.1 * math.log(points[trial].get("scale", 0.2)) ** 2
            losses = center + 0.02 * shared[seed] + 0.02 * random.standard_normal() + 0.005 * random.standard_normal(2)
            self[name] = Planted.result(*losses)
            return self[name]

        def __contains__(self, name):
            return True

        @staticmethod
        def result(validation, test):
            losses = Losses(False, None, validation, Evaluation(validation), Evaluation(test))
            return type("Result", (), {"losses": losses})

    comparisons = 1000
    for _ in range(comparisons):
        results, shared = Planted(), random.standard_normal(5)
        losses = {}
        for model in ("base", "a", "b"):
            chosen = [tune(model, seed, Rates(start=0.01, factor=2.0), results, points).reported for seed in seeds]
            losses[model] = {run.seed: results[run.name].losses.test.loss for run in chosen}
        effects = analyse(losses, "base").effects.values()
        wrong += any(effect.verdict in ("better", "worse") for effect in effects)
    assert wrong / comparisons < 0.06
