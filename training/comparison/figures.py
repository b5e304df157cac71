"""The figures of a comparison: of one scale over steps and parameters, of a ladder over compute and learning rate.

Each function returns a figure, or `None` if there are no data for it. Means are over the seeds of the reported runs,
without those that diverged, which the legend counts. A ladder has the intervals of its trend, and FLOPs of a run.
"""

import itertools
import math
import textwrap
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FixedLocator, Formatter, FuncFormatter, NullLocator, SymmetricalLogLocator

from ..disk import atomic_dir, read_bytes
from .inference import Interval
from .render import Section
from .results import Outcome, RunOutcome, ScaleOutcome
from .trend import COMPUTE


Style = dict[str, Any]
Points = list[tuple[float, float]]
# Of `(x, value, interval)`
Improvements = list[tuple[float, float, Interval | None]]

# For any colour vision: six of Okabe and Ito (2008), then three of Tol's "muted" (2021)
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933", "#332288")
# One fewer than the colours, so that pairs differ for many models
_MARKERS = "osD^vPX*"
BASELINE = {"color": "#222222", "marker": "h", "linewidth": 2.6, "zorder": 1.9}
_NOISE = {"color": "#888888", "alpha": 0.22, "linewidth": 0, "zorder": 0}
_EQUAL = {"color": "#56B4E9", "alpha": 0.12, "linewidth": 0, "zorder": -1}
_EQUALLY = "\n{} of equal size"
_CROSS = {"color": "#555555", "marker": "x"}
_NOISE_LABEL = Patch(label="noise floor: ±1 sd over seeds", **_NOISE)

# Inches. Text of 10 points is still read where a figure is as wide as a phone
_WIDTH = 6.0
_PIXELS = 1350
# An axis leaves out what is so many times the typical magnitude: it would flatten all else
_FAR = 30.0

# Title of each quantity, its unit, and the function that makes one curve of several layers
QUANTITIES = {
    "entropy": ("Entropy, mean over layers", "nats", np.mean),
    "first_token_mass": ("Mass on the first token, mean over layers", "share", np.mean),
    "zero_rows": ("Rows without any weight, mean over layers", "share", np.mean),
    "largest_weight": ("Largest weight of any layer", "|weight|", np.max),
    "smallest_score": ("Smallest score of any layer", "score", np.min),
    "largest_score": ("Largest score of any layer", "score", np.max),
    "gradient_norm": ("Gradient norm before clipping", "norm", np.max),
}


def figure_section(folder: Path, name: str, title: str, caption: str, figure: Figure) -> Section:
    """Writes `figures/NAME.png`, whole or not at all, and returns its section."""
    with atomic_dir(folder / "figures") as unfinished:
        figure.savefig(path := unfinished / f"{name}.png", dpi=_PIXELS / figure.get_figwidth())
        drawn = read_bytes(path)
    return Section(title, [caption], figure=(name, drawn))


def draw_curves(results: ScaleOutcome) -> Figure | None:
    """Losses over steps, and below the improvement over the baseline, as in Figure 1 of arXiv 2603.13381."""
    finished = {name: model.finished for name, model in results.models.items()}
    if not results.objective.has_parts or not any(finished.values()):
        return None
    figure = Figure(figsize=(_WIDTH, 6.5), layout="constrained")
    losses, improvements = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    improved, styles = _improvements_while_training(results), _model_styles(results)
    ends = {name: values[-1] for name, (_, values) in improved.items() if len(values)}
    limit = _limit(ends.values(), results.statistics.noise_floor_percent)
    far = {name: value for name, value in ends.items() if abs(value) > limit}
    labels = _draw_losses_over_steps(losses, results, far)

    reference = finished[results.baseline]
    steps, values = _align(run.history.validation_loss for run in reference)
    points = [(step, 0.0) for step in steps]
    improvements.axhline(0.0, color=BASELINE["color"], linewidth=BASELINE["linewidth"])
    if len(reference) > 1:
        floor = 100 * values.std(axis=0, ddof=1) / values.mean(axis=0)
        improvements.fill_between(steps, -floor, floor, **_NOISE)
        points += [*zip(steps, floor), *zip(steps, -floor)]
        labels.append(_NOISE_LABEL)
    for name, (steps, values) in improved.items():
        drawn = _plot(improvements, steps, values, styles[name])
        points += drawn if name not in far else []
    _scale_percent(improvements, "improvement (%)")
    _show_late_range(improvements, points)
    improvements.set_xlabel("optimizer step")
    beyond = "; ".join(f"{name} ends at {_percent(value)} %" for name, value in far.items())
    title = f"Improvement of validation loss over {results.baseline}; up is better"
    _set_title(improvements, f"{title}\nBeyond the axis: {beyond}" if far else title)
    return _add_legend(figure, results, labels)


