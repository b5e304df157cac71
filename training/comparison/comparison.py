"""The plan of a comparison: models, learning rates and seeds on one recipe, at one scale or at several."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..result import RunResult
from ..run.conflicts import emulated_bf16
from ..run.recipe import Recipe
from ..size import Size
from ..text import align
from .config import ComparisonConfig, ModelConfig
from .inference import FIRST_INTERIM, alpha_of_last, analyse, power_warning
from .lr_search import Rates


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Unique in its comparison; also its folder's path there."""
        return f"{self.model}/rate-{self.learning_rate:g}-seed-{self.seed}"


@dataclass(frozen=True)
class Variant:
    """A model of a comparison, at one scale. In an outline it has a config and rates alone.

    Attributes:
        config: its fields in the file, with the changes of the scale.
        starts_anew: whether its scale says where the search of rates begins.
        rates_by_seed: the rates of a seed, where it does not have `rates`.
        intermediate_size: the MLP width, after matching.
        tokens: number of training tokens of each run, with full batches.
        model_config: all fields of the configuration of its model.
    """

    config: ModelConfig
    rates: Rates
    starts_anew: bool = False
    rates_by_seed: dict[int, Rates] = field(default_factory=dict)
    recipe: Recipe | None = None
    size: Size = field(default_factory=lambda: Size(0, 0, 0, 0))
    intermediate_size: int | None = None
    steps: int = 0
    tokens: int = 0
    model_config: dict[str, Any] = field(default_factory=dict)

    def rates_of(self, seed: int) -> Rates:
        """Returns the rates that a seed can choose."""
        return self.rates_by_seed.get(seed, self.rates)


@dataclass(frozen=True)
class Scale:
    """One scale of a comparison, with all overrides applied: models that see the same tokens.

    Attributes:
        name: the name of the comparison, and of the scale if there are several.
    """

    name: str
    config: ComparisonConfig
    variants: dict[str, Variant]

    @property
    def baseline(self) -> str:
        """The model that all others are compared with."""
        return self.config.baseline

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs. Each chooses a learning rate for each model."""
        return self.config.seeds

    @property
    def stop(self) -> str | None:
        """`"early"` if models leave at their verdicts (see `progress_of`)."""
        return self.config.stop

    def runs_of(self, model: str) -> int:
        """The number of runs of a model; a search may need more."""
        return len(self.seeds) * len(self.variants[model].rates.first)

    @property
    def is_open(self) -> bool:
        """Whether a search may need more runs than planned."""
        return any(variant.rates.is_search for variant in self.variants.values())

    @property
    def tasks(self) -> list[str]:
        """The downstream tasks for every reported run."""
        return self.config.tasks or []

    @property
    def baseline_flops(self) -> int:
        """The compute of a run of the baseline."""
        return self.variants[self.baseline].size.flops_per_token * self.tokens_per_run

    @property
    def tokens_per_run(self) -> int:
        """The number of training tokens, with full batches."""
        return self.variants[self.baseline].tokens

    @property
    def steps_per_run(self) -> int:
        """The number of optimizer steps of a run."""
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
        """Returns this scale with searches that begin at rates chosen before, unless the scale sets its own."""
        variants = dict(self.variants)
        for name, variant in variants.items():
            if not variant.starts_anew:
                rates = {seed: variant.rates.starting_at(rate) for seed, rate in chosen.get(name, {}).items()}
                variants[name] = dataclasses.replace(variant, rates_by_seed=rates)
        return dataclasses.replace(self, variants=variants)

    def power_warning(self) -> str | None:
        """A warning if there are too few seeds for a verdict."""
        seeds = len(self.seeds)
        return power_warning(seeds, len(self.variants) - 1, alpha_of_last(seeds, self.stop is not None))

    def describe(self) -> Iterator[str]:
        """Yields the plan line by line."""
        rows = [self._describe_model(name) for name in self.variants]
        is_shown = {column: any(row[column] for row in rows) for column in rows[0]}
        is_shown["trained"] = any(row["trained"] != row["parameters"] for row in rows)
        shown = [column for column in rows[0] if is_shown[column]]
        yield from align([shown, *([row[column] for column in shown] for row in rows)])
        more = ", more if a search goes on" if self.is_open else ""
        seeds = " ".join(map(str, self.seeds))
        yield (
            f"{self.runs} runs of {self.tokens_per_run:,} tokens, {self.flops:.3g} FLOPs in all{more}; seeds {seeds}"
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

    def _describe_model(self, name: str) -> dict[str, str]:
        variant = self.variants[name]
        size = variant.size
        return {
            "model": f"{name} (baseline)" if name == self.baseline else name,
            "parameters": f"{size.total:,}",
            "trained": f"{size.trained:,}",
            "non-embedding": f"{size.non_embedding:,}",
            "MLP width": "" if variant.intermediate_size is None else f"{variant.intermediate_size:,}",
            "FLOPs per token": f"{size.flops_per_token:,}",
            "FLOPs per run": f"{size.flops_per_token * self.tokens_per_run:.3g}",
            "learning rates": str(variant.rates),
            "runs": f"{self.runs_of(name)} or more" if variant.rates.is_search else str(self.runs_of(name)),
        }


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
    """The progress of a scale, from its finished runs.

    Attributes:
        scale: the scale; its searches begin where the scale before it ended.
        tunings: the choices of each model, by seed. A model that leaves early has fewer.
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
        """The models with a seed at the smallest or the largest of several rates."""
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

    The first interim analysis of `stop: early` waits for the runs of the first `FIRST_INTERIM` seeds. A model without
    a verdict gets the next seed, and so does the baseline as long as such a model is left.
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
        verdicts = analyse(losses, scale.baseline, at_boundary=at_boundary, most=len(scale.seeds))
        open_models = [model for model in analysed if model in verdicts.open_models()]
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
            measured = results[run.name].losses
            loss = None if measured.diverged else measured.validation.loss
            losses[run.learning_rate] = math.inf if loss is None else loss
    return Tuning(model, seed, losses, [], rates.best(losses), rates.boundary(losses))


