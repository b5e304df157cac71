"""The finished runs in the folder of a comparison, and which runs can begin next."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import METRICS_FILE, read_json
from ..values import from_json
from .inference import FIRST_INTERIM, analyse
from .plan import Comparison, Run, Scale


# The types of the fields of `metrics.json`
_FIELDS: dict[str, Any] = {"diverged": bool, "versions": dict[str, str], "test_loss_parts": list[float] | None}
_FIELDS |= dict.fromkeys(("steps", "tokens_seen", "trained_parameters"), int)
_FIELDS |= dict.fromkeys(("token_stream", "attn_implementation", "device", "kernels"), str)
_FIELDS |= dict.fromkeys(
    ("diverged_at", "peak_memory", "train_tokens", "validation_tokens", "test_tokens"), int | None
)
_FIELDS |= dict.fromkeys(("train_loss", "train_seconds", "tokens_per_second"), float | None)
_FIELDS |= dict.fromkeys(("dataset_fingerprint", "base_model"), str | None)
_REQUIRED = _FIELDS.keys() - {"test_loss_parts", "trained_parameters", "kernels", "base_model"} | {"test_loss"}


def check_metrics(file: Path, metrics: dict[str, Any], required: Collection[str] = _REQUIRED) -> None:
    """Raises `ValueError` for the content of a `metrics.json` of which a field is missing or of another type."""
    kinds = {name: float | None for name in metrics if name.startswith(("eval_", "test_"))} | _FIELDS
    kinds |= {} if metrics.get("diverged") else {"eval_loss": float, "test_loss": float | None}
    for name, kind in kinds.items():
        if name in metrics:
            from_json(kind, metrics[name], f"{file}: {name}.")
        elif name in required:
            raise ValueError(f"{file}: {name} is missing")


def scale_folder(folder: Path, name: str) -> Path:
    """The folder of a scale in that of its comparison, which is the same if there is only one, without a name."""
    return folder / "scales" / name if name else folder


def run_folder(folder: Path, run: Run) -> Path:
    """The folder of a run in that of its scale."""
    return folder / "runs" / run.name


@dataclass(frozen=True)
class Tuning:
    """The choice of a learning rate by a seed.

    Attributes:
        seed: that chooses.
        losses: validation loss of each rate tried, in nats per token; infinity if the run diverged.
        ready: runs that the choice waits for.
        rate: the rate chosen; `None` before, or if every rate diverged.
        boundary: whether it is the `smallest` or the `largest` rate tried.
    """

    seed: int
    losses: dict[float, float]
    ready: list[Run]
    rate: float | None = None
    boundary: str | None = None


class RunStore:
    """The finished runs in the folder of a scale, which may be an address (see `storage`).

    The metrics of a run are read once, and a step of a search is made once.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics: dict[Run, dict[str, Any]] = {}
        self._losses: dict[tuple, dict[float, float]] = {}  # of each search, as far as it is

    def metrics(self, run: Run) -> dict[str, Any] | None:
        """The metrics of a run; `None` if it is not finished."""
        if run not in self._metrics:
            file = run_folder(self.folder, run) / METRICS_FILE
            if not file.is_file():
                return None
            check_metrics(file, metrics := read_json(file))
            self._metrics[run] = metrics
        return self._metrics[run]

    def add(self, run: Run, metrics: dict[str, Any]) -> None:
        """Takes the metrics of a run that was finished just now, which a shared folder may show later."""
        self._metrics[run] = metrics

    def seeds_of(self, scale: Scale, model: str) -> list[int]:
        """The seeds that a model is trained with, as far as is known: all, or those up to the analysis at which it
        leaves.

        With `stop: early`, the first interim analysis is made when the runs of the first `FIRST_INTERIM` seeds are
        finished. A model about which there is no verdict gets the next seed, as does the baseline as long as there is
        such a model. The finished runs alone decide, so a comparison that goes on decides the same.
        """
        if scale.stop is None:
            return scale.seeds
        counts = dict.fromkeys(scale.variants, FIRST_INTERIM)
        for count in range(FIRST_INTERIM, len(scale.seeds)):
            analysed = [model for model, own in counts.items() if own == count]
            losses = {model: self._test_losses(scale, model, scale.seeds[:own]) for model, own in counts.items()}
            if scale.baseline not in analysed or None in losses.values():
                break
            at_boundary = [model for model in analysed if self.is_at_boundary(scale, model, scale.seeds[:count])]
            found = analyse(losses, scale.baseline, at_boundary=at_boundary, most=len(scale.seeds))
            if open_models := [model for model in analysed if model in found.open_models()]:
                counts |= dict.fromkeys([scale.baseline, *open_models], count + 1)
        return scale.seeds[: counts[model]]

    def _test_losses(self, scale: Scale, model: str, seeds: list[int]) -> dict[int, float | None] | None:
        """The test losses of a model's reported runs, `None` where one diverged; `None` if not all are finished."""
        losses = {}
        for tuning in (self._tune(scale, model, seed) for seed in seeds):
            if tuning.ready:
                return None
            metrics = self.metrics(_reported(model, tuning))
            losses[tuning.seed] = None if metrics["diverged"] else metrics["test_loss"]
        return losses

    def is_at_boundary(self, scale: Scale, model: str, seeds: Sequence[int] | None = None) -> bool:
        """Whether the best rate of a seed, by default of any, is the smallest or the largest of several that were
        tried.
        """
        tunings = [self._tune(scale, model, seed) for seed in seeds or self.seeds_of(scale, model)]
        return any(tuning.boundary and tuning.rate is not None for tuning in tunings)

    def tunings(self, scale: Scale, model: str) -> list[Tuning]:
        """How far the choice of a model's learning rate is, for each seed. A single rate is chosen when its run is
        finished.
        """
        return [self._tune(scale, model, seed) for seed in self.seeds_of(scale, model)]

    def _tune(self, scale: Scale, model: str, seed: int) -> Tuning:
        """Goes on with the search of a seed from where it was when last asked for, with the losses of the finished
        runs.
        """
        rates = scale.variants[model].rates_of(seed)
        losses = self._losses.setdefault((model, rates, seed), {})
        while next_rates := rates.next(losses):
            runs = [Run(model, rate, seed) for rate in next_rates]
            if ready := [run for run in runs if self.metrics(run) is None]:
                return Tuning(seed, dict(losses), ready)
            for run in runs:
                found = self.metrics(run)
                # Where there is nothing to choose, there may be no validation split
                losses[run.learning_rate] = math.inf if found["diverged"] else found.get("eval_loss", 0.0)
        return Tuning(seed, losses, [], rates.best(losses), rates.boundary(losses))

    def reported(self, scale: Scale, model: str) -> list[Run]:
        """The finished runs of a model that are reported; one for each seed in the end.

        A seed that diverges at each of its rates reports the run at the smallest.
        """
        return [_reported(model, tuning) for tuning in self.tunings(scale, model) if not tuning.ready]

    def tried(self, scale: Scale, model: str) -> list[Run]:
        """The finished runs that choose a model's learning rate and are not reported."""
        reported = set(self.reported(scale, model))
        runs = [
            Run(model, rate, tuning.seed) for tuning in self.tunings(scale, model) for rate in sorted(tuning.losses)
        ]
        return [run for run in runs if run not in reported]

    def unfinished(self, scale: Scale, model: str) -> list[Run]:
        """The runs of a model that can begin now: all that are left, unless a search goes on."""
        return [run for tuning in self.tunings(scale, model) for run in tuning.ready]

    def count(self, scale: Scale, model: str) -> int:
        """The number of finished runs of a model."""
        rates = scale.variants[model].rates_of
        runs = [
            Run(model, rate, tuning.seed)
            for tuning in self.tunings(scale, model)
            for rate in (*tuning.losses, *rates(tuning.seed).next(tuning.losses))
        ]
        return sum(self.metrics(run) is not None for run in runs)


