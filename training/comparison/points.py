"""The ranges of nuisance parameters that `tune` searches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


LEARNING_RATE = "learning_rate"
# The share of a range, at either end, in which a best value suggests that better ones lie beyond
_END = 0.1


@dataclass(frozen=True)
class Range:
    """The values of a field: those listed, or any from `low` to `high`, evenly by logarithm unless `is_linear`."""

    low: float | None = None
    high: float | None = None
    is_linear: bool = False
    values: tuple[Any, ...] = ()

    @classmethod
    def read(cls, name: str, content: Any) -> "Range":
        """Reads `[low, high]`, `{linear: [low, high]}` or `{values: [...]}` of a file; raises `ValueError`."""
        kind, ends = "logarithmic", content
        if isinstance(content, Mapping) and len(content) == 1:
            ((kind, ends),) = content.items()
        if kind == "values" and isinstance(ends, list) and len(ends) >= 2:
            if name == LEARNING_RATE and not all(type(rate) in (int, float) and 0 < rate < math.inf for rate in ends):
                raise ValueError(f"fields: {name}={content!r} must be numbers above 0")
            return cls(values=tuple(ends))
        if kind in ("logarithmic", "linear") and isinstance(ends, list) and len(ends) == 2:
            low, high = ends
            are_numbers = all(type(end) in (int, float) and math.isfinite(end) for end in ends)
            if are_numbers and low < high and (kind == "linear" or low > 0):
                return cls(low, high, is_linear=kind == "linear")
        allowed = "[low, high] with 0 < low < high, {linear: [low, high]} or {values: [...]} of two or more"
        raise ValueError(f"fields: {name}={content!r} must be {allowed}")

    def at(self, share: float) -> Any:
        """Returns the value at a share of the range, from 0 to 1, with three digits; a whole number between such."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.is_linear:
            value = self.low + share * (self.high - self.low)
        else:
            value = self.low * (self.high / self.low) ** share
        return round(value) if type(self.low) is type(self.high) is int else float(f"{value:.3g}")

    def end_near(self, value: Any) -> float | None:
        """Returns the end of the range if the value lies in the tenth before it, or beyond."""
        if self.values or type(value) not in (int, float):
            return None
        scale = (lambda number: number) if self.is_linear else math.log
        if not self.is_linear and value <= 0:
            return self.low
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.low if share < _END else self.high if share > 1 - _END else None

    def __str__(self) -> str:
        return " ".join(map(str, self.values)) if self.values else f"{self.low:g} to {self.high:g}"
