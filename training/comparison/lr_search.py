"""The choice that each seed makes for a model: among the points of `tune`, then among learning rates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..result import RunResult


LEARNING_RATE = "learning_rate"
# The share of a range, at either end, in which a best value suggests that better ones lie beyond
_END = 0.1
# The most rates that a search tries unless the file says otherwise
LIMIT = 8

# Finished runs, by their names
Results = Mapping[str, RunResult]
# Of `tune`: the values of each by field
Points = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    model: str
    learning_rate: float
    seed: int
    trial: int | None = None
    """The number of its point in `tune`."""

    @property
    def name(self) -> str:
        """Unique in its comparison, and the path of its folder there."""
        trial = "" if self.trial is None else f"trial-{self.trial}-"
        return f"{self.model}/{trial}rate-{self.learning_rate:g}-seed-{self.seed}"


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
        """Returns the end of the range if the value lies in the tenth before it or beyond, or is the end of a list."""
        if any(type(number) not in (int, float) for number in (value, *self.values)):
            return None
        if self.values:
            ends = (min(self.values) or None, max(self.values))  # 0 turns a field off
            return value if len(self.values) > 2 and value in ends else None
        scale = (lambda number: number) if self.is_linear else math.log
        if not self.is_linear and value <= 0:
            return self.low
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.low if share < _END else self.high if share > 1 - _END else None

    def __str__(self) -> str:
        return " ".join(map(str, self.values)) if self.values else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Rates:
    """The learning rates of a model: `listed`, or a search.

    A search begins with `start / factor`, `start` and `start * factor`. While the smallest or the largest rate is the
    best, or better than its neighbour, it tries the next one beyond, up to `limit` rates. A deeper valley may lie
    behind a ridge. `shift` moves its begin by so many factors. With `keeps` a seed has one rate, which
    it chose before.
    """

    listed: tuple[float, ...] = ()  # ascending
    start: float | None = None
    factor: float | None = None
    limit: int = LIMIT
    shift: int = 0
    keeps: bool = False

    @property
    def is_search(self) -> bool:
        return self.start is not None

    @property
    def may_go_on(self) -> bool:
        """Whether the search may try more rates than the first ones."""
        return self.is_search and self.limit > len(self.first) > 1

    @property
    def search(self) -> dict[str, float] | None:
        """The settings as in the file; `None` for a list."""
        return {"start": self.start, "factor": self.factor, "limit": self.limit} if self.is_search else None

    @property
    def first(self) -> list[float]:
        """The rates that are always tried, ascending; with `keeps` one in place of that of each seed."""
        rates = [self._at(self.shift + power) for power in (-1, 0, 1)] if self.is_search else list(self.listed)
        return rates[:1] if self.keeps else rates

    def next(self, losses: Mapping[float, float]) -> list[float]:
        """Returns the rates to try next, if any."""
        if missing := [rate for rate in self.first if rate not in losses]:
            return missing
        if not self.may_go_on or len(losses) >= self.limit:
            return []
        end = self.boundary(losses) or _falling_end(losses)
        beyond = {"smallest": self.power(min(losses)) - 1, "largest": self.power(max(losses)) + 1}
        return [self._at(beyond[end])] if end else []

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

    def __str__(self) -> str:
        rates = " ".join(f"{rate:g}" for rate in self.first)
        return "kept" if self.keeps else f"{rates} ..." if self.may_go_on else rates

    def power(self, rate: float) -> int:
        return round(math.log(rate / self.start, self.factor))

    def _at(self, power: int) -> float:
        # Six digits, which the names of run folders have
        return float(f"{self.start * self.factor**power:.6g}")


def _falling_end(losses: Mapping[float, float]) -> str | None:
    """Tells whether the `smallest` or the `largest` rate has a lower loss than its neighbour."""
    ordered = [losses[rate] for rate in sorted(losses)]
    if ordered[0] < ordered[1]:
        return "smallest"
    return "largest" if ordered[-1] < ordered[-2] else None


@dataclass(frozen=True)
class Tuning:
    """What a seed tried for a model, and what it chose."""

    losses: dict[Run, float]  # validation loss of each finished run; infinity if it diverged
    ready: list[Run]  # runs that the choice waits for
    chosen: Run | None = None  # None before the choice, or if every run diverged
    boundary: str | None = None

    @property
    def is_finished(self) -> bool:
        return bool(self.losses) and not self.ready

    @property
    def reported(self) -> Run:
        """The run that the seed reports. A seed that diverged in each of its runs reports the smallest rate."""
        return self.chosen or min(self.losses, key=lambda run: run.learning_rate)


def tune(
    model: str, seed: int, rates: Rates, results: Results, points: Points | None = None, before: Tuning | None = None
) -> Tuning:
    """Finds what a seed tries next, from the finished runs alone: its points first, then rates around the best one.

    `before` is what the same seed chose elsewhere: it takes over the point, and keeps the rate or searches from it.
    """
    start, boundary = (None, None) if before is None else (before.reported, before.boundary if rates.keeps else None)
    if rates.keeps:
        rates = replace(rates, keeps=False) if start is None else Rates(listed=(start.learning_rate,))
    losses: dict[Run, float] = {}

    def ready_of(runs: list[Run]) -> list[Run]:
        losses.update({run: _validation_loss(results[run.name]) for run in runs if run.name in results})
        return [run for run in runs if run not in losses]

    trial = None
    if points is not None:
        own = rates.start if rates.is_search else rates.listed[0]
        trials = [Run(model, point.get(LEARNING_RATE, own), seed, trial) for trial, point in enumerate(points)]
        if start is not None:
            trial = start.trial
        elif ready := ready_of(trials):
            return Tuning(losses, ready)
        else:
            trial = min(trials, key=lambda run: (losses[run], run.trial)).trial
        if rates.is_search:
            rates = replace(rates, start=trials[trial].learning_rate)
    if start is not None and rates.is_search:
        rates = replace(rates, shift=rates.power(start.learning_rate))  # the nearest of the grid
    by_rate: dict[float, float] = {}
    while next_rates := rates.next(by_rate):
        runs = [Run(model, rate, seed, trial) for rate in next_rates]
        if ready := ready_of(runs):
            return Tuning(losses, ready)
        by_rate |= {run.learning_rate: losses[run] for run in runs}
    rate = rates.best(by_rate)
    if rate is None:
        return Tuning(losses, [])
    return Tuning(losses, [], Run(model, rate, seed, trial), boundary or rates.boundary(by_rate))


def _validation_loss(result: RunResult) -> float:
    """Returns infinity for a run that diverged."""
    losses = result.losses
    loss = None if losses.diverged else losses.validation.loss
    return math.inf if loss is None else loss
