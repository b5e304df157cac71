"""Downstream tasks of comparisons: each reported run is evaluated once, and scores are judged like losses."""

import pytest
from support.lm_eval_command import lm_eval_results, write_task
from support.planted import PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison import downstream
from modeling_nlq.training.comparison.inference import Verdict, analyse
from modeling_nlq.training.comparison.results import TaskOutcome
from modeling_nlq.training.comparison.run import run_and_report, run_comparison


@pytest.mark.slow
def test_a_ladder_has_the_numbers_of_lm_eval(make_file, small_index, tmp_path, monkeypatch):
    widths = {"small": 32, "large": 48}
    scales = {
        name: {"switches": {"hidden_size": width, "intermediate_size": 4 * width}} for name, width in widths.items()
    }
    training = {"save_strategy": "no", "max_steps": 12, "report_to": "none"}
    task = write_task(tmp_path)
    file = make_file(scales=scales, tasks=[task], seeds=[0], learning_rates=[1e-2], training=training)
    folder = tmp_path / "ladder"
    results = run_and_report(load_plan(file), folder)
    for name in scales:
        found = results.scales[name]
        run = folder / "scales" / name / found.models["twin"].runs[0].folder
        theirs = lm_eval_results(monkeypatch, run, task, tmp_path / f"{name}.json", "--batch_size", "16")
        assert found.tasks.keys() == theirs.keys() == {"my_task"}
        assert found.tasks["my_task"].keys() == {"acc", "brier_score"}
        for metric, judged in found.tasks["my_task"].items():
            score = judged.scores["twin"][0]
            assert judged.items == 20 and score == pytest.approx(theirs["my_task"][f"{metric},none"], abs=1e-5)
            assert f"{score:.4f}" in (folder / "results.md").read_text()


def test_scores_are_judged_seed_by_seed(make_file, tmp_path, monkeypatch):
    """`twin` has a higher accuracy and fewer bits in every seed; one of its runs diverged elsewhere."""
    pytest.importorskip("lm_eval")
    seeds = [0, 1, 2, 3]

    def planted(model, tasks):
        seed, is_twin = int(str(model)[-1]), "twin" in str(model)
        values = {
            "acc,none": 0.4 + 0.02 * seed + 0.1 * is_twin + 0.001 * (seed % 2) * is_twin,
            "bits,strict-match": 3.0 - 0.1 * is_twin,
            "f1,none": 35.0 + 5 * is_twin,
        }
        better = {"acc": True, "bits": False, "f1": True}
        return {
            "results": {"my_task": {"alias": "x", **values}},
            "n-samples": {"my_task": {"effective": 1000}},
            "chance": {"my_task": 0.25},
            "higher_is_better": {"my_task": better},
        }

    monkeypatch.setattr(downstream, "evaluate_tasks", planted)
    file = make_file(tasks=[write_task(tmp_path)], seeds=seeds)
    results = run_comparison(load_plan(file), tmp_path / "results", PlantedEngine(lambda comparison, run: 3.0))
    metrics = results.largest.tasks["my_task"]
    with monkeypatch.context() as patch:  # each run is evaluated once
        patch.setattr(downstream, "evaluate_tasks", None)
        assert run_comparison(load_plan(file), tmp_path / "results", PlantedEngine(None)) == results
    assert {name: found.statistics.effects["twin"].verdict for name, found in metrics.items()} == {
        "acc": "better",
        "bits,strict-match": "better",
        "f1": "better",
    }
    assert all(found.statistics.effects["twin"].loss_improvement > 0 for found in metrics.values())
    errors = {
        name: {seed: 1 - value for seed, value in scores.items()} for name, scores in metrics["acc"].scores.items()
    }
    assert metrics["acc"].statistics.effects["twin"].p == analyse(errors, "base", resolution=1e-3).effects["twin"].p

    # One item more in each of two seeds, as counted: no sign that there is no noise
    one_more = TaskOutcome(40, None, True, {"base": {0: 0.225, 1: 0.275}, "twin": {0: 0.25, 1: 0.3}})
    effect = analyse(downstream.judged_losses(one_more), "base", resolution=downstream.resolution(one_more)).effects[
        "twin"
    ]
    assert effect.verdict == "too few seeds: no verdict" and effect.p > 0.3

    def diverging(comparison, run):
        return None if (run.model, run.seed) == ("twin", 2) else 3.0

    results = run_comparison(load_plan(file), tmp_path / "diverged", PlantedEngine(diverging))
    found = results.largest.tasks["my_task"]["acc"]
    assert found.scores["twin"][2] is None
    assert found.statistics.effects["twin"].verdict is Verdict.SOME_DIVERGED


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["nlq_brackets"], "there is no task 'nlq_brackets'; `lm-eval ls tasks` lists all"),
        ("arc_easy", "tasks='arc_easy' must be a list"),
    ],
)
def test_bad_input(make_file, small_index, tasks, message):
    with pytest.raises(ValueError, match=message):
        load_plan(make_file(tasks=tasks))
