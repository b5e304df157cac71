"""The figures of a ladder, from results that are made up."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from modeling_nlq.training.comparison.figures import save
from modeling_nlq.training.comparison.ladder_figures import draw_bowls, draw_improvements, draw_losses, draw_multipliers
from modeling_nlq.training.comparison.trend import Scale, analyse_trend


MODELS = {"softmax": 0.0, "relu": 1.5, "sigmoid": 0.4, "squared ReLU": -1.2, "gated": 3.0}  # improvement in percent
FLOPS = {"width 64": 1e15, "width 96": 6e15, "width 128": 3e16, "width 192": 1.8e17}
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
DRAWINGS = {"losses": draw_losses, "multipliers": draw_multipliers, "improvements": draw_improvements, "bowls": draw_bowls}


def make_ladder(seeds=4, scales=4, noise=0.004, diverged=("squared ReLU", "width 192"), gated=3.0):
    """The content of a ladder's results; `gated` is the improvement of that model in percent."""
    random = np.random.default_rng(3)
    parts, contents = [], {}
    for scale, flops in list(FLOPS.items())[:scales]:
        models, shared = {}, random.standard_normal(seeds)
        for index, (name, percent) in enumerate({**MODELS, "gated": gated}.items()):
            loss = (2 + 1.6 * (flops / 1.8e17) ** -0.12) * (1 - percent / 100)
            best = -2.6 - 0.2 * np.log10(flops / 1e15) + 0.05 * index

            def validation_loss(rate, loss=loss, best=best):
                return loss * (1.01 + 0.04 * (np.log10(rate) - best) ** 2 + 0.5 * noise * random.standard_normal())

            tried = [
                {
                    "learning_rate": rate,
                    "seed": seed,
                    "diverged": name == "gated" and rate == RATES[-1] and seed == 0,
                    "validation_loss": validation_loss(rate),
                    "test_loss": loss,
                }
                for rate in RATES
                if rate != RATES[2]
                for seed in range(seeds)
            ]
            losses = loss * (1 + noise * (np.sqrt(0.75) * shared + 0.5 * random.standard_normal(seeds)))
            runs = [
                {
                    "learning_rate": RATES[2],
                    "seed": seed,
                    "diverged": (name, scale) == diverged and seed == 1,
                    "validation_loss": validation_loss(RATES[2]),
                    "test_loss": value,
                }
                for seed, value in enumerate(losses.tolist())
            ]
            for run in runs:
                run["test_loss"] = None if run["diverged"] else run["test_loss"]
            models[name] = {"runs": runs, "tried": tried}
        contents[scale] = {"name": scale, "baseline": "softmax", "models": models}
        own = {name: flops * (1 + 0.02 * index) for index, name in enumerate(MODELS)}
        parts.append(
            Scale(
                scale, own, {name: {run["seed"]: run["test_loss"] for run in model["runs"]} for name, model in models.items()}
            )
        )
    trend = dataclasses.asdict(analyse_trend(parts, "softmax"))
    return {
        "name": "activations",
        "baseline": "softmax",
        "scales": contents,
        "trend": json.loads(json.dumps(trend, allow_nan=False)),
    }


@pytest.fixture(scope="module")
def ladder():
    return make_ladder()


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_figure_can_be_written(drawing, ladder, tmp_path):
    save(DRAWINGS[drawing](ladder), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_losses_of_every_seed(ladder):
    figure = draw_losses(ladder)
    axes = figure.axes[0]
    points = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert [len(line.get_xdata()) for line in points] == [16, 16, 16, 15, 16]
    assert "squared ReLU (1 of 16 diverged)" in labels(figure)


def test_multipliers_and_what_lies_beyond():
    ladder = make_ladder(gated=25.0)
    steps = ladder["trend"]["models"]["gated"]["steps"]
    assert [step["note"] for step in steps.values()] == ["", "", "beyond", "beyond"]
    figure = draw_multipliers(ladder)
    axes = figure.axes[0]
    drawn = [container.lines[0].get_ydata()[0] for container in axes.containers]
    found = [step["multiplier"] for model in ladder["trend"]["models"].values() for step in model["steps"].values()]
    assert drawn == [value for value in found if value is not None] and len(drawn) == 4 * 4 - 3
    assert sum(line.get_marker() == r"$\uparrow$" for line in axes.lines) == 2
    assert labels(figure)[-1] == "more than a decade beyond the ladder" and "softmax (baseline)" not in labels(figure)


def test_improvements_without_an_interval_are_crosses(ladder):
    """Such as that of the model with a diverged run."""
    figure = draw_improvements(ladder)
    (cross,) = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    step = ladder["trend"]["models"]["squared ReLU"]["steps"]["width 192"]
    assert (cross.get_marker(), cross.get_ydata()[0]) == ("X", step["improvement"])
    assert labels(figure)[-2:] == ["noise floor: \N{PLUS-MINUS SIGN}1 sd of the baseline over seeds", "no interval"]


def test_bowls_are_means_over_seeds(ladder):
    figure = draw_bowls(ladder)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == list(FLOPS)
    model = ladder["scales"]["width 64"]["models"]["softmax"]
    runs = [*model["tried"], *model["runs"]]
    means = [np.mean([run["validation_loss"] for run in runs if run["learning_rate"] == rate]) for rate in RATES]
    assert panels[0].lines[1].get_ydata() == pytest.approx(means)
    rings = [line for line in panels[0].lines if line.get_markersize() == 10]
    assert (rings[0].get_xdata()[0], rings[0].get_ydata()[0]) == (RATES[int(np.argmin(means))], pytest.approx(min(means)))
    assert len(rings) == 5
    # One run diverged at the highest rate, which has no mean for this model
    crosses = [line for line in panels[0].lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [RATES[-1]]
    broken = [line for line in panels[0].lines if np.isnan(np.asarray(line.get_ydata(), dtype=float)).any()]
    assert len(broken) == 1 and list(np.isnan(broken[0].get_ydata())) == [rate == RATES[-1] for rate in RATES]


def test_bowls_show_every_reported_run(ladder):
    """A lucky seed lies far below the means and an unlucky one far above them; each is what its seed chose."""
    runs = copy.deepcopy(ladder["scales"])
    for found in runs.values():
        for loss, run in zip((1.5, 5.0), found["models"]["relu"]["runs"]):
            run["validation_loss"] = loss
        found["models"]["relu"]["tried"][0]["validation_loss"] = 80.0
    for axes in draw_bowls({**ladder, "scales": runs}).axes[: len(FLOPS)]:
        low, high = axes.get_ylim()
        assert low < 1.5 and 5.0 < high < 10


def test_small_ladders_have_fewer_figures():
    ladder = make_ladder(scales=2, seeds=1, diverged=None)
    for content in ladder["scales"].values():
        for model in content["models"].values():
            model["tried"] = []
    assert draw_bowls(ladder) is None
