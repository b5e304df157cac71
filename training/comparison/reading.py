"""The plan of a comparison from its file: every model is sized, and every run checked, before anything is trained."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ..run.conflicts import check_recipe
from ..run.lora import choose_trained
from ..run.recipe import Recipe, read_recipe, without_private
from ..size import Size, matching_intermediate_size, measure
from ..text import one_line
from .comparison import Comparison, Scale, Variant, outline
from .config import SINGLE, ComparisonFile, ModelConfig, with_sections


def read_comparison(file: ComparisonFile) -> Comparison:
    """Makes the plan of a comparison, and checks that every run of it can be made; raises as `read_file` does."""
    plan, scales = outline(file.config, file.source), {}
    for name, scale in plan.scales.items():
        entry = file.config.scale_configs[name]
        source = file.config.source_of(name, file.source)
        for model, variant in scale.variants.items():
            _check_overrides(file.overrides, variant.config, f"{source}: model {model!r}")
        recipe = with_sections({**file.recipe, **entry.recipe_fields()}, entry, file.recipe_source)
        recipe_source = file.recipe_source if file.config.scales is None else source
        scales[name] = size_scale(scale, read_shared_recipe(recipe, file.overrides, recipe_source), source)
    scales = dict(sorted(scales.items(), key=lambda item: item[1].baseline_flops))
    if file.config.scales is None:
        config = scales[SINGLE].config
    else:
        _check_scales(file.source, scales)
        recipe = read_recipe(file.recipe, file.overrides, file.recipe_source).to_dict()
        in_order = {name: file.config.scales[name] for name in scales}
        config = dataclasses.replace(file.config, recipe=recipe, scales=in_order)
    return Comparison(plan.name, config, scales, file.command)


def _check_overrides(overrides: Mapping[str, Any], config: ModelConfig, source: str) -> None:
    """Raises `ValueError` for a field of the command line that a model sets, and which would not change it."""
    names = overrides.keys() & {*config.recipe_fields(), *(config.training or {})}
    names |= overrides.get("switches", {}).keys() & (config.switches or {}).keys()
    if names:
        raise ValueError(f"command line: {', '.join(sorted(names))}: {source} sets that; change it in the file")


def read_shared_recipe(content: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> Recipe:
    """Reads the recipe that all models share, without the folders and names of a single run."""
    recipe = read_recipe(content, overrides, source)
    return dataclasses.replace(recipe, training=without_private(recipe.training))


def size_scale(scale: Scale, shared: Recipe, source: str) -> Scale:
    """Sizes the models of a scale, and checks that they see the same tokens."""
    config, baseline = scale.config, scale.baseline
    if config.tokens_per_parameter is not None:
        steps = _steps(scale, shared, source)
        shared = shared.replace(training={"max_steps": steps})  # hence the recipe has the steps
    variants = {baseline: size_variant(baseline, scale.variants[baseline], shared, source)}
    reference = variants[baseline]
    # The baseline comes first: others may be matched to it
    for model in (name for name in scale.variants if name != baseline):
        variant = size_variant(model, scale.variants[model], shared, source, config.match, reference.size)
        _check_same_data(f"{source}: model {model!r}", variant, reference)
        variants[model] = variant
    variants = {model: variants[model] for model in scale.variants}
    config = dataclasses.replace(config, recipe=shared.to_dict(), tokens_per_parameter=None)
    return dataclasses.replace(scale, config=config, variants=variants)


def size_variant(
    model: str,
    variant: Variant,
    shared: Recipe,
    source: str,
    match: str | None = None,
    budget: Size | None = None,
) -> Variant:
    """Gives a model of an outline its recipe and its size.

    Args:
        match: what is matched to the budget, where the model does not say it.
        budget: the size to match.
    """
    source, config = f"{source}: model {model!r}", variant.config
    match = config.match if config.match or "match" in config.nulls else match
    try:
        recipe = read_shared_recipe(_recipe_of(config, shared), {}, source)
        if match is not None and budget is not None:
            width = matching_intermediate_size(recipe.config, budget, match, recipe.sample_lengths)
            recipe = recipe.replace(switches={"intermediate_size": width})
        arguments, model_config = recipe.arguments, recipe.config
        check_recipe(recipe)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{source}: {one_line(error).removeprefix(f'{source}: ')}") from error
    _check_can_compare(recipe, source)
    # Each run has one device, even if this process has several
    rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    return dataclasses.replace(
        variant,
        recipe=recipe,
        size=measure(model_config, recipe.sample_lengths, prepare=functools.partial(choose_trained, recipe)),
        intermediate_size=getattr(model_config, "intermediate_size", None),
        steps=arguments.max_steps,
        tokens=arguments.max_steps * rows * sum(recipe.sample_lengths),
        model_config=json.loads(model_config.to_json_string(use_diff=False)),
    )


def _recipe_of(config: ModelConfig, shared: Recipe) -> dict[str, Any]:
    """Returns the shared recipe with the fields of a model; null takes one back to its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Recipe)} | {"model": shared.model}
    changes = {name: defaults[name] if value is None else value for name, value in config.recipe_fields().items()}
    return with_sections({**shared.to_dict(), **changes}, config, "recipe")


