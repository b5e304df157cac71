"""Learning rates: a list, or a search that finds its own range, and the choice that each seed makes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..result import RunResult


# The most rates that a search tries unless the file says otherwise
LIMIT = 8

# Finished runs, by their names
Results = Mapping[str, RunResult]


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Unique in its comparison, and the path of its folder there."""
        return f"{self.model}/rate-{self.learning_rate:g}-seed-{self.seed}"


@dataclass(frozen=True)
class Rates:
    """The learning rates of a model: `listed`, or a search.

    A search begins with `start / factor`, `start` and `start * factor`. While the best rate is the smallest or the
    largest, it tries the next one beyond, up to `limit` rates. `shift` moves its begin by so many factors.
    """

    listed: tuple[float, ...] = ()  # ascending
    start: float | None = None
    factor: float | None = None
    limit: int = LIMIT
    shift: int = 0

    @property
    def is_search(self) -> bool:
        return self.start is not None

    @property
    def search(self) -> dict[str, float] | None:
        """The settings as in the file; `None` for a list."""
        return {"start": self.start, "factor": self.factor, "limit": self.limit} if self.is_search else None

    @property
    def first(self) -> list[float]:
        """The rates that are always tried, ascending."""
        return [self._at(self.shift + power) for power in (-1, 0, 1)] if self.is_search else list(self.listed)

    def next(self, losses: Mapping[float, float]) -> list[float]:
        """Returns the rates to try next, if any."""
        if missing := [rate for rate in self.first if rate not in losses]:
            return missing
        boundary = self.boundary(losses)
        if not self.is_search or boundary is None or len(losses) >= self.limit:
            return []
        beyond = self._power(min(losses)) - 1 if boundary == "smallest" else self._power(max(losses)) + 1
        return [self._at(beyond)]

    def best(self, losses: Mapping[float, float]) -> float | None:
        """The rate with the lowest loss, the smaller of equals; `None` if all diverged."""
        rate = min(losses, key=lambda rate: (losses[rate], rate))
        return rate if math.isfinite(losses[rate]) else None

    def boundary(self, losses: Mapping[float, float]) -> str | None:
        """Tells whether the best rate is the `smallest` (also if all diverged) or the `largest` of several."""
        best = self.best(losses)
        if len(losses) < 2:
            return None
        if best in (None, min(losses)):
            return "smallest"
        return "largest" if best == max(losses) else None

    def starting_at(self, rate: float | None) -> "Rates":
        """Returns a search that begins at the nearest rate of its grid, or the same list."""
        return self if rate is None or not self.is_search else replace(self, shift=self._power(rate))

    def __str__(self) -> str:
        rates = " ".join(f"{rate:g}" for rate in self.first)
        return f"{rates} ..." if self.is_search else rates

    def _power(self, rate: float) -> int:
        return round(math.log(rate / self.start, self.factor))

    def _at(self, power: int) -> float:
        # Six digits, which the names of run folders have
        return float(f"{self.start * self.factor**power:.6g}")


@dataclass(frozen=True)
class Tuning:
    """The choice of a model's learning rate by a seed."""

    model: str
    seed: int
    losses: dict[float, float]  # validation loss of each rate tried; infinity if the run diverged
    finished: int  # runs, also of a step of the search that is not complete
    ready: list[Run]  # runs that the choice waits for
    rate: float | None = None  # None before the choice, or if every rate diverged
    boundary: str | None = None

    @property
    def reported(self) -> Run:
        """The run that the seed reports. A seed that diverges at each of its rates reports the smallest rate."""
        return Run(self.model, min(self.losses) if self.rate is None else self.rate, self.seed)


def tune(model: str, seed: int, rates: Rates, results: Results) -> Tuning:
    losses: dict[float, float] = {}
    while next_rates := rates.next(losses):
        runs = [Run(model, rate, seed) for rate in next_rates]
        if ready := [run for run in runs if run.name not in results]:
            return Tuning(model, seed, losses, len(losses) + len(runs) - len(ready), ready)
        for run in runs:
            measured = results[run.name].losses
            loss = None if measured.diverged else measured.validation.loss
            losses[run.learning_rate] = math.inf if loss is None else loss
    rate = rates.best(losses)
    return Tuning(model, seed, losses, len(losses), [], rate, None if rate is None else rates.boundary(losses))
