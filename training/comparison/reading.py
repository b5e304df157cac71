"""From the file of a comparison to its plan: every field is checked, and every model sized, before anything is
trained.
"""

import dataclasses
import functools
import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import TrainingArguments

from modeling_nlq.configuration_nlq import check_kernels

from ...configuration import find
from ..disk import resolve_user_path
from ..files import check_keys, merged, read_section, read_yaml
from ..run.lora import choose_trained
from ..run.objectives import objective_in
from ..run.recipe import (
    Recipe,
    check_recipe,
    check_trusted,
    override_words,
    read_recipe,
    without_private,
)
from ..run.tasks import check_tasks
from ..sharing.scrub import without_folders
from ..size import ModelKind, Size, matching_intermediate_size, measure
from ..text import QUOTE_IT, check_name, one_line
from .fields import ComparisonFields, ModelFields, ScaleFields
from .inference import FIRST_INTERIM
from .plan import Comparison, Scale, Variant, default_folder
from .rates import Rates, read_rates


_SECTIONS = ("switches", "training")
_RECIPE_FIELDS_OF_MODEL = ("model", "trainable", "lora", "parametrization", "base_sizes")
_RECIPE_FIELDS_OF_SCALE = ("model", "tokenizer", "block_size")
_MATCHES = ("parameters", "flops")
# These differ between the runs of one model; `seeds` and `learning_rates` set them
_SET_BY_RUN = ("learning_rate", "seed", "data_seed")


@dataclass(frozen=True)
class ComparisonFile:
    """The file of a comparison or a screening, as far as both are alike.

    Attributes:
        source: its path, for messages.
        given: its fields but the sections of the recipe.
        recipe: the recipe that all models share, with those sections, and without `overrides`.
        recipe_source: the origin of the recipe, for messages.
        overrides: changed fields of the recipe.
    """

    source: str
    name: str
    command: str
    given: dict[str, Any]
    recipe: dict[str, Any]
    recipe_source: str
    overrides: dict[str, Any]


def read_file(
    source: str | Path, overrides: Mapping[str, Any] | None = None, trust_parts: bool = False
) -> ComparisonFile:
    """Reads the file of a comparison or a screening, and applies overrides.

    Args:
        source: the name of a shipped comparison or a YAML file, such as the `comparison.yaml` of a results folder.
        overrides, trust_parts: of the recipe that all models share, as in `load_recipe`.

    Raises:
        ValueError: for an unknown field, name or value.
    """
    path = find("comparisons", str(source))
    given = read_yaml(resolve_user_path(path))
    misplaced = TrainingArguments.__dataclass_fields__.keys() - {*ComparisonFields.__annotations__, *_SET_BY_RUN}
    if fields := [key for key in given if key in misplaced]:
        raise ValueError(f"{path}: unknown field {fields[0]!r}; set it in the section 'training'")
    check_keys(str(path), given, ComparisonFields.__annotations__)
    overrides = dict(overrides or {})
    check_set_by_run("arguments", overrides)
    if given.get("recipe") in (None, "", {}):
        raise ValueError(f"{path}: the field 'recipe' is missing")
    recipe, recipe_source = given["recipe"], f"{path}: recipe"
    if not isinstance(recipe, dict):
        recipe_source = str(find("recipes", str(recipe)))
        recipe = read_yaml(resolve_user_path(recipe_source))
    check_trusted(recipe, overrides, recipe_source, trust_parts)
    check_kernels(given, str(path))
    objective = objective_in(recipe)
    defaults = {"test_fraction": 0.02, "record_stability": "record_stability" in Recipe.read_by(objective)}
    recipe = _merged({**defaults, **recipe}, given, str(path), recipe_source)
    if any(given.get(section) for section in _SECTIONS) and isinstance(given["recipe"], str):
        recipe_source = f"{path} with {recipe_source}"
    name = _own_name(path, given)
    if (tasks := given.get("tasks")) is not None:
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            raise ValueError(f"{path}: tasks={tasks!r} must be a list of names of tasks")
        if objective.kind is not ModelKind.DECODER:
            raise ValueError(
                f"{path}: tasks={tasks!r}: lm_eval's tasks need decoders; take tasks out, or set objective: causal"
            )
        check_tasks(tasks)
    shown = Path(source).name if Path(source).is_file() else str(source)
    command = shlex.join(["nlq", "compare", shown, *override_words(without_folders(without_private(overrides)))])
    kept = {field: value for field, value in given.items() if field not in _SECTIONS} | {"name": name}
    return ComparisonFile(str(path), name, command, kept, recipe, recipe_source, overrides)


