"""The noise of sums over independent scales.

n_s is the number of seeds at scale s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special


# In nats or percent. Smaller differences are rounding.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class Estimate:
    """A sum of means, each over the seeds of one scale, and its noise (see `welch_sum`)."""

    value: float
    standard_error: float
    degrees_of_freedom: float

    def p(self) -> float:
        """The two-sided p-value of a sum of 0; without any noise its limit, 0 or 1."""
        if self.standard_error <= _ROUNDING:
            return float(abs(self.value) <= _ROUNDING)
        return float(2 * special.stdtr(self.degrees_of_freedom, -abs(self.value) / self.standard_error))

    def interval(self, confidence: float) -> tuple[float, float]:
        """The two-sided t interval."""
        margin = 0.0
        if self.standard_error > _ROUNDING:
            margin = -float(special.stdtrit(self.degrees_of_freedom, (1 - confidence) / 2)) * self.standard_error
        return self.value - margin, self.value + margin


def welch_sum(parts: Sequence[np.ndarray], value: float | None = None) -> Estimate | None:
    """Adds the means of several scales, each with the noise of its own seeds.

    The sum of `mean(z_s)` has the variance V = sum v_s, v_s = var(z_s) / n_s. Welch (1947) and Satterthwaite (1946)
    give it V^2 / sum(v_s^2 / (n_s - 1)) degrees of freedom. With few seeds that is too many, so the mean of this
    number and of the smallest n_s - 1 is used (Banerjee 1960). A test of a single
    scale is Student's. Returns `None` if a scale has a single seed.

    Args:
        parts: z_s, a value for each seed, with the weight of the scale.
        value: the estimate, if the parts give only its noise (delta method).
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
