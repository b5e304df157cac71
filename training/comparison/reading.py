"""From the file of a comparison to its plan: every field is checked, and every model sized, before anything is trained."""

import itertools
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import TrainingArguments, get_scheduler

from ...configuration import find, names
from ..files import check_keys, read_section, read_yaml
from ..parameters import Size, matching_intermediate_size, measure
from ..run.recipe import check_recipe, check_trusted, override_words, resolve_recipe, without_private
from ..run.task_items import check_held_out
from ..run.tasks import check_tasks
from ..scrub import without_folders
from ..text import LONGEST_NAME, check_name, one_line
from .factors import RATE, make_design, merged_change
from .inference import FIRST_INTERIM
from .plan import Comparison, Ladder, Variant, default_folder, without_gpu_advice
from .rates import Rates, read_rates
from .screening import BEST, OFF, Screening, check_factors, row_name


_FIELDS = (
    "name",
    "recipe",
    "baseline",
    "models",
    "factors",
    "fold",
    "confirm",
    "scales",
    "tokens_per_parameter",
    "learning_rates",
    "seeds",
    "stop",
    "tasks",
    "match",
    "training",
    "switches",
)
_RECIPE_FIELDS_OF_MODEL = ("model", "trainable", "lora", "parametrization", "base_sizes")
_MODEL_FIELDS = (*_RECIPE_FIELDS_OF_MODEL, "switches", "training", "learning_rates", "match")
_RECIPE_FIELDS_OF_SCALE = ("model", "tokenizer", "block_size")
_SCALE_FIELDS = (*_RECIPE_FIELDS_OF_SCALE, "switches", "training", "models", "tokens_per_parameter", "seeds")
_MATCHES = ("parameters", "flops")
_MOST_FACTORS = 15
# These differ between the runs of one model; `seeds` and `learning_rates` set them
_SET_BY_RUN = ("learning_rate", "seed", "data_seed")


@without_gpu_advice()
def load_comparison(
    source: str | Path, overrides: Mapping[str, Any] | None = None, trust_parts: bool = False
) -> Comparison | Ladder | Screening:
    """Reads a comparison, applies overrides, and checks that every run of it can be made.

    Args:
        source: the name of a shipped comparison or a YAML file, such as the `comparison.yaml` of a results folder.
        overrides, trust_parts: of the recipe that all models share, as in `load_recipe`.

    Returns:
        A `Ladder` if the file has `scales`, a `Screening` if it has `factors`.

    Raises:
        ValueError: for an unknown field, name or value.
    """
    path = find("comparisons", str(source))
    given = read_yaml(path)
    check_keys(str(path), given, _FIELDS)
    overrides = dict(overrides or {})
    _check_set_by_run("arguments", overrides)
    has_factors = given.get("factors") is not None
    models = read_section(given.get("models"), f"{path}: models")
    if not has_factors and (extra := [name for name in ("fold", "confirm") if name in given]):
        raise ValueError(f"{path}: {extra[0]} needs factors")
    for name in ("recipe",) if has_factors else ("recipe", "baseline"):
        if given.get(name) in (None, "", {}):
            raise ValueError(f"{path}: the field {name!r} is missing")
    if has_factors:
        _check_factor_fields(path, given)
    else:
        _check_models(path, models, given["baseline"])

    # The recipe that all models share
    shared, recipe_source = given["recipe"], f"{path}: recipe"
    if not isinstance(shared, dict):
        recipe_source = str(find("recipes", str(shared)))
        shared = read_yaml(Path(recipe_source))
    check_trusted(shared, overrides, recipe_source, trust_parts)
    shared = _merged({"test_fraction": 0.02, "record_stability": True, **shared}, given, str(path), recipe_source)
    resolved = {name: value for name, value in given.items() if name not in ("training", "switches")}
    resolved["name"] = own_name = _own_name(path, given)
    _check_tasks(path, given.get("tasks"))
    _check_stop(path, given)
    shown = Path(source).name if Path(source).is_file() else str(source)
    command = shlex.join(["nlq", "compare", shown, *override_words(without_folders(without_private(overrides)))])
    if has_factors:
        return _read_screening(str(path), own_name, command, resolved, shared, overrides, recipe_source)
    if given.get("scales") is None:
        return _read_comparison(str(path), own_name, command, resolved, shared, overrides, recipe_source)

    scales, found = read_section(given["scales"], f"{path}: scales"), {}
    _check_names(f"{path}: scale", scales)
    for name, entry in scales.items():
        where = f"{path}: scale {name!r}"
        entry = read_section(entry, where)
        check_keys(where, entry, _SCALE_FIELDS)
        _check_overrides(where, entry, overrides)
        own = {field: entry.get(field, resolved.get(field)) for field in ("tokens_per_parameter", "seeds")}
        scale = {**resolved, **own, "models": _models_of_scale(where, models, entry), "name": f"{own_name}, {name}"}
        del scale["scales"]
        recipe = _merged(
            {**shared, **{field: entry[field] for field in _RECIPE_FIELDS_OF_SCALE if field in entry}}, entry, where
        )
        found[name] = _read_comparison(where, scale["name"], command, scale, recipe, overrides, where)
        _mark_own_starts(found[name], entry)
    found = dict(sorted(found.items(), key=lambda item: _baseline_flops(item[1])))
    _check_scales(path, found)
    recipe = resolve_recipe(shared, overrides, recipe_source).given
    in_order = {name: scales[name] for name in found}
    return Ladder(own_name, given["baseline"], found, command, {**resolved, "scales": in_order, "recipe": recipe})


