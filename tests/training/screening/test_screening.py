"""Screenings: the design, its effects beside ordinary least squares, planted truths, refusals, and one from file to
report.
"""

import itertools
import json
import math
import re
import zlib
from pathlib import Path

import error_rates
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.golden import check_golden
from support.paths import REPOSITORY
from support.planted import Interrupted, PlantedEngine


pytest.importorskip("pydoe", reason="needs pydoe: pip install 'modeling-nlq[screening]'")

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.status import CONFIRMATION
from modeling_nlq.training.screening.design import RATE, make_design
from modeling_nlq.training.screening.effects import analyse_effects
from modeling_nlq.training.screening.run import run_and_report
from modeling_nlq.training.screening.sections import ScreeningOutcome, describe, write_report
from modeling_nlq.training.values import from_json, to_json
from nlq import main


NAMES = [f"f{index}" for index in range(15)]


@settings(max_examples=10, deadline=None)
@given(count=st.integers(2, 15))
def test_designs_are_balanced(count):
    design = make_design(NAMES[:count])
    rows = design.rows
    assert design.factors == [*NAMES[:count], RATE]
    assert (rows[0] == -1).all() and set(np.unique(rows)) == {-1, 1}
    assert len(np.unique(rows, axis=0)) == len(rows)
    # Main effects are balanced, and mixed neither with each other nor with an interaction of two
    for chosen in itertools.chain(*(itertools.combinations(range(count + 1), size) for size in (1, 2, 3))):
        assert np.prod(rows[:, chosen], axis=1).sum() == 0
    # The groups of aliases hold each interaction once, and those of one group are equal up to a sign
    groups = design.aliases()
    assert sorted(pair for group in groups for pair in group) == sorted(itertools.combinations(design.factors, 2))
    for group in groups:
        products = [np.prod([rows[:, design.factors.index(name)] for name in pair], axis=0) for pair in group]
        assert all(abs(product @ products[0]) == len(rows) for product in products)


def least_squares(design, losses):
    rows, seeds = losses.shape
    row, seed = (index.ravel() for index in np.indices(losses.shape))
    full = np.column_stack([row[:, None] == np.arange(rows), seed[:, None] == np.arange(1, seeds)]).astype(float)
    residuals = losses.ravel() - full @ np.linalg.lstsq(full, losses.ravel(), rcond=None)[0]
    freedom = losses.size - np.linalg.matrix_rank(full)
    variance = residuals @ residuals / freedom
    main = np.column_stack([np.ones(losses.size), design.rows[row] / 2, seed[:, None] == np.arange(1, seeds)])
    coefficients = np.linalg.lstsq(main, losses.ravel(), rcond=None)[0]
    covariance = variance * np.linalg.inv(main.T @ main)
    effects = slice(1, 1 + len(design.factors))
    return coefficients[effects], np.sqrt(np.diag(covariance)[effects]), freedom


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(2, 7), seeds=st.integers(2, 4))
def test_effects_are_those_of_least_squares(seed, count, seeds):
    rng, design = np.random.default_rng(seed), make_design(NAMES[:count])
    losses = 4 + rng.normal(size=(len(design.rows), seeds)) + rng.normal(size=(1, seeds))
    found = analyse_effects(design, losses)
    effects, errors, freedom = least_squares(design, losses)
    variances = [stats.tvar(row) for row in losses - losses.mean(axis=0)]
    welch = sum(variances) ** 2 / sum(variance**2 / (seeds + 1) for variance in variances) - 2
    assert found.freedom == pytest.approx(min(freedom, welch)) and found.freedom >= seeds - 1
    by_benchmark = error_rates.p_of_screening(losses, design.rows)
    assert [own.p for own in found.main.values()] == pytest.approx(by_benchmark.tolist())
    for name, effect, error in zip(design.factors, effects, errors):
        own = found.main[name]
        assert own.effect == pytest.approx(effect)
        assert own.p == pytest.approx(2 * stats.t.sf(abs(effect) / error, found.freedom))
        assert own.high - own.low == pytest.approx(2 * stats.t.ppf(0.975, found.freedom) * error)
        assert own.improvement == pytest.approx(-100 * effect / losses.mean())


