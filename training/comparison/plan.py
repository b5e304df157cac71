"""The plan of a comparison: models, learning rates and seeds on one recipe, at one scale or at several."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..run.recipe import Recipe
from ..run.result import RunResult
from ..size import Size
from ..text import align
from .inference import FIRST_INTERIM, alpha_of_last, analyse, power_warning
from .rates import Rates


def default_folder(name: str) -> Path:
    """The results folder of a comparison, unless another one is given."""
    return Path(f"runs/compare-{name}")


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        model: a name of the comparison.
        learning_rate, seed: settings of the run.
    """

    model: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Unique in its comparison; also its folder's path there."""
        return f"{self.model}/rate-{self.learning_rate:g}-seed-{self.seed}"


@dataclass
class Variant:
    """A model of a comparison, at one scale.

    Attributes:
        given: its entry in the comparison's file.
        rates: the rates to choose among.
        rates_by_seed: the rates of a seed, where it does not have `rates`.
        has_own_start: whether its scale says where the search of rates begins.
        recipe: its recipe without learning rate and seed; `None` in an outline (see `load_outline`).
        size: parameters and FLOPs per token.
        intermediate_size: the MLP width, after matching.
        steps: number of optimizer steps of each run.
        tokens: number of training tokens of each run, if every batch is full.
        config: all fields of its configuration.
    """

    given: dict[str, Any]
    rates: Rates
    has_own_start: bool = False
    rates_by_seed: dict[int, Rates] = field(default_factory=dict)
    recipe: Recipe | None = None
    size: Size = field(default_factory=lambda: Size(0, 0, 0, 0))
    intermediate_size: int | None = None
    steps: int = 0
    tokens: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def rates_of(self, seed: int) -> Rates:
        """The rates among which a seed chooses."""
        return self.rates_by_seed.get(seed, self.rates)


@dataclass
class Scale:
    """One scale of a comparison, with all overrides applied: models that see the same tokens.

    Attributes:
        name: the name of the comparison, and that of the scale if there are several.
        baseline: the model that all others are compared with.
        variants: models by name.
        seeds: seeds of the runs, which all models share. Every seed tries the rates of a model, and reports its own
            run at the rate with the lowest validation loss.
        given: the fields of the file, with those of the scale, as one mapping.
        tasks: downstream tasks on which every reported run is evaluated (see `evaluate_tasks`).
        command: the command that runs the comparison.
        stop: `"early"` if models leave as soon as there is a verdict about them (see `progress_of`); then the
            seeds are the most that a model has.
    """

    name: str
    baseline: str
    variants: dict[str, Variant]
    seeds: list[int]
    given: dict[str, Any]
    tasks: list[str] = field(default_factory=list)
    command: str = ""
    stop: Literal["early"] | None = None

    def runs_of(self, model: str) -> int:
        """The number of runs of a model; a search may need more."""
        return len(self.seeds) * len(self.variants[model].rates.first)

    @property
    def is_open(self) -> bool:
        """Whether a search may need more runs than planned."""
        return any(variant.rates.is_search for variant in self.variants.values())

    @property
    def tokens_per_run(self) -> int:
        """The number of training tokens, if every batch is full; `gather` counts the tokens that the runs saw."""
        return self.variants[self.baseline].tokens

    @property
    def steps_per_run(self) -> int:
        """The number of optimizer steps of a run, which all models share."""
        return self.variants[self.baseline].steps

    @property
    def runs(self) -> int:
        """The number of all runs; a search may need more."""
        return sum(map(self.runs_of, self.variants))

    @property
    def flops(self) -> int:
        """Of all runs; a search may need more."""
        return sum(
            self.runs_of(name) * item.tokens * item.size.flops_per_token for name, item in self.variants.items()
        )

    def recipe_of(self, run: Run, folder: Path) -> Recipe:
        """Returns the recipe of a run in its folder."""
        settings = {"learning_rate": run.learning_rate, "seed": run.seed, "output_dir": str(folder)}
        return self.variants[run.model].recipe.replace(training=settings)

    def starting_at(self, chosen: Mapping[str, Mapping[int, float]]) -> "Scale":
        """This scale, whose seeds begin their searches at the rates that they chose before, by model and seed.

        Other seeds begin where the file says, as do all seeds of a model for which the scale says it.
        """
        variants = dict(self.variants)
        for name, variant in variants.items():
            if not variant.has_own_start:
                own = {seed: variant.rates.starting_at(rate) for seed, rate in chosen.get(name, {}).items()}
                variants[name] = dataclasses.replace(variant, rates_by_seed=own)
        return dataclasses.replace(self, variants=variants)

    def power_warning(self) -> str | None:
        """A warning if there are too few seeds for a verdict."""
        seeds = len(self.seeds)
        return power_warning(seeds, len(self.variants) - 1, alpha_of_last(seeds, self.stop is not None))

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        rows = []
        for name, variant in self.variants.items():
            size = variant.size
            row = {
                "model": name + (" (baseline)" if name == self.baseline else ""),
                "parameters": f"{size.total:,}",
                "trained": f"{size.trained:,}",
                "non-embedding": f"{size.non_embedding:,}",
                "MLP width": "" if variant.intermediate_size is None else f"{variant.intermediate_size:,}",
                "FLOPs per token": f"{size.flops_per_token:,}",
                "FLOPs per run": f"{size.flops_per_token * self.tokens_per_run:.3g}",
                "learning rates": str(variant.rates),
                "runs": f"{self.runs_of(name)}{' or more' * variant.rates.is_search}",
            }
            rows.append(row)
        unneeded = {"trained"} if all(row["trained"] == row["parameters"] for row in rows) else set()
        unneeded |= {"MLP width"} - {name for row in rows for name, cell in row.items() if cell}
        rows = [{name: cell for name, cell in row.items() if name not in unneeded} for row in rows]
        yield from align([list(rows[0]), *(list(row.values()) for row in rows)])
        yield (
            f"{self.runs} runs of {self.tokens_per_run:,} tokens, {self.flops:.3g} FLOPs in all"
            f"{', more if a search goes on' * self.is_open}; seeds {' '.join(map(str, self.seeds))}"
        )
        if self.stop:
            yield f"these are the runs of all seeds; from {FIRST_INTERIM} seeds on, a model leaves at its verdict"
        if warning := self.power_warning():
            yield f"warning: {warning}"
        if any(len(variant.rates.first) == 2 for variant in self.variants.values()):
            yield (
                "warning: of two learning rates the best is always at the boundary, without a verdict; list one, or "
                "three"
            )