def _own_name(path: Path, given: Mapping[str, Any]) -> str:
    if not isinstance(given.get("name") or "", str):
        raise ValueError(f"{path}: name={given['name']!r} must be a text")
    name = " ".join(str(given.get("name") or path.stem).split())  # a heading has one line
    check_name(f"{path}: name", name)
    return name


def read_default_folder(source: str) -> Path:
    """The results folder of a comparison unless another one is given, by the name in its file: nothing else is read."""
    path = find("comparisons", source)
    return default_folder(_own_name(path, read_yaml(path)))


def load_outline(given: Mapping[str, Any]) -> Comparison | Ladder:
    """A comparison without its models: names, rates and seeds, as the `comparison.yaml` of a results folder has them.

    Raises:
        ValueError: if another version wrote it.
    """
    names = ["models"]
    if given.get("scales") is None or not all((fields or {}).get("seeds") for fields in given["scales"].values()):
        names.append("seeds")
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"comparison.yaml lacks {missing[0]!r}: another version of modeling-nlq wrote it")

    for kind in ("model", "scale"):
        _check_names(f"comparison.yaml: {kind}", given.get(f"{kind}s") or ())

    def make(name: str, fields: Mapping[str, Any]) -> Comparison:
        shared = read_rates("learning_rates", given.get("learning_rates"))
        variants = {}
        scale = fields if fields is not given else {}
        for model, entry in _models_of_scale(name, given["models"], scale or {}).items():
            rates = read_rates("learning_rates", entry.get("learning_rates")) or shared
            variants[model] = Variant({}, rates, Size(0, 0, 0, 0), None, 0, 0, "", entry)
        seeds = (fields or {}).get("seeds") or given.get("seeds")
        return Comparison(name, given["baseline"], variants, seeds, [], 0, "", dict(given), given.get("stop"))

    if given.get("scales") is None:
        return make(given["name"], given)
    scales = {}
    for name, fields in given["scales"].items():
        scales[name] = make(name, fields)
        _mark_own_starts(scales[name], fields or {})
    return Ladder(given["name"], given["baseline"], scales, "", dict(given))


