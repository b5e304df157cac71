"""The trend over a ladder of scales: how the improvement of each model over the baseline changes with compute.

Runs of one seed at one scale are paired; seeds of different scales are independent. Losses are in nats per token, and
compute is in FLOPs of a run of the baseline. The slope of an improvement over log10 of compute, and to first order
the compute multiplier, are weighted sums of means over the seeds of a scale. So `welch_sum` tests them.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from .inference import ALPHA, ROUNDING, Estimate, Interval, holm


# What a ladder climbs unless its scales are tasks
COMPUTE = "compute"

# In decades of compute beyond the ladder, where the curve is read
REACH = 1.0

# Relative step of a mean loss for the derivatives of the delta method
_STEP = 1e-5


@dataclass(frozen=True)
class ScaleLosses:
    """The losses `losses[model][seed]` at one scale, None if a run diverged; all models have the same seeds."""

    name: str
    flops: dict[str, float]
    losses: dict[str, dict[int, float | None]]
    at_boundary: Collection[str] = ()


@dataclass(frozen=True)
class Step:
    """One model at one scale. Values that cannot be computed are None."""

    flops: float
    improvement: float | None  # percent of the baseline's mean loss over the seeds that both finished
    improvement_interval: Interval | None = None  # of the analysis of this scale alone, see `trend_of`
    multiplier: float | None = None  # how many times the model's FLOPs the baseline would need to be as good
    multiplier_interval: Interval | None = None
    note: str = ""  # why there is no multiplier; "beyond" if it or an end lies over `REACH` decades beyond the ladder


class TrendVerdict(StrEnum):
    """How the improvement of a model changes with compute."""

    GROWS = "grows"
    SHRINKS = "shrinks"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class ModelTrend:
    """The trend of a model, and the model at each scale. A worse model "grows" if it catches up."""

    verdict: TrendVerdict
    meaning: str  # the verdict in words, or why there is no test
    steps: dict[str, Step]
    slope: float | None = None  # of the least-squares line, in percent of the loss per decade of compute
    slope_interval: Interval | None = None
    p: float | None = None
    holm_p: float | None = None


@dataclass(frozen=True)
class Trend:
    """The trends of a ladder, without NaN or infinity."""

    baseline: str
    alpha: float  # the nominal probability that any model wrongly grows or shrinks
    flops: dict[str, float]
    noise_floor_percent: dict[str, float | None]  # standard deviation of the baseline over seeds
    multiplier_note: str
    models: dict[str, ModelTrend]
    axis: str = COMPUTE  # or the size of a task, which `flops` then hold


def analyse_trend(scales: Sequence[ScaleLosses], baseline: str, axis: str = COMPUTE) -> Trend:
    """Compares every model with the baseline at every scale, and over the scales.

    The test is on the slope of the least-squares line through the improvements in percent. It is left out if the model
    or the baseline has a diverged run or is `at_boundary` at a scale. No two of the scales may have the same compute.
    With another `axis`, a size of a task, `flops` of a scale are its values, and there are no multipliers.
    """
    scales, level = sorted(scales, key=lambda scale: scale.flops[baseline]), 1 - ALPHA
    flops = {scale.name: float(scale.flops[baseline]) for scale in scales}
    losses = {scale.name: {model: _array(runs) for model, runs in scale.losses.items()} for scale in scales}
    settled = [scale.name for scale in scales if not _obstacle(scale, baseline, baseline, losses[scale.name])]
    curve, multiplier_note = None, ""
    try:
        if axis != COMPUTE:
            raise ValueError(f"There are no compute multipliers: the scales differ in {axis}, a size of the task.")
        curve = LossCurve(settled, [flops[name] for name in settled], [losses[name][baseline] for name in settled])
    except ValueError as error:
        multiplier_note = str(error)

    weights, models = slope_weights(flops.values()), {}
    for model in (name for name in scales[0].losses if name != baseline):
        steps, obstacles, percents = {}, [], []
        for scale in scales:
            at_scale, compute = losses[scale.name], float(scale.flops[model])
            differences = at_scale[baseline] - at_scale[model]
            improvement, multiplier, interval = _improvement(at_scale[baseline], differences), None, None
            note = _obstacle(scale, baseline, model, at_scale)
            if note or len(differences) < 2:
                obstacles.append(f"{note or 'a single seed'} at {scale.name}")
            else:
                percents.append(100 * differences / at_scale[baseline].mean())
            if curve is None:
                note = note or "no multiplier"
            elif not note:
                multiplier, interval = curve.multiplier(settled.index(scale.name), differences, compute, level)
                note = "beyond" if multiplier is None or None in (interval or ()) else ""
            steps[scale.name] = Step(compute, improvement, None, multiplier, interval, note)
        if obstacles:
            models[model] = ModelTrend(TrendVerdict.CANNOT_TELL, f"no test: {'; '.join(obstacles)}", steps)
        else:
            slope = welch_sum([weight * values for weight, values in zip(weights, percents)])
            fields = slope.value, slope.interval(level), slope.p()
            models[model] = ModelTrend(TrendVerdict.CANNOT_TELL, "", steps, *fields)
    tested = {name: trend for name, trend in models.items() if trend.p is not None}
    for (name, trend), holm_p in zip(tested.items(), holm(trend.p for trend in tested.values())):
        verdict, meaning = judge_slope(trend, holm_p)
        models[name] = replace(trend, verdict=verdict, meaning=meaning, holm_p=holm_p)
    floors = dict.fromkeys(losses)
    for name, runs in losses.items():
        finished = runs[baseline][np.isfinite(runs[baseline])]
        if len(finished) > 1 and finished.any():
            floors[name] = float(100 * finished.std(ddof=1) / finished.mean())
    return Trend(baseline, ALPHA, flops, floors, multiplier_note, models, axis)


def slope_weights(flops: Iterable[float]) -> np.ndarray:
    """Returns the weights of values in the slope of their least-squares line over log10 of compute."""
    decades = np.log10(list(flops))
    centred = decades - decades.mean()
    return centred / (centred @ centred)


def _array(runs: dict[int, float | None]) -> np.ndarray:
    """The losses in order of seeds; NaN if diverged."""
    losses = np.array([math.nan if loss is None else loss for _, loss in sorted(runs.items())], dtype=float)
    return np.where(np.isfinite(losses), losses, math.nan)


def _obstacle(scale: ScaleLosses, baseline: str, model: str, losses: dict[str, np.ndarray]) -> str:
    """Says what keeps a model from a test at a scale, or nothing."""
    for name, who, whose in ((model, "", "its"), (baseline, "the baseline ", "the baseline's")):
        if diverged := int(np.isnan(losses[name]).sum()):
            return f"{who}diverged in {diverged} of {len(losses[name])} runs"
        if name in scale.at_boundary:
            return f"{whose} best rate is at the boundary"
    return "" if losses[baseline].any() else "the baseline's loss is 0"


def _improvement(base: np.ndarray, differences: np.ndarray) -> float | None:
    """The mean in percent over the seeds that both finished."""
    pairs = np.isfinite(differences)
    return 100 / float(base[pairs].mean()) * float(differences[pairs].mean()) if base[pairs].any() else None


def judge_slope(trend: ModelTrend, holm_p: float) -> tuple[TrendVerdict, str]:
    is_ahead = list(trend.steps.values())[-1].improvement > 0
    if holm_p >= ALPHA:
        return TrendVerdict.CANNOT_TELL, "the noise hides whether the distance from the baseline changes"
    if trend.slope > 0:
        return TrendVerdict.GROWS, f"{'pulls ahead of' if is_ahead else 'catches up with'} the baseline"
    return TrendVerdict.SHRINKS, f"{'loses some of its lead over' if is_ahead else 'falls behind'} the baseline"


def welch_sum(parts: Sequence[np.ndarray], value: float | None = None) -> Estimate | None:
    """Adds the means of several scales, each with the noise of its own seeds, as `add` does.

    The mean of z_s over n_s seeds has the variance var(z_s) / n_s. Returns `None` if a scale has a single seed.

    Args:
        parts: z_s, a value for each seed, with the weight of the scale.
        value: the estimate, if the parts give only its noise (delta method).
    """
    if any(len(part) < 2 for part in parts):
        return None
    errors = [part.std(ddof=1) / math.sqrt(len(part)) if np.ptp(part) > ROUNDING else 0.0 for part in parts]
    means = [Estimate(float(part.mean()), float(error), len(part) - 1) for part, error in zip(parts, errors)]
    return add(means) if value is None else replace(add(means), value=value)


def add(estimates: Sequence[Estimate]) -> Estimate:
    """Adds independent numbers.

    Welch (1947) and Satterthwaite (1946) give the variance V = sum v_s V^2 / sum(v_s^2 / f_s) degrees of freedom, too
    many where f_s are few. So the mean of this number and the smallest f_s is used (Banerjee 1960). A test of a single
    number is Student's.
    """
    total, noisy = sum(each.value for each in estimates), [each for each in estimates if each.standard_error]
    if not noisy:
        return Estimate(total, 0.0, math.inf)
    variances, freedoms = np.array([(each.standard_error**2, each.degrees_of_freedom) for each in noisy]).T
    satterthwaite = variances.sum() ** 2 / (variances**2 / freedoms).sum()
    return Estimate(total, math.sqrt(variances.sum()), float(satterthwaite + freedoms.min()) / 2)


class LossCurve:
    """The loss of the baseline over compute, for the compute multipliers.

    The curve interpolates log loss over log compute by a monotone cubic through the means of the scales (Fritsch and
    Butland 1984). Its slopes at both ends assume that slopes change by the same factor from scale to scale, as in a
    power law: s_1 (s_1 / s_2)^(h_1 / (h_1 + h_2)). Here s_1 and h_1 are the slope and length of the line through the
    last two means; s_2 and h_2 belong to the line before it. Beyond the ends the curve is a line.
    """

    def __init__(self, names: Sequence[str], flops: Sequence[float], losses: Sequence[np.ndarray]):
        """Makes the curve from the baseline's test losses `(seed,)` in nats, at the FLOPs of each scale, rising.

        Raises:
            ValueError: if there are too few scales, or the mean loss does not fall; the message is a sentence.
        """
        if len(losses) < 2:
            raise ValueError(
                "There are no compute multipliers: they need 2 scales at which every run of the baseline finished "
                f"and no best rate is at the boundary, not {len(losses)}."
            )
        self.log_flops, self.losses = np.log(flops), losses
        means = self.means = np.array([values.mean() for values in losses])
        for (name, loss), (next_name, next_loss) in itertools.pairwise(zip(names, means)):
            if next_loss >= loss:
                raise ValueError(
                    f"There are no compute multipliers: the baseline's loss does not fall from {name} to {next_name}."
                )
        self._step = min(_STEP, -np.diff(np.log(means)).max() / 10)

    def multiplier(
        self, scale: int, differences: np.ndarray, flops: float, confidence: float
    ) -> tuple[float | None, Interval | None]:
        """Returns the multiplier C' / `flops` of a model and its interval, by the delta method.

        At C' the curve has the mean loss of the model. A value is None if C' lies more than `REACH` decades beyond the
        ladder, and the interval is None if a scale has a single seed.

        Args:
            differences: the baseline's loss minus the model's `(seed,)`, in nats, for the seeds of the baseline.
        """
        difference = float(differences.mean())
        log_compute, slope = self._solve(self.means, scale, difference)
        # What each seed adds to log(C' / C_k), at each scale
        parts = []
        for values, mean, shift in zip(self.losses, self.means, self._step * np.diag(self.means)):
            below, above = (self._solve(self.means + sign * shift, scale, difference)[0] for sign in (-1, 1))
            parts.append((above - below) / (2 * self._step * mean) * values)
        parts[scale] = parts[scale] - differences / (slope * (self.means[scale] - difference))
        start, reach = self.log_flops[scale], REACH * math.log(10)
        rise = log_compute - float(start)
        estimate = welch_sum(parts, rise)

        def relative(rise: float) -> float | None:
            is_within = self.log_flops[0] - reach <= start + rise <= self.log_flops[-1] + reach
            return math.exp(start + rise) / flops if is_within else None

        return relative(rise), estimate and tuple(relative(end) for end in estimate.interval(confidence))

    def _solve(self, means: np.ndarray, scale: int, difference: float) -> tuple[float, float]:
        """Returns log C and the slope where the curve through `means` is lower than at a scale by `difference`."""
        log_flops, log_means = self.log_flops, np.log(means)
        curve = CubicHermiteSpline(log_flops, log_means, _slopes(log_flops, log_means))
        log_loss = math.log(means[scale] - difference)
        for end, is_beyond in ((0, log_loss >= log_means[0]), (-1, log_loss <= log_means[-1])):
            if is_beyond:
                slope = float(curve(log_flops[end], 1))
                return float(log_flops[end]) + (log_loss - float(log_means[end])) / slope, slope
        roots = curve.solve(log_loss, extrapolate=False)
        # At the mean of a scale, rounding may put the root just outside the pieces on both sides
        root = float(roots[0] if len(roots) else log_flops[np.abs(log_means - log_loss).argmin()])
        return root, float(curve(root, 1))


def _slopes(log_flops: np.ndarray, log_means: np.ndarray) -> np.ndarray:
    lengths = np.diff(log_flops)
    secants = np.diff(log_means) / lengths
    if len(secants) == 1:
        return np.repeat(secants, 2)
    slopes = PchipInterpolator(log_flops, log_means)(log_flops, 1)
    for end, first, second in ((0, 0, 1), (-1, -1, -2)):
        power = lengths[first] / (lengths[first] + lengths[second])
        # Three times the slope of the line is as steep as a monotone cubic may be (Fritsch and Carlson 1980)
        slopes[end] = max(secants[first] * (secants[first] / secants[second]) ** power, 3 * secants[first])
    return slopes
