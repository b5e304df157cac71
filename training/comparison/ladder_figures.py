"""The figures of a ladder of scales: loss, compute multiplier and improvement over compute, and loss over learning rate.

Each function takes the results of a comparison at several scales and returns a figure, or `None` if there are no data for it.
Compute is in FLOPs of a run. Intervals are those of the trend.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from .figures import NOISE, add_legend, begin_figure, model_styles, noise_patch, scale_percent
from .outcome import Outcome, RunOutcome
from .trend import Step


_GREY = "#555555"


def draw_losses(outcome: Outcome) -> Figure | None:
    """Test losses of all seeds over compute, and a line through the means of each model."""
    styles = _styles(outcome)
    losses = {
        name: {scale: [run.test_loss for run in found.models[name].finished] for scale, found in outcome.scales.items()}
        for name in styles
    }
    if not any(values for found in losses.values() for values in found.values()):
        return None
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots()
    for name, found in losses.items():
        places = [_flops(outcome, scale, name) for scale in found]
        style = {**styles[name], "linewidth": 0.7 * styles[name]["linewidth"], "markersize": 4}
        known = [(place, np.mean(values)) for place, values in zip(places, found.values()) if values]
        if known:
            axes.plot(*zip(*known), **{**style, "marker": None, "alpha": 0.8})
        points = [(place, value) for place, values in zip(places, found.values()) for value in values]
        if points:
            axes.plot(*zip(*points), **{**style, "linestyle": "none", "alpha": 0.6})
    _scale_compute(axes, outcome)
    axes.grid(alpha=0.25)
    axes.set_ylabel("test loss (nats per token)")
    axes.set_title(f"{outcome.name}: loss over compute, every seed", parse_math=False)
    add_legend(figure, outcome.baseline, _all_runs(outcome), styles)
    return figure


def draw_multipliers(outcome: Outcome) -> Figure | None:
    """How much more compute the baseline would need, over compute. An arrow stands for one beyond the reach of the curve."""
    styles = _styles(outcome)
    known = [step for step in _all_steps(outcome) if step.multiplier is not None]
    if not known:
        return None
    figure, axes = begin_figure(1.0)
    ends = [end for step in known for end in (step.multiplier, *(step.multiplier_interval or ())) if end is not None]
    axes.set_yscale("log")
    axes.set_ylim(min(*ends, 0.9) / 1.08, max(*ends, 1.1) * 1.08)
    bottom, top = axes.get_ylim()
    is_any_open = False
    for place, step, style in _draw_lines(axes, outcome, "multiplier"):
        value, interval = step.multiplier, step.multiplier_interval
        if value is not None:
            low, high = interval or (value, value)
            reach = [[value - (low or bottom)], [(high or top) - value]]
            axes.errorbar(place, value, yerr=reach, capsize=3 if None not in (low, high) else 0, **style)
            arrows = [0.965] * (high is None) + [0.035] * (low is None)
        elif step.note == "beyond":
            arrows = [0.965 if step.difference > 0 else 0.035]
        else:
            continue
        is_any_open |= bool(arrows)
        for end in arrows:
            sign = r"$\uparrow$" if end > 0.5 else r"$\downarrow$"
            axes.plot(place, end, color=style["color"], marker=sign, markersize=14, transform=axes.get_xaxis_transform())
    _scale_compute(axes, outcome)
    digits = (1, 2, 5) if top / bottom > 10 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(10, subs=digits))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", alpha=0.25)
    axes.set_ylabel(f"FLOPs that {outcome.baseline} needs for the same loss\n(as a multiple)", parse_math=False)
    axes.set_title(f"{outcome.name}: compute multiplier over {outcome.baseline}; up is better", parse_math=False)
    arrow = Line2D(
        [], [], color=_GREY, linestyle="none", marker=r"$\uparrow$", markersize=11, label="more than a decade beyond the ladder"
    )
    add_legend(
        figure,
        outcome.baseline,
        _all_runs(outcome),
        {name: styles[name] for name in outcome.trend.models},
        [arrow] if is_any_open else [],
    )
    return figure


def draw_improvements(outcome: Outcome) -> Figure | None:
    """Improvement of the test loss over compute."""
    trend, styles = outcome.trend, _styles(outcome)
    if all(step.improvement is None for step in _all_steps(outcome)):
        return None
    figure, axes = begin_figure(0.0)
    floors = [(trend.flops[scale], floor) for scale, floor in trend.noise_floor_percent.items() if floor is not None]
    values = [0.0]
    if floors:
        places, floor = map(np.array, zip(*floors))
        axes.fill_between(places, -floor, floor, **NOISE)
        values += [*floor, *-floor]
    is_any_open = False
    for place, step, style in _draw_lines(axes, outcome, "improvement"):
        if step.improvement is not None:
            cross = {"marker": "X", "markerfacecolor": "white"} if step.improvement_interval is None else {}
            low, high = step.improvement_interval or (step.improvement, step.improvement)
            reach = [[step.improvement - low], [high - step.improvement]]
            axes.errorbar(place, step.improvement, yerr=reach, capsize=0 if cross else 3, **{**style, **cross})
            values += [low, high]
            is_any_open |= bool(cross)
    _scale_compute(axes, outcome)
    scale_percent(axes, "improvement of test loss (%)", values)
    axes.set_title(f"{outcome.name}: improvement over {outcome.baseline}; up is better", parse_math=False)
    cross = Line2D([], [], color=_GREY, linestyle="none", marker="X", markerfacecolor="white", label="no interval")
    others = [noise_patch()] * bool(floors) + [cross] * is_any_open
    shown = {name: styles[name] for name in outcome.trend.models}
    add_legend(figure, outcome.baseline, _all_runs(outcome), shown, others)
    return figure


def draw_bowls(outcome: Outcome) -> Figure | None:
    """Validation loss over learning rate at every scale: the runs that chose a rate, and their means over seeds.

    A cross at the top is a run that diverged; a rate at which one did has no mean. A ring marks the lowest mean
    of the rates that most seeds tried. Every reported run is visible; high losses of other runs are cut off.
    """
    styles = _styles(outcome)
    tried_at = {
        scale: {name: found.models[name].losses_by_rate() for name in styles} for scale, found in outcome.scales.items()
    }
    panels = [scale for scale, found in tried_at.items() if any(len(losses) > 1 for losses in found.values())]
    if not panels:
        return None
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.3 * rows + 1.2), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, scale in zip(grid, panels):
        means, losses, crosses = [], [], []
        for name, found in tried_at[scale].items():
            rates = sorted(found)
            finished = {rate: [loss for loss in found[rate] if loss is not None] for rate in rates}
            line = [(rate, np.mean(found[rate]) if None not in found[rate] else np.nan) for rate in rates]
            means += [mean for _, mean in line if np.isfinite(mean)]
            points = [(rate, loss) for rate in rates for loss in finished[rate]]
            losses += [loss for _, loss in points]
            crosses += [(rate, styles[name]["color"]) for rate in rates if None in found[rate]]
            style = {**styles[name], "markersize": 4}
            if points:
                axes.plot(*zip(*points), **{**style, "linestyle": "none", "alpha": 0.45, "markersize": 3})
                axes.plot(*zip(*line), **{**style, "marker": None, "linewidth": 0.8 * style["linewidth"]})
            if np.isfinite([mean for _, mean in line]).any():
                # Only rates that most seeds tried: the others were tried by seeds that did well there
                most = max(map(len, found.values()))
                tried = [(mean, rate) for rate, mean in line if np.isfinite(mean) and len(found[rate]) == most]
                if tried:
                    place = min(tried)[::-1]
                    axes.plot(*place, marker="o", markersize=10, markerfacecolor="none", color=style["color"], zorder=3)
        if means:
            # Rates that are far too large would flatten the bowls
            low, best = min(losses), min(means)
            high = min(max(means), best + 3 * (np.median(means) - best) or best * 1.01)
            reported = [run.validation_loss for name in styles for run in outcome.scales[scale].models[name].finished]
            high = max([high, *reported])
            if high > low:
                axes.set_ylim(low - 0.08 * (high - low), high + 0.12 * (high - low))
        for index, (rate, colour) in enumerate(crosses):
            shift = 0.03 * sum(rate == other for other, _ in crosses[:index])
            axes.plot(rate, 0.97 - shift, marker="x", color=colour, transform=axes.get_xaxis_transform(), markersize=6)
        axes.set_xscale("log")
        _tick_rates(axes, sorted({rate for found in tried_at[scale].values() for rate in found}))
        axes.set_title(scale, fontsize=10, parse_math=False)
        axes.grid(alpha=0.25)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for index, axes in enumerate(grid[: len(panels)]):
        if index % columns == 0:
            axes.set_ylabel("validation loss (nats)")
        if index + columns >= len(panels):
            axes.set_xlabel("learning rate")
    figure.suptitle(f"{outcome.name}: learning rates tried, mean over seeds", parse_math=False)
    ring = Line2D([], [], color=_GREY, linestyle="none", marker="o", markersize=10, markerfacecolor="none")
    ring.set_label("lowest mean of the rates that most seeds tried")
    cross = Line2D([], [], color=_GREY, linestyle="none", marker="x", label="a run diverged")
    is_any_diverged = any(None in found[rate] for scale in panels for found in tried_at[scale].values() for rate in found)
    add_legend(figure, outcome.baseline, _all_runs(outcome), styles, [ring, cross] if is_any_diverged else [ring])
    return figure


def _all_runs(outcome: Outcome) -> dict[str, list[RunOutcome]]:
    """The reported runs of each model at all scales, those of the baseline first."""
    names = [outcome.baseline, *outcome.trend.models]
    return {name: [run for found in outcome.scales.values() for run in found.models[name].runs] for name in names}


def _all_steps(outcome: Outcome) -> list[Step]:
    return [step for model in outcome.trend.models.values() for step in model.steps.values()]


def _styles(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return model_styles(outcome.baseline, outcome.trend.models)


def _flops(outcome: Outcome, scale: str, model: str) -> float:
    trend = outcome.trend
    return trend.flops[scale] if model == outcome.baseline else trend.models[model].steps[scale].flops


def _dodge_models(outcome: Outcome, names: list[str]) -> dict[str, list[float]]:
    """The place of each model at each scale: its compute, a little aside so that intervals do not cover each other."""
    scales = outcome.trend.flops
    decades = np.log10(list(scales.values()))
    gap = min(0.02 * (decades[-1] - decades[0] + 1), 0.5 * np.diff(decades).min() / max(len(names), 1))
    shifts = gap * (np.arange(len(names)) - (len(names) - 1) / 2)
    return {name: [_flops(outcome, scale, name) * 10**shift for scale in scales] for name, shift in zip(names, shifts)}


def _draw_lines(axes: Axes, outcome: Outcome, quantity: str) -> Iterator[tuple[float, Step, dict[str, Any]]]:
    """Joins a quantity of each model over the scales by a line, and yields place, step and style of each of its points."""
    styles, models = _styles(outcome), outcome.trend.models
    for name, places in _dodge_models(outcome, list(models)).items():
        style = {**styles[name], "linewidth": 1.5, "markersize": 7, "zorder": 3}
        points = list(zip(places, models[name].steps.values()))
        line = [(place, getattr(step, quantity)) for place, step in points if getattr(step, quantity) is not None]
        if line:
            axes.plot(*zip(*line), **{**style, "marker": None, "alpha": 0.5, "linewidth": 1})
        for place, step in points:
            yield place, step, style


def _scale_compute(axes: Axes, outcome: Outcome) -> None:
    """A logarithmic axis of compute, with the names of the scales above it."""
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of a run")
    axes.tick_params(axis="x", which="minor", labelsize=7.5)  # of ladders shorter than two decades
    flops = outcome.trend.flops
    above = axes.secondary_xaxis("top")
    above.xaxis.set_major_locator(FixedLocator(list(flops.values())))
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, index: list(flops)[index]))
    above.xaxis.set_minor_locator(NullLocator())
    above.tick_params(labelsize=9)
    axes.vlines(list(flops.values()), 0, 1, transform=axes.get_xaxis_transform(), color="#888888", alpha=0.2, linewidth=0.8)


def _tick_rates(axes: Axes, rates: list[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
