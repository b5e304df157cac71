"""Learning rates: a given list, or a search that finds its own range, and the best of them."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


# A search stops after so many rates unless the file says otherwise
_LIMIT = 8


@dataclass(frozen=True)
class Rates:
    """The learning rates of a model: `listed`, or a search.

    A search begins with `start / factor`, `start` and `start * factor`. As long as the best rate is the smallest or
    the largest one tried, it tries the next one beyond. So it ends when the best rate has a worse neighbour on both
    sides, or at `limit`.

    Attributes:
        listed: the rates of a list, ascending; empty for a search.
        start: the middle of the first three rates of a search, without a `shift`.
        factor: the ratio of neighbouring rates, above 1.
        limit: the most rates that a search tries, at least 3.
        shift: by how many factors a search begins above `start`. So all searches of a model try rates of one grid.
    """

    listed: tuple[float, ...] = ()
    start: float | None = None
    factor: float | None = None
    limit: int = _LIMIT
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
        """The rates to try after those whose losses are known; none when the best is found or the limit is reached.

        Args:
            losses: validation loss of each rate tried, in nats per token; infinity if it diverged.
        """
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
        """Tells whether the best rate is the `smallest` or the `largest` of several; it is the `smallest` if all
        diverged.
        """
        best = self.best(losses)
        if len(losses) > 1 and best in (None, min(losses)):
            return "smallest"
        return "largest" if len(losses) > 1 and best == max(losses) else None

    def starting_at(self, rate: float) -> "Rates":
        """A search like this one that begins at another rate, the nearest of its grid; a list stays as it is."""
        return dataclasses.replace(self, shift=self._power(rate)) if self.is_search else self

    def __str__(self) -> str:
        rates = " ".join(f"{rate:g}" for rate in self.first)
        return f"{rates} ..." if self.is_search else rates

    def _power(self, rate: float) -> int:
        return round(math.log(rate / self.start, self.factor))

    def _at(self, power: int) -> float:
        # Six digits, which the names of run folders have
        return float(f"{self.start * self.factor**power:.6g}")


def read_rates(source: str, given: Any) -> Rates | None:
    """Reads `learning_rates` of a comparison: a rate, a list of rates, or `{start: 2.0e-3, factor: 2, limit: 8}`.

    Returns:
        `None` if there are none.

    Raises:
        ValueError: naming the source and the value.
    """
    if isinstance(given, Mapping):
        search = {"factor": 2, "limit": _LIMIT, **given}
        if search.keys() != {"start", "factor", "limit"} or not _is_rate(search["start"]):
            raise ValueError(
                f"{source}={dict(given)!r} must be a list of numbers, or {{start: RATE, factor: 2, limit: {_LIMIT}}}"
            )
        if not _is_rate(search["factor"]) or not 1.05 <= search["factor"] <= 100:
            raise ValueError(f"{source}: factor={search['factor']!r} must be a number from 1.05 to 100")
        if not isinstance(search["limit"], int) or search["limit"] < 3:
            raise ValueError(f"{source}: limit={search['limit']!r} must be a whole number of at least 3 rates")
        return Rates(start=float(search["start"]), factor=float(search["factor"]), limit=search["limit"])
    rates = given if isinstance(given, list) else [] if given is None else [given]
    if not all(map(_is_rate, rates)):
        raise ValueError(f"{source}={rates!r} must be a list of numbers above 0")
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise ValueError(f"{source}={rates!r} holds a rate twice")
    return Rates(listed=tuple(sorted(map(float, rates)))) if rates else None


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
