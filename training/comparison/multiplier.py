"""The compute multiplier: how many times the compute of a model the baseline would need to be as good.

It is read from a curve through the baseline's mean losses, so it needs no law of compute. `log` is the natural
logarithm.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy.interpolate import CubicHermiteSpline, PchipInterpolator

from .inference import Interval
from .noise import welch_sum


# In decades of compute beyond the ladder, where the curve is read
REACH = 1.0

# Relative step of a mean loss for the derivatives of the delta method
_STEP = 1e-5


class LossCurve:
    """The loss of the baseline over compute, and the multipliers that are read from it.

    The curve interpolates log loss over log compute by a monotone cubic through the means of the scales (Fritsch and
    Butland 1984). Its slopes at both ends assume that slopes change by the same factor from scale to scale, as in a
    power law. The slope at an end is s_1 (s_1 / s_2)^(h_1 / (h_1 + h_2)). Here s_1 and h_1 are the slope and length of
    the line through the last two means, s_2 and h_2 those of the line before it. Beyond it the curve is a line.

    To first order a multiplier is a sum of means, and `welch_sum` gives the noise of that sum (delta method).
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
        self.log_flops = np.log(flops)
        self.losses = losses
        means = np.array([values.mean() for values in losses])
        for (name, loss), (next_name, next_loss) in itertools.pairwise(zip(names, means)):
            if next_loss >= loss:
                raise ValueError(
                    f"There are no compute multipliers: the baseline's loss does not fall from {name} to {next_name}."
                )
        self._curve = _Curve(self.log_flops, means)
        self._step = min(_STEP, -np.diff(np.log(means)).max() / 10)
        # With each mean a little lower and higher
        self._shifted = [
            [_Curve(self.log_flops, means + sign * shift) for sign in (-1, 1)] for shift in self._step * np.diag(means)
        ]

    def multiplier(
        self, scale: int, differences: np.ndarray, flops: float, confidence: float
    ) -> tuple[float | None, Interval | None]:
        """Returns the multiplier M = C' / C_k of a model, where the curve at C' has the mean loss of the model.

        Args:
            differences: the baseline's loss minus the model's `(seed,)`, in nats, for the seeds of the baseline.
            flops: C_k, of the model's run.

        Returns:
            The multiplier and its interval. A value is None if C' lies more than `REACH` decades beyond the ladder,
            and the interval is None if a scale has a single seed.
        """
        rise, parts = self._rise(scale, differences)
        estimate = welch_sum(parts, rise)
        place, reach = self.log_flops[scale], REACH * math.log(10)

        def relative(rise: float) -> float | None:
            is_within = self.log_flops[0] - reach <= place + rise <= self.log_flops[-1] + reach
            return math.exp(place + rise) / flops if is_within else None

        return relative(rise), estimate and tuple(relative(end) for end in estimate.interval(confidence))

    def _rise(self, scale: int, differences: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """log(C' / C_0), and what each seed adds to it, at each scale `(seed,)`."""
        difference = float(differences.mean())
        place, slope = self._curve.place(scale, difference)
        parts = []
        for values, mean, (below, above) in zip(self.losses, self._curve.means, self._shifted):
            change = above.place(scale, difference)[0] - below.place(scale, difference)[0]
            parts.append(change / (2 * self._step * mean) * values)
        parts[scale] = parts[scale] - differences / (slope * (self._curve.means[scale] - difference))
        return place - float(self.log_flops[scale]), parts


class _Curve:
    """The monotone curve through some means."""

    def __init__(self, log_flops: np.ndarray, means: np.ndarray):
        self.log_flops, self.means, self.log_means = log_flops, means, np.log(means)
        self.log_loss = CubicHermiteSpline(log_flops, self.log_means, _slopes(log_flops, self.log_means))

    def place(self, scale: int, difference: float) -> tuple[float, float]:
        """Returns log C and the slope where the loss is lower than the mean of a scale by `difference`."""
        log_loss = math.log(self.means[scale] - difference)
        for end, is_beyond in ((0, log_loss >= self.log_means[0]), (-1, log_loss <= self.log_means[-1])):
            if is_beyond:
                slope, start = float(self.log_loss(self.log_flops[end], 1)), float(self.log_flops[end])
                return start + (log_loss - float(self.log_means[end])) / slope, slope
        roots = self.log_loss.solve(log_loss, extrapolate=False)
        # At the mean of a scale, rounding may put the root just outside the pieces on both sides
        place = float(roots[0] if len(roots) else self.log_flops[np.abs(self.log_means - log_loss).argmin()])
        return place, float(self.log_loss(place, 1))


def _slopes(log_flops: np.ndarray, log_means: np.ndarray) -> np.ndarray:
    """The slopes of the curve at the scales (see `LossCurve`)."""
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