def read_comparison(file: ComparisonFile) -> Comparison:
    """Makes the plan of a comparison, and checks that every run of it can be made; raises as `read_file` does."""
    given, path = file.given, file.source
    if "confirm" in given:
        raise ValueError(f"{path}: confirm needs factors")
    check_stop(path, given)
    _check_models(path, read_section(given.get("models"), f"{path}: models"), given.get("baseline"))
    scales = {}
    for name, entry, fields in _scales_in(given, path, read_section(given.get("scales"), f"{path}: scales")):
        where = _place(path, name)
        check_keys(where, entry, ScaleFields.__annotations__)
        changed = {field: entry[field] for field in _RECIPE_FIELDS_OF_SCALE if field in entry}
        recipe = _merged({**file.recipe, **changed}, entry, where)
        scales[name] = read_scale(file, fields, recipe, where, where if name else file.recipe_source)
        for model, variant in scales[name].variants.items():
            variant.has_own_start = _has_own_start(entry, model)
    scales = dict(sorted(scales.items(), key=lambda item: _baseline_flops(item[1])))
    if given.get("scales") is None:
        return Comparison(file.name, given["baseline"], scales, file.command, scales[""].given)
    _check_scales(path, scales)
    recipe = read_recipe(file.recipe, file.overrides, file.recipe_source).to_dict()
    in_order = {name: given["scales"][name] for name in scales}
    return Comparison(
        file.name, given["baseline"], scales, file.command, {**given, "scales": in_order, "recipe": recipe}
    )


def load_outline(given: Mapping[str, Any]) -> Comparison:
    """Reads names, rates and seeds of a comparison from the `comparison.yaml` of a results folder, without making its
    models.

    Raises:
        ValueError: for a field that is missing or of another type.
    """
    _check_models(
        "comparison.yaml", read_section(given.get("models"), "comparison.yaml: models"), given.get("baseline")
    )
    read_section(given.get("scales"), "comparison.yaml: scales")
    entries = {name: entry or {} for name, entry in (given.get("scales") or {"": {}}).items()}
    shared, scales = read_rates("learning_rates", given.get("learning_rates")), {}
    for name, entry, fields in _scales_in(given, "comparison.yaml", entries):
        variants = {}
        check_seeds("comparison.yaml", fields.get("seeds"))
        for model, own in fields["models"].items():
            rates = read_rates("learning_rates", own.get("learning_rates")) or shared
            variants[model] = Variant(own, rates, has_own_start=_has_own_start(entry, model))
        scales[name] = Scale(
            fields["name"], given["baseline"], variants, fields["seeds"], fields, stop=given.get("stop")
        )
    return Comparison(str(given.get("name")), given["baseline"], scales, "", dict(given))


def read_default_folder(source: str) -> Path:
    """Returns a comparison's default results folder, from the name in its file. Nothing else is read."""
    path = find("comparisons", source)
    return default_folder(_own_name(path, read_yaml(resolve_user_path(path))))


