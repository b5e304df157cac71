"""The trend over a ladder of scales: how the improvement of each model over the baseline changes with compute.

Runs of one seed at one scale saw the same tokens, so they are paired; seeds of different scales are independent.
Losses are in nats per token, and compute is in FLOPs of a run of the baseline.

An improvement, its slope over log10 of compute, and to first order the compute multiplier are weighted sums of means
over the seeds of a scale. So `noise.welch_sum` gives all tests and intervals.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from .inference import Interval, holm
from .multiplier import LossCurve
from .noise import welch_sum


@dataclass(frozen=True)
class ScaleLosses:
    """The losses of all models at one scale, with the same seeds for each.

    Attributes:
        losses: `losses[model][seed]`, the final test loss; None, NaN or infinity if the run diverged.
        at_boundary: models whose best learning rate is at the boundary of those tried.
    """

    name: str
    flops: dict[str, float]
    losses: dict[str, dict[int, float | None]]
    at_boundary: Collection[str] = ()


@dataclass(frozen=True)
class Step:
    """One model at one scale. Values that cannot be computed are None.

    Attributes:
        improvement: percent of the baseline's mean loss, over the seeds that both finished.
        improvement_interval: a paired t interval; the baseline's mean loss counts as known.
        multiplier: how many times the model's FLOPs the baseline would need to be as good.
        multiplier_interval: an end is None if it lies more than `REACH` decades beyond the ladder.
        note: "beyond" if the multiplier or an end lies there; else the reason for no multiplier, or empty.
    """

    flops: float
    improvement: float | None
    improvement_interval: Interval | None
    multiplier: float | None = None
    multiplier_interval: Interval | None = None
    note: str = ""


class TrendVerdict(StrEnum):
    """How the improvement of a model changes with compute."""

    GROWS = "grows"
    SHRINKS = "shrinks"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class ModelTrend:
    """The trend of a model, and the model at each scale.

    The improvement of a worse model is negative: it "grows" if the model catches up.

    Attributes:
        meaning: the verdict in words, or why there is no test.
        slope: of the least-squares line through the improvements, in percent of the loss per decade of compute.
    """

    verdict: TrendVerdict
    meaning: str
    steps: dict[str, Step]
    slope: float | None = None
    slope_interval: Interval | None = None
    p: float | None = None
    holm_p: float | None = None


@dataclass(frozen=True)
class Trend:
    """The trends of a ladder, without NaN or infinity.

    Attributes:
        alpha: the nominal probability that any model wrongly grows or shrinks.
        flops: of a run of the baseline at each scale, ascending.
        noise_floor_percent: standard deviation of the baseline's loss over seeds, in percent of its mean.
    """

    baseline: str
    alpha: float
    flops: dict[str, float]
    noise_floor_percent: dict[str, float | None]
    multiplier_note: str
    models: dict[str, ModelTrend]


def analyse_trend(scales: Sequence[ScaleLosses], baseline: str, alpha: float = 0.05) -> Trend:
    """Compares every model with the baseline at every scale, and over the scales.

    The test is on the slope of the least-squares line through the improvements in percent, where all scales count
    equally. It is left out if the model or the baseline has a diverged run or is `at_boundary` at a scale.

    Args:
        scales: two or more, in any order, with the same models and no two of the same compute.
    """
    scales = sorted(scales, key=lambda scale: scale.flops[baseline])
    names, flops = [scale.name for scale in scales], [float(scale.flops[baseline]) for scale in scales]
    losses = [{model: _array(scale, model) for model in scale.losses} for scale in scales]

    def whole(model: str) -> list[int]:
        """The scales at which all runs of a model finished at settled rates."""
        return [
            index
            for index, (scale, found) in enumerate(zip(scales, losses))
            if np.isfinite(found[model]).all() and model not in scale.at_boundary
        ]

    curve, multiplier_note, measured = None, "", whole(baseline)
    try:
        curve = LossCurve(
            names=[names[index] for index in measured],
            flops=[flops[index] for index in measured],
            losses=[losses[index][baseline] for index in measured],
        )
    except ValueError as error:
        multiplier_note = str(error)

    decades, models = np.log10(flops), {}
    for model in (name for name in scales[0].losses if name != baseline):
        steps, notes = {}, []
        for index, (scale, found) in enumerate(zip(scales, losses)):
            step = _step(found[baseline], found[model], float(scale.flops[model]), 1 - alpha)
            note = _obstacle(scale, baseline, model, found)
            if note:
                step = replace(step, note=note, improvement_interval=None)
            elif curve is None:
                step = replace(step, note="no multiplier")
            else:
                multiplier, interval = curve.multiplier(
                    measured.index(index), found[baseline] - found[model], step.flops, 1 - alpha
                )
                is_beyond = multiplier is None or None in (interval or ())
                step = replace(
                    step, multiplier=multiplier, multiplier_interval=interval, note="beyond" if is_beyond else ""
                )
            steps[scale.name] = step
            if note or len(found[model]) < 2:
                notes.append(f"{note or 'a single seed'} at {scale.name}")
        if notes:
            models[model] = ModelTrend(TrendVerdict.CANNOT_TELL, f"no test: {'; '.join(notes)}", steps)
        else:
            percents = [100 * (found[baseline] - found[model]) / found[baseline].mean() for found in losses]
            models[model] = _test(steps, decades, percents, 1 - alpha)
    tested = {name: trend for name, trend in models.items() if trend.p is not None}
    for (name, trend), holm_p in zip(tested.items(), holm(trend.p for trend in tested.values())):
        models[name] = _judge(replace(trend, holm_p=holm_p), alpha)
    return Trend(
        baseline=baseline,
        alpha=alpha,
        flops=dict(zip(names, flops)),
        noise_floor_percent={name: _noise_floor(found[baseline]) for name, found in zip(names, losses)},
        multiplier_note=multiplier_note,
        models=models,
    )


def _step(base: np.ndarray, model: np.ndarray, flops: float, confidence: float) -> Step:
    """Returns a step without its multiplier, from losses `(seed,)` that are NaN if diverged."""
    pairs = np.isfinite(base) & np.isfinite(model)
    improvement = interval = None
    if pairs.any():
        in_percent = 100 / float(base[pairs].mean())
        improvement = in_percent * float((base - model)[pairs].mean())
        if pairs.all() and (estimate := welch_sum([base - model])):
            low, high = estimate.interval(confidence)
            interval = in_percent * low, in_percent * high
    return Step(flops, improvement, interval)


def _obstacle(scale: ScaleLosses, baseline: str, model: str, found: dict[str, np.ndarray]) -> str:
    """Says what keeps a model from a test at a scale: diverged runs, or a best rate at the boundary."""
    for name, who, whose in ((model, "", "its"), (baseline, "the baseline ", "the baseline's")):
        if diverged := int((~np.isfinite(found[name])).sum()):
            return f"{who}diverged in {diverged} of {len(found[name])} runs"
        if name in scale.at_boundary:
            return f"{whose} best rate is at the boundary"
    return ""


def _test(steps: dict[str, Step], decades: np.ndarray, percents: list[np.ndarray], confidence: float) -> ModelTrend:
    """Tests the slope of the improvements in percent, each `(seed,)`, before Holm's correction and the verdict."""
    centred = decades - decades.mean()
    weights = centred / (centred @ centred)
    slope = welch_sum([weight * values for weight, values in zip(weights, percents)])
    return ModelTrend(
        verdict=TrendVerdict.CANNOT_TELL,
        meaning="",
        steps=steps,
        slope=slope.value,
        slope_interval=slope.interval(confidence),
        p=slope.p(),
    )


