"""Conflicts between the settings of a recipe, which are errors before anything heavy starts."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedConfig, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from modeling_nlq import NLQConfig, NLQSeq2SeqConfig
from modeling_nlq.configuration_nlq import AUTOMATIC

from ..loading import added_parameters, load_config
from ..size import ModelKind, context_of, empty_model, freeze_all_but, kind_of, positions_of, shapes_of, vocabulary_of
from .muon import muon_parameters
from .objectives import name_for, objective_of
from .parametrization import check_completep
from .recipe import Recipe


# Flags of `TrainingArguments` with which results would be missing or others, or differ after a run resumes
_REFUSED_ARGUMENTS = {
    "save_only_model": "a run that resumes needs its optimizer, or it ends with another result",
    "ignore_data_skip": "a run that resumes would see other data",
    "prediction_loss_only": "evaluations need logits, for perplexity, accuracy and losses by document",
    "restore_callback_states_from_checkpoint": "a run restores its own record, which would be lost",
    "bf16_full_eval": "the model would be saved in 16 bits, because Trainer casts it to evaluate",
    "fp16_full_eval": "the model would be saved in 16 bits, because Trainer casts it to evaluate",
    "eval_use_gather_object": "metrics are computed from gathered tensors, not objects",
    "dataloader_drop_last": "evaluations would leave out rows",
}


def emulated_bf16(training: Mapping[str, Any]) -> str | None:
    """Returns a warning if bfloat16 is asked for on a CPU without instructions for it."""
    if not training.get("bf16") or torch.accelerator.is_available() or not torch.backends.mkldnn.is_available():
        return None
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return "bf16=True: this CPU has no instructions for bfloat16, which takes many times as long; set bf16: false"


def check_recipe(recipe: Recipe) -> None:
    """Raises `ValueError` for conflicts between settings, or a model that does not exist."""
    checks = (_conflicts_with_model, _conflicts_of_arguments, _conflicts_of_trained, _conflicts_of_optimizer)
    conflicts = [conflict for check in checks for conflict in check(recipe)]
    if conflicts:
        raise ValueError("; ".join(conflicts))


def conflicts_of_lengths(recipe: Recipe, config: PreTrainedConfig) -> Iterator[str]:
    for (name, half), length in zip(objective_of(recipe).lengths.items(), recipe.sample_lengths):
        length = length if recipe.synthetic is None else recipe.synthetic.longest
        positions, context = positions_of(config, half), context_of(config, half)
        if positions is not None and length > positions:
            less = "" if positions == context else f" less the {context - positions} up to the id of the pad token"
            yield f"{name}={length} exceeds max_position_embeddings={context}{less}"


def _conflicts_with_model(recipe: Recipe) -> Iterator[str]:
    config = recipe.config
    kind = kind_of(config)
    objective = type(objective_of(recipe))
    yield from conflicts_of_lengths(recipe, config)
    size = recipe.new_vocabulary_size or 0
    if size and recipe.has_weights:
        yield (
            f"tokenizer={recipe.tokenizer_name!r} would be new, and the weights of {recipe.model!r} know another; set "
            f"--tokenizer {recipe.model}"
        )
    elif size > vocabulary_of(config):
        yield f"tokenizer={recipe.tokenizer_name!r} exceeds the model's vocab_size={vocabulary_of(config)}"
    if recipe.switches and recipe.has_weights and shapes_of(load_config(recipe.model)) != shapes_of(config):
        yield (
            f"the switches {', '.join(recipe.switches)} change parameters of the saved model {recipe.model!r}; use "
            "`nlq convert MODEL TARGET --set SWITCH=VALUE`"
        )
    if kind is not objective.kind:
        has_both = ModelKind.ENCODER_DECODER in (kind, objective.kind)
        hint = "" if has_both else f"; or set is_causal: {str(kind is ModelKind.ENCODER).lower()}"
        yield (
            f"objective={recipe.objective!r}: model {recipe.model!r} is {kind.description}; set objective: "
            f"{name_for(kind)}{hint}"
        )
    read = Recipe.read_by(objective)
    for name in recipe.to_dict():
        if name not in read:
            what = "objective" if recipe.synthetic is None else "dataset"
            yield f"{name}={getattr(recipe, name)!r} does not go with {what}={getattr(recipe, what)!r}"
    if recipe.synthetic is not None and recipe.objective != recipe.synthetic.objective:
        yield f"dataset={recipe.dataset!r} needs objective: {recipe.synthetic.objective}"
    ours = [name for name in ("record_stability", "packing") if getattr(recipe, name) != getattr(Recipe, name)]
    if (recipe.attn_implementation or "").startswith(AUTOMATIC):
        ours.append("attn_implementation")
    # Others may see the previous document, or lack layers to record
    for name in () if isinstance(config, NLQConfig | NLQSeq2SeqConfig) else ours:
        value = getattr(recipe, name)
        yield f"{name}={value!r} needs an NLQ model, and {recipe.model!r} is of type {config.model_type!r}"
    if recipe.parametrization == "completep" and "parametrization" in read:
        if recipe.has_weights:
            yield f"parametrization='completep' is about initial values, and {recipe.model!r} is a saved model"
        if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            yield "parametrization='completep' needs Trainer's optimizer, and DeepSpeed makes its own"
        try:
            check_completep(config, recipe.base_sizes, recipe.arguments)
        except ValueError as error:
            yield str(error)


def _conflicts_of_optimizer(recipe: Recipe) -> Iterator[str]:
    if recipe.optimizer != "muon":
        return
    if not hasattr(torch.optim, "Muon"):
        yield f"optimizer='muon' needs PyTorch 2.9, and this is {torch.__version__}"
    if recipe.parametrization == "completep":
        yield "optimizer='muon' and parametrization='completep' both scale the steps of matrices; choose one"
    if "optim" in recipe.training:
        yield f"optimizer='muon' and optim={recipe.training['optim']!r} both name the optimizer; choose one"
    if parse_flag_from_env("ACCELERATE_USE_FSDP") or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        yield "optimizer='muon' needs whole matrices, which FSDP and DeepSpeed split; train it by DDP"
    model = empty_model(recipe.config)
    if recipe.trainable == "new":
        freeze_all_but(model, added_parameters(recipe.model, recipe.conversion))
    if not muon_parameters(model):
        yield f"optimizer='muon' needs nn.Linear to train inside the blocks, and {recipe.config.model_type!r} has none"


def _conflicts_of_arguments(recipe: Recipe) -> Iterator[str]:
    arguments = recipe.arguments
    try:
        for tracker in get_reporting_integration_callbacks(arguments.report_to):
            tracker()
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        yield f"report_to={', '.join(map(str, arguments.report_to))}: {str(error).rstrip('.')}, or set report_to: none"
    if arguments.resume_from_checkpoint is not None:
        yield "resume_from_checkpoint: a run goes on from the last complete checkpoint in its folder by itself"
    if arguments.push_to_hub:
        yield "push_to_hub would upload more than the model; share the finished run by `nlq publish`"
    for name, why in _REFUSED_ARGUMENTS.items():
        if getattr(arguments, name):
            yield f"{name}=True: {why}; remove it"
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(arguments, name) < 1:
            yield f"{name}={getattr(arguments, name)} must be at least 1"
    kwargs = arguments.lr_scheduler_kwargs or {}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=arguments.learning_rate)
    try:
        get_scheduler(arguments.lr_scheduler_type, optimizer, 1, 2, kwargs)
    except (TypeError, ValueError) as error:
        yield f"lr_scheduler_kwargs={kwargs!r} for lr_scheduler_type={arguments.lr_scheduler_type.value!r}: {error}"
    metric = (arguments.metric_for_best_model or "loss").removeprefix("eval_")
    objective = objective_of(recipe)
    known = [
        "loss",
        objective.perplexity,
        *(["bits_per_byte"] if objective.has_bits_per_byte else []),
        "token_accuracy",
    ]
    if metric not in known:
        yield f"metric_for_best_model={metric!r} must be one of {', '.join(known)}"
    if recipe.streaming and recipe.max_validation_documents is None:
        yield "streaming needs max_validation_documents"


def _conflicts_of_trained(recipe: Recipe) -> Iterator[str]:
    if recipe.trainable == "new":
        try:
            added_parameters(recipe.model, recipe.conversion)
        except ValueError as error:
            yield str(error)
    if recipe.lora is None:
        return
    if recipe.trainable == "new":
        yield "lora and trainable='new' both say what is trained; choose one"
    if not recipe.has_weights:
        yield f"lora adapts trained weights, and model {recipe.model!r} has none; name a saved model"
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        yield "lora cannot be added to weights that FSDP has cut into shards; train it without FSDP"