def read_scale(
    file: ComparisonFile, given: dict[str, Any], recipe: dict[str, Any], source: str, recipe_source: str
) -> Scale:
    """Reads one scale: the fields of the file with its own, and the recipe of its models; messages name the places of
    both.
    """
    models, baseline = given["models"], given["baseline"]
    check_seeds(source, given.get("seeds"))
    rates = read_rates(f"{source}: learning_rates", given.get("learning_rates"))
    shared = read_shared_recipe(recipe, file.overrides, recipe_source)
    if (ratio := given.get("tokens_per_parameter")) is not None:
        steps = _steps(source, ratio, models[baseline], baseline, shared)
        shared = shared.replace(training={"max_steps": steps})
    variants: dict[str, Variant] = {}
    # The baseline first: others may be matched to it
    for model in sorted(models, key=lambda model: model != baseline):
        budget = variants[baseline].size if model != baseline else None
        variant = read_model(source, model, models[model], shared, rates, given.get("match"), budget)
        reference = variants.get(baseline, variant)
        if variant.tokens != reference.tokens:
            seen = f"{variant.tokens:,} tokens, the baseline {reference.tokens:,}"
            raise ValueError(f"{source}: model {model!r} would see {seen}: that compares the amount of data too")
        tokenizers = [item.recipe.tokenizer_name for item in (variant, reference)]
        if tokenizers[0] != tokenizers[1]:
            raise ValueError(
                f"{source}: model {model!r} has the tokenizer {tokenizers[0]!r}, the baseline {tokenizers[1]!r}: all "
                "must read the same tokens; name one tokenizer in the recipe"
            )
        variants[model] = variant
    variants = {model: variants[model] for model in models}
    models = {model: item.given for model, item in variants.items()}
    whole = {**given, "recipe": shared.to_dict(), "models": models}
    whole.pop("tokens_per_parameter", None)  # the recipe has the steps
    tasks, seeds = list(given.get("tasks") or []), list(given["seeds"])
    return Scale(given["name"], baseline, variants, seeds, whole, tasks, file.command, given.get("stop"))


