"""The plan of a screening: the runs of a design and the comparison that confirms its result."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison.comparison import Comparison, Variant, outline, read_shared_recipe, size_scale, size_variant
from ..comparison.config import ComparisonConfig, ComparisonFile, as_written
from ..comparison.estimate import describe_estimate
from ..comparison.inference import FIRST_INTERIM
from ..comparison.lr_search import Rates
from ..comparison.sections import SINGLE, ConfirmConfig, ModelConfig, SearchConfig
from ..run.recipe import Recipe
from ..size import Size
from ..text import check_name
from .design import RATE, Design, make_design, merged_change


OFF, BEST = "off", "best"
_MOST_FACTORS = 15


@dataclass(frozen=True)
class Screening:
    config: ComparisonConfig
    design: Design
    runs: Comparison  # of the rows of the design, in order
    sizes: dict[str, Size]  # of the model with a factor on, by its name, and of the baseline, by `OFF`
    confirm: Callable[[Sequence[str]], Comparison]  # of the baseline with these survivors
    confirmation: Comparison  # of the first factor; any other has as many runs

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def machine_warning(self) -> str | None:
        return self.runs.machine_warning

    def describe(self) -> Iterator[str]:
        scale = self.runs.largest
        for name, factor in self.config.factors.items():
            yield f"{name}: {json.dumps(factor.to_dict())}, {self.added_parameters(name):+,} parameters"
        low, high = self.config.rates.listed
        yield f"{RATE}: {low:g} or {high:g}"
        yield (
            f"screening: {len(self.design.rows)} models with {len(scale.seeds)} seeds each, {scale.runs} runs of "
            f"{scale.tokens_per_run:,} tokens, {scale.flops:.3g} FLOPs"
        )
        if self.config.tune is not None:
            yield f"screening: {scale.describe_tuning()}"
        for group in self.design.aliases():
            if len(group) > 1:
                yield f"cannot be told apart: {', '.join(' x '.join(pair) for pair in group)}"
        scale = self.confirmation.largest
        most = "at most " if scale.config.stop else ""
        yield (
            "then the factors that survive, together, against the baseline, each model at its own learning rate: "
            f"{most}{scale.runs} runs{scale.or_more}"
        )
        yield f"confirmation: {scale.describe_tuning()}"

    def added_parameters(self, factor: str) -> int:
        return self.sizes[factor].total - self.sizes[OFF].total


@describe_estimate.register
def _(plan: Screening, threads: int | None = None, noise_floor: float | None = None) -> Iterator[str]:
    yield from describe_estimate(plan.runs, threads, has_verdicts=False)
    yield "confirmation, without what its factors add to the time:"
    yield from describe_estimate(plan.confirmation, threads, noise_floor)


def read_screening(file: ComparisonFile) -> Screening:
    config, source = file.config, file.source
    _check(config, source)
    design = make_design(list(config.factors))
    low, high = config.rates.listed
    shared = read_shared_recipe(file.recipe, file.overrides, file.recipe_source)

    def plan(name: str, **fields: Any) -> Comparison:
        try:
            changed = dataclasses.replace(config, factors=None, confirm=None, **fields)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        unsized = dataclasses.replace(outline(changed, source).largest, name=f"{config.name}, {name}")
        scale = size_scale(unsized, shared, source)
        return Comparison(scale.name, scale.config, {SINGLE: scale}, file.command)

    sizes = _sizes(config, shared, source)
    rows = {}
    for row in design.rows:
        on = [factor for factor, level in zip(design.factors[:-1], row) if level > 0]
        rate = high if row[-1] > 0 else low
        check_name(f"{source}: factors: their names together", _row_name(on, rate))
        rows[_row_name(on, rate)] = _model_with(config, on, learning_rates=[rate])
    tune = config.tune and dataclasses.replace(config.tune, at="baseline")
    runs = plan("screening", models=rows, baseline=_row_name([], low), learning_rates=[low], tune=tune)

    def confirm(survivors: Sequence[str]) -> Comparison:
        models = {OFF: ModelConfig(), BEST: _model_with(config, survivors)}
        asked = config.confirm or ConfirmConfig()
        unused = max(config.seeds) + 1  # the first seed that did not choose the survivors
        seeds = asked.seeds or list(range(unused, unused + max(len(config.seeds), FIRST_INTERIM)))
        rates = asked.learning_rates or SearchConfig(math.sqrt(low * high), 2.0)
        return plan("confirmation", models=models, baseline=OFF, learning_rates=rates, seeds=seeds, stop=asked.stop)

    first = confirm(list(config.factors)[:1])  # its fields are checked before anything is trained
    config = dataclasses.replace(config, recipe=as_written(shared.to_dict()))
    return Screening(config, design, runs, sizes, confirm, first)


def _row_name(factors: list[str], rate: float) -> str:
    return f"{'+'.join(factors) or OFF}, rate {rate:g}"


def _model_with(config: ComparisonConfig, factors: Sequence[str], **fields: Any) -> ModelConfig:
    changes = {name: config.factors[name].to_dict() for name in factors}
    return ModelConfig(**merged_change(changes, factors), **fields)


def _sizes(config: ComparisonConfig, shared: Recipe, source: str) -> dict[str, Size]:
    def sized(name: str, factors: list[str], budget: Size | None = None) -> Variant:
        variant = Variant(_model_with(config, factors), Rates(listed=(1.0,)), config.match)
        return size_variant(variant, shared, f"{source}: model {name!r}", budget)

    off = sized(OFF, [])
    sizes = {OFF: off.size}
    for factor in config.factors:
        on = sized(factor, [factor], off.size)
        if on.model_config == off.model_config and on.recipe.training == off.recipe.training:
            raise ValueError(f"{source}: factor {factor!r} changes nothing; remove it")
        sizes[factor] = on.size
    return sizes


def _check(config: ComparisonConfig, path: str) -> None:
    for name in ("models", "baseline", "scales", "tokens_per_parameter", "stop", "tasks"):
        if getattr(config, name) is not None:
            raise ValueError(f"{path}: factors and {name} exclude each other: a screening makes its own models")
    if not 2 <= len(config.factors) <= _MOST_FACTORS:
        raise ValueError(f"{path}: factors holds {len(config.factors)} changes; it must hold 2 to {_MOST_FACTORS}")
    if wrong := [name for name in config.factors if "+" in name or "," in name or name in (OFF, BEST, RATE)]:
        raise ValueError(f"{path}: factor {wrong[0]!r}: the name must be another one, without + and ,")
    if config.rates is None or len(config.rates.listed) != 2:
        raise ValueError(f"{path}: learning_rates must be a list of two with factors: the low rate and the high one")
    if len(config.seeds or ()) < 2:
        raise ValueError(f"{path}: seeds={config.seeds!r}: a screening needs two or more")
