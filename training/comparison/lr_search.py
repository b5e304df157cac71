"""Learning rates: a list, or a search that finds its own range, and the best of them."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass


# The most rates that a search tries unless the file says otherwise
LIMIT = 8


@dataclass(frozen=True)
class Rates:
    """The learning rates of a model: `listed`, or a search.

    A search begins with `start / factor`, `start` and `start * factor`. While the best rate is the smallest or the
    largest, it tries the next one beyond, up to `limit` rates.

    Attributes:
        listed: the rates of a list, ascending; empty for a search.
        start: the middle of the first three rates of a search, without a `shift`.
        shift: by how many factors a search begins above `start`, on the same grid.
    """

    listed: tuple[float, ...] = ()
    start: float | None = None
    factor: float | None = None
    limit: int = LIMIT
    shift: int = 0

    @property
    def is_search(self) -> bool:
        """Whether the rates are searched for."""
        return self.start is not None

    @property
    def search(self) -> dict[str, float] | None:
        """The settings of a search, as in the file; `None` for a list."""
        return {"start": self.start, "factor": self.factor, "limit": self.limit} if self.is_search else None

    @property
    def first(self) -> list[float]:
        """The rates that are tried in any case, ascending."""
        return [self._at(self.shift + power) for power in (-1, 0, 1)] if self.is_search else list(self.listed)

    def next(self, losses: Mapping[float, float]) -> list[float]:
        """Returns the rates to try next; none when the best is found or the limit is reached."""
        if missing := [rate for rate in self.first if rate not in losses]:
            return missing
        boundary = self.boundary(losses)
        if not self.is_search or boundary is None or len(losses) >= self.limit:
            return []
        powers = list(map(self._power, losses))
        return [self._at(min(powers) - 1 if boundary == "smallest" else max(powers) + 1)]

    def best(self, losses: Mapping[float, float]) -> float | None:
        """The rate with the lowest loss, the smaller of equals; `None` if all diverged."""
        rate = min(losses, key=lambda rate: (losses[rate], rate))
        return rate if math.isfinite(losses[rate]) else None

    def boundary(self, losses: Mapping[float, float]) -> str | None:
        """Tells whether the best rate is the `smallest` (also if all diverged) or the `largest` of several."""
        best = self.best(losses)
        if len(losses) > 1 and best in (None, min(losses)):
            return "smallest"
        return "largest" if len(losses) > 1 and best == max(losses) else None

    def starting_at(self, rate: float) -> "Rates":
        """Returns a search that begins at the rate of its grid nearest to this one; a list stays as it is."""
        return dataclasses.replace(self, shift=self._power(rate)) if self.is_search else self

    def __str__(self) -> str:
        rates = " ".join(f"{rate:g}" for rate in self.first)
        return f"{rates} ..." if self.is_search else rates

    def _power(self, rate: float) -> int:
        return round(math.log(rate / self.start, self.factor))

    def _at(self, power: int) -> float:
        # Six digits, which the names of run folders have
        return float(f"{self.start * self.factor**power:.6g}")
