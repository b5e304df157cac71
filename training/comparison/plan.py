"""The plan of a comparison: models, learning rates and seeds on one recipe, at one scale or at several."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..run.recipe import ResolvedRecipe, resolve_recipe
from ..size import Size
from ..text import align
from .inference import FIRST_INTERIM, alpha_of_last, power_warning
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
        content: its recipe without learning rate and seed, as `resolve_recipe` takes it.
        size: parameters and FLOPs per token.
        intermediate_size: the MLP width, after matching.
        steps: number of optimizer steps of each run.
        tokens: number of training tokens of each run, if every batch is full.
        tokenizer: the tokenizer of its recipe.
        config: all fields of its configuration.
    """

    given: dict[str, Any]
    rates: Rates
    has_own_start: bool = False
    rates_by_seed: dict[int, Rates] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)
    size: Size = field(default_factory=lambda: Size(0, 0, 0, 0))
    intermediate_size: int | None = None
    steps: int = 0
    tokens: int = 0
    tokenizer: str = ""
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
        stop: `"early"` if models leave as soon as there is a verdict about them (see `RunStore.seeds_of`); then the
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

    def in_order(self, runs: list[Run]) -> list[Run]:
        """Sorts runs seed by seed, so that early results cover all models."""
        return sorted(runs, key=lambda run: self.seeds.index(run.seed))

    def resolve(self, run: Run, folder: Path) -> ResolvedRecipe:
        """The recipe of a run."""
        content = copy.deepcopy(self.variants[run.model].content)
        content["training"].update(learning_rate=run.learning_rate, seed=run.seed)
        return resolve_recipe(content, {"output_dir": str(folder)}, f"model {run.model!r}")

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

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        for name, scale in self.scales.items():
            yield from (f"scale {name}", *(f"  {line}" for line in scale.describe())) if name else scale.describe()
        if len(self.scales) > 1:
            total = sum(scale.flops for scale in self.scales.values())
            shares = ", ".join(f"{name} {scale.flops / total:.0%}" for name, scale in self.scales.items())
            yield f"{total:.3g} FLOPs in all: {shares}"