def draw_task_curves(results: ScaleOutcome) -> Figure | None:
    """Losses over steps of a synthetic task. They end near 0, where a percentage of them says nothing."""
    if results.objective.has_parts or not any(model.finished for model in results.models.values()):
        return None
    figure, axes = _begin_figure("")
    labels = _draw_losses_over_steps(axes, results)
    axes.set_xlabel("optimizer step")
    return _add_legend(figure, results, labels)


def draw_parameters(results: ScaleOutcome) -> Figure | None:
    """Improvement against parameters, as in Figure 2 of arXiv 2603.13381; models of one size stand side by side."""
    effects = {results.baseline: (0.0, None)}
    for name, effect in results.statistics.effects.items():
        if effect.loss_improvement is not None:
            effects[name] = effect.loss_improvement, effect.loss_improvement_interval
    if len(effects) < 2 or not results.objective.has_parts:
        return None
    sizes = {name: results.models[name].size.non_embedding for name in effects}
    groups: list[list[str]] = []
    for name in sorted(effects, key=sizes.__getitem__):
        if groups and sizes[name] <= 1.01 * sizes[groups[-1][0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    places: dict[str, float] = {}
    for group in groups:
        first = max(places.values(), default=-2.0) + 2
        places |= {name: first + index for index, name in enumerate(group)}
    floor = results.statistics.noise_floor_percent or 0.0
    points = {name: [(places[name], *effect)] for name, effect in effects.items()}
    figure, axes = _begin_improvements(results, points, floor)
    axes.axhspan(-floor, floor, **_NOISE)
    centers, written = [], EngFormatter(places=1, sep=" ")
    for group in groups:
        low, high = places[group[0]], places[group[-1]]
        centers.append((low + high) / 2)
        if len(group) > 1:
            axes.axvspan(low - 0.5, high + 0.5, **_EQUAL)
    labels = [f"{written(sizes[group[0]])}{_EQUALLY.format(len(group)) if len(group) > 1 else ''}" for group in groups]
    axes.set_xticks(centers, labels, rotation=0 if len(groups) <= 6 else 45)
    axes.set_xlim(-1, max(places.values()) + 1)
    axes.set_xlabel("non-embedding parameters, in order" if len(groups) > 1 else "non-embedding parameters")
    return _add_legend(figure, results, [_NOISE_LABEL] if floor else [])


def draw_interim(results: ScaleOutcome) -> Figure | None:
    interims = {name: history for name, history in (results.interim or {}).items() if history}
    if not interims or not results.objective.has_parts:
        return None
    points: dict[str, Improvements] = {}
    for index, (name, history) in enumerate(interims.items()):
        shift = 0.6 * ((index + 0.5) / len(interims) - 0.5)
        points[name] = [
            (interim.seeds + shift, interim.loss_improvement, interim.loss_improvement_interval)
            for interim in history
            if interim.loss_improvement_interval is not None
        ]
    figure, axes = _begin_improvements(results, points, 0.0)
    axes.set_xticks(sorted({interim.seeds for history in interims.values() for interim in history}))
    axes.set_xlabel("seeds")
    return _add_legend(figure, results)


def draw_stability(results: ScaleOutcome) -> Figure | None:
    styles, panels = _model_styles(results), {}
    for quantity in QUANTITIES:
        curves = {name: [over_layers(run, quantity) for run in results.models[name].runs] for name in styles}
        # A constant is left out, such as the rows without weight under softmax
        if len({value for of_model in curves.values() for curve in of_model for _, value in curve}) > 1:
            panels[quantity] = curves
    if not panels.keys() - {"gradient_norm"}:
        return None
    figure, grid = _begin_panels(len(panels), columns=2, height=2.0, more=1.2, sharex=True)
    for axes, (quantity, curves) in zip(grid, panels.items()):
        title, unit, _ = QUANTITIES[quantity]
        points: Points = []
        for name, style in styles.items():
            style = {**style, "linewidth": 0.7 * style["linewidth"], "marker": None}
            runs = list(zip(results.models[name].runs, curves[name]))
            steps, values = _align(curve for run, curve in runs if not run.diverged)
            points += _plot(axes, steps, values.mean(axis=0), style)
            for run, curve in runs:
                if run.diverged and curve:
                    points += _plot(axes, *zip(*curve), {**style, "linestyle": ":"})
                    axes.plot(*curve[-1], marker="x", color=style["color"])
        _compress(axes, [value for _, value in points], 10.0)
        axes.set_title(title.replace(", ", ",\n"), fontsize=10)
        axes.set(ylabel=unit)
        axes.grid(alpha=0.25)
    for axes in grid[-2:]:  # the lowest of each column
        axes.set_xlabel("optimizer step")
        axes.tick_params(labelbottom=True)
    figure.suptitle("Stability while training, mean over seeds", fontsize=11)
    return _add_legend(figure, results, [Line2D([], [], label="a run that diverged", linestyle=":", **_CROSS)])


def draw_losses(outcome: Outcome) -> Figure | None:
    figure, axes = _begin_figure(f"Loss over {outcome.trend.axis}, every seed")
    for name, style in _model_styles(outcome).items():
        losses = {
            outcome.trend.models[name].steps[scale].flops
            if name in outcome.trend.models
            else outcome.trend.flops[scale]: [run.test_loss for run in results.models[name].finished]
            for scale, results in outcome.scales.items()
        }
        _plot_seeds(axes, losses, style)
    if not any(len(line.get_xdata()) for line in axes.lines):
        return None
    _scale_compute(axes, outcome)
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"test loss (nats per {outcome.largest.objective.loss_unit})")
    return _add_legend(figure, outcome)


def draw_accuracies(outcome: Outcome) -> Figure | None:
    """The accuracy of every seed on a synthetic task, which is often all or nothing; `None` for text."""
    of_scales = {outcome.trend.flops[scale]: results.accuracies for scale, results in outcome.scales.items()}
    if not all(of_scales.values()):
        return None
    figure, axes = _begin_figure(f"Accuracy over {outcome.trend.axis}, every seed")
    styles = _model_styles(outcome)
    for index, (name, style) in enumerate(styles.items()):
        shift = 1 + 0.02 * (index - (len(styles) - 1) / 2)  # else models that all learn it hide one another
        _plot_seeds(axes, {x * shift: [100 * each for each in values[name]] for x, values in of_scales.items()}, style)
    _scale_compute(axes, outcome)
    axes.grid(alpha=0.25)
    axes.set_ylabel("accuracy in the test (%)")
    axes.set_ylim(-3, 103)
    return _add_legend(figure, outcome)


def draw_improvements(outcome: Outcome) -> Figure | None:
    trend, points = outcome.trend, {}
    if not outcome.largest.objective.has_parts:
        return None  # as for `draw_task_curves`
    for index, (name, model) in enumerate(trend.models.items()):
        shift = 1 + 0.08 * (index - (len(trend.models) - 1) / 2)
        steps = (step for step in model.steps.values() if step.improvement is not None)
        points[name] = [(step.flops * shift, step.improvement, step.improvement_interval) for step in steps]
    floors = [(trend.flops[scale], floor) for scale, floor in trend.noise_floor_percent.items() if floor is not None]
    if not floors and not any(points.values()):
        return None
    flops, floor = np.array(floors).reshape(-1, 2).T
    figure, axes = _begin_improvements(outcome, points, max(floor, default=0.0))
    axes.fill_between(flops, -floor, floor, **_NOISE)
    _scale_compute(axes, outcome)
    return _add_legend(figure, outcome, [_NOISE_LABEL] if floors else [], has_baseline=False)


def draw_bowls(outcome: Outcome) -> Figure | None:
    """Validation loss over learning rate at every scale: the runs that chose a rate, and their means over seeds.

    A cross at the top marks a rate at which a run diverged. Losses far above those of reported runs are cut off.
    """
    panels = {
        scale: results
        for scale, results in outcome.scales.items()
        if any(len(model.losses_by_rate()) > 1 for model in results.models.values())
    }
    if not panels:
        return None
    figure, grid = _begin_panels(len(panels), columns=min(len(panels), 2), height=2.5, more=1.2)
    for axes, (scale, results) in zip(grid, panels.items()):
        _draw_bowls_at(axes, results)
        axes.set_title(scale, fontsize=10, parse_math=False)
        axes.set_xlabel("learning rate")
    for axes in grid[::2]:  # the first of each row
        axes.set_ylabel(f"validation {outcome.largest.objective.loss_name} (nats)")
    figure.suptitle("Learning rates tried, mean over seeds", fontsize=11)
    return _add_legend(figure, outcome, [Line2D([], [], label="a run diverged", linestyle="none", **_CROSS)])


def draw_intervals(title: str, what: str, rows: Sequence[tuple[str, float, Interval]], summaries: int = 0) -> Figure:
    """Draws numbers with their intervals, one below the other; the last are `summaries` of those above."""
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.0, color=BASELINE["color"], linewidth=1)
    for line, (_, value, (low, high)) in enumerate(rows):
        is_summary = line >= len(rows) - summaries
        style = {"fmt": "D", "color": BASELINE["color"]} if is_summary else {"fmt": "o", "color": _COLOURS[0]}
        axes.errorbar(value, line, xerr=[[max(value - low, 0)], [max(high - value, 0)]], capsize=3, **style)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(f"{what}; right is better")
    axes.set_title(title, parse_math=False)
    axes.grid(axis="x", alpha=0.25)
    return figure