def _judge(trend: ModelTrend, alpha: float) -> ModelTrend:
    top = list(trend.steps.values())[-1].improvement
    verdict = TrendVerdict.CANNOT_TELL
    if trend.holm_p < alpha:
        verdict = TrendVerdict.GROWS if trend.slope > 0 else TrendVerdict.SHRINKS
    meaning = {
        TrendVerdict.GROWS: "pulls ahead of the baseline" if top > 0 else "catches up with the baseline",
        TrendVerdict.SHRINKS: "loses some of its lead over the baseline" if top > 0 else "falls behind the baseline",
        TrendVerdict.CANNOT_TELL: "the noise hides whether the distance from the baseline changes",
    }
    return replace(trend, verdict=verdict, meaning=meaning[verdict])


def _noise_floor(losses: np.ndarray) -> float | None:
    finished = losses[np.isfinite(losses)]
    return float(100 * finished.std(ddof=1) / finished.mean()) if len(finished) > 1 else None


def _array(scale: ScaleLosses, model: str) -> np.ndarray:
    """The losses of a model in order of seeds; NaN if diverged."""
    losses = np.array(
        [math.nan if loss is None else loss for _, loss in sorted(scale.losses[model].items())], dtype=float
    )
    return np.where(np.isfinite(losses), losses, math.nan)