def _count(scale: Scale, tuning: Tuning, results: Results) -> int:
    """Counts the finished runs of a seed, also in a step of its search that is not complete."""
    rates = scale.variants[tuning.model].rates_of(tuning.seed)
    tried = {*tuning.losses, *rates.next(tuning.losses)}
    return sum(Run(tuning.model, rate, tuning.seed).name in results for rate in tried)


@dataclass(frozen=True)
class Comparison:
    """The same models at one scale or more, with all overrides applied.

    Attributes:
        config: the whole comparison with its overrides. Two of them without `differences` are the same comparison.
        scales: by name, from the smallest to the largest.
    """

    name: str
    config: ComparisonConfig
    scales: dict[str, Scale]
    command: str = ""

    @property
    def baseline(self) -> str:
        """The model that all others are compared with."""
        return self.config.baseline

    @property
    def largest(self) -> Scale:
        """The scale with the most compute."""
        return list(self.scales.values())[-1]

    def progress(self, results: Mapping[str, Results]) -> dict[str, ScaleProgress]:
        """Returns how far each scale is that has begun, by name. A scale begins when those before it are finished.

        Each seed begins its search where it ended at the last scale that has the seed, so that choices of seeds stay
        independent.
        """
        starts: dict[str, dict[int, float]] = {}
        progress: dict[str, ScaleProgress] = {}
        for name, scale in self.scales.items():
            progress[name] = progress_of(scale.starting_at(starts), results[name])
            if progress[name].ready:
                break
            for model, tunings in progress[name].tunings.items():
                chosen = {tuning.seed: tuning.rate for tuning in tunings if tuning.rate is not None}
                starts[model] = {**starts.get(model, {}), **chosen}
        return progress

    def by_scale(self, lines: Mapping[str, Iterable[str]]) -> Iterator[str]:
        """Yields lines about each scale, below its name if there are several."""
        for name, about in lines.items():
            if len(self.scales) > 1:
                yield f"scale {name}"
                yield from (f"  {line}" for line in about)
            else:
                yield from about

    def describe(self) -> Iterator[str]:
        """Yields the plan line by line."""
        yield from self.by_scale({name: scale.describe() for name, scale in self.scales.items()})
        if len(self.scales) > 1:
            total = sum(scale.flops for scale in self.scales.values())
            shares = ", ".join(f"{name} {scale.flops / total:.0%}" for name, scale in self.scales.items())
            yield f"{total:.3g} FLOPs in all: {shares}"

    @property
    def machine_warning(self) -> str | None:
        """A warning if a model trains in bfloat16 on a CPU that emulates it."""
        variants = (variant for scale in self.scales.values() for variant in scale.variants.values())
        return next(filter(None, (emulated_bf16(variant.recipe.training) for variant in variants)), None)


def outline(config: ComparisonConfig, source: str) -> Comparison:
    """Returns the plan without recipes and sizes, with the scales in the order of the file."""
    scales = {}
    for name in config.scale_configs:
        here = config.at_scale(name, config.source_of(name, source))
        variants = {}
        for model, entry in here.models.items():
            if (rates := entry.rates or here.rates) is None:
                raise ValueError(f"{source}: learning_rates is missing")
            variants[model] = Variant(entry, rates, config.starts_anew(name, model))
        scales[name] = Scale(here.name, here, variants)
    return Comparison(config.name, config, scales)
