"""The plan of a screening: from a file with `factors` to the runs of a design, and those that confirm it."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison.inference import FIRST_INTERIM
from ..comparison.plan import Comparison, Variant
from ..comparison.rates import Rates, read_rates
from ..comparison.reading import (
    ComparisonFile,
    check_names,
    check_set_by_run,
    check_stop,
    read_model,
    read_scale,
    read_shared_recipe,
)
from ..files import check_keys, read_section
from ..size import Size
from .design import RATE, Design, make_design, merged_change


OFF, BEST = "off", "best"
_MOST_FACTORS = 15


@dataclass
class Screening:
    """The plan of a screening.

    Attributes:
        factors: the changes by name.
        rates: the low and the high learning rate.
        runs: the runs of the design, as a comparison whose models are its rows, in order.
        sizes: the size of the model with one factor on, by its name, and of the baseline, by `OFF`.
        confirm: function from the factors that survive to the comparison that confirms them.
        confirmation: that comparison for the first factor alone, whose number of runs is that of any other.
    """

    name: str
    command: str
    given: dict[str, Any]
    factors: dict[str, dict[str, Any]]
    design: Design
    rates: tuple[float, float]
    runs: Comparison
    sizes: dict[str, Size]
    confirm: Callable[[Sequence[str]], Comparison]
    confirmation: Comparison

    def describe(self) -> Iterator[str]:
        """The plan, line by line."""
        scale = self.runs.largest
        rows, seeds = len(self.design.rows), len(scale.seeds)
        for name, change in self.factors.items():
            yield f"{name}: {json.dumps(change)}, {self.added_parameters(name):+,} parameters"
        low, high = self.rates
        yield f"{RATE}: {low:g} or {high:g}"
        yield (
            f"screening: {rows} models with {seeds} seeds each, {rows * seeds} runs of {scale.tokens_per_run:,} "
            f"tokens, {scale.flops:.3g} FLOPs"
        )
        for group in self.design.aliases():
            if len(group) > 1:
                yield f"cannot be told apart: {', '.join(' x '.join(pair) for pair in group)}"
        scale = self.confirmation.largest
        yield (
            "then the factors that survive, together, against the baseline, each model at its own learning rate: "
            f"{'at most ' * bool(scale.stop)}{scale.runs} runs{', more if a search goes on' * scale.is_open}"
        )

    def added_parameters(self, factor: str) -> int:
        """The parameters that a factor adds to the baseline."""
        return self.sizes[factor].total - self.sizes[OFF].total


def read_screening(file: ComparisonFile) -> Screening:
    """Makes the plan of a screening from its file.

    Raises:
        ValueError: for an unknown field, name or value, factors that no model can have together, and one that changes
            nothing.
    """
    given, source = file.given, file.source
    _check_factor_fields(source, given)
    factors = {
        factor: {section: dict(content or {}) for section, content in (fields or {}).items()}
        for factor, fields in given["factors"].items()
    }
    design = make_design(list(factors))
    low, high = read_rates(f"{source}: learning_rates", given["learning_rates"]).listed
    shared = read_shared_recipe(file.recipe, file.overrides, file.recipe_source)
    built: dict[str, Variant] = {}
    for factor in (OFF, *factors):
        change = {} if factor == OFF else merged_change(factors, [factor])
        budget = built[OFF].size if built else None
        one = read_model(source, factor, change, shared, Rates(listed=(low,)), given.get("match"), budget)
        off = built.setdefault(OFF, one)
        if factor != OFF and one.config == off.config and one.recipe.training == off.recipe.training:
            raise ValueError(f"{source}: factor {factor!r} changes nothing; remove it")
        built[factor] = one

    def plan(name: str, **changes: Any) -> Comparison:
        fields = {field: value for field, value in given.items() if field not in ("factors", "confirm")}
        scale = read_scale(file, {**fields, **changes, "name": name}, file.recipe, source, file.recipe_source)
        scale.given["name"] = file.name  # the folder's file has the name of the screening
        return Comparison(name, scale.baseline, {"": scale}, file.command, scale.given)

    models = {}
    for row in design.rows:
        on = [factor for factor, level in zip(design.factors[:-1], row) if level > 0]
        rate = high if row[-1] > 0 else low
        models[_row_name(on, rate)] = {**merged_change(factors, on), "learning_rates": [rate]}
    runs = plan(f"{file.name}, screening", models=models, baseline=_row_name([], low), learning_rates=[low])

    def confirm(survivors: Sequence[str]) -> Comparison:
        models = {OFF: {}, BEST: merged_change(factors, survivors)}
        unused = max(given["seeds"]) + 1  # seeds that did not choose the survivors
        new = list(range(unused, unused + max(len(given["seeds"]), FIRST_INTERIM)))
        asked = {"learning_rates": {"start": math.sqrt(low * high), "factor": 2}, "seeds": new}
        asked |= given.get("confirm") or {}
        check_stop(source, {**given, **asked})
        return plan(f"{file.name}, confirmation", **asked, models=models, baseline=OFF)

    first = confirm(list(factors)[:1])  # its fields are checked before anything is trained
    whole, sizes = {**given, "recipe": shared.to_dict()}, {name: variant.size for name, variant in built.items()}
    return Screening(file.name, file.command, whole, factors, design, (low, high), runs, sizes, confirm, first)


def _row_name(factors: list[str], rate: float) -> str:
    """The name of a row, which also names its folder."""
    return f"{'+'.join(factors) or OFF}, rate {rate:g}"


def _check_factor_fields(path: str, given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for fields that a screening does not have, or that it needs otherwise."""
    for name in ("models", "baseline", "scales", "tokens_per_parameter", "stop", "tasks"):
        if given.get(name) is not None:
            raise ValueError(
                f"{path}: factors and {name} exclude each other: the models of a screening are those of its design"
            )
    factors = read_section(given["factors"], f"{path}: factors")
    if not 2 <= len(factors) <= _MOST_FACTORS:
        raise ValueError(f"{path}: factors holds {len(factors)} changes; it must hold 2 to {_MOST_FACTORS}")
    check_names(f"{path}: factor", factors)
    if wrong := [name for name in factors if "+" in name or "," in name or name in (OFF, BEST, RATE)]:
        raise ValueError(f"{path}: factor {wrong[0]!r}: the name must be another one, without + and ,")
    for name, fields in factors.items():
        source = f"{path}: factor {name!r}"
        check_keys(source, sections := read_section(fields, source), ("switches", "training"))
        for section, content in sections.items():
            check_set_by_run(source, read_section(content, f"{source}: {section}"))
    rates = read_rates(f"{path}: learning_rates", given.get("learning_rates"))
    if rates is None or rates.is_search or len(rates.listed) != 2:
        raise ValueError(f"{path}: learning_rates must be a list of two with factors: the low rate and the high one")
    if isinstance(given.get("seeds"), list) and len(given["seeds"]) < 2:
        raise ValueError(
            f"{path}: seeds={given['seeds']!r}: a screening needs two or more: the noise shows between seeds"
        )
    confirm = read_section(given.get("confirm"), f"{path}: confirm")
    check_keys(f"{path}: confirm", confirm, ("learning_rates", "seeds", "stop"))
    seeds = confirm.get("seeds")
    if isinstance(seeds, list) and len(seeds) < FIRST_INTERIM:
        raise ValueError(
            f"{path}: confirm: seeds={seeds!r} must be {FIRST_INTERIM} or more; set confirm: {{seeds: ...}}"
        )