def _draw_losses_over_steps(axes: Axes, results: ScaleOutcome, far: Container[str] = ()) -> list[Line2D]:
    """Draws the losses of every model, and returns the legend's entries; the models `far` do not set the axis."""
    points: Points = []
    for name, style in _model_styles(results).items():
        runs = results.models[name].finished
        steps, values = _align(run.history.validation_loss for run in runs)
        band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), **band)
        drawn = _plot(axes, steps, values.mean(axis=0), style)
        steps, values = _align(run.history.train_loss for run in runs)
        thin = {**style, "linestyle": "--", "linewidth": 1.2, "alpha": 0.8, "marker": None}
        drawn += _plot(axes, steps, _smooth(values.mean(axis=0)), thin)
        points += drawn if name not in far else []
    _show_late_range(axes, points)
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"loss (nats per {results.objective.loss_unit})")
    _set_title(axes, "Loss while training, mean over seeds")
    grey = {"color": "#555555", "linewidth": 1.6}
    return [Line2D([], [], label="validation", **grey), Line2D([], [], label="training", linestyle="--", **grey)]


def _draw_bowls_at(axes: Axes, results: ScaleOutcome) -> None:
    means, rates = [], set()
    for name, style in _model_styles(results).items():
        tried = results.models[name].losses_by_rate()
        rates |= tried.keys()
        _plot_runs(axes, tried, {**style, "alpha": 0.45, "markersize": 3})
        means += _plot_means(axes, tried, {**style, "linewidth": 1.2})
        for rate in (rate for rate, losses in tried.items() if None in losses):
            axes.plot(rate, 0.97, marker="x", color=style["color"], transform=axes.get_xaxis_transform())
    if means:
        reported = [run.validation_loss for model in results.models.values() for run in model.finished]
        # Rates that are far too large would flatten the bowls
        high = max([*reported, min(max(means), min(means) + 3 * (np.median(means) - min(means)))])
        low = min([*means, *reported])
        margin = 0.1 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(rates)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=45)
    axes.grid(alpha=0.25)