def read_shared_recipe(content: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> Recipe:
    """Reads the recipe that all models share, without the folders and names of a single run."""
    recipe = read_recipe(content, overrides, source)
    return dataclasses.replace(recipe, training=without_private(recipe.training))


def _scales_in(
    given: Mapping[str, Any], path: str, entries: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields name and entry of each scale, and the fields of the file with those of the scale; a single one has no
    name.
    """
    if given.get("scales") is None:
        entries = {"": {}}
    else:
        check_names(f"{path}: scale", entries)
    for name, entry in entries.items():
        where = _place(path, name)
        entry = read_section(entry, where)
        own = {field: entry[field] for field in ("tokens_per_parameter", "seeds") if entry.get(field) is not None}
        fields = {field: value for field, value in given.items() if field != "scales"} | own
        fields["models"] = _models_of_scale(where, given["models"], entry)
        fields["name"] = f"{given.get('name')}, {name}" if name else given.get("name")
        yield name, entry, fields


def _place(path: str, scale: str) -> str:
    return f"{path}: scale {scale!r}" if scale else path


def _models_of_scale(source: str, models: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The models with the fields that a scale sets for some of them."""
    own = read_section(entry.get("models"), f"{source}: models")
    check_keys(f"{source}: models", own, models)
    merged = {}
    for name, before in models.items():
        where = f"{source}: model {name!r}"
        fields = {"model": before} if isinstance(before, str) else read_section(before, where)
        added = read_section(own.get(name), where)
        for section in _SECTIONS:
            if section in added:
                parts = (read_section(part.get(section), f"{where}: {section}") for part in (fields, added))
                added = {**added, section: {name: value for part in parts for name, value in part.items()}}
        merged[name] = {**fields, **added}
    return merged


def _has_own_start(entry: Mapping[str, Any], model: str) -> bool:
    """Whether the entry of a scale gives learning rates for a model: the scale before it does not change where they
    begin.
    """
    return ((entry.get("models") or {}).get(model) or {}).get("learning_rates") is not None


def _own_name(path: Path, given: Mapping[str, Any]) -> str:
    if isinstance(name := given.get("name"), bool):
        check_name(f"{path}: name", name)
    name = " ".join(str(name or path.stem).split())  # a heading has one line
    check_name(f"{path}: name", name)
    return name


def _merged(
    recipe: Mapping[str, Any], given: Mapping[str, Any], source: str, recipe_source: str = ""
) -> dict[str, Any]:
    """A recipe with the sections `training` and `switches` of a comparison or a scale."""
    whole = dict(recipe)
    for section in _SECTIONS:
        own = read_section(given.get(section), f"{source}: {section}")
        check_set_by_run(f"{source}: {section}", own)
        whole[section] = merged(read_section(recipe.get(section), f"{recipe_source}: {section}"), own)
    return whole


def _steps(source: str, ratio: Any, entry: Any, baseline: str, shared: Recipe) -> int:
    """The number of optimizer steps in which the baseline sees `ratio` tokens for each of its non-embedding
    parameters.
    """
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio < math.inf:
        raise ValueError(f"{source}: tokens_per_parameter={ratio!r} must be a number above 0")
    if "max_steps" in shared.training:
        raise ValueError(f"{source}: tokens_per_parameter and max_steps both set the number of tokens; remove one")
    once = shared.replace(training={"max_steps": 1})
    variant = read_model(source, baseline, entry, once, Rates(listed=(1.0,)), None, None)
    return math.ceil(ratio * variant.size.non_embedding / variant.tokens)


def _baseline_flops(scale: Scale) -> int:
    return scale.variants[scale.baseline].size.flops_per_token * scale.tokens_per_run


def _check_scales(path: str, scales: Mapping[str, Scale]) -> None:
    """Raises `ValueError` if scales cannot be compared with each other."""
    if len(scales) < 2:
        raise ValueError(
            f"{path}: scales holds only {', '.join(map(repr, scales)) or 'nothing'}; a ladder needs two or more"
        )
    tokenizers = {name: scale.variants[scale.baseline].recipe.tokenizer_name for name, scale in scales.items()}
    smallest, first = next(iter(tokenizers.items()))
    for smaller, larger in itertools.pairwise(scales):
        if tokenizers[larger] != first:
            raise ValueError(
                f"{path}: scale {larger!r} has the tokenizer {tokenizers[larger]!r}, scale {smallest!r} {first!r}: "
                "losses of other tokens cannot be compared; name one tokenizer in the recipe"
            )
        if (flops := _baseline_flops(scales[larger])) == _baseline_flops(scales[smaller]):
            raise ValueError(
                f"{path}: the scales {smaller!r} and {larger!r} have the same compute, {flops:.3g} FLOPs a run"
            )


def _check_models(path: str, models: Mapping[str, Any], baseline: Any) -> None:
    if isinstance(baseline, int | float | date):
        raise ValueError(f"{path}: baseline={baseline!r} must be text; {QUOTE_IT}")
    if not isinstance(baseline, str) or baseline not in models:
        raise ValueError(
            f"{path}: baseline={baseline!r} must be one of the models {', '.join(map(str, models)) or '(none given)'}"
        )
    if len(models) < 2:
        raise ValueError(f"{path}: models holds only the baseline {baseline!r}; there is nothing to compare it with")
    check_names(f"{path}: model", models)


def check_names(source: str, given: Iterable[Any]) -> None:
    """Raises `ValueError` for a name that cannot be that of a folder."""
    for name in given:
        check_name(source, name)


def check_set_by_run(source: str, fields: Iterable[str]) -> None:
    """Raises `ValueError` for a field that differs between the runs of one model."""
    if fixed := [name for name in _SET_BY_RUN if name in fields]:
        raise ValueError(
            f"{source}: {', '.join(fixed)}: set seeds and learning_rates in the comparison's file instead"
        )


def check_stop(path: str, given: Mapping[str, Any]) -> None:
    """Raises `ValueError` if `stop` has an unknown value, or excludes other fields."""
    stop, seeds = given.get("stop"), given.get("seeds")
    if stop not in (None, "early"):
        raise ValueError(f"{path}: stop={stop!r} must be early, or left out")
    if stop and (given.get("scales") is not None or given.get("tasks") is not None):
        raise ValueError(
            f"{path}: stop: early needs a comparison at one scale, without tasks: each of them needs all runs"
        )
    if stop and isinstance(seeds, list) and len(seeds) <= FIRST_INTERIM:
        raise ValueError(
            f"{path}: stop: early has its first interim analysis at {FIRST_INTERIM} seeds, and seeds={seeds!r} has no "
            "more"
        )


def check_seeds(source: str, seeds: Any) -> None:
    """Raises `ValueError` if `seeds` is no list of different seeds."""
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"{source}: seeds={seeds!r} must be a list of at least one whole number from 0 to 2**32 - 1")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{source}: seeds={seeds!r} holds a seed twice")


def read_model(
    path: str,
    name: str,
    entry: Any,
    shared: Recipe,
    learning_rates: Rates | None,
    match: Any,
    budget: Size | None,
) -> Variant:
    """Reads an entry of `models`: `None`, the name of a configuration, or a mapping of fields that differ from the
    recipe.

    Args:
        path: the place of `models`, for messages.
        name, entry: the model and its entry.
        shared: the recipe that all models share.
        learning_rates, match: those of the comparison, where the entry has none.
        budget: the size to match.

    Raises:
        ValueError: if there is no such model, or it cannot be trained by the recipe.
    """
    source = f"{path}: model {name!r}"
    entry = {"model": entry} if isinstance(entry, str) else read_section(entry, source)
    check_keys(source, entry, ModelFields.__annotations__)
    rates = read_rates(f"{source}: learning_rates", entry.get("learning_rates")) or learning_rates
    if rates is None:
        raise ValueError(f"{path}: learning_rates is missing")
    match = entry.get("match", match)
    if match is not None and match not in _MATCHES:
        raise ValueError(f"{source}: match={match!r} must be one of {', '.join(_MATCHES)}, or null")

    # `null` takes a field of the recipe back to its default
    changes = {name: entry[name] for name in _RECIPE_FIELDS_OF_MODEL if name in entry}
    defaults = {"model": shared.model}
    content = shared.to_dict() | {
        name: defaults.get(name, getattr(Recipe, name, None)) if value is None else value
        for name, value in changes.items()
    }
    for section in _SECTIONS:
        changes = read_section(entry.get(section), f"{source}: {section}")
        check_set_by_run(source, changes)
        content[section] = merged(content.get(section, {}), changes)
    try:
        recipe = read_shared_recipe(content, {}, source)
        if match is not None and budget is not None:
            width = matching_intermediate_size(recipe.config, budget, match, recipe.sample_lengths)
            recipe = recipe.replace(switches={"intermediate_size": width})
        arguments, config = recipe.arguments, recipe.config
        check_recipe(recipe)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{source}: {one_line(error).removeprefix(f'{source}: ')}") from error
    if arguments.max_steps <= 0:
        raise ValueError(f"{source}: the recipe needs max_steps, so that all models see the same number of tokens")
    if recipe.test_fraction == 0:
        raise ValueError(f"{source}: test_fraction=0 leaves no test split to report")
    if arguments.save_strategy == "steps" and arguments.logging_strategy == "steps":
        save_steps, logging_steps = (
            math.ceil(arguments.max_steps * given) if given < 1 else given  # as Trainer reads a share of all steps
            for given in (arguments.save_steps, arguments.logging_steps)
        )
        if save_steps % logging_steps:
            raise ValueError(
                f"{source}: save_steps={save_steps} must be a multiple of logging_steps={logging_steps}, or a run "
                "that is interrupted would report another training loss"
            )
    # Each run has one device, even if this process has several
    tokens_per_step = (
        arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * sum(recipe.sample_lengths)
    )
    size = measure(config, recipe.sample_lengths, prepare=functools.partial(choose_trained, recipe))
    return Variant(
        given=entry,
        rates=rates,
        recipe=recipe,
        size=size,
        intermediate_size=getattr(config, "intermediate_size", None),
        steps=arguments.max_steps,
        tokens=arguments.max_steps * tokens_per_step,
        config=json.loads(config.to_json_string(use_diff=False)),
    )
