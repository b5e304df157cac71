"""The plan of a comparison: models, learning rates and seeds on one recipe, at one scale or at several."""

import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..parameters import Size
from ..run.recipe import ResolvedRecipe, resolve_recipe
from ..text import align
from .inference import FIRST_INTERIM, power_warning
from .rates import Rates


def default_folder(name: str) -> Path:
    """The results folder of a comparison, unless another one is given."""
    return Path(f"runs/compare-{name}")


@contextmanager
def without_gpu_advice() -> Iterator[None]:
    """Drops a message of `TrainingArguments`: that compiling helps most on newer GPUs than this machine has.

    A plan may be read on another machine than it runs on, and makes the arguments of many runs. A run that trains gives the
    message once, in its own log.
    """

    def is_no_advice(record: logging.LogRecord) -> bool:
        return "speedups for torchdynamo" not in record.getMessage()

    logger = logging.getLogger("transformers.training_args")
    logger.addFilter(is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(is_no_advice)


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
    """A model of a comparison.

    Attributes:
        content: its recipe without learning rate and seed, as `resolve_recipe` takes it.
        rates: the rates to choose among.
        size: parameters and FLOPs per token.
        intermediate_size: the MLP width, after matching.
        steps: number of optimizer steps of each run.
        tokens: number of training tokens of each run, if every batch is full.
        tokenizer: the tokenizer of its recipe.
        given: its entry in the comparison's file.
        config: all fields of its configuration.
        has_own_start: whether its scale says where the search of rates begins.
        rates_by_seed: the rates of a seed, where it does not have `rates`.
    """

    content: dict[str, Any]
    rates: Rates
    size: Size
    intermediate_size: int | None
    steps: int
    tokens: int
    tokenizer: str
    given: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    has_own_start: bool = False
    rates_by_seed: dict[int, Rates] = field(default_factory=dict)

    def rates_of(self, seed: int) -> Rates:
        """The rates among which a seed chooses."""
        return self.rates_by_seed.get(seed, self.rates)


@dataclass
class Comparison:
    """A comparison at one scale, with all overrides applied.

    Attributes:
        name: its name.
        baseline: the model that all others are compared with.
        variants: models by name.
        seeds: seeds of the runs, which all models share. Every seed tries the rates of a model, and reports its own run at the
            rate with the lowest validation loss.
        tasks: downstream tasks on which every reported run is evaluated (see `evaluate_tasks`).
        tokens_per_run: number of training tokens, if every batch is full; `gather` counts the tokens that the runs saw.
        command: the command that runs it.
        given: the whole comparison with its overrides, as one mapping; equal mappings are the same comparison.
        stop: `"early"` if models leave as soon as there is a verdict about them (see `RunStore.seeds_of`); then the seeds
            are the most that a model has.
    """

    name: str
    baseline: str
    variants: dict[str, Variant]
    seeds: list[int]
    tasks: list[str]
    tokens_per_run: int
    command: str
    given: dict[str, Any]
    stop: Literal["early"] | None = None

    def has_choice(self, model: str) -> bool:
        """Whether a model has several rates. With one rate there is nothing to choose."""
        return len(self.variants[model].rates.first) > 1

    def runs_of(self, model: str) -> int:
        """The number of runs of a model; a search may need more."""
        return len(self.seeds) * len(self.variants[model].rates.first)

    @property
    def steps_per_run(self) -> int:
        """The number of optimizer steps of a run, which all models share."""
        return self.variants[self.baseline].steps

    @property
    def flops(self) -> int:
        """Of all runs; a search may need more."""
        return sum(self.runs_of(name) * item.tokens * item.size.flops_per_token for name, item in self.variants.items())

    def in_order(self, runs: list[Run]) -> list[Run]:
        """Sorts runs seed by seed, so that early results cover all models."""
        return sorted(runs, key=lambda run: self.seeds.index(run.seed))

    @without_gpu_advice()
    def resolve(self, run: Run, folder: Path) -> ResolvedRecipe:
        """The recipe of a run."""
        content = copy.deepcopy(self.variants[run.model].content)
        content["training"].update(learning_rate=run.learning_rate, seed=run.seed)
        return resolve_recipe(content, {"output_dir": str(folder)}, f"model {run.model!r}")

    def power_warning(self) -> str | None:
        """A warning if there are too few seeds for a verdict."""
        return power_warning(len(self.seeds), len(self.variants) - 1)

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        rows = []
        for name, variant in self.variants.items():
            size = variant.size
            rows.append(
                {
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
            )
        if all(row["trained"] == row["parameters"] for row in rows):
            rows = [{name: cell for name, cell in row.items() if name != "trained"} for row in rows]
        yield from align([list(rows[0]), *(list(row.values()) for row in rows)])
        runs = sum(self.runs_of(name) for name in self.variants)
        choice = ", each seed chooses among its own rates" if any(map(self.has_choice, self.variants)) else ""
        is_open = any(variant.rates.is_search for variant in self.variants.values())
        trained = sum(self.runs_of(name) * variant.tokens for name, variant in self.variants.items())
        yield (
            f"{runs} runs of {self.tokens_per_run:,} tokens, {trained:,} tokens, {self.flops:.3g} FLOPs in "
            f"all{', more if a search goes on' * is_open}; seeds {' '.join(map(str, self.seeds))}{choice}"
        )
        if self.stop:
            yield f"{runs} is the most: from {FIRST_INTERIM} seeds on, a model leaves as soon as there is a verdict about it"
        if warning := self.power_warning():
            yield f"warning: {warning}"


@dataclass
class Ladder:
    """The same comparison at several scales, from the smallest to the largest.

    Attributes:
        name, baseline, command, given: as in `Comparison`.
        scales: a comparison for each scale, by name.
    """

    name: str
    baseline: str
    scales: dict[str, Comparison]
    command: str
    given: dict[str, Any]

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        for name, comparison in self.scales.items():
            yield f"scale {name}"
            yield from (f"  {line}" for line in comparison.describe())
        flops = {name: comparison.flops for name, comparison in self.scales.items()}
        shares = ", ".join(f"{name} {value / sum(flops.values()):.0%}" for name, value in flops.items())
        yield f"{sum(flops.values()):.3g} FLOPs in all: {shares}"


def scales_of(plan: Comparison | Ladder) -> dict[str, Comparison]:
    """The scales of a plan by name; a comparison at one scale is its only one, without a name."""
    return plan.scales if isinstance(plan, Ladder) else {"": plan}


def with_starts(comparison: Comparison, chosen: Mapping[str, Mapping[int, float]]) -> Comparison:
    """A comparison in which seeds begin their searches at rates of their own, unless its scale says where to begin.

    Args:
        comparison: the comparison.
        chosen: the rates of each model's seeds. Other seeds begin where the file says.
    """
    variants = {
        name: dataclasses.replace(
            variant, rates_by_seed={seed: variant.rates.starting_at(rate) for seed, rate in chosen.get(name, {}).items()}
        )
        if not variant.has_own_start
        else variant
        for name, variant in comparison.variants.items()
    }
    return dataclasses.replace(comparison, variants=variants)