def test_planted_truths():
    design, rng = make_design(["helps", "with", "harms", "twin"]), np.random.default_rng(0)
    on = {name: design.rows[:, index] > 0 for index, name in enumerate(design.factors)}
    losses = 4 - 0.1 * on["helps"] + 0.1 * on["harms"] - 0.2 * (on["with"] & on["helps"]) + 0.05 * on[RATE]
    losses = losses[:, None] + 0.01 * rng.normal(size=(len(design.rows), 3)) + rng.normal(size=(1, 3))
    found = analyse_effects(design, losses)
    assert found.survivors == ["helps", "with"] and found.main["twin"].holm_p > 0.05
    assert found.main["helps"].effect == pytest.approx(-0.2, abs=0.02), "an average over `with` on and off"
    strongest = max(found.interactions, key=lambda group: abs(group.effect))
    assert ["helps", "with"] in strongest.aliases and strongest.p < 0.001 and found.p_of_interactions < 0.001
    assert found.interaction_size**2 == pytest.approx(np.mean([group.effect**2 for group in found.interactions]))


def test_interactions_are_seldom_found_where_there_are_none():
    design, rng = make_design(NAMES[:3]), np.random.default_rng(0)
    found = [analyse_effects(design, 4 + rng.normal(size=(len(design.rows), 2))) for _ in range(400)]
    assert stats.kstest([effects.p_of_interactions for effects in found], "uniform").pvalue > 0.01
    mean_square = np.mean([effects.interaction_size**2 for effects in found])
    assert mean_square == pytest.approx(4 / len(design.rows) / 2, rel=0.1)


@pytest.fixture
def make_screening(make_file):
    def make(**fields):
        factors = {
            "rope": _switch(position_embedding="rope"),
            "gate": _switch(attention_gate="headwise"),
            "harm": _switch(initializer_range=0.1),
        }
        training = {"max_steps": 4, "save_strategy": "no", "eval_steps": 4, "report_to": "none"}
        defaults = {"models": None, "baseline": None, "factors": factors, "training": training}
        defaults |= {"learning_rates": [5e-3, 1e-2], "seeds": [0, 1], "confirm": {"seeds": [0, 1, 2]}}
        return make_file(**{**defaults, **fields})

    return make


def test_the_plan(make_screening):
    screening = load_plan(make_screening(confirm={"seeds": [0, 1, 2, 3], "stop": "early"}))
    variants = screening.runs.largest.variants
    assert len(variants) == 8 and screening.runs.baseline == "off, rate 0.005"
    for (name, variant), row in zip(variants.items(), screening.design.rows):
        fields = ("position_embedding", "attention_gate", "initializer_range")
        assert [field in variant.recipe.switches for field in fields] == (row > 0)[:3].tolist()
        assert variant.rates.first == [1e-2 if row[3] > 0 else 5e-3]
        assert name.startswith(
            "+".join(factor for factor, on in zip(screening.config.factors, row > 0) if on) or "off"
        )
    confirmation = screening.confirm(["rope", "gate"]).largest
    changes = {"position_embedding": "rope", "attention_gate": "headwise"}
    off = confirmation.variants["off"].recipe.switches
    assert confirmation.variants["best"].recipe.switches == {**off, **changes}
    assert confirmation.config.stop == "early" and len(confirmation.seeds) == 4
    assert confirmation.variants["best"].rates.is_search
    text = "\n".join(screening.describe())
    assert "16 runs" in text and "cannot be told apart" in text
    assert "confirmation: a learning rate is chosen; a verdict may hang on other values" in text


def planted(effect_of):
    def loss(scale, run):
        effect = effect_of(run.model, run.seed)
        noise = zlib.crc32(f"{scale.name}, {run.name}".encode()) / 2**32
        rate = 0.05 * math.log2(run.learning_rate**2 / 5e-5) ** 2  # equal at both rates of the design
        return None if effect is None else effect + 0.02 * noise + 0.1 * run.seed + rate

    return PlantedEngine(loss)