def _read_comparison(
    source: str,
    name: str,
    command: str,
    given: dict[str, Any],
    shared: dict[str, Any],
    overrides: dict[str, Any],
    recipe_source: str,
) -> Comparison:
    """Reads a comparison at one scale.

    Args:
        source: the name of the file, for messages.
        name, command: as in `Comparison`.
        given: the fields of the file.
        shared: the recipe that all models share.
        overrides: changed fields of that recipe.
        recipe_source: its origin, for messages.
    """
    models, baseline = given["models"], given["baseline"]
    _check_seeds(source, given.get("seeds"))
    learning_rates = read_rates(f"{source}: learning_rates", given.get("learning_rates"))
    shared = resolve_recipe(shared, overrides, recipe_source).given
    if set(given.get("tasks") or []) & set(names("tasks")):
        check_held_out(shared, f"{source}: the models are trained")
    if (ratio := given.get("tokens_per_parameter")) is not None:
        shared["training"]["max_steps"] = _steps(source, ratio, models[baseline], baseline, shared)
    variants: dict[str, Variant] = {}
    for model in sorted(models, key=lambda model: model != baseline):  # the baseline first: others may be matched to it
        budget = variants[baseline].size if model != baseline else None
        variants[model] = _read_model(source, model, models[model], shared, learning_rates, given.get("match"), budget)
        if (tokens := variants[model].tokens) != variants[baseline].tokens:
            seen = f"{tokens:,} tokens, the baseline {variants[baseline].tokens:,}"
            raise ValueError(f"{source}: model {model!r} would see {seen}: that compares the amount of data too")
        if (tokenizer := variants[model].tokenizer) != variants[baseline].tokenizer:
            other = variants[baseline].tokenizer
            raise ValueError(
                f"{source}: model {model!r} has the tokenizer {tokenizer!r}, the baseline {other!r}: all must read the same "
                "tokens; name one tokenizer in the recipe"
            )
    variants = {model: variants[model] for model in models}
    resolved = {**given, "recipe": shared, "models": {model: item.given for model, item in variants.items()}}
    resolved.pop("tokens_per_parameter", None)  # the recipe has the steps
    return Comparison(
        name,
        baseline,
        variants,
        list(given["seeds"]),
        list(given.get("tasks") or []),
        variants[baseline].tokens,
        command,
        resolved,
        given.get("stop"),
    )


def _check_factor_fields(path: Path, given: Mapping[str, Any]) -> None:
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
    _check_names(f"{path}: factor", factors)
    if wrong := [name for name in factors if "+" in name or "," in name or name in (OFF, BEST, RATE)]:
        raise ValueError(f"{path}: factor {wrong[0]!r}: the name must be another one, without + and ,")
    for name, fields in factors.items():
        source = f"{path}: factor {name!r}"
        check_keys(source, sections := read_section(fields, source), ("switches", "training"))
        for section, content in sections.items():
            _check_set_by_run(source, read_section(content, f"{source}: {section}"))
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


def _read_screening(
    source: str,
    name: str,
    command: str,
    given: dict[str, Any],
    shared: dict[str, Any],
    overrides: dict[str, Any],
    recipe_source: str,
) -> Screening:
    """Reads a screening; the arguments are those of `_read_comparison`."""
    entries, choices = _flat_factors(given["factors"])
    factors = {
        factor: {section: dict(content or {}) for section, content in (fields or {}).items()}
        for factor, fields in entries.items()
    }
    alone = [factor for factor in factors if not any(factor in options for options in choices)]
    design = make_design(alone, bool(given.get("fold")), choices)
    low, high = read_rates(f"{source}: learning_rates", given["learning_rates"]).listed
    _check_seeds(source, given.get("seeds"))
    resolved = resolve_recipe(shared, overrides, recipe_source).given
    sizes: dict[str, Size] = {}

    def build(what: str, change: dict[str, Any]) -> Variant:
        budget = sizes.get(OFF)
        try:
            variant = _read_model(source, what, change, resolved, Rates(listed=(low,)), given.get("match"), budget)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{source}: model {what!r}: ")) from error
        sizes.setdefault(OFF, variant.size)  # the first is the baseline, which others may be matched to
        return variant

    try:
        built = check_factors(factors, choices, build)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error

    models = {}
    for row in design.rows:
        on = [factor for factor, level in zip(design.factors[:-1], row) if level > 0]
        rate = high if row[-1] > 0 else low
        models[row_name(on, rate)] = {**merged_change(factors, on), "learning_rates": [rate]}
    fields = {field: value for field, value in given.items() if field not in ("factors", "fold", "confirm")}
    own = {**fields, "models": models, "baseline": row_name([], low), "learning_rates": [low]}
    runs = _read_comparison(source, f"{name}, screening", command, own, shared, overrides, recipe_source)

    def confirm(survivors: Sequence[str]) -> Comparison:
        models = {OFF: {}, BEST: merged_change(factors, survivors)}
        asked = {"learning_rates": {"start": math.sqrt(low * high), "factor": 2}, "seeds": given["seeds"]}
        own = {**fields, **asked, **(given.get("confirm") or {}), "models": models, "baseline": OFF}
        try:
            _check_stop(Path(source), own)
            return _read_comparison(source, f"{name}, confirmation", command, own, shared, overrides, recipe_source)
        except ValueError as error:
            raise ValueError(f"{source}: confirm: {str(error).removeprefix(f'{source}: ')}") from error

    first = confirm(list(factors)[:1])  # its fields are checked before anything is trained
    return Screening(name, command, {**given, "recipe": resolved}, factors, design, (low, high), runs, built, confirm, first)


