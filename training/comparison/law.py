"""The baseline's law of compute, `L(C) = E + a C^-b`, and the noise of sums over independent scales.

L is the test loss in nats per token after training with C FLOPs, E the irreducible loss (Hestness et al. 2017; Hoffmann et al.
2022). `log` is the natural logarithm, n_s the number of seeds at scale s.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special


# For E, a and b, and one that can show how well they describe the losses.
SCALES_OF_A_LAW = 4

# In decades of compute beyond the largest scale. Nothing is read from a law, or from a line, farther out.
REACH = 1.0

# Beyond it, the reducible loss would fall by more than a factor of 100 per decade.
_LARGEST_EXPONENT = 2.0

# In nats or percent. Smaller differences are rounding.
_ROUNDING = 1e-10

Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class Estimate:
    """A sum of means, each over the seeds of one scale, and its noise (see `add_means`)."""

    value: float
    standard_error: float
    degrees_of_freedom: float

    def p_positive(self) -> float:
        """The one-sided p-value of a sum of 0 or less; without any noise its limit, 0 or 1."""
        if self.standard_error <= _ROUNDING:
            return float(self.value <= _ROUNDING)
        return float(special.stdtr(self.degrees_of_freedom, -self.value / self.standard_error))

    def p(self) -> float:
        """The two-sided p-value of a sum of 0."""
        return min(1.0, 2 * Estimate(abs(self.value), self.standard_error, self.degrees_of_freedom).p_positive())

    def interval(self, confidence: float) -> tuple[float, float]:
        """The two-sided t interval."""
        margin = 0.0
        if self.standard_error > _ROUNDING:
            margin = -float(special.stdtrit(self.degrees_of_freedom, (1 - confidence) / 2)) * self.standard_error
        return self.value - margin, self.value + margin


def add_means(parts: Sequence[np.ndarray], value: float | None = None) -> Estimate | None:
    """Adds the means of several scales, each with the noise of its own seeds.

    The sum of `mean(z_s)` has the variance V = sum v_s, v_s = var(z_s) / n_s. Welch (1947) and Satterthwaite (1946) give it
    V^2 / sum(v_s^2 / (n_s - 1)) degrees of freedom. With four scales of three seeds, one of them four times as noisy, a test at
    5 % then errs in 6.3 %. With the mean of this number and of the smallest n_s - 1, which is never too many (Banerjee 1960),
    it errs in 5 % at most (`benchmarks/trend.py`). For a single scale both numbers are n - 1, and the test is Student's.

    Args:
        parts: z_s, a value for each seed, with the weight of the scale. Quantities of one seed are in one z_s, so pairs stay
            pairs, and scales that share noise are merged first (see `merge_groups`).
        value: the estimate, if the parts give only its noise (delta method).

    Returns:
        `None` if a scale has a single seed.
    """
    if any(len(part) < 2 for part in parts):
        return None
    total = float(sum(part.mean() for part in parts)) if value is None else value
    noisy = [part for part in parts if np.ptp(part) > _ROUNDING]
    if not noisy:
        return Estimate(total, 0.0, math.inf)
    variances, freedoms = np.array([(part.var(ddof=1) / len(part), len(part) - 1) for part in noisy]).T
    satterthwaite = variances.sum() ** 2 / (variances**2 / freedoms).sum()
    return Estimate(total, math.sqrt(variances.sum()), float(satterthwaite + freedoms.min()) / 2)


def merge_groups(parts: Sequence[np.ndarray], groups: Sequence[Hashable]) -> list[np.ndarray]:
    """Adds the parts of each group seed by seed, for `add_means`: only groups are independent.

    Args:
        parts: z_s of each scale, with its weight; those of a group have the same seeds.
        groups: of each scale.
    """
    merged: dict[Hashable, np.ndarray] = {}
    for part, group in zip(parts, groups, strict=True):
        merged[group] = merged[group] + part if group in merged else part
    return list(merged.values())


@dataclass(frozen=True)
class Law:
    """The law of the baseline. Intervals are None if a scale has a single seed.

    Attributes:
        irreducible_loss: E in nats, at least 0.
        coefficient: a, in nats times FLOPs^b.
        exponent: b, without unit.
        irreducible_loss_interval: (low, high) in nats, cut at 0.
        coefficient_interval: (low, high).
        exponent_interval: (low, high), cut at 0.
        residuals: by scale, the baseline's mean loss minus the law, in nats.
        curve: points (C, loss, low, high) in FLOPs and nats, from the smallest scale to `REACH` decades beyond the largest.
    """

    irreducible_loss: float
    coefficient: float
    exponent: float
    irreducible_loss_interval: Interval | None
    coefficient_interval: Interval | None
    exponent_interval: Interval | None
    residuals: dict[str, float]
    curve: list[tuple[float, float, float | None, float | None]]


class Fit:
    """A fit of the law to the losses of the baseline, and what is read from it.

    Least squares of `log loss - log L(C)` over all seeds: noise is taken as the same share of the loss at every scale, for
    three to five seeds cannot tell the weights. Parameters are (E, log A, b), with A = a C^-b at the middle of the ladder.
    Intervals assume no such equality: to first order, a parameter is a weighted sum of log losses, with weights from the
    pseudoinverse of the Jacobian, and `add_means` gives the noise of that sum.
    """

    def __init__(self, flops: Sequence[float], losses: Sequence[np.ndarray], groups: Sequence[Hashable] | None = None):
        """Fits the law.

        Args:
            flops: of the baseline's run at each scale, rising.
            losses: of the baseline at each scale `(seed,)`, in nats.
            groups: of each scale; scales of one group share noise. By default, each is independent.

        Raises:
            ValueError: if there are too few scales, or the losses follow no such law; the message is a sentence.
        """
        if len(losses) < SCALES_OF_A_LAW:
            scales = f"{SCALES_OF_A_LAW} scales at which every run of the baseline finished"
            raise ValueError(f"There is no law of compute: it needs {scales}, not {len(losses)}.")
        self.groups = range(len(losses)) if groups is None else groups
        self.log_flops = np.log(flops)
        self.middle = self.log_flops.mean()
        self.log_losses = [np.log(values) for values in losses]
        counts = [len(values) for values in losses]
        places, points = np.repeat(self.log_flops, counts), np.concatenate(self.log_losses)
        means = np.array([values.mean() for values in losses])
        if means[-1] >= means[0]:
            raise ValueError("There is no law of compute: the baseline's loss does not fall.")
        # Starts with half of the lowest loss as E, and the line through log(loss - E)
        lowest = means.min()
        slope, height = np.polyfit(self.log_flops - self.middle, np.log(means - lowest / 2), 1)
        found = optimize.least_squares(
            lambda parameters: np.log(self._loss(parameters, places)) - points,
            (lowest / 2, height, np.clip(-slope, 0.01, 1.0)),
            lambda parameters: self._jacobian(parameters, places),
            bounds=((0.0, -np.inf, 0.0), (lowest, np.inf, _LARGEST_EXPONENT)),
            x_scale=(lowest, 1.0, 0.1),
            **dict.fromkeys(("xtol", "ftol", "gtol"), 1e-14),
            max_nfev=500,
        )
        self.parameters = found.x
        # The solver stays inside of its bounds
        if not found.success or not 1e-3 < found.x[2] < 0.99 * _LARGEST_EXPONENT:
            raise ValueError("There is no law of compute: the baseline's losses do not follow E + a C^-b.")
        influence = np.linalg.pinv(self._jacobian(found.x, places))
        self._weights = np.split(influence, np.cumsum(counts)[:-1], axis=1)

    def law(self, names: Sequence[str], confidence: float) -> Law:
        """The law with its intervals.

        Args:
            names: of the scales.
            confidence: level of each interval.
        """
        floor, height, exponent = map(float, self.parameters)
        log_coefficient = height + exponent * self.middle

        def interval(value: float, gradient: Sequence[float]) -> Interval | None:
            estimate = self._estimate(value, np.array(gradient))
            return None if estimate is None else estimate.interval(confidence)

        irreducible, exponents = interval(floor, (1.0, 0.0, 0.0)), interval(exponent, (0.0, 0.0, 1.0))
        coefficients = interval(log_coefficient, (0.0, 1.0, self.middle))
        curve = []
        first, last = self.log_flops[[0, -1]]
        # The largest scale is one of the points; beyond it the law is an extrapolation
        for place in [*np.linspace(first, last, 20), *np.linspace(last, last + REACH * math.log(10), 11)[1:]]:
            loss = float(self._loss(self.parameters, place))
            ends = interval(math.log(loss), self._jacobian(self.parameters, np.array([place]))[0])
            curve.append((math.exp(place), loss, *((None, None) if ends is None else map(_exp, ends))))
        residuals = [
            np.exp(logs).mean() - self._loss(self.parameters, place) for logs, place in zip(self.log_losses, self.log_flops)
        ]
        return Law(
            irreducible_loss=floor,
            coefficient=math.exp(log_coefficient),
            exponent=exponent,
            irreducible_loss_interval=irreducible and (max(irreducible[0], 0.0), irreducible[1]),
            coefficient_interval=coefficients and (_exp(coefficients[0]), _exp(coefficients[1])),
            exponent_interval=exponents and (max(exponents[0], 0.0), exponents[1]),
            residuals={name: float(residual) for name, residual in zip(names, residuals)},
            curve=curve,
        )

    def multiplier(
        self, scale: int, differences: np.ndarray, flops: float, confidence: float
    ) -> tuple[float | None, Interval | None]:
        """The compute multiplier M = C' / C_k of a model.

        L(C') lies as far below L(C_0) as the model's mean loss lies below the baseline's at this scale. With d that difference
        and r = a C_0^-b,

            log M = log(C_0 / C_k) - log(1 - d / r) / b.

        Only the difference of the model enters, so noise that the runs of a seed share cancels.

        Args:
            scale: index of the scale.
            differences: the baseline's loss minus the model's `(seed,)`, in nats, for the seeds of the baseline.
            flops: C_k, of the model's run.
            confidence: level of the interval.

        Returns:
            The multiplier and its interval. None stands for a value for which C' lies more than `REACH` decades beyond the
            ladder, and for the interval if a scale has a single seed.
        """
        rise, gradient, noise = self._rise(scale, differences)
        if not math.isfinite(rise):
            return None, (None, None)
        estimate = self._estimate(rise, gradient, {scale: noise})
        place, reach = self.log_flops[scale], REACH * math.log(10)

        def relative(rise: float) -> float | None:
            is_within = self.log_flops[0] - reach <= place + rise <= self.log_flops[-1] + reach
            return math.exp(place + rise) / flops if is_within else None

        return relative(rise), estimate and tuple(relative(end) for end in estimate.interval(confidence))

    def multiplier_slope(
        self, differences: Sequence[np.ndarray], flops: Sequence[float], confidence: float
    ) -> tuple[float, Interval | None]:
        """The slope of the least-squares line through log10 of the multipliers, per decade of compute, and its interval.

        Arguments are those of `multiplier`, for every scale; each must have a multiplier.
        """
        centred = self.log_flops - self.middle
        weights = centred / (centred @ centred)
        rises = [self._rise(scale, values) for scale, values in enumerate(differences)]
        slope = sum(
            weight * (rise + place - math.log(own))
            for weight, (rise, *_), place, own in zip(weights, rises, self.log_flops, flops)
        )
        gradient = sum(weight * gradient for weight, (_, gradient, _) in zip(weights, rises))
        noise = {scale: weight * noise for scale, (weight, (*_, noise)) in enumerate(zip(weights, rises))}
        estimate = self._estimate(float(slope), gradient, noise)
        return float(slope), estimate and estimate.interval(confidence)

    def _rise(self, scale: int, differences: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """log(C' / C_0), its derivatives by the parameters `(3,)`, and what each seed's difference adds to it `(seed,)`."""
        place, exponent = self.log_flops[scale] - self.middle, float(self.parameters[2])
        difference, reducible = float(differences.mean()), math.exp(self.parameters[1] - exponent * place)
        left = reducible - difference
        if left <= 0:
            return math.inf, np.zeros(3), np.zeros_like(differences)
        rise = -math.log(left / reducible) / exponent
        # log A changes r by r, and b changes it by -r times the place
        by_height = -difference / (exponent * left)
        return rise, np.array([0.0, by_height, -rise / exponent - by_height * place]), differences / (exponent * left)

    def _loss(self, parameters: np.ndarray, log_flops: np.ndarray) -> np.ndarray:
        floor, height, exponent = parameters
        return floor + np.exp(height - exponent * (log_flops - self.middle))

    def _jacobian(self, parameters: np.ndarray, log_flops: np.ndarray) -> np.ndarray:
        """The derivatives of log L by the parameters, `(point, 3)`."""
        loss = self._loss(parameters, log_flops)
        reducible = loss - parameters[0]
        return np.stack([np.ones_like(loss), reducible, -reducible * (log_flops - self.middle)], axis=1) / loss[:, None]

    def _estimate(self, value: float, gradient: np.ndarray, others: dict[int, np.ndarray] | None = None) -> Estimate | None:
        """The noise of a value that depends on the parameters by `gradient`, and on `others[scale]` of each seed besides."""
        parts = [len(logs) * (gradient @ weights) * logs for weights, logs in zip(self._weights, self.log_losses)]
        for scale, other in (others or {}).items():
            parts[scale] = parts[scale] + other
        return add_means(merge_groups(parts, self.groups), value)


def _exp(value: float) -> float | None:
    """`exp(value)`; None where it overflows."""
    return math.exp(value) if value < 709 else None
