"""Trains a recipe into a run folder, with all that is needed to load, judge and share the model."""

import copy
import functools
import itertools
import json
import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from matplotlib import rc_context, rcParamsDefault
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

import modeling_nlq
from modeling_nlq.backends_nlq import find_backend
from modeling_nlq.modeling_nlq import NLQAttention
from modeling_nlq.ops_nlq import forget_used_kernels, used_kernels

from ..disk import atomic_dir, write_text
from ..files import CARD_FILE, CONVERSION_FILE, PLOT_FILE, STATE_FILE
from ..loading import initialize_by_name, load_weights
from ..result import Attention, Data, Evaluation, Losses, Machine, RunResult
from ..sharing.card import base_model_of, render
from ..sharing.scrub import without_folders
from ..size import ModelKind, Size, auto_class_of, measure, size_of, vocabulary_of
from ..text import count
from .blocks import Blocks
from .checkpoints import ChecksumCallback, checkpoint_to_resume
from .conflicts import check_recipe, conflicts_of_lengths, emulated_bf16
from .data import check_vocabulary, prepare_data, warn_of_spare_ids
from .evaluation import LanguageModelingMetrics, token_losses
from .lora import choose_trained, merge_lora
from .objectives import objective_of
from .parametrization import completep_factors, scale_initial_values
from .provenance import code_fingerprint, record_run
from .recipe import Recipe
from .run_folder import RunFolder
from .stability import StabilityCallback
from .trainer import RecordingTrainer, RunRecord, has_diverged, peak_memory, utilization


logger = logging.get_logger(__name__)

# Validation blocks on which attention is recorded
_STABILITY_BLOCKS = 2


