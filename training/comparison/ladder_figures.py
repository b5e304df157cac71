"""The figures of a ladder of scales: loss and improvement over compute, and loss over learning rate.

Each function takes the results of a comparison at several scales and returns a figure, or `None` if there are no data
for it; the table in `report.py` has their titles and captions. Compute is in FLOPs of a run. Intervals are those of
the trend.
"""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .figures import NOISE, add_legend, begin_figure, draw_interval, model_styles, noise_patch, scale_percent
from .outcome import Outcome, RunOutcome


def draw_losses(outcome: Outcome) -> Figure | None:
    """Test losses of all seeds over compute, and a line through the means of each model."""
    styles = _styles(outcome)
    figure, axes = begin_figure()
    is_empty = True
    for name, style in styles.items():
        losses = {
            float(outcome.scales[scale].flops(name)): [run.test_loss for run in found.models[name].finished]
            for scale, found in outcome.scales.items()
        }
        means = [(place, np.mean(values)) for place, values in losses.items() if values]
        points = [(place, value) for place, values in losses.items() for value in values]
        if points:
            is_empty = False
            axes.plot(*zip(*means), **{**style, "marker": None, "alpha": 0.8})
            axes.plot(*zip(*points), **{**style, "linestyle": "none", "alpha": 0.6, "markersize": 4})
    if is_empty:
        return None
    _scale_compute(axes, outcome)
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"test loss (nats per {outcome.largest.loss_unit})")
    axes.set_title(f"{outcome.name}: loss over compute, every seed", parse_math=False)
    add_legend(figure, outcome.baseline, _all_runs(outcome), styles)
    return figure


def draw_improvements(outcome: Outcome) -> Figure | None:
    """Improvement of the test loss over compute; the models stand a little aside so that intervals do not cover each
    other.
    """
    trend, styles = outcome.trend, _styles(outcome)
    figure, axes = begin_figure()
    axes.axhline(0.0, color=styles[outcome.baseline]["color"], linewidth=1)
    values = [0.0]
    floors = [(trend.flops[scale], floor) for scale, floor in trend.noise_floor_percent.items() if floor is not None]
    if floors:
        places, floor = map(np.array, zip(*floors))
        axes.fill_between(places, -floor, floor, **NOISE)
        values += [*floor, *-floor]
    for index, (name, model) in enumerate(trend.models.items()):
        shift = 1 + 0.06 * (index - (len(trend.models) - 1) / 2)
        known = [(step.flops * shift, step) for step in model.steps.values() if step.improvement is not None]
        for place, step in known:
            values += draw_interval(axes, place, step.improvement, step.improvement_interval, styles[name])
        line = [(place, step.improvement) for place, step in known]
        if line:
            axes.plot(*zip(*line), **{**styles[name], "marker": None, "alpha": 0.5, "linewidth": 1})
    if len(values) == 1:
        return None
    _scale_compute(axes, outcome)
    scale_percent(axes, "improvement of test loss (%)", values)
    axes.set_title(f"{outcome.name}: improvement over {outcome.baseline}; up is better", parse_math=False)
    shown = {name: styles[name] for name in trend.models}
    add_legend(figure, outcome.baseline, _all_runs(outcome), shown, [noise_patch()] if floors else [])
    return figure


def draw_bowls(outcome: Outcome) -> Figure | None:
    """Validation loss over learning rate at every scale: the runs that chose a rate, and their means over seeds.

    A cross at the top is a rate at which a run diverged, which has no mean. Every reported run is visible; losses of
    other runs that lie far above are cut off.
    """
    styles = _styles(outcome)
    tried_at = {
        scale: {name: found.models[name].losses_by_rate() for name in styles}
        for scale, found in outcome.scales.items()
    }
    panels = [scale for scale, found in tried_at.items() if any(len(losses) > 1 for losses in found.values())]
    if not panels:
        return None
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.3 * rows + 1.2), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, scale in zip(grid, panels):
        means, reported = [], []
        for name, found in tried_at[scale].items():
            style = {**styles[name], "markersize": 3}
            line = [(rate, np.mean(losses)) for rate, losses in found.items() if None not in losses]
            points = [(rate, loss) for rate, losses in found.items() for loss in losses if loss is not None]
            if points:
                axes.plot(*zip(*points), **{**style, "linestyle": "none", "alpha": 0.45})
            if line:
                axes.plot(*zip(*line), **{**style, "marker": None, "linewidth": 1.2})
            for rate in (rate for rate, losses in found.items() if None in losses):
                axes.plot(rate, 0.97, marker="x", color=style["color"], transform=axes.get_xaxis_transform())
            means += [mean for _, mean in line]
            reported += [run.validation_loss for run in outcome.scales[scale].models[name].finished]
        if means:
            # Rates that are far too large would flatten the bowls
            high = max([*reported, min(max(means), min(means) + 3 * (np.median(means) - min(means)))])
            low = min([*means, *reported])
            margin = 0.1 * (high - low) or 0.1
            axes.set_ylim(low - margin, high + margin)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(
            FixedLocator(sorted({rate for found in tried_at[scale].values() for rate in found}))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(scale, fontsize=10, parse_math=False)
        axes.set(xlabel="learning rate", ylabel=f"validation {outcome.largest.loss_name} (nats)")
        axes.grid(alpha=0.25)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(f"{outcome.name}: learning rates tried, mean over seeds", parse_math=False)
    cross = Line2D([], [], color="#555555", linestyle="none", marker="x", label="a run diverged")
    add_legend(figure, outcome.baseline, _all_runs(outcome), styles, [cross])
    return figure


def _all_runs(outcome: Outcome) -> dict[str, list[RunOutcome]]:
    """The reported runs of each model at all scales, those of the baseline first."""
    names = [outcome.baseline, *outcome.trend.models]
    return {name: [run for found in outcome.scales.values() for run in found.models[name].runs] for name in names}


def _styles(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return model_styles(outcome.baseline, outcome.trend.models)


def _scale_compute(axes: Axes, outcome: Outcome) -> None:
    """A logarithmic axis of compute, with the names of the scales above it."""
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of a run")
    flops = outcome.trend.flops
    above = axes.secondary_xaxis("top")
    above.xaxis.set_major_locator(FixedLocator(list(flops.values())))
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, index: list(flops)[index]))
    above.xaxis.set_minor_locator(NullLocator())
    axes.vlines(
        list(flops.values()), 0, 1, transform=axes.get_xaxis_transform(), color="#888888", alpha=0.2, linewidth=0.8
    )
