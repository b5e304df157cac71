"""`stop: early`: a model leaves when there is a verdict, which holds at all analyses; a killed comparison decides the
same.
"""

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.planted import Interrupted, PlantedEngine
from support.runs import change_json

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.comparison import RunStore, progress_of
from modeling_nlq.training.comparison.inference import FIRST_INTERIM, alpha_spent, analyse, analyse_early
from modeling_nlq.training.comparison.run import run_comparison


def losses_of(differences, baseline=None):
    count = max(map(len, differences.values()))
    baseline = np.zeros(count) if baseline is None else baseline
    models = {
        name: {seed: 4.0 + baseline[seed] + value for seed, value in enumerate(values)}
        for name, values in differences.items()
    }
    return {"base": {seed: 4.0 + value for seed, value in enumerate(baseline)}, **models}


@given(most=st.integers(FIRST_INTERIM, 60))
def test_all_analyses_together_spend_alpha(most):
    shares = [alpha_spent(seeds, most) for seeds in range(most + 1)]
    assert shares[:FIRST_INTERIM] == [0.0] * FIRST_INTERIM
    assert sum(shares) == pytest.approx(1.0) and min(shares[FIRST_INTERIM:]) > 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 8))
def test_verdict_p_and_interval_are_those_of_the_formula(seed, count):
    rng, most, models = np.random.default_rng(seed), 8, 2
    values = {"a": rng.normal(0.02, 0.01, count), "b": rng.normal(0, 0.01, count)}
    found = analyse(losses_of(values), "base", most=most)
    share = 0.5 if count == most else 0.5 / 5
    for name, own in values.items():
        effect = found.effects[name]
        p = stats.ttest_1samp(own, 0.0).pvalue
        assert effect.holm_p == pytest.approx(min(1.0, p * models / share))
        assert (effect.verdict == ("worse" if own.mean() > 0 else "better")) == (p < 0.05 * share / models)
        low, high = stats.ttest_1samp(own, 0.0).confidence_interval(1 - 0.05 * share)
        assert effect.loss_improvement_interval == pytest.approx((-25 * high, -25 * low))


def test_equivalence_needs_the_whole_interval_within_the_noise_floor():
    baseline = np.array([-0.1, 0.1] * 4)
    small = 0.001 * np.array([1, -1, 1, 1, -1, 1, -1, -1])
    near = small + 0.099 * np.array([1, -1] * 4)
    found = analyse(losses_of({"twin": small, "near": near}, baseline), "base", most=9)
    assert found.effects["twin"].verdict == "equivalent"
    assert found.effects["near"].verdict in ("within noise", "too few seeds: no verdict")
    assert found.open_models() == ["near"]
    assert analyse(losses_of({"twin": small}, baseline), "base").effects["twin"].verdict == "within noise"


def test_interim_analyses_are_those_of_the_first_seeds():
    rng = np.random.default_rng(2)
    values = {"long": rng.normal(0, 0.01, 6), "short": rng.normal(0.5, 0.01, 3)}
    found, history = analyse_early(losses_of(values), "base", range(6), {})
    assert [interim.seeds for interim in history["long"]] == [3, 4, 5, 6]
    assert [interim.seeds for interim in history["short"]] == [3]
    first = analyse(losses_of({"long": values["long"][:4], "short": values["short"]}), "base", most=6).effects["long"]
    assert history["long"][1].loss_improvement_interval == first.loss_improvement_interval
    assert found.effects["short"].verdict == "worse"


def test_a_baseline_at_the_boundary_counts_where_it_is():
    values = {"left": np.array([0.5, 0.51, 0.49]), "open": np.array([0.01, -0.02, 0.005, 0.01])}
    found, _ = analyse_early(losses_of(values), "base", range(6), {"base": [3]})
    assert found.effects["left"].verdict == "worse"
    assert found.effects["open"].verdict == "no verdict: the baseline's best rate is at the boundary"


def test_a_killed_comparison_decides_the_same(make_file, tmp_path):
    def loss(scale, run):
        noise = 0.01 * (run.model == "twin") * (-1) ** (run.seed // 2)
        return 4 + 0.01 * run.seed + 0.5 * (run.model == "planted") + noise

    models, seeds = dict.fromkeys(("base", "twin", "planted")), [0, 1, 2, 3, 4]
    plan, engine = load_plan(make_file(models=models, seeds=seeds, stop="early")), PlantedEngine(loss)
    whole = run_comparison(plan, tmp_path / "whole", engine)
    counts = {name: len(model.runs) for name, model in whole.largest.models.items()}
    assert counts == {"base": 5, "twin": 5, "planted": 3}
    assert whole.largest.statistics.effects["planted"].verdict == "worse"
    both = load_plan(make_file(models=dict.fromkeys(("base", "planted")), seeds=seeds, stop="early"))
    found = run_comparison(both, tmp_path / "both", PlantedEngine(loss)).largest.models
    assert [len(model.runs) for model in found.values()] == [3, 3], "the baseline ends with the last model"
    parts = PlantedEngine(loss)
    for most in (4, 10, 12):
        parts.most_runs = most
        with pytest.raises(Interrupted):
            run_comparison(plan, tmp_path / "parts", parts)
    parts.most_runs = None
    assert run_comparison(plan, tmp_path / "parts", parts) == whole and sorted(parts.made) == sorted(engine.made)
    for lost in ("twin/rate-0.01-seed-2", "base/rate-0.01-seed-1"):
        shutil.rmtree(tmp_path / "parts" / "runs" / lost)
    progress = progress_of(plan.largest, RunStore(tmp_path / "parts"))
    ready, done = progress.ready, progress.finished
    assert {run.name for run in ready} == {"twin/rate-0.01-seed-2", "base/rate-0.01-seed-1"} and done >= 7
    more = load_plan(make_file(models=models, seeds=[*seeds, 5], stop="early"))
    with pytest.raises(ValueError, match="stop: early needs the plan of its interim analyses"):
        run_comparison(more, tmp_path / "whole", engine)


def test_a_model_stays_where_the_text_may_explain_its_difference(make_file, tmp_path):
    plan = load_plan(make_file(models=dict.fromkeys(("base", "planted")), seeds=[0, 1, 2, 3], stop="early"))
    run_comparison(plan, tmp_path, PlantedEngine(lambda _, run: 4 + 0.01 * run.seed + 0.5 * (run.model == "planted")))
    progress = progress_of(plan.largest, RunStore(tmp_path))
    assert not progress.ready and len(progress.reported("planted")) == 3
    for file in tmp_path.glob("runs/planted/*/metrics.json"):
        change_json(file, losses__test__loss_parts=[1.5, 3.5, 4.5, 5.5, 7.5])
    assert [run.seed for run in progress_of(plan.largest, RunStore(tmp_path)).ready] == [3, 3]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"seeds": [0, 1, 2]}, "has its first interim analysis at 3 seeds"),
        ({"tasks": [__file__]}, "stop: early needs a comparison at one scale, without tasks"),
        (
            {"scales": {"small": {}, "large": {"switches": {"hidden_size": 64}}}},
            "stop: early needs a comparison at one scale",
        ),
    ],
)
def test_plans_that_cannot_stop_are_refused(make_file, fields, message):
    with pytest.raises(ValueError, match=message):
        load_plan(make_file(**{"seeds": [0, 1, 2, 3], "stop": "early", **fields}))