def _reported(model: str, tuning: Tuning) -> Run:
    return Run(model, min(tuning.losses) if tuning.rate is None else tuning.rate, tuning.seed)


def next_runs(scale: Scale, finished: RunStore) -> tuple[list[Run], int]:
    """The runs that can begin now, in their order, and the number of finished runs."""
    ready = [run for model in scale.variants for run in finished.unfinished(scale, model)]
    return scale.in_order(ready), sum(finished.count(scale, model) for model in scale.variants)


def in_turn(comparison: Comparison, folder: Path) -> Iterator[tuple[str, Scale, RunStore]]:
    """Goes through the scales in the order in which they are made, the smallest first.

    The rates of a scale are known when the scale before it is finished: each seed begins its search at the rate that
    it chose at the last scale that it has. One start for all seeds would be an accident of the scale before that they
    share, and their choices would not be independent.

    Yields:
        Name, scale and finished runs. The runs may be made before the next scale is asked for.
    """
    starts: dict[str, dict[int, float]] = {}
    for name, planned in comparison.scales.items():
        scale, finished = planned.starting_at(starts), RunStore(scale_folder(folder, name))
        yield name, scale, finished
        for model in scale.variants:
            chosen = {tuning.seed: tuning.rate for tuning in finished.tunings(scale, model) if tuning.rate is not None}
            starts[model] = {**starts.get(model, {}), **chosen}
