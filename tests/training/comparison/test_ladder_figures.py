"""The figures of a ladder, from published results."""

import dataclasses
import json

import numpy as np
import pytest
from support.paths import REPOSITORY

from modeling_nlq.training.comparison.figures import save
from modeling_nlq.training.comparison.ladder_figures import draw_bowls, draw_improvements, draw_losses, draw_multipliers
from modeling_nlq.training.comparison.outcome import Outcome, read_outcome


RESULTS = REPOSITORY / "docs" / "results" / "ladder" / "activations" / "results.json"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return read_outcome(json.loads(RESULTS.read_text()))


def with_steps(outcome: Outcome, model: str, **fields) -> Outcome:
    """A ladder in which the steps of a model at all scales but the smallest have other fields."""
    trend = outcome.trend.models[model]
    first, *others = trend.steps
    steps = {first: trend.steps[first], **{name: dataclasses.replace(trend.steps[name], **fields) for name in others}}
    models = {**outcome.trend.models, model: dataclasses.replace(trend, steps=steps)}
    return dataclasses.replace(outcome, trend=dataclasses.replace(outcome.trend, models=models))


def with_runs(outcome: Outcome, model: str, change) -> Outcome:
    """A ladder in which the reported runs of a model, each with its index, are changed."""
    scales = {}
    for name, found in outcome.scales.items():
        own = found.models[model]
        runs = [dataclasses.replace(run, **change(index)) for index, run in enumerate(own.runs)]
        scales[name] = dataclasses.replace(found, models={**found.models, model: dataclasses.replace(own, runs=runs)})
    return dataclasses.replace(outcome, scales=scales)


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("draw", [draw_losses, draw_multipliers, draw_improvements, draw_bowls])
def test_figure_can_be_written(draw, outcome, tmp_path):
    save(draw(outcome), tmp_path / "figures" / "figure.png")
    assert (tmp_path / "figures" / "figure.png").stat().st_size > 10_000


def test_losses_of_every_seed(outcome):
    changed = with_runs(outcome, "tanh", lambda index: {"diverged": True, "test_loss": None} if index == 1 else {})
    figure = draw_losses(changed)
    points = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    runs = sum(len(found.seeds) for found in outcome.scales.values())
    assert sorted(len(line.get_xdata()) for line in points) == [runs - 3, *[runs] * (len(points) - 1)]
    assert f"tanh (3 of {runs} diverged)" in labels(figure)


def test_multipliers_and_what_lies_beyond(outcome):
    beyond = with_steps(outcome, "relu", multiplier=None, multiplier_interval=None, note="beyond", difference=1.0)
    figure = draw_multipliers(beyond)
    drawn = [container.lines[0].get_ydata()[0] for container in figure.axes[0].containers]
    found = [step.multiplier for model in beyond.trend.models.values() for step in model.steps.values()]
    assert drawn == [value for value in found if value is not None]
    assert sum(line.get_marker() == r"$\uparrow$" for line in figure.axes[0].lines) >= 2
    assert labels(figure)[-1] == "more than a decade beyond the ladder"
    assert not any("(baseline)" in label for label in labels(figure))


def test_improvements_without_an_interval_are_crosses(outcome):
    changed = with_steps(outcome, "tanh", improvement_interval=None)
    figure = draw_improvements(changed)
    crosses = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    steps = list(changed.trend.models["tanh"].steps.values())[1:]
    assert [cross.get_ydata()[0] for cross in crosses] == [step.improvement for step in steps]
    assert labels(figure)[-2:] == ["noise floor: \N{PLUS-MINUS SIGN}1 sd of the baseline over seeds", "no interval"]


def test_bowls_are_means_over_seeds(outcome):
    (name, found), *_ = outcome.scales.items()
    axes = draw_bowls(outcome).axes[0]
    losses = found.models[outcome.baseline].losses_by_rate()
    means = {rate: np.mean(values) for rate, values in losses.items()}
    assert axes.get_title() == name and axes.lines[1].get_ydata() == pytest.approx(list(means.values()))
    most = max(map(len, losses.values()))
    best = min((means[rate], rate) for rate in losses if len(losses[rate]) == most)
    rings = [line for line in axes.lines if line.get_markersize() == 10]
    assert (rings[0].get_ydata()[0], rings[0].get_xdata()[0]) == best and len(rings) == len(found.models)


def test_bowls_show_every_reported_run_and_those_that_diverged(outcome):
    """A lucky seed lies far below the means and an unlucky one far above them; a rate at which a run diverged has no mean."""
    changed = with_runs(
        outcome, "relu", lambda index: {"validation_loss": (1.5, 9.0)[index]} if index < 2 else {"diverged": True}
    )
    figure = draw_bowls(changed)
    for axes in figure.axes[: len(outcome.scales)]:
        low, high = axes.get_ylim()
        assert low < 1.5 and 9.0 < high < 14
        assert any(line.get_marker() == "x" for line in axes.lines)
        assert any(np.isnan(np.asarray(line.get_ydata(), dtype=float)).any() for line in axes.lines)
    assert labels(figure)[-1] == "a run diverged"


def test_a_ladder_without_a_choice_has_no_bowls(outcome):
    scales = {}
    for name, found in outcome.scales.items():
        models = {}
        for model, own in found.models.items():
            runs = [dataclasses.replace(run, learning_rate=1e-2) for run in own.runs]
            models[model] = dataclasses.replace(own, tried=[], runs=runs)
        scales[name] = dataclasses.replace(found, models=models)
    assert draw_bowls(dataclasses.replace(outcome, scales=scales)) is None