@dataclass(frozen=True)
class Tuning:
    """The choice of a model's learning rate by a seed.

    Attributes:
        losses: validation loss of each rate tried, in nats per token; infinity if the run diverged.
        ready: runs that the choice waits for.
        rate: the rate chosen; `None` before, or if every rate diverged.
        boundary: whether it is the `smallest` or the `largest` rate tried.
    """

    model: str
    seed: int
    losses: dict[float, float]
    ready: list[Run]
    rate: float | None = None
    boundary: str | None = None

    @property
    def reported(self) -> Run:
        """The run that the seed reports. A seed that diverges at each of its rates reports the smallest rate."""
        return Run(self.model, min(self.losses) if self.rate is None else self.rate, self.seed)

    @property
    def is_at_boundary(self) -> bool:
        """Whether a rate was chosen that is the smallest or the largest of several."""
        return self.boundary is not None and self.rate is not None


# Finished runs, by their names
Results = Mapping[str, RunResult]


@dataclass(frozen=True)
class ScaleProgress:
    """How far a scale is: what its finished runs say about the choices of rates, and about the seeds of each model.

    Attributes:
        scale: the scale, whose searches begin where the scale before it ended.
        tunings: the choices of each model, by seed. With `stop: early` a model has the seeds up to the analysis at
            which it leaves.
        finished: the number of finished runs of each model.
    """

    scale: Scale
    tunings: dict[str, list[Tuning]]
    finished: dict[str, int]

    @property
    def ready(self) -> list[Run]:
        """The runs that can begin now, seed by seed, so that early results cover all models."""
        runs = [run for tunings in self.tunings.values() for tuning in tunings for run in tuning.ready]
        return sorted(runs, key=lambda run: self.scale.seeds.index(run.seed))

    @property
    def at_boundary(self) -> list[str]:
        """The models of which a seed chose the smallest or the largest of several rates."""
        return [model for model, of in self.tunings.items() if any(tuning.is_at_boundary for tuning in of)]

    def reported(self, model: str) -> list[Run]:
        """Returns the finished runs of a model that are reported; one for each seed in the end."""
        return [tuning.reported for tuning in self.tunings[model] if not tuning.ready]

    def tried(self, model: str) -> list[Run]:
        """Returns the finished runs that choose a model's learning rate and are not reported."""
        reported = self.reported(model)
        runs = (Run(model, rate, item.seed) for item in self.tunings[model] for rate in sorted(item.losses))
        return [run for run in runs if run not in reported]


