"""The figures of a ladder of scales: loss, compute multiplier and improvement over compute, and loss over learning rate.

Each function takes the content of a ladder's `results.json` and returns a figure, or `None` if there are no data for it. That
content has `name`, `baseline`, `scales` (by name, the content of a comparison's `results.json`) and `trend` (that of `Trend`).
Compute is in FLOPs of a run. Intervals are those of the trend.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from .figures import BASELINE, NOISE, add_legend, model_styles, noise_patch, scale_percent
from .tables import losses_by_rate


_GREY = "#555555"


def draw_losses(ladder: dict[str, Any]) -> Figure | None:
    """Test losses of all seeds over compute, and a line through the means of each model."""
    styles, trend = _ladder_styles(ladder), ladder["trend"]
    losses = {name: {scale: _finished_losses(ladder, scale, name) for scale in trend["flops"]} for name in styles}
    if not any(values for found in losses.values() for values in found.values()):
        return None
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots()
    for name, found in losses.items():
        places = [_flops(ladder, scale, name) for scale in found]
        style = {**styles[name], "linewidth": 0.7 * styles[name]["linewidth"], "markersize": 4}
        known = [(place, np.mean(values)) for place, values in zip(places, found.values()) if values]
        if known:
            axes.plot(*zip(*known), **{**style, "marker": None, "alpha": 0.8})
        points = [(place, value) for place, values in zip(places, found.values()) for value in values]
        if points:
            axes.plot(*zip(*points), **{**style, "linestyle": "none", "alpha": 0.6})
    _scale_compute(axes, ladder)
    axes.grid(alpha=0.25)
    axes.set_ylabel("test loss (nats per token)")
    axes.set_title(f"{ladder['name']}: loss over compute, every seed", parse_math=False)
    add_legend(figure, _all_runs(ladder), styles, [])
    return figure


def draw_multipliers(ladder: dict[str, Any]) -> Figure | None:
    """How much more compute the baseline would need, over compute. An arrow stands for one beyond the reach of the curve."""
    styles = _ladder_styles(ladder)
    known = [step for step in _all_steps(ladder) if step["multiplier"] is not None]
    if not known:
        return None
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color=BASELINE["color"], linewidth=1, zorder=1)
    ends = [end for step in known for end in (step["multiplier"], *(step["multiplier_interval"] or ())) if end is not None]
    axes.set_yscale("log")
    axes.set_ylim(min(*ends, 0.9) / 1.08, max(*ends, 1.1) * 1.08)
    bottom, top = axes.get_ylim()
    is_any_open = False
    for place, step, style in _draw_lines(axes, ladder, "multiplier"):
        value, interval = step["multiplier"], step["multiplier_interval"]
        if value is not None:
            low, high = interval or (value, value)
            reach = [[value - (low or bottom)], [(high or top) - value]]
            axes.errorbar(place, value, yerr=reach, capsize=3 if None not in (low, high) else 0, **style)
            arrows = [0.965] * (high is None) + [0.035] * (low is None)
        elif step["note"] == "beyond":
            arrows = [0.965 if step["difference"] > 0 else 0.035]
        else:
            continue
        is_any_open |= bool(arrows)
        for end in arrows:
            sign = r"$\uparrow$" if end > 0.5 else r"$\downarrow$"
            axes.plot(place, end, color=style["color"], marker=sign, markersize=14, transform=axes.get_xaxis_transform())
    _scale_compute(axes, ladder)
    digits = (1, 2, 5) if top / bottom > 10 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(10, subs=digits))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", alpha=0.25)
    axes.set_ylabel(f"FLOPs that {ladder['baseline']} needs for the same loss\n(as a multiple)", parse_math=False)
    axes.set_title(f"{ladder['name']}: compute multiplier over {ladder['baseline']}; up is better", parse_math=False)
    arrow = Line2D(
        [], [], color=_GREY, linestyle="none", marker=r"$\uparrow$", markersize=11, label="more than a decade beyond the ladder"
    )
    add_legend(figure, _all_runs(ladder), _without_baseline(ladder, styles), [arrow] if is_any_open else [])
    return figure


def draw_improvements(ladder: dict[str, Any]) -> Figure | None:
    """Improvement of the test loss over compute."""
    trend, styles = ladder["trend"], _ladder_styles(ladder)
    if all(step["improvement"] is None for step in _all_steps(ladder)):
        return None
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.0, color=BASELINE["color"], linewidth=1, zorder=1)
    floors = [(trend["flops"][scale], floor) for scale, floor in trend["noise_floor_percent"].items() if floor is not None]
    values = [0.0]
    if floors:
        places, floor = map(np.array, zip(*floors))
        axes.fill_between(places, -floor, floor, **NOISE)
        values += [*floor, *-floor]
    is_any_open = False
    for place, step, style in _draw_lines(axes, ladder, "improvement"):
        if step["improvement"] is not None:
            cross = {"marker": "X", "markerfacecolor": "white"} if step["improvement_interval"] is None else {}
            low, high = step["improvement_interval"] or (step["improvement"], step["improvement"])
            reach = [[step["improvement"] - low], [high - step["improvement"]]]
            axes.errorbar(place, step["improvement"], yerr=reach, capsize=0 if cross else 3, **{**style, **cross})
            values += [low, high]
            is_any_open |= bool(cross)
    _scale_compute(axes, ladder)
    scale_percent(axes, "improvement of test loss (%)", values)
    axes.set_title(f"{ladder['name']}: improvement over {ladder['baseline']}; up is better", parse_math=False)
    cross = Line2D([], [], color=_GREY, linestyle="none", marker="X", markerfacecolor="white", label="no interval")
    others = [noise_patch()] * bool(floors) + [cross] * is_any_open
    add_legend(figure, _all_runs(ladder), _without_baseline(ladder, styles), others)
    return figure


def draw_bowls(ladder: dict[str, Any]) -> Figure | None:
    """Validation loss over learning rate at every scale: the runs that chose a rate, and their means over seeds.

    A cross at the top is a run that diverged; a rate at which one did has no mean. A ring marks the lowest mean
    of the rates that most seeds tried. Every reported run is visible; high losses of other runs are cut off.
    """
    styles, names = _ladder_styles(ladder), list(ladder["trend"]["flops"])
    tried_at = {scale: {name: losses_by_rate(ladder["scales"][scale], name) for name in styles} for scale in names}
    panels = [scale for scale in names if any(len(found) > 1 for found in tried_at[scale].values())]
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
            high = max([high, *_reported_validation_losses(ladder["scales"][scale], styles)])
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
    figure.suptitle(f"{ladder['name']}: learning rates tried, mean over seeds", parse_math=False)
    ring = Line2D([], [], color=_GREY, linestyle="none", marker="o", markersize=10, markerfacecolor="none")
    ring.set_label("lowest mean of the rates that most seeds tried")
    cross = Line2D([], [], color=_GREY, linestyle="none", marker="x", label="a run diverged")
    is_any_diverged = any(None in found[rate] for scale in panels for found in tried_at[scale].values() for rate in found)
    add_legend(figure, _all_runs(ladder), styles, [ring, cross] if is_any_diverged else [ring])
    return figure


def _all_runs(ladder: dict[str, Any]) -> dict[str, Any]:
    """The reported runs of each model at all scales, in the form of a comparison's results."""
    scales = ladder["scales"].values()
    names = [ladder["baseline"], *ladder["trend"]["models"]]
    models = {name: {"runs": [run for scale in scales for run in scale["models"][name]["runs"]]} for name in names}
    return {"baseline": ladder["baseline"], "models": models}