def _check_can_compare(recipe: Recipe, source: str) -> None:
    """Raises `ValueError` if runs of a recipe cannot be compared, or not be resumed to the same results."""
    arguments = recipe.arguments
    if arguments.max_steps <= 0:
        raise ValueError(f"{source}: the recipe needs max_steps, so that all models see the same number of tokens")
    if recipe.test_fraction == 0:
        raise ValueError(f"{source}: test_fraction=0 leaves no test split to report")
    if arguments.save_strategy == "steps" and arguments.logging_strategy == "steps":
        save_steps, logging_steps = (
            math.ceil(arguments.max_steps * steps) if steps < 1 else steps  # as Trainer reads a share of all steps
            for steps in (arguments.save_steps, arguments.logging_steps)
        )
        if save_steps % logging_steps:
            raise ValueError(
                f"{source}: save_steps={save_steps} must be a multiple of logging_steps={logging_steps}, or a run "
                "that is interrupted would report another training loss"
            )


def _check_same_data(source: str, variant: Variant, reference: Variant) -> None:
    """Raises `ValueError` if a model would see other tokens than the baseline."""
    if variant.tokens != reference.tokens:
        raise ValueError(
            f"{source} would see {variant.tokens:,} tokens, the baseline {reference.tokens:,}: that compares the "
            "amount of data too"
        )
    tokenizer, expected = variant.recipe.tokenizer_name, reference.recipe.tokenizer_name
    if tokenizer != expected:
        raise ValueError(
            f"{source} has the tokenizer {tokenizer!r}, the baseline {expected!r}: all must read the same tokens; "
            "name one tokenizer in the recipe"
        )


def _steps(scale: Scale, shared: Recipe, source: str) -> int:
    """Returns the optimizer steps for `tokens_per_parameter` of the baseline, without its embeddings."""
    if "max_steps" in shared.training:
        raise ValueError(f"{source}: tokens_per_parameter and max_steps both set the number of tokens; remove one")
    baseline = scale.variants[scale.baseline]
    sized = size_variant(scale.baseline, baseline, shared.replace(training={"max_steps": 1}), source)
    return math.ceil(scale.config.tokens_per_parameter * sized.size.non_embedding / sized.tokens)


def _check_scales(path: str, scales: Mapping[str, Scale]) -> None:
    """Raises `ValueError` if scales cannot be compared with each other."""
    tokenizers = {name: scale.variants[scale.baseline].recipe.tokenizer_name for name, scale in scales.items()}
    smallest, first = next(iter(tokenizers.items()))
    for smaller, larger in itertools.pairwise(scales):
        if tokenizers[larger] != first:
            raise ValueError(
                f"{path}: scale {larger!r} has the tokenizer {tokenizers[larger]!r}, scale {smallest!r} {first!r}: "
                "losses of other tokens cannot be compared; name one tokenizer in the recipe"
            )
        if (flops := scales[larger].baseline_flops) == scales[smaller].baseline_flops:
            raise ValueError(
                f"{path}: the scales {smaller!r} and {larger!r} have the same compute, {flops:.3g} FLOPs a run"
            )