def progress_of(scale: Scale, results: Results) -> ScaleProgress:
    """Finds which runs of a scale come next, from the finished runs alone.

    With `stop: early`, the first interim analysis is made when the runs of the first `FIRST_INTERIM` seeds are
    finished. A model about which there is no verdict gets the next seed, as does the baseline as long as there is such
    a model.
    """
    counts = dict.fromkeys(scale.variants, len(scale.seeds) if scale.stop is None else FIRST_INTERIM)
    tunings: dict[str, list[Tuning]] = {model: [] for model in scale.variants}
    while True:
        for model, seen in tunings.items():
            seen += [_tune(scale, model, seed, results) for seed in scale.seeds[len(seen) : counts[model]]]
        analysed = [model for model, count in counts.items() if count == max(counts.values())]
        if (
            max(counts.values()) >= len(scale.seeds)
            or scale.baseline not in analysed
            or any(tuning.ready for seen in tunings.values() for tuning in seen)
        ):
            break
        losses = {
            model: {tuning.seed: results[tuning.reported.name].test_loss for tuning in seen}
            for model, seen in tunings.items()
        }
        at_boundary = [model for model in analysed if any(tuning.is_at_boundary for tuning in tunings[model])]
        found = analyse(losses, scale.baseline, at_boundary=at_boundary, most=len(scale.seeds))
        open_models = [model for model in analysed if model in found.open_models()]
        if not open_models:
            break
        counts |= dict.fromkeys([scale.baseline, *open_models], max(counts.values()) + 1)
    finished = {model: sum(_count(scale, tuning, results) for tuning in seen) for model, seen in tunings.items()}
    return ScaleProgress(scale, tunings, finished)


def _tune(scale: Scale, model: str, seed: int, results: Results) -> Tuning:
    """Follows the search of a seed as far as its runs are finished."""
    rates, losses = scale.variants[model].rates_of(seed), {}
    while next_rates := rates.next(losses):
        runs = [Run(model, rate, seed) for rate in next_rates]
        if ready := [run for run in runs if run.name not in results]:
            return Tuning(model, seed, losses, ready)
        for run in runs:
            found = results[run.name].losses
            has_loss = not found.diverged and found.validation.loss is not None
            losses[run.learning_rate] = found.validation.loss if has_loss else math.inf
    return Tuning(model, seed, losses, [], rates.best(losses), rates.boundary(losses))


def _count(scale: Scale, tuning: Tuning, results: Results) -> int:
    """Counts the finished runs of a seed, with those of a step of its search that is not complete."""
    rates = scale.variants[tuning.model].rates_of(tuning.seed)
    tried = {*tuning.losses, *rates.next(tuning.losses)}
    return sum(Run(tuning.model, rate, tuning.seed).name in results for rate in tried)


@dataclass
class Comparison:
    """The same models at one scale or more, with all overrides applied.

    Attributes:
        baseline: the model that all others are compared with.
        scales: by name, from the smallest to the largest; a single scale has no name, "".
        command: the command that runs it.
        given: the whole comparison with its overrides, as one mapping; equal mappings are the same comparison.
    """

    name: str
    baseline: str
    scales: dict[str, Scale]
    command: str
    given: dict[str, Any]

    @property
    def largest(self) -> Scale:
        """The scale with the most compute."""
        return list(self.scales.values())[-1]

    def progress(self, results: Mapping[str, Results]) -> dict[str, ScaleProgress]:
        """Returns how far each scale is that has begun, by name; the next one begins when all before it are finished.

        Each seed begins the search for its rate where it ended at the last scale that has the seed. With one start for
        all seeds, which an accident of the scale before could choose, their choices would not be independent.

        Args:
            results: the finished runs, by scale.
        """
        starts: dict[str, dict[int, float]] = {}
        found: dict[str, ScaleProgress] = {}
        for name, scale in self.scales.items():
            found[name] = progress_of(scale.starting_at(starts), results[name])
            if found[name].ready:
                break
            for model, tunings in found[name].tunings.items():
                chosen = {tuning.seed: tuning.rate for tuning in tunings if tuning.rate is not None}
                starts[model] = {**starts.get(model, {}), **chosen}
        return found

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        for name, scale in self.scales.items():
            yield from (f"scale {name}", *(f"  {line}" for line in scale.describe())) if name else scale.describe()
        if len(self.scales) > 1:
            total = sum(scale.flops for scale in self.scales.values())
            shares = ", ".join(f"{name} {scale.flops / total:.0%}" for name, scale in self.scales.items())
            yield f"{total:.3g} FLOPs in all: {shares}"