def _all_steps(ladder: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for model in ladder["trend"]["models"].values() for step in model["steps"].values()]


def _ladder_styles(ladder: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return model_styles(_all_runs(ladder))


def _without_baseline(ladder: dict[str, Any], styles: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: style for name, style in styles.items() if name != ladder["baseline"]}


def _flops(ladder: dict[str, Any], scale: str, model: str) -> float:
    trend = ladder["trend"]
    return trend["flops"][scale] if model == ladder["baseline"] else trend["models"][model]["steps"][scale]["flops"]


def _finished_losses(ladder: dict[str, Any], scale: str, model: str) -> list[float]:
    return [run["test_loss"] for run in ladder["scales"][scale]["models"][model]["runs"] if not run["diverged"]]


def _reported_validation_losses(results: dict[str, Any], models: Iterable[str]) -> list[float]:
    runs = [run for name in models for run in results["models"][name]["runs"]]
    return [run["validation_loss"] for run in runs if not run["diverged"]]


def _dodge_models(ladder: dict[str, Any], names: list[str]) -> dict[str, list[float]]:
    """The place of each model at each scale: its compute, a little aside so that intervals do not cover each other."""
    scales = ladder["trend"]["flops"]
    decades = np.log10(list(scales.values()))
    gap = min(0.02 * (decades[-1] - decades[0] + 1), 0.5 * np.diff(decades).min() / max(len(names), 1))
    shifts = gap * (np.arange(len(names)) - (len(names) - 1) / 2)
    return {name: [_flops(ladder, scale, name) * 10**shift for scale in scales] for name, shift in zip(names, shifts)}


def _draw_lines(axes: Axes, ladder: dict[str, Any], quantity: str) -> Iterator[tuple[float, dict[str, Any], dict[str, Any]]]:
    """Joins a quantity of each model over the scales by a line, and yields place, step and style of each of its points."""
    styles, models = _ladder_styles(ladder), ladder["trend"]["models"]
    for name, places in _dodge_models(ladder, list(models)).items():
        style = {**styles[name], "linewidth": 1.5, "markersize": 7, "zorder": 3}
        points = list(zip(places, models[name]["steps"].values()))
        line = [(place, step[quantity]) for place, step in points if step[quantity] is not None]
        if line:
            axes.plot(*zip(*line), **{**style, "marker": None, "alpha": 0.5, "linewidth": 1})
        for place, step in points:
            yield place, step, style


def _scale_compute(axes: Axes, ladder: dict[str, Any]) -> None:
    """A logarithmic axis of compute, with the names of the scales above it."""
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of a run")
    axes.tick_params(axis="x", which="minor", labelsize=7.5)  # of ladders shorter than two decades
    flops = ladder["trend"]["flops"]
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
