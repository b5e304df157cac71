"""Learning rates: a list, or a search that finds its own range, and the best of them."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..files import check_keys
from ..values import Value


# What a search has unless the file says otherwise
_FACTOR, _LIMIT = 2.0, 8


@dataclass(frozen=True)
class SearchConfig(Value):
    """A search for the learning rate, which each seed makes by itself."""

    start: float
    """The middle of the first three rates."""
    factor: float | None = None
    """The ratio of neighbouring rates, from 1.05 to 100; by default 2."""
    limit: int | None = None
    """The most rates that a seed tries, at least 3; by default 8."""

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.start < math.inf:
            raise ValueError(f"start={self.start:g} must be a number above 0")
        if self.factor is not None and not 1.05 <= self.factor <= 100:
            raise ValueError(f"factor={self.factor:g} must be a number from 1.05 to 100")
        if self.limit is not None and self.limit < 3:
            raise ValueError(f"limit={self.limit} must be a whole number of at least 3 rates")

    @classmethod
    def read(cls, content: Mapping[str, Any], source: str) -> "SearchConfig":
        """Reads `{start: 2.0e-3, factor: 2, limit: 8}`; only the start is needed."""
        check_keys(source, content, [item.name for item in dataclasses.fields(cls)])
        if content.get("start") is None:
            raise ValueError(f"{source}: start is missing; a search is {{start: RATE, factor: 2, limit: {_LIMIT}}}")
        try:
            return cls(**content)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that the file sets."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Rates:
    """The learning rates of a model: `listed`, or a search.

    A search begins with `start / factor`, `start` and `start * factor`. As long as the best rate is the smallest or
    the largest one tried, it tries the next one beyond. So it ends when the best rate has a worse neighbour on both
    sides, or at `limit`.

    Attributes:
        listed: the rates of a list, ascending; empty for a search.
        start: the middle of the first three rates of a search, without a `shift`.
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


def make_rates(value: float | list[float] | SearchConfig | None) -> Rates | None:
    """Makes the rates of a field `learning_rates`; none if the file leaves it out."""
    if isinstance(value, SearchConfig):
        return Rates(start=value.start, factor=value.factor or _FACTOR, limit=value.limit or _LIMIT)
    rates = value if isinstance(value, list) else [] if value is None else [value]
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"learning_rates={rates!r} must be a list of numbers above 0")
    if len({f"{rate:g}" for rate in rates}) < len(rates):
        raise ValueError(f"learning_rates={rates!r} holds a rate twice")
    return Rates(listed=tuple(sorted(rates))) if rates else None
