"""The baseline's law of compute, `L(C) = E + a C^-b`.

L is the test loss in nats per token after training with C FLOPs, E the irreducible loss (Hestness et al. 2017; Hoffmann et al.
2022). `log` is the natural logarithm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from .noise import Estimate, Interval, add_means


# Three determine E, a and b. A fourth shows how well they describe the losses.
SCALES_OF_A_LAW = 4

# The level of the lack-of-fit test: of ladders that follow the law, one in 20 is rejected.
MISFIT = 0.05

# Differences of log losses below this are rounding.
_ROUNDING = 1e-10

# With a larger exponent, the reducible loss would fall by more than a factor of 100 per decade of compute.
_LARGEST_EXPONENT = 2.0


@dataclass(frozen=True)
class Law:
    """The law of a model. Intervals are None if a scale has a single seed.

    Attributes:
        irreducible_loss: E in nats, at least 0.
        coefficient: a, in nats times FLOPs^b.
        exponent: b, without unit.
        irreducible_loss_interval: (low, high) in nats, cut at 0.
        coefficient_interval: (low, high).
        exponent_interval: (low, high), cut at 0.
        residuals: the model's mean loss minus the law at each scale, in nats.
        curve: points (C, loss, low, high) in FLOPs and nats, from the smallest scale to the largest.
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

    The fit minimises the squares of `log loss - log L(C)` over all seeds. It assumes that noise is the same share of the loss
    at every scale, because three to five seeds are too few to estimate weights. The parameters are (E, log A, b), with
    A = a C^-b at the middle of the ladder. The intervals do not assume equal noise: to first order, a parameter is a weighted
    sum of log losses, with weights from the pseudoinverse of the Jacobian, and `add_means` gives the noise of that sum.
    """

    def __init__(self, flops: Sequence[float], losses: Sequence[np.ndarray]):
        """Fits the law.

        Args:
            flops: the FLOPs of a run of the baseline at each scale, rising.
            losses: the baseline's test losses at each scale, `(seed,)`, in nats.

        Raises:
            ValueError: if there are too few scales, if the losses do not fall, or if a lack-of-fit test at level `MISFIT`
                rejects the law. The report prints the message.
        """
        if len(losses) < SCALES_OF_A_LAW:
            scales = f"{SCALES_OF_A_LAW} scales where every run of the baseline finished and no best rate is at an edge"
            raise ValueError(f"No law of compute was fitted: it needs {scales}, and this ladder has {len(losses)}.")
        self.log_flops = np.log(flops)
        self.middle = self.log_flops.mean()
        self.log_losses = [np.log(values) for values in losses]
        counts = [len(values) for values in losses]
        places, points = np.repeat(self.log_flops, counts), np.concatenate(self.log_losses)
        means = np.array([values.mean() for values in losses])
        if means[-1] >= means[0]:
            raise ValueError("No law of compute was fitted: the baseline's loss does not fall.")
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
            raise ValueError("No law of compute was fitted: the baseline's losses do not follow E + a C^-b.")
        self._check_fit()
        influence = np.linalg.pinv(self._jacobian(found.x, places))
        self._weights = np.split(influence, np.cumsum(counts)[:-1], axis=1)

    def law(self, names: Sequence[str], confidence: float) -> Law:
        """The law with its intervals.

        Args:
            names: the names of the scales.
            confidence: the level of each interval.
        """
        floor, height, exponent = map(float, self.parameters)
        log_coefficient = height + exponent * self.middle

        def interval(value: float, gradient: Sequence[float]) -> Interval | None:
            estimate = self._estimate(value, np.array(gradient))
            return None if estimate is None else estimate.interval(confidence)

        irreducible, exponents = interval(floor, (1.0, 0.0, 0.0)), interval(exponent, (0.0, 0.0, 1.0))
        coefficients = interval(log_coefficient, (0.0, 1.0, self.middle))
        curve = []
        for place in np.linspace(*self.log_flops[[0, -1]], 20):
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

    def _loss(self, parameters: np.ndarray, log_flops: np.ndarray) -> np.ndarray:
        floor, height, exponent = parameters
        return floor + np.exp(height - exponent * (log_flops - self.middle))

    def _jacobian(self, parameters: np.ndarray, log_flops: np.ndarray) -> np.ndarray:
        """The derivatives of log L by the parameters, `(point, 3)`."""
        loss = self._loss(parameters, log_flops)
        reducible = loss - parameters[0]
        return np.stack([np.ones_like(loss), reducible, -reducible * (log_flops - self.middle)], axis=1) / loss[:, None]

    def _check_fit(self) -> None:
        """Raises `ValueError` if the means lie farther from the law than the noise between seeds explains.

        The F test for lack of fit, with the weights of the fit. Without seeds to compare there is no test.
        """
        counts = np.array([len(logs) for logs in self.log_losses])
        free = int((counts - 1).sum())
        within = sum(((logs - logs.mean()) ** 2).sum() for logs in self.log_losses)
        if free == 0 or within / free < _ROUNDING**2:
            return
        logs = np.array([values.mean() for values in self.log_losses])
        losses = self._loss(self.parameters, self.log_flops)
        lack = counts @ (logs - np.log(losses)) ** 2 / (len(counts) - len(self.parameters))
        p = special.fdtrc(len(counts) - len(self.parameters), free, lack / (within / free))
        if p < MISFIT:
            farthest = np.abs(np.exp(logs) - losses).max()
            raise ValueError(
                "No law of compute was fitted: the baseline's losses do not follow E + a C^-b. Their means are up to "
                f"{farthest:.2g} nats away, more than noise explains (p = {p:.1g})."
            )

    def _estimate(self, value: float, gradient: np.ndarray) -> Estimate | None:
        """The noise of a value that depends on the parameters by `gradient`."""
        parts = [len(logs) * (gradient @ weights) * logs for weights, logs in zip(self._weights, self.log_losses)]
        return add_means(parts, value)


def _exp(value: float) -> float | None:
    """`exp(value)`; None where it overflows."""
    return math.exp(value) if value < 709 else None
