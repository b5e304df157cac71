"""The figures of a ladder, from published results."""

import dataclasses

import numpy as np
import pytest
from support.paths import REPOSITORY

from modeling_nlq.training.comparison.figures import draw_accuracies, draw_bowls, draw_improvements, draw_losses
from modeling_nlq.training.comparison.results import Outcome, read_outcome
from modeling_nlq.training.result import Evaluation


PUBLISHED = REPOSITORY / "docs" / "results"
RESULTS = PUBLISHED / "ladder" / "activations" / "results.json"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return read_outcome(RESULTS)


def with_runs(outcome: Outcome, model: str, change) -> Outcome:
    scales = {}
    for name, found in outcome.scales.items():
        own = found.models[model]
        runs = []
        for index, run in enumerate(own.runs):
            losses = dataclasses.replace(run.result.losses, **change(index))
            runs.append(dataclasses.replace(run, result=dataclasses.replace(run.result, losses=losses)))
        scales[name] = dataclasses.replace(found, models={**found.models, model: dataclasses.replace(own, runs=runs)})
    return dataclasses.replace(outcome, scales=scales)


def test_losses_of_every_seed(outcome):
    changed = with_runs(outcome, "tanh", lambda index: {"diverged": True} if index == 1 else {})
    figure = draw_losses(changed)
    points = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    runs = sum(len(found.seeds) for found in outcome.scales.values())
    assert sorted(len(line.get_xdata()) for line in points) == [runs - 3, *[runs] * (len(points) - 1)]
    assert f"tanh (3 of {runs} diverged)" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_improvements_with_their_intervals(outcome):
    containers = draw_improvements(outcome).axes[0].containers
    steps = [step for model in outcome.trend.models.values() for step in model.steps.values()]
    assert [container.lines[0].get_ydata()[0] for container in containers] == [step.improvement for step in steps]
    ends = [container.lines[2][0].get_segments()[0][:, 1] for container in containers]
    assert np.array(ends) == pytest.approx(np.array([step.improvement_interval for step in steps]))


def test_synthetic_tasks_show_accuracies_in_place_of_improvements(outcome):
    """In percent of a baseline's loss near 0, improvements have six digits."""
    task = read_outcome(PUBLISHED / "tasks-recall" / "results.json")
    points = [line for line in draw_accuracies(task).axes[0].lines if line.get_linestyle() == "None"]
    for line, name in zip(points, task.largest.models, strict=True):
        runs = [run for found in task.scales.values() for run in found.models[name].runs]
        assert list(line.get_ydata()) == [100 * run.result.losses.test.token_accuracy for run in runs]
    assert draw_improvements(task) is None and draw_accuracies(outcome) is None


def test_bowls_show_means_every_reported_run_and_rates_without_a_mean(outcome):
    """One seed is far below the means and one far above them. If a run diverged, its rate has no mean."""
    (name, found), *_ = outcome.scales.items()
    axes = draw_bowls(outcome).axes[0]
    means = [np.mean(losses) for losses in found.models[outcome.baseline].losses_by_rate().values()]
    assert axes.get_title() == name and axes.lines[1].get_ydata() == pytest.approx(means)
    losses = [{"validation": Evaluation(1.5)}, {"validation": Evaluation(9.0)}, *[{"diverged": True}] * 9]
    changed = with_runs(outcome, "relu", losses.__getitem__)
    for axes in draw_bowls(changed).axes[: len(outcome.scales)]:
        low, high = axes.get_ylim()
        assert low < 1.5 and 9.0 < high < 14
        assert any(line.get_marker() == "x" for line in axes.lines)