def train_recipe(
    recipe: Recipe, tokenizer_folder: Path | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> RunResult:
    """Trains, evaluates and saves a model, and resumes from the last complete checkpoint of the same recipe.

    A run whose loss becomes infinite or NaN stops there and saves no weights. `tokenizer_folder` holds a tokenizer
    that several runs share.
    """
    arguments = recipe.arguments
    is_main_process = arguments.process_index == 0
    check_recipe(recipe)
    if is_main_process and (warning := emulated_bf16(vars(arguments))) is not None:
        logger.warning(warning)
    place = RunFolder(Path(arguments.output_dir))
    with arguments.main_process_first(local=False):
        place.claim_run(recipe.to_dict(), arguments.world_size, is_main_process)
    if place.is_finished():
        logger.warning(f"{place.path} is finished: nothing to do")
        return place.result()

    # Without weights, so that an impossible backend is an error before data are prepared
    size = measure(
        recipe.config, recipe.sample_lengths, recipe.attn_implementation, functools.partial(choose_trained, recipe)
    )
    with arguments.main_process_first(local=False, desc="data preparation"):
        tokenizer, blocks, fingerprint = prepare_data(recipe, tokenizer_folder or place.path, arguments.seed)
    check_vocabulary(tokenizer, recipe.tokenizer_name, recipe.config)
    if is_main_process:
        warn_of_spare_ids(tokenizer, recipe)
    forget_used_kernels()
    if arguments.torch_compile:
        torch.compiler.reset()  # kernels are recorded while a graph is traced
    set_seed(arguments.seed)
    model = make_model(recipe, tokenizer)
    trainer = make_trainer(recipe, model, blocks, tokenizer, fingerprint)
    for callback in callbacks:
        trainer.add_callback(callback)
    if is_main_process:
        text = "a stream" if blocks["train"].tokens is None else f"{blocks['train'].tokens:,} tokens"
        where = _describe_attention(model, recipe)
        print(f"{size.total:,} parameters, {text} of training text, on {where}", flush=True)

    _train(trainer, place, recipe.to_dict())
    evaluated = _evaluate_and_save(trainer, recipe, blocks) if trainer.record.diverged_at is None else {}
    result = _make_result(trainer, recipe, blocks, size, evaluated)
    if trainer.is_world_process_zero():
        _write_results(trainer, recipe, result)
    return result


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Makes or loads the model of a recipe, with the tokenizer's special tokens.

    What the recipe does not train is frozen. With a LoRA, the model is a `peft.PeftModel`.
    """
    config = copy.deepcopy(recipe.config)
    objective = objective_of(recipe)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.mask_token_id = tokenizer.mask_token_id
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if objective.kind is ModelKind.ENCODER_DECODER and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.bos_token_id if config.bos_token_id is not None else config.pad_token_id
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # where Trainer sets them too
        setattr(config.get_text_config(decoder=True), name, getattr(config, name))
    if conflicts := [*conflicts_of_lengths(recipe, config)]:  # RoBERTa counts positions from the pad token on
        raise ValueError("; ".join(conflicts))
    if not recipe.has_weights:
        model = auto_class_of(config).from_config(config, attn_implementation=recipe.attn_implementation)
        initialize_by_name(model, recipe.arguments.seed)
    else:
        options = {"dtype": torch.float32, "attn_implementation": recipe.attn_implementation}
        model = load_weights(recipe.model, config, **options, trust_remote_code=False)
    # Without a name, as in `GPT2LMHeadModel`, Trainer would divide the loss by too many tokens
    model.loss_type = model.loss_type or objective.loss_type
    return choose_trained(recipe, model)


def make_trainer(
    recipe: Recipe,
    model: PreTrainedModel,
    blocks: dict[str, Blocks],
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str | None,
) -> RecordingTrainer:
    """Makes the `Trainer` of a recipe, and scales the model's initial values for CompleteP."""
    arguments, objective = recipe.arguments, objective_of(recipe)
    if objective.kind is ModelKind.ENCODER_DECODER and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        # One module: FSDP2 lets no two groups share a parameter
        model.set_input_embeddings(model.get_input_embeddings())
    factors = None
    if recipe.base_sizes is not None:
        factors = completep_factors(model, recipe.base_sizes)
        scale_initial_values(model, factors)
    collate = objective.make_collator(tokenizer, model)
    smooth = functools.partial(
        LabelSmoother(arguments.label_smoothing_factor), shift_labels=bool(objective.label_shift)
    )
    validation = blocks["validation"]
    global_batch_size = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    trainer = RecordingTrainer(
        record=RunRecord(global_batch_size, fingerprint),
        optimizer=recipe.optimizer,
        factors=factors,
        model=model,
        args=arguments,
        train_dataset=blocks["train"].dataset,
        eval_dataset=validation.dataset,
        data_collator=collate,
        processing_class=tokenizer,
        # Trainer shifts labels by the name of a class, which `torch_compile` and FSDP2 change
        compute_loss_func=smooth if arguments.label_smoothing_factor else None,
        compute_metrics=LanguageModelingMetrics(validation.bytes_per_token, objective),
        preprocess_logits_for_metrics=functools.partial(token_losses, shift=objective.label_shift),
    )
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    trainer.masking = objective.make_masking(tokenizer, seed)
    trainer.add_callback(ChecksumCallback)
    if recipe.record_stability:
        probe = collate(list(itertools.islice(validation.dataset, _STABILITY_BLOCKS)))
        positions = probe.get("position_ids")
        trainer.add_callback(StabilityCallback(trainer, probe["input_ids"], recipe.stability_steps, positions))
    return trainer


def _describe_attention(model: PreTrainedModel, recipe: Recipe) -> str:
    device, length = recipe.arguments.device, max(recipe.sample_lengths)
    backends = {}
    for layer in (module for module in model.modules() if isinstance(module, NLQAttention)):
        request = layer.attention_request(False, device, next(layer.parameters()).dtype, length, layer.head_dim)
        backends[find_backend(layer.config._attn_implementation, [layer.layer_idx], request)] = None
    cpus = f" ({count(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else ""
    return f"{device}{cpus}; attention by {', '.join(backends) or model.config._attn_implementation}"


def _train(trainer: RecordingTrainer, place: RunFolder, given: dict[str, Any]) -> None:
    resumed = checkpoint_to_resume(trainer.args, trainer.model.config, trainer.record, trainer.is_fsdp_enabled)
    # Its shares of a batch may be others
    if trainer.is_world_process_zero() and place.made_from() != given:
        place.write(given)
    if resumed is None:
        trainer.train(resume_from_checkpoint=None)
        return
    checkpoint, state = resumed
    if state.global_step < state.max_steps and trainer.record.diverged_at is None:
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        except UnpicklingError:  # PyTorch's message advises to run what it holds
            raise ValueError(f"{checkpoint} is damaged, or holds code besides tensors; delete it") from None
        return
    # Interrupted after its last step: Trainer would take one more, and TensorBoard log below the current folder
    trainer.remove_callback(TensorBoardCallback)
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.model.to(trainer.args.device)


def _evaluate_and_save(trainer: RecordingTrainer, recipe: Recipe, blocks: dict[str, Blocks]) -> dict[str, float]:
    """Returns the metrics of all splits, and saves the model."""
    objective = objective_of(recipe)
    evaluated = {}
    for entry in trainer.state.log_history:
        if entry["step"] == trainer.state.global_step and "eval_loss" in entry:
            evaluated = {name: value for name, value in entry.items() if name.startswith("eval_")}
    if trainer.args.load_best_model_at_end:  # the weights are not those of the last step any more
        evaluated = {}
    evaluated = evaluated or trainer.evaluate()
    if not math.isfinite(evaluated["eval_loss"]):  # the model diverged after the last logged loss
        trainer.record.diverged_at = trainer.state.global_step
        return {}
    if "test" in blocks:
        trainer.compute_metrics = LanguageModelingMetrics(blocks["test"].bytes_per_token, objective)
        evaluated |= trainer.evaluate(blocks["test"].dataset, metric_key_prefix="test")
        evaluated["loss_parts"] = trainer.compute_metrics.loss_parts()
    if recipe.lora is not None:
        merge_lora(trainer)
    evaluated |= objective.evaluate_generation(trainer.model, trainer.processing_class, blocks["validation"])
    trainer.save_model()
    return evaluated


def _make_result(
    trainer: RecordingTrainer, recipe: Recipe, blocks: dict[str, Blocks], size: Size, evaluated: dict[str, float]
) -> RunResult:
    record, arguments = trainer.record, trainer.args
    config = trainer.model.config  # with a LoRA, of the merged model
    losses = [entry["loss"] for entry in trainer.state.log_history if math.isfinite(entry.get("loss", math.nan))]
    fingerprint = record.conditions["dataset_fingerprint"]
    device = torch.cuda.get_device_name() if arguments.device.type == "cuda" else arguments.device.type
    speed = record.tokens_seen / record.seconds if record.seconds else None
    is_half = arguments.bf16 or arguments.fp16
    packages = ("torch", "transformers", "accelerate", "datasets", "tokenizers")
    versions = {"python": platform.python_version(), "nlq": modeling_nlq.__version__}
    return RunResult(
        losses=Losses(
            diverged=record.diverged_at is not None or has_diverged(evaluated["eval_loss"], vocabulary_of(config)),
            diverged_at=record.diverged_at,
            train=losses[-1] if losses else None,
            validation=Evaluation.from_metrics(evaluated, "eval"),
            test=Evaluation.from_metrics(evaluated, "test", loss_parts=evaluated.get("loss_parts")),
        ),
        data=Data(
            steps=trainer.state.global_step,
            tokens_seen=record.tokens_seen,
            token_stream=record.token_stream,
            **{f"{split}_tokens": part.tokens for split, part in blocks.items()},
            fingerprint=fingerprint,
            trained_on=record_run(recipe, fingerprint),
            is_fine_tuned=recipe.has_weights,
            base_model=base_model_of(recipe.model) if recipe.has_weights else None,
        ),
        size=size,
        machine=Machine(
            seconds=record.seconds,
            tokens_per_second=speed,
            mfu=utilization(speed, size.flops_per_token, device, arguments.world_size) if speed and is_half else None,
            peak_memory=peak_memory(arguments.device),
            processes=arguments.world_size,
            device=device,
            threads=torch.get_num_threads(),
            code=code_fingerprint(),
            versions=versions | {name: version(name) for name in packages},
        ),
        attention=Attention(config._attn_implementation, _kernels(trainer.model)),
    )


def _kernels(model: PreTrainedModel) -> str:
    module = type(model.config).__module__  # FSDP derives a class of the model
    if not module.startswith(f"{modeling_nlq.__name__}."):
        return f"code of {module.split('.')[0]}"
    names = [f"{operation} by {', '.join(kernels)}" for operation, kernels in used_kernels().items()]
    return "; ".join([f"code of the package {modeling_nlq.__version__}", *names])


def _write_results(trainer: RecordingTrainer, recipe: Recipe, result: RunResult) -> None:
    """Writes plot, card and state, and the result last: a run that has it is finished."""
    folder, state, model = Path(trainer.args.output_dir), trainer.state, trainer.model
    conversion = recipe.conversion if recipe.trainable == "new" else None
    unit = objective_of(recipe).loss_unit
    plot_losses(state.log_history, folder / PLOT_FILE, without_folders(recipe.model), unit)
    if conversion is not None:
        write_text(folder / CONVERSION_FILE, json.dumps(conversion, indent=2) + "\n")
    if result.losses.diverged_at is None:
        # Merged, a model has fewer parameters than with the LoRA that was trained
        size = result.size if recipe.lora is None else size_of(model)
        name = folder.resolve().name
        card = render(name, model.config, size, recipe.to_dict(), result, conversion, has_plot=True)
        write_text(folder / CARD_FILE, str(card))
    # Trainer's summary counts only from the last interruption on
    state.log_history = [entry for entry in state.log_history if "train_runtime" not in entry]
    with atomic_dir(folder) as unfinished:
        state.save_to_json(str(unfinished / STATE_FILE))
    result.save(folder)


@rc_context(rcParamsDefault)  # not a `matplotlibrc` of the working directory, which may run LaTeX
def plot_losses(log_history: list[dict[str, float]], path: Path, title: str, unit: str) -> None:
    """Draws training and validation loss over steps, in nats per `unit`, as a PNG."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", {"alpha": 0.6}), ("eval_loss", "validation", {"marker": "o"})):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})")
    axes.set_title(title, parse_math=False)  # a name may hold a dollar
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_dir(path.parent) as unfinished:
        figure.savefig(unfinished / path.name, dpi=150)