@pytest.mark.slow
def test_what_survives_is_confirmed(make_screening, tmp_path, capsys):
    gate, harm, rope = {"attention_gate": "headwise"}, {"initializer_range": 0.1}, {"position_embedding": "rope"}
    factors = {name: _switch(**switches) for name, switches in (("gate", gate), ("harm", harm), ("rope", rope))}
    file, folder = make_screening(factors=factors, name="planted"), tmp_path / "out"
    engine = planted(lambda name, _: 4.0 - 0.5 * ("gate" in name or name == "best") + 0.5 * ("harm" in name))
    screening = load_plan(file, {"explore": False})
    for most in (5, 20):  # killed in the middle of the design, and while what survives is confirmed
        engine.most_runs = most
        with pytest.raises(Interrupted):
            run_and_report(screening, folder, engine)
    engine.most_runs = None
    outcome = run_and_report(screening, folder, engine)
    made = len(engine.made)
    assert made == len(set(engine.made)) and outcome.effects.survivors == ["gate"]
    assert outcome.confirmation.largest.statistics.effects["best"].verdict == "better"
    best = load_plan(folder / CONFIRMATION / "comparison.yaml", {}).largest.variants["best"]
    assert best.recipe.switches["attention_gate"] == "headwise"
    assert (folder / "results.json").read_text() == to_json(outcome)
    golden = Path(__file__).with_name("golden")
    report = (folder / "results.md").read_text()
    check_golden({golden / "report.md": report, golden / "terminal.txt": describe(outcome)})
    assert {path.name for path in (folder / "figures").iterdir()} == {"effects.png"}
    assert main(["compare", file, "--output_dir", str(folder), "--status"]) == 0
    assert "18 of 18 runs finished" in capsys.readouterr().out
    assert to_json(run_and_report(screening, folder, engine)) == to_json(outcome) and len(engine.made) == made
    with pytest.raises(ValueError, match="holds another comparison"):
        run_and_report(load_plan(make_screening(seeds=[0, 1, 2])), folder, engine)


def test_nothing_survives_or_a_run_diverges(make_screening, tmp_path):
    screening = load_plan(make_screening())

    def outcome(folder, effect_of):
        return run_and_report(screening, tmp_path / folder, planted(effect_of))

    nothing = outcome("nothing", lambda *_: 4.0)
    assert nothing.confirmation is None and "there was nothing to confirm" in describe(nothing)
    lost = outcome("lost", lambda name, seed: None if (name, seed) == ("off, rate 0.005", 1) else 4.0)
    assert lost.effects is None and lost.diverged == ["off, rate 0.005"]
    assert "No effects: off, rate 0.005 diverged" in describe(lost)


def _switch(**switches):
    return {"switches": switches}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"models": {"a": None}}, "factors and models exclude each other"),
        ({"factors": {"one": _switch(attention_gate="headwise")}}, "factors holds 1 changes; it must hold 2 to 15"),
        ({"learning_rates": [1e-2]}, "learning_rates must be a list of two"),
        ({"seeds": [0]}, "a screening needs two or more"),
        ({"confirm": {"seeds": [0]}}, r"confirm: seeds=\[0\] must be 3 or more"),
        (
            {"factors": {"a": _switch(attention_gate="headwise"), "b": _switch(attention_gate="elementwise")}},
            "factors 'a' and 'b' exclude each other: they set attention_gate='headwise' and attention_gate='element",
        ),
        (
            {"factors": {"a": _switch(position_embedding="learned"), "b": _switch(norm_type="rmsnorm")}},
            "factor 'a' changes nothing",
        ),
        (
            {
                "factors": {
                    "a" * 120: _switch(attention_gate="headwise"),
                    "b" * 120: _switch(norm_type="rmsnorm"),
                }
            },
            r"factors: their names together '.*': a name must be made of at most 200",
        ),
        ({"factors": {"a+b": _switch(norm_type="rmsnorm"), "c": {}}}, r"factor 'a\+b': the name must be another one"),
    ],
)
def test_wrong_screenings_are_refused_by_name(make_screening, fields, message):
    with pytest.raises(ValueError, match=message):
        load_plan(make_screening(**fields))