def _plot_runs(axes: Axes, losses: dict[float, list[float | None]], style: Style) -> None:
    points = [(x, loss) for x, values in losses.items() for loss in values if loss is not None]
    axes.plot([x for x, _ in points], [loss for _, loss in points], **{**style, "linestyle": "none"})


def _plot_means(axes: Axes, losses: dict[float, list[float | None]], style: Style) -> list[float]:
    """Joins the means where no run diverged, and returns them."""
    means = {x: np.mean(values) for x, values in losses.items() if values and None not in values}
    axes.plot([*means], [*means.values()], **{**style, "marker": None})
    return list(means.values())


def _plot_seeds(axes: Axes, values: dict[float, list[float | None]], style: Style) -> None:
    _plot_means(axes, values, {**style, "alpha": 0.8})
    _plot_runs(axes, values, {**style, "alpha": 0.6, "markersize": 4})


def _begin_figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    _set_title(axes, title)
    return figure, axes


def _set_title(axes: Axes, title: str) -> None:
    lines = [textwrap.fill(line, 62) for line in title.splitlines()]
    axes.set_title("\n".join(lines), fontsize=11, parse_math=False)  # a name may hold a $


def _begin_panels(count: int, columns: int, height: float, more: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Returns a figure of panels; a row has a `height` in inches, and the rest `more`."""
    rows = -(-count // columns)
    figure = Figure(figsize=(_WIDTH, height * rows + more), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid[:count]


def _begin_improvements(
    results: Outcome | ScaleOutcome, points: dict[str, Improvements], floor: float
) -> tuple[Figure, Axes]:
    """Draws the improvements of models, joined over a ladder; numbers stand for points far beyond the others."""
    figure, axes = _begin_figure(f"Improvement over {results.baseline}; up is better")
    axes.axhline(0.0, color=BASELINE["color"], linewidth=1)
    styles, shown, far = _model_styles(results), [-floor, floor], []
    limit = _limit((value for improvements in points.values() for _, value, _ in improvements), floor)
    for name, improvements in points.items():
        for x, value, interval in improvements:
            low, high = interval or (value, value)
            style = {**styles[name], "linewidth": 1.5, "markersize": 7, "zorder": 3}
            # An interval without width may be off by rounding
            axes.errorbar(x, value, yerr=[[max(value - low, 0)], [max(high - value, 0)]], capsize=3, **style)
            if abs(value) > limit:
                far.append((x, value, style["color"]))
            else:
                shown += [max(low, -limit), min(high, limit)]
        if isinstance(results, Outcome):
            line = {**styles[name], "marker": None, "alpha": 0.5, "linewidth": 1}
            axes.plot([x for x, *_ in improvements], [value for _, value, _ in improvements], **line)
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin * (1 + 3 * any(value < 0 for _, value, _ in far)), high + margin)
    for x, value, colour in far:
        end, offset = (0, 20) if value < 0 else (1, -20)
        place = {"xycoords": axes.get_xaxis_transform(), "xytext": (0, offset), "textcoords": "offset points"}
        style = {"ha": "center", "color": colour, "arrowprops": {"arrowstyle": "-|>", "color": colour}}
        axes.annotate(f"{_percent(value)} %", (x, end), **place, **style)
    loss_name = "loss" if isinstance(results, Outcome) else results.objective.loss_name
    _scale_percent(axes, f"improvement of test {loss_name} (%)")
    return figure, axes


def _limit(improvements: Iterable[float], floor: float | None) -> float:
    """Returns the largest improvement that an axis shows, by the typical one and by the noise floor."""
    magnitudes = sorted(abs(value) for value in improvements if value)
    typical = magnitudes[(len(magnitudes) - 1) // 2] if magnitudes else math.inf
    return _FAR * max(typical, floor or 0.0)


def _percent(value: float) -> str:
    return Formatter.fix_minus(f"{value:+.3g}") if value else "0"


def _improvements_while_training(results: ScaleOutcome) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns steps and percents of each model, means over the seeds that it and the baseline finished."""
    reference, improved = results.models[results.baseline].finished, {}
    for name, model in results.models.items():
        pairs = [(run, other) for run in model.finished for other in reference if run.seed == other.seed]
        if pairs and name != results.baseline:
            steps, values = _align(run.history.validation_loss for pair in pairs for run in pair)
            own, baseline = values[0::2].mean(axis=0), values[1::2].mean(axis=0)
            improved[name] = steps, 100 * (baseline - own) / baseline
    return improved


def _model_styles(results: Outcome | ScaleOutcome) -> dict[str, Style]:
    """The style of each model, the same in every figure; the baseline is first."""
    models = results.trend.models if isinstance(results, Outcome) else results.models
    styles = {results.baseline: BASELINE}
    for index, name in enumerate(name for name in models if name != results.baseline):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        styles[name] = {"color": colour, "marker": marker, "linewidth": 1.6, "zorder": 2}
    return styles


def over_layers(run: RunOutcome, quantity: str) -> Points:
    """The curve of a quantity in a run, over the layers that have it at each step."""
    curves = [layer[quantity] for layer in run.history.stability.values() if quantity in layer]
    values: dict[int, list[float]] = {}
    for step, value in itertools.chain(*curves, run.history.gradient_norm if quantity == "gradient_norm" else ()):
        if value is not None:
            values.setdefault(step, []).append(value)
    return [(step, float(QUANTITIES[quantity][2](entries))) for step, entries in sorted(values.items())]


def _align(curves: Iterable[Sequence[tuple[int, float | None]]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps where every curve has a value, and the values `(curve, step)`, empty without curves."""
    values = [{step: value for step, value in curve if value is not None} for curve in curves] or [{}]
    steps = sorted(set.intersection(*(set(curve) for curve in values)))
    return np.array(steps), np.array([[curve[step] for step in steps] for curve in values], dtype=float)


def _plot(axes: Axes, steps: Sequence[int], values: Sequence[float], style: Style) -> Points:
    """Draws a curve, with markers where there are few points, and returns its points."""
    axes.plot(steps, values, **{**style, "marker": style["marker"] if len(steps) <= 20 else None, "markersize": 4})
    return list(zip(steps, values))


def _smooth(values: np.ndarray) -> np.ndarray:
    if not len(values):
        return values
    window = np.ones(len(values) // 20 | 1)  # odd, so that it has a middle
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _show_late_range(axes: Axes, points: Points) -> None:
    """Leaves out the first fifth of training."""
    last = max((step for step, _ in points), default=0)
    values = [value for step, value in points if step >= 0.2 * last]
    if values:
        margin = 0.05 * (max(values) - min(values)) or 0.1
        axes.set_ylim(min(values) - margin, max(values) + margin)


def _compress(axes: Axes, values: Sequence[float], ratio: float) -> None:
    """Makes the axis logarithmic beyond the median magnitude if a value is `ratio` times larger."""
    magnitudes = [abs(value) for value in values if value]
    if magnitudes and max(magnitudes) > ratio * np.median(magnitudes):
        limit = float(np.median(magnitudes))
        axes.set_yscale("symlog", linthresh=limit)
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=limit, subs=(1, 2, 5)))


def _scale_percent(axes: Axes, label: str) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: _percent(value))
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.25)


def _add_legend(
    figure: Figure, results: Outcome | ScaleOutcome, labels: Sequence[Line2D | Patch] = (), has_baseline: bool = True
) -> Figure:
    """Adds a legend with the number of runs of each model that diverged, and returns the figure."""
    scales = results.scales.values() if isinstance(results, Outcome) else [results]
    handles = []
    for name, style in _model_styles(results).items():
        if name == results.baseline and not has_baseline:
            continue
        notes = ["baseline"] if name == results.baseline else []
        runs = [run for scale in scales for run in scale.models[name].runs]
        if diverged := sum(run.diverged for run in runs):
            notes.append(f"{diverged} of {len(runs)} diverged")
        handles.append(Line2D([], [], label=f"{name} ({', '.join(notes)})" if notes else name, **style))
    for columns in (3, 2, 1):  # as many as fit
        options = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False}
        legend = figure.legend(handles=[*handles, *labels], **options)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return figure
        figure.legends.clear()


def _scale_compute(axes: Axes, outcome: Outcome) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("FLOPs of a run" if outcome.trend.axis == COMPUTE else outcome.trend.axis)
    names, flops = zip(*outcome.trend.flops.items())
    form = ".3g" if outcome.trend.axis == COMPUTE else "g"
    axes.set_xticks(flops, [f"{size:{form}}".replace("e+", "e") for size in flops])
    axes.minorticks_off()
    above = axes.secondary_xaxis("top")
    above.xaxis.set_major_locator(FixedLocator(flops))
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, index: names[index]))
    above.xaxis.set_minor_locator(NullLocator())
    axes.vlines(flops, 0, 1, transform=axes.get_xaxis_transform(), color="#888888", alpha=0.2, linewidth=0.8)


# Title, caption, and the function that draws it; the first of a report's figures stands before its tables
FIGURES = {
    "curves": (
        "Losses over steps",
        "Above: validation loss (solid, with a band from the lowest seed to the highest) and training loss (dashed). "
        "Below: improvement of validation loss over the baseline, seed by seed.",
        draw_curves,
    ),
    "task_curves": (
        "Losses over steps",
        "Validation loss (solid, with a band from the lowest seed to the highest) and training loss (dashed).",
        draw_task_curves,
    ),
    "parameters": (
        "Improvement against parameters",
        "Improvement of test loss, with intervals. Models on a blue ground are equally large, to 1 %.",
        draw_parameters,
    ),
    "interim": (
        "Improvement at each interim analysis",
        "Improvement of test loss after each seed, with intervals that hold at all interim analyses together.",
        draw_interim,
    ),
    "stability": (
        "Stability",
        "Attention on the same tokens of the validation split while training; runs that diverged are dotted.",
        draw_stability,
    ),
}
FIGURES_OF_A_LADDER = {
    "accuracies": (
        "Accuracy over {axis}",
        "Accuracy in the test of every seed. Lines join means over the seeds.",
        draw_accuracies,
    ),
    "improvements": (
        "Improvement over {axis}",
        "Improvement of test loss with the interval of each model and scale; grey is the noise floor.",
        draw_improvements,
    ),
    "losses": ("Loss over {axis}", "Test loss of every run. Lines join means over the seeds.", draw_losses),
    "bowls": (
        "Loss against learning rate",
        "Validation loss of the runs that chose a rate, at each scale, and the mean of the seeds that tried it.",
        draw_bowls,
    ),
}
