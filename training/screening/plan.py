"""The plan of a screening: from a file with `factors` to the runs of a design, and those that confirm what survives."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison.inference import FIRST_INTERIM
from ..comparison.plan import Comparison, Variant, without_gpu_advice
from ..comparison.rates import Rates, read_rates
from ..comparison.reading import (
    ComparisonFile,
    check_names,
    check_seeds,
    check_set_by_run,
    check_stop,
    read_model,
    read_scale,
)
from ..files import check_keys, read_section
from ..parameters import Size
from ..run.recipe import resolve_recipe
from ..text import LONGEST_NAME
from .design import RATE, Design, make_design, merged_change, runs_one_at_a_time


OFF, BEST = "off", "best"
_MOST_FACTORS = 15


@dataclass
class Screening:
    """The plan of a screening.

    Attributes:
        name, command, given: as in `Comparison`.
        factors: the changes by name.
        design: the design.
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
        for name in self.factors:
            others = [option for options in self.design.choices if name in options for option in options if option != name]
            excludes = f"; never together with {', '.join(others)}" if others else ""
            yield f"{name}: {json.dumps(self.factors[name])}, {self.added_parameters(name):+,} parameters{excludes}"
        low, high = self.rates
        yield f"{RATE}: {low:g} or {high:g}"
        yield (
            f"screening: {rows} models with {seeds} seeds each, {rows * seeds} runs of {scale.tokens_per_run:,} tokens, "
            f"{scale.flops:.3g} FLOPs; one factor at a time, the same intervals take "
            f"{runs_one_at_a_time(self.design, seeds)} runs"
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


@without_gpu_advice()
def read_screening(file: ComparisonFile) -> Screening:
    """Makes the plan of a screening from its file.

    Raises:
        ValueError: for an unknown field, name or value, a factor or a pair of them that no model can have, one that changes
            nothing, and two that are the same.
    """
    given, source = file.given, file.source
    _check_factor_fields(source, given)
    entries, choices = _flat_factors(given["factors"])
    factors = {
        factor: {section: dict(content or {}) for section, content in (fields or {}).items()}
        for factor, fields in entries.items()
    }
    alone = [factor for factor in factors if not any(factor in options for options in choices)]
    design = make_design(alone, bool(given.get("fold")), choices)
    low, high = read_rates(f"{source}: learning_rates", given["learning_rates"]).listed
    check_seeds(source, given.get("seeds"))
    resolved = resolve_recipe(file.recipe, file.overrides, file.recipe_source).given
    sizes: dict[str, Size] = {}

    def build(what: str, change: dict[str, Any]) -> Variant:
        budget = sizes.get(OFF)
        try:
            variant = read_model(source, what, change, resolved, Rates(listed=(low,)), given.get("match"), budget)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{source}: model {what!r}: ")) from error
        sizes.setdefault(OFF, variant.size)  # the first is the baseline, which others may be matched to
        return variant

    try:
        built = _check_factors(factors, choices, build)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error

    def plan(name: str, **changes: Any) -> Comparison:
        fields = {field: value for field, value in given.items() if field not in ("factors", "fold", "confirm")}
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
        asked = {"learning_rates": {"start": math.sqrt(low * high), "factor": 2}, "seeds": given["seeds"]}
        asked |= given.get("confirm") or {}
        try:
            check_stop(source, {**given, **asked})
            return plan(f"{file.name}, confirmation", **asked, models=models, baseline=OFF)
        except ValueError as error:
            raise ValueError(f"{source}: confirm: {str(error).removeprefix(f'{source}: ')}") from error

    first = confirm(list(factors)[:1])  # its fields are checked before anything is trained
    whole = {**given, "recipe": resolved}
    return Screening(file.name, file.command, whole, factors, design, (low, high), runs, built, confirm, first)


def _row_name(factors: list[str], rate: float) -> str:
    """The name of a row, which also names its folder."""
    return f"{'+'.join(factors) or OFF}, rate {rate:g}"


def _check_factors(
    factors: Mapping[str, Mapping[str, Any]], choices: Sequence[Sequence[str]], build: Callable[[str, dict[str, Any]], Variant]
) -> dict[str, Size]:
    """Builds the baseline, each factor alone, and each pair that may be on together, before anything is trained.

    Returns:
        The sizes of the baseline and of the single factors.
    """
    built = {OFF: build(OFF, {})}
    for name in factors:
        try:
            built[name] = build(f"factor {name!r}", merged_change(factors, [name]))
        except ValueError as error:
            raise ValueError(f"factor {name!r}: {error}") from error
    for first, second in itertools.combinations(built, 2):
        one, other = built[first], built[second]
        if one.config == other.config and one.content["training"] == other.content["training"]:
            what = f"changes nothing: {OFF!r} has it" if first == OFF else f"is the same as {first!r}"
            raise ValueError(f"factor {second!r} {what}; remove it")
    for first, second in itertools.combinations(factors, 2):
        if any(first in options and second in options for options in choices):
            continue
        change = merged_change(factors, [first, second])
        try:
            build(f"factors {first!r} and {second!r}", change)
        except ValueError as error:
            raise ValueError(f"factors {first!r} and {second!r} exclude each other: {error}") from error
    return {name: variant.size for name, variant in built.items()}


def _check_factor_fields(path: str, given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for fields that a screening does not have, or that it needs otherwise."""
    for name in ("models", "baseline", "scales", "tokens_per_parameter", "stop", "tasks"):
        if given.get(name) is not None:
            raise ValueError(
                f"{path}: factors and {name} exclude each other: the models of a screening are those of its design"
            )
    if not isinstance(given.get("fold", False), bool):
        raise ValueError(f"{path}: fold={given['fold']!r} must be true or false")
    entries = read_section(given["factors"], f"{path}: factors")
    for name, fields in entries.items():
        if _is_choice(fields):
            source = f"{path}: factor {name!r}"
            check_keys(source, fields, ("one_of",))
            if len(read_section(fields["one_of"], f"{source}: one_of")) < 2:
                raise ValueError(f"{source}: one_of={fields['one_of']!r} must hold two or more options; off is one more")
    factors, choices = _flat_factors(entries)
    every = [name for name, fields in entries.items() if not _is_choice(fields)]
    every += itertools.chain.from_iterable(choices)
    if twice := [name for name in factors if every.count(name) > 1]:
        raise ValueError(f"{path}: factors: two of them, or an option and a factor, have the name {twice[0]!r}; rename one")
    if not 2 <= len(entries) - len(choices) <= _MOST_FACTORS:
        raise ValueError(
            f"{path}: factors holds {len(entries) - len(choices)} changes besides one_of; it must hold 2 to {_MOST_FACTORS}"
        )
    check_names(f"{path}: factor", factors)
    if wrong := [name for name in factors if "+" in name or "," in name or name in (OFF, BEST, RATE)]:
        raise ValueError(f"{path}: factor {wrong[0]!r}: the name must be another one, without + and ,")
    for name, fields in factors.items():
        source = f"{path}: factor {name!r}"
        check_keys(source, sections := read_section(fields, source), ("switches", "training"))
        for section, content in sections.items():
            check_set_by_run(source, read_section(content, f"{source}: {section}"))
    longest = [name for name in factors if not any(name in options for options in choices)]
    longest += [max(options, key=lambda option: len(str(option))) for options in choices]
    if len("+".join(longest)) > LONGEST_NAME:
        raise ValueError(f"{path}: the names of the factors are too long together: they name folders; shorten them")
    rates = read_rates(f"{path}: learning_rates", given.get("learning_rates"))
    if rates is None or rates.is_search or len(rates.listed) != 2:
        raise ValueError(f"{path}: learning_rates must be a list of two with factors: the low rate and the high one")
    if isinstance(given.get("seeds"), list) and len(given["seeds"]) < 2:
        raise ValueError(f"{path}: seeds={given['seeds']!r}: a screening needs two or more: the noise shows between seeds")
    confirm = read_section(given.get("confirm"), f"{path}: confirm")
    check_keys(f"{path}: confirm", confirm, ("learning_rates", "seeds", "stop"))
    seeds = confirm.get("seeds", given.get("seeds"))
    if isinstance(seeds, list) and len(seeds) < FIRST_INTERIM:
        raise ValueError(f"{path}: confirm: seeds={seeds!r} must be {FIRST_INTERIM} or more; set confirm: {{seeds: ...}}")


def _is_choice(fields: Any) -> bool:
    return isinstance(fields, Mapping) and "one_of" in fields


def _flat_factors(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[list[str]]]:
    """The entries of all factors and options by name, and the options of each choice."""
    factors, choices = {}, []
    for name, fields in given.items():
        if _is_choice(fields):
            choices.append(list(fields["one_of"]))
            factors.update(fields["one_of"])
        else:
            factors[name] = fields
    return factors, choices