def _merged(recipe: Mapping[str, Any], given: Mapping[str, Any], source: str, recipe_source: str = "") -> dict[str, Any]:
    """A recipe with the sections `training` and `switches` of a comparison or a scale."""
    merged = dict(recipe)
    for section in ("training", "switches"):
        own = read_section(given.get(section), f"{source}: {section}")
        _check_set_by_run(f"{source}: {section}", own)
        merged[section] = {**read_section(recipe.get(section), f"{recipe_source}: {section}"), **own}
    return merged


def _mark_own_starts(comparison: Comparison, entry: Mapping[str, Any]) -> None:
    """Keeps the learning rates that a scale gives for a model: the scale before it does not change where they begin."""
    for model, fields in (entry.get("models") or {}).items():
        comparison.variants[model].has_own_start = (fields or {}).get("learning_rates") is not None


def _check_overrides(source: str, entry: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an argument that a scale sets too: one of the two would be lost."""
    given = {**overrides, **(overrides.get("switches") or {})}
    own = {*entry, *read_section(entry.get("training"), source), *read_section(entry.get("switches"), source)}
    if both := sorted(own & given.keys() - {"switches"}):
        raise ValueError(f"arguments: {both[0]}={given[both[0]]!r}, which {source} sets, too; change it there")


def _models_of_scale(source: str, models: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The models with the fields that a scale sets for some of them."""
    own = read_section(entry.get("models"), f"{source}: models")
    check_keys(f"{source}: models", own, models)
    merged = {}
    for name, before in models.items():
        fields = {"model": before} if isinstance(before, str) else read_section(before, f"{source}: model {name!r}")
        added = read_section(own.get(name), f"{source}: model {name!r}")
        sections = {
            section: {
                **read_section(fields.get(section), f"{source}: model {name!r}: {section}"),
                **read_section(added.get(section), f"{source}: model {name!r}: {section}"),
            }
            for section in ("switches", "training")
            if section in fields or section in added
        }
        merged[name] = {**fields, **added, **sections}
    return merged


def _steps(source: str, ratio: Any, entry: Any, baseline: str, shared: dict[str, Any]) -> int:
    """The number of optimizer steps in which the baseline sees `ratio` tokens for each of its non-embedding parameters."""
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio < math.inf:
        raise ValueError(f"{source}: tokens_per_parameter={ratio!r} must be a number above 0")
    if "max_steps" in shared["training"]:
        raise ValueError(f"{source}: tokens_per_parameter and max_steps both set the number of tokens; remove one")
    once = {**shared, "training": {**shared["training"], "max_steps": 1}}
    variant = _read_model(source, baseline, entry, once, Rates(listed=(1.0,)), None, None)
    return math.ceil(ratio * variant.size.non_embedding / variant.tokens)


def _baseline_flops(comparison: Comparison) -> int:
    return comparison.variants[comparison.baseline].size.flops_per_token * comparison.tokens_per_run


def _check_scales(path: Path, scales: Mapping[str, Comparison]) -> None:
    """Raises `ValueError` if scales cannot be compared with each other."""
    if len(scales) < 2:
        raise ValueError(f"{path}: scales holds only {', '.join(map(repr, scales)) or 'nothing'}; a ladder needs two or more")
    smallest, first = next((name, scale.variants[scale.baseline].tokenizer) for name, scale in scales.items())
    for smaller, larger in itertools.pairwise(scales):
        tokenizer = scales[larger].variants[scales[larger].baseline].tokenizer
        if tokenizer != first:
            raise ValueError(
                f"{path}: scale {larger!r} has the tokenizer {tokenizer!r}, scale {smallest!r} {first!r}: losses of "
                "other tokens cannot be compared; name one tokenizer in the recipe"
            )
        if (flops := _baseline_flops(scales[larger])) == _baseline_flops(scales[smaller]):
            raise ValueError(f"{path}: the scales {smaller!r} and {larger!r} have the same compute, {flops:.3g} FLOPs a run")


def _check_models(path: Path, models: Mapping[str, Any], baseline: Any) -> None:
    if isinstance(baseline, bool):
        _check_names(f"{path}: baseline", [baseline])
    if not isinstance(baseline, str) or baseline not in models:
        raise ValueError(
            f"{path}: baseline={baseline!r} must be one of the models {', '.join(map(str, models)) or '(none given)'}"
        )
    if len(models) < 2:
        raise ValueError(f"{path}: models holds only the baseline {baseline!r}; there is nothing to compare it with")
    _check_names(f"{path}: model", models)


def _check_names(source: str, given: Iterable[Any]) -> None:
    """Raises `ValueError` for a name that cannot be that of a folder, or two that would share one."""
    for name in given:
        check_name(source, name)
    folded = [name.casefold() for name in given]
    if twice := [name for name in given if folded.count(name.casefold()) > 1]:
        raise ValueError(f"{source}s {' and '.join(map(repr, twice))} would share a folder on some machines; rename one")


def _check_set_by_run(source: str, fields: Iterable[str]) -> None:
    if fixed := [name for name in _SET_BY_RUN if name in fields]:
        raise ValueError(f"{source}: {', '.join(fixed)}: set seeds and learning_rates in the comparison's file instead")


def _check_tasks(path: Path, tasks: Any) -> None:
    if tasks is None:
        return
    if not isinstance(tasks, list) or not tasks or not all(isinstance(name, str) for name in tasks):
        raise ValueError(f"{path}: tasks={tasks!r} must be a list of names of tasks")
    check_tasks(tasks)


def _check_stop(path: Path, given: Mapping[str, Any]) -> None:
    stop, seeds = given.get("stop"), given.get("seeds")
    if stop not in (None, "early"):
        raise ValueError(f"{path}: stop={stop!r} must be early, or left out")
    if stop and given.get("scales") is not None:
        raise ValueError(f"{path}: stop: early needs a comparison at one scale: a trend needs all models at all scales")
    if stop and given.get("tasks") is not None:
        raise ValueError(
            f"{path}: stop: early and tasks exclude each other: the number of a model's runs depends on their losses, so a "
            "test of their scores would err too often"
        )
    if stop and isinstance(seeds, list) and len(seeds) <= FIRST_INTERIM:
        raise ValueError(
            f"{path}: stop: early looks at {FIRST_INTERIM} seeds first, and seeds={seeds!r} has no more; give the most seeds "
            "that a model may take"
        )


def _is_seed(seed: Any) -> bool:
    return isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32


def _check_seeds(source: str, seeds: Any) -> None:
    if not isinstance(seeds, list) or not seeds or not all(map(_is_seed, seeds)):
        raise ValueError(f"{source}: seeds={seeds!r} must be a list of at least one whole number from 0 to 2**32 - 1")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{source}: seeds={seeds!r} holds a seed twice")


def _read_model(
    path: str, name: str, entry: Any, shared: dict[str, Any], learning_rates: Rates | None, match: Any, budget: Size | None
) -> Variant:
    """Reads an entry of `models`: `None`, the name of a configuration, or a mapping of fields that differ from the recipe."""
    source = f"{path}: model {name!r}"
    entry = {"model": entry} if isinstance(entry, str) else read_section(entry, source)
    check_keys(source, entry, _MODEL_FIELDS)
    rates = read_rates(f"{source}: learning_rates", entry.get("learning_rates")) or learning_rates
    if rates is None:
        raise ValueError(f"{path}: learning_rates is missing")
    match = entry.get("match", match)
    if match is not None and match not in _MATCHES:
        raise ValueError(f"{source}: match={match!r} must be one of {', '.join(_MATCHES)}, or null")

    # `null` takes a field of the recipe back to its default
    own = {name: entry[name] for name in _RECIPE_FIELDS_OF_MODEL if name in entry}
    content = {name: value for name, value in {**shared, **own}.items() if value is not None or name not in own}
    content.setdefault("model", shared["model"])
    for section in ("training", "switches"):
        own = read_section(entry.get(section), f"{source}: {section}")
        _check_set_by_run(source, own)
        content[section] = {**shared[section], **own}
    try:
        resolved = resolve_recipe(content, None, source)
        if match is not None and budget is not None:
            width = matching_intermediate_size(resolved.config, budget, match, resolved.recipe.block_size)
            content["switches"]["intermediate_size"] = width
            resolved = resolve_recipe(content, None, source)
        recipe, arguments, config = resolved.recipe, resolved.training_arguments, resolved.config
        check_recipe(resolved)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{source}: {one_line(error).removeprefix(f'{source}: ')}") from error
    for name in ("max_steps", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(arguments, name) != int(getattr(arguments, name)):
            raise ValueError(f"{source}: {name}={getattr(arguments, name)} must be a whole number")
    if arguments.max_steps <= 0:
        raise ValueError(f"{source}: the recipe needs max_steps, so that all models see the same number of tokens")
    if recipe.test_fraction == 0:
        raise ValueError(f"{source}: test_fraction=0 leaves no test split to report")
    save_steps, logging_steps = (
        math.ceil(arguments.max_steps * given) if given < 1 else given  # as Trainer reads a share of all steps
        for given in (arguments.save_steps, arguments.logging_steps)
    )
    strategies = arguments.save_strategy.value, arguments.logging_strategy.value
    if strategies[0] != "no" and strategies not in (("steps", "steps"), ("epoch", "epoch")):
        raise ValueError(
            f"{source}: save_strategy={strategies[0]} and logging_strategy={strategies[1]} must both be steps or both epoch, "
            "or a run that is interrupted would report another training loss"
        )
    if arguments.save_strategy == "steps" and save_steps % logging_steps:
        raise ValueError(
            f"{source}: save_steps={save_steps} must be a multiple of logging_steps={logging_steps}, or a run that is "
            "interrupted would report another training loss"
        )
    # Each run has one device, even if this process has several
    tokens_per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * recipe.block_size
    if tokens_per_step < 1:
        raise ValueError(f"{source}: per_device_train_batch_size and gradient_accumulation_steps must be at least 1")
    _check_schedule(source, arguments)
    size = measure(config, recipe.block_size, prepare=resolved.choose_trained)
    steps, width = arguments.max_steps, getattr(config, "intermediate_size", None)
    all_fields = json.loads(config.to_json_string(use_diff=False))
    return Variant(content, rates, size, width, steps, steps * tokens_per_step, recipe.tokenizer, entry, all_fields)


def _check_schedule(source: str, arguments: TrainingArguments) -> None:
    """Raises `ValueError` if Transformers cannot make the schedule of the learning rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            arguments.get_warmup_steps(arguments.max_steps),
            arguments.max_steps,
            dict(arguments.lr_scheduler_kwargs or {}),
        )
    except (TypeError, ValueError) as error:
        kind, given = arguments.lr_scheduler_type.value, arguments.lr_scheduler_kwargs
        raise ValueError(f"{source}: lr_scheduler_type={kind}, lr_scheduler_kwargs={given}: {one_line(error)}") from error
