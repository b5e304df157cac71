"""Downstream tasks of comparisons: each reported run is evaluated once, and scores are judged like losses."""

from pathlib import Path

import pytest
from support.lm_eval_command import write_task
from support.planted import PlantedEngine

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison import downstream
from modeling_nlq.training.comparison.inference import Verdict, analyse
from modeling_nlq.training.comparison.results import TaskOutcome
from modeling_nlq.training.comparison.run import run_comparison


def test_scores_are_judged_seed_by_seed(make_file, tmp_path, monkeypatch):
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
    assert metrics.keys() == {"acc", "bits,strict-match", "f1"}
    effects = [found.statistics.effects["twin"] for found in metrics.values()]
    assert all(effect.verdict == "better" and effect.loss_improvement > 0 for effect in effects)
    scores = metrics["acc"].scores
    errors = {name: {seed: 1 - value for seed, value in of_seeds.items()} for name, of_seeds in scores.items()}
    assert metrics["acc"].statistics.effects["twin"].p == analyse(errors, "base", resolution=1e-3).effects["twin"].p

    # One item more in each of two seeds, as counted: no sign that there is no noise
    one_more = TaskOutcome(40, None, True, {"base": {0: 0.225, 1: 0.275}, "twin": {0: 0.25, 1: 0.3}})
    judged, resolution = downstream.judged_losses(one_more), downstream.resolution(one_more)
    effect = analyse(judged, "base", resolution=resolution).effects["twin"]
    assert effect.verdict == "too few seeds: no verdict" and effect.p > 0.3

    def diverging(comparison, run):
        return None if (run.model, run.seed) == ("twin", 2) else 3.0

    results = run_comparison(load_plan(file), tmp_path / "diverged", PlantedEngine(diverging))
    found = results.largest.tasks["my_task"]["acc"]
    assert found.scores["twin"][2] is None
    assert found.statistics.effects["twin"].verdict is Verdict.SOME_DIVERGED


@pytest.mark.parametrize("axis", [{}, {"conditions": {"a": {}, "b": {"training": {"weight_decay": 0.3}}}}])
def test_scores_of_two_versions_of_a_task_are_not_mixed(make_file, tmp_path, monkeypatch, axis):
    pytest.importorskip("lm_eval")
    values = {"n-samples": {}, "chance": {}, "higher_is_better": {"my_task": {"acc": True}}}
    results = {"results": {"my_task": {"acc,none": 0.5}}, **values}
    monkeypatch.setattr(downstream, "evaluate_tasks", lambda *_: results)
    task, engine = Path(write_task(tmp_path)), PlantedEngine(lambda *_: 3.0)
    plans = [load_plan(make_file(seeds=seeds, tasks=[str(task)], **axis)) for seeds in ([0, 1], [0, 1, 2])]
    run_comparison(plans[0], tmp_path / "results", engine)
    before = task.read_text()
    task.write_text(before + "# another prompt\n")
    changed = rf"tasks: a file has changed since .*seed-0 was evaluated \({task.name}: '"
    with pytest.raises(ValueError, match=changed):
        run_comparison(plans[1], tmp_path / "results", engine)
    task.write_text(before)
    run_comparison(plans[1], tmp_path / "results", engine)


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