def test_the_shipped_results_are_those_of_their_runs(tmp_path):
    shipped = REPOSITORY / "docs" / "results" / "screening" / "83k"
    results = from_json(ScreeningOutcome, json.loads((shipped / "results.json").read_text()))
    design = make_design(list(results.factors))
    assert (design.rows == results.design.rows).all() and design.factors == results.design.factors
    losses = [list(losses.values()) for losses in results.runs.largest.losses.values()]
    found = analyse_effects(design, np.array(losses))
    # They are of a version that took the rows for equally noisy
    assert set(results.effects.survivors) - set(found.survivors) == {"canon", "exclusive"}
    assert (found.freedom, results.effects.freedom) == (pytest.approx(12.5, abs=0.1), 31)
    for name, effect in found.main.items():
        known = results.effects.main[name]
        assert effect.effect == pytest.approx(known.effect) and effect.p > known.p
    write_report(results, tmp_path)
    assert (tmp_path / "results.md").read_text() == (shipped / "results.md").read_text()


def test_the_shipped_results_of_2026_are_those_of_their_runs(tmp_path):
    shipped = REPOSITORY / "docs" / "results" / "screening" / "2026"
    results = from_json(ScreeningOutcome, json.loads((shipped / "results.json").read_text()))
    models = results.runs.largest.models.values()
    losses = [[run.result.losses.validation.loss for run in model.runs] for model in models]
    found = analyse_effects(make_design(list(results.factors)), np.array(losses))
    assert found.survivors == results.effects.survivors == []
    for name, effect in found.main.items():
        known = results.effects.main[name]
        assert (effect.effect, effect.p or 0.0) == pytest.approx((known.effect, known.p or 0.0))
    write_report(results, tmp_path)
    assert (tmp_path / "results.md").read_text() == (shipped / "results.md").read_text()


@pytest.mark.slow
def test_all_rows_take_the_points_of_the_baseline(make_screening, tmp_path):
    tuned = {"trials": 3, "fields": {"weight_decay": {"linear": [0.0, 0.2]}, "warmup_steps": [0.1, 0.4]}}
    factors = {"rope": _switch(position_embedding="rope"), "gate": _switch(attention_gate="headwise")}
    screening = load_plan(make_screening(factors=factors, tune=tuned), {"explore": False})
    chosen = {0: 1, 1: 2}  # by seed

    def loss(scale, run):
        return 4.0 + 0.1 * (run.trial != chosen.get(run.seed, 1)) - 0.5 * ("gate" in run.model or run.model == "best")

    engine = PlantedEngine(loss)
    outcome = run_and_report(screening, tmp_path, engine)
    plan, text = "\n".join(screening.describe()), (tmp_path / "results.md").read_text()
    assert "the baseline tries 3 points with each seed, and all rows take the best: weight_decay 0 to 0.2, wa" in plan
    assert "confirmation: each seed tries 3 points for each model, then rates around its best: weight_decay" in plan
    assert "## Tuning\n\nEach seed tried 3 points for the baseline, whose point all models take: trial 0 with" in text
    assert re.findall(r"^\| off, rate 0.005 \| \d \| (\d) \|", text, flags=re.MULTILINE) == ["1", "2"]
    for model in outcome.runs.largest.models.values():
        assert {run.seed: run.trial for run in model.runs} == chosen
    rows, made = len(screening.design.rows), [name for name in engine.made if "screening" in name]
    assert len(made) == screening.runs.largest.runs == 2 * (rows + 2)
    assert outcome.effects.survivors == ["gate"]
    for model in outcome.confirmation.largest.models.values():
        assert [run.trial for run in model.runs] == [1, 2, 1]
    with pytest.raises(ValueError, match="learning_rate: a screening has it as a factor"):
        load_plan(make_screening(tune={"trials": 3, "fields": {"learning_rate": [1e-3, 1e-2]}}))
