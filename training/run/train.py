"""Trains a recipe into a run folder, with all that is needed to load, judge and share the model."""

import copy
import functools
import itertools
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from matplotlib import rc_context, rcParamsDefault
from matplotlib.figure import Figure
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

import modeling_nlq
from modeling_nlq.backends_nlq import find_backend
from modeling_nlq.modeling_nlq import NLQAttention
from modeling_nlq.ops_nlq import forget_used_kernels, used_kernels

from ..disk import atomic_dir, write_text
from ..files import CARD_FILE, CONVERSION_FILE, PLOT_FILE, STATE_FILE
from ..loading import initialize_by_name, source_named
from ..result import Attention, Data, Evaluation, Losses, Machine, RunResult
from ..sharing.card import base_model_of, render
from ..sharing.scrub import without_folders
from ..size import ModelKind, Size, auto_class_of, listed, measure, size_of, vocabulary_of
from .blocks import Blocks
from .checkpoints import ChecksumCallback, checkpoint_to_resume
from .conflicts import check_recipe, conflicts_of_lengths, emulated_bf16
from .data import check_vocabulary, prepare_data
from .evaluation import LanguageModelingMetrics, token_losses
from .lora import choose_trained, merge_lora
from .objectives import objective_of
from .parametrization import completep_factors, scale_initial_values
from .provenance import record_run
from .recipe import Recipe
from .run_folder import RunFolder
from .stability import StabilityCallback
from .trainer import RecordingTrainer, RunRecord, best_checkpoint, has_diverged, peak_memory


logger = logging.get_logger(__name__)

# Blocks of the validation split on which attention is recorded while training
_STABILITY_BLOCKS = 2


def train_recipe(
    recipe: Recipe,
    tokenizer_folder: Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunResult:
    """Trains, evaluates and saves; goes on from the last complete checkpoint of the same recipe.

    A run whose loss becomes infinite or not a number stops there and saves no weights.

    Args:
        tokenizer_folder: folder of the tokenizer that several runs share; by default the run makes or loads its own.
    """
    arguments = recipe.arguments
    place = RunFolder(Path(arguments.output_dir))
    is_main_process = arguments.process_index == 0
    folder = place.path
    check_recipe(recipe)
    with arguments.main_process_first(local=False):
        place.claim_run(recipe, arguments.world_size, is_main_process)
    if place.is_finished():
        logger.warning(f"{folder} is finished: nothing to do")
        return place.result()
    if is_main_process and (warning := emulated_bf16(vars(arguments))) is not None:
        logger.warning(warning)
    # Makes the model without weights, so that an impossible backend is an error before data are prepared
    size = measure(
        recipe.config, recipe.sample_lengths, recipe.attn_implementation, functools.partial(choose_trained, recipe)
    )
    forget_used_kernels()
    if arguments.torch_compile:
        # Kernels are recorded while a graph is traced
        torch.compiler.reset()
    run = _build(recipe, size, tokenizer_folder or folder, callbacks)
    if is_main_process:
        print(_announcement(run), flush=True)
    _train(run)
    result = _collect(run)
    if run.trainer.is_world_process_zero():
        _write_results(run, result)
    return result


# Build


@dataclass
class _Run:
    """The parts of a run."""

    recipe: Recipe
    trainer: Trainer
    record: RunRecord
    blocks: dict[str, Blocks]
    fingerprint: str | None
    size: Size


def _build(recipe: Recipe, size: Size, tokenizer_folder: Path, callbacks: Sequence[TrainerCallback]) -> _Run:
    arguments = recipe.arguments
    with arguments.main_process_first(local=False, desc="data preparation"):
        tokenizer, blocks, fingerprint = prepare_data(recipe, tokenizer_folder, arguments.seed)
    set_seed(arguments.seed)
    model = make_model(recipe, tokenizer)
    objective = objective_of(recipe)
    if objective.kind is ModelKind.ENCODER_DECODER and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        # One module: FSDP2 lets no two groups share a parameter
        model.set_input_embeddings(model.get_input_embeddings())
    factors = None
    if recipe.base_sizes is not None:
        factors = completep_factors(model, recipe.base_sizes)
        scale_initial_values(model, factors)
    global_batch_size = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    record = RunRecord(global_batch_size, fingerprint)
    collate = objective.make_collator(tokenizer, model)
    smoothing = arguments.label_smoothing_factor
    smoother = functools.partial(LabelSmoother(smoothing), shift_labels=bool(objective.label_shift))
    trainer = RecordingTrainer(
        record=record,
        factors=factors,
        model=model,
        args=arguments,
        train_dataset=blocks["train"].dataset,
        eval_dataset=blocks["validation"].dataset,
        data_collator=collate,
        processing_class=tokenizer,
        # Trainer itself shifts the labels of model classes it knows by name, which `torch_compile` and FSDP2 change
        compute_loss_func=smoother if smoothing else None,
        compute_metrics=LanguageModelingMetrics(blocks["validation"].bytes_per_token, objective),
        preprocess_logits_for_metrics=functools.partial(token_losses, shift=objective.label_shift),
    )
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    trainer.masking = objective.make_masking(tokenizer, seed)
    if recipe.record_stability:
        probe = collate(list(itertools.islice(blocks["validation"].dataset, _STABILITY_BLOCKS)))
        callbacks = [
            StabilityCallback(trainer, probe["input_ids"], recipe.stability_steps, probe.get("position_ids")),
            *callbacks,
        ]
    for callback in (ChecksumCallback, *callbacks):
        trainer.add_callback(callback)
    return _Run(recipe, trainer, record, blocks, fingerprint, size)


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Makes or loads the model of a recipe, with the tokenizer's special tokens.

    What the recipe does not train is frozen. With a LoRA, the model is a `peft.PeftModel`.
    """
    config = copy.deepcopy(recipe.config)
    check_vocabulary(tokenizer, recipe.tokenizer_name, config)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.mask_token_id = tokenizer.mask_token_id
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    objective = objective_of(recipe)
    has_both = objective.kind is ModelKind.ENCODER_DECODER
    if has_both and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.bos_token_id if config.bos_token_id is not None else config.pad_token_id
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # where Trainer sets them too
        setattr(config.get_text_config(decoder=True), name, getattr(config, name))
    if conflicts := [*conflicts_of_lengths(recipe, config)]:  # RoBERTa counts positions from the pad token on
        raise ValueError("; ".join(conflicts))
    if not recipe.has_weights:
        model = auto_class_of(config).from_config(config, attn_implementation=recipe.attn_implementation)
        initialize_by_name(model, recipe.arguments.seed)
    else:
        with source_named(recipe.model):
            model, loading = auto_class_of(config).from_pretrained(
                recipe.model,
                config=config,
                dtype=torch.float32,
                attn_implementation=recipe.attn_implementation,
                output_loading_info=True,
                trust_remote_code=False,
            )
        if missing := sorted(loading["missing_keys"]):  # they would be new, without a word
            raise ValueError(f"model {recipe.model!r} is no language model: its weights lack {listed(missing)}")
    # Without a name, as in `GPT2LMHeadModel`, Trainer would divide the loss by too many tokens
    model.loss_type = model.loss_type or objective.loss_type
    return choose_trained(recipe, model)


def _announcement(run: _Run) -> str:
    """Says what is trained, on how much text, where, and by which attention backends."""
    model = run.trainer.model
    arguments = run.trainer.args
    tokens = run.blocks["train"].tokens
    backends = {}
    for layer in (module for module in model.modules() if isinstance(module, NLQAttention)):
        parameter = next(layer.parameters())
        tensors = (arguments.device, parameter.dtype, max(run.recipe.sample_lengths), layer.head_dim)
        name = find_backend(
            layer.config._attn_implementation, [layer.layer_idx], layer.attention_request(False, *tensors)
        )
        backends[name] = None
    text = "a stream" if tokens is None else f"{tokens:,} tokens"
    cpus = f" ({torch.get_num_threads()} threads)" if arguments.device.type == "cpu" else ""
    attention = ", ".join(backends) or model.config._attn_implementation
    device = f"{arguments.device}{cpus}"
    return f"{run.size.total:,} parameters, {text} of training text, on {device}; attention by {attention}"


# Run


def _train(run: _Run) -> None:
    """Trains from the beginning, or from where the run was interrupted."""
    trainer, arguments = run.trainer, run.recipe.arguments
    resumed = checkpoint_to_resume(arguments, trainer.model.config, run.record, trainer.is_fsdp_enabled)
    place = RunFolder(Path(arguments.output_dir))
    # Its shares of a batch may be others
    if trainer.is_world_process_zero() and place.made_from() != run.recipe.to_dict():
        place.write(run.recipe.to_dict())
    if resumed is None:
        trainer.train(resume_from_checkpoint=None)
        return
    checkpoint, state = resumed
    if state.global_step < state.max_steps and run.record.diverged_at is None:
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        except UnpicklingError:  # PyTorch's message advises to run what it holds
            raise ValueError(f"{checkpoint} is damaged, or holds code besides tensors; delete it") from None
        return
    # Interrupted after its last step, when Trainer would take one more. TensorBoard would log the evaluation below the
    # current folder, because its own is named when training begins
    trainer.remove_callback(TensorBoardCallback)
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    best = best_checkpoint(state, arguments.output_dir) if arguments.load_best_model_at_end else None
    if best is not None:
        state.best_model_checkpoint = best
        trainer._load_best_model()
    trainer.model.to(arguments.device)


# Collect


def _collect(run: _Run) -> RunResult:
    recipe, trainer, record, arguments = run.recipe, run.trainer, run.record, run.trainer.args
    evaluated = _evaluate_and_save(run) if record.diverged_at is None else {}
    config = trainer.model.config  # with a LoRA, of the merged model
    losses = [entry["loss"] for entry in trainer.state.log_history if math.isfinite(entry.get("loss", math.nan))]
    is_on_gpu = arguments.device.type == "cuda"
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
            **{f"{split}_tokens": part.tokens for split, part in run.blocks.items()},
            fingerprint=run.fingerprint,
            trained_on=record_run(run.recipe, run.fingerprint),
            is_fine_tuned=recipe.has_weights,
            base_model=base_model_of(run.recipe.model) if recipe.has_weights else None,
        ),
        size=run.size,
        machine=Machine(
            seconds=record.seconds,
            tokens_per_second=record.tokens_seen / record.seconds if record.seconds else None,
            peak_memory=peak_memory(arguments.device),
            processes=arguments.world_size,
            device=torch.cuda.get_device_name() if is_on_gpu else arguments.device.type,
            versions={
                "python": platform.python_version(),
                "nlq": modeling_nlq.__version__,
                **{name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "tokenizers")},
            },
        ),
        attention=Attention(config._attn_implementation, _kernels(trainer.model)),
    )


def _evaluate_and_save(run: _Run) -> dict[str, Any]:
    objective = objective_of(run.recipe)
    trainer = run.trainer
    last = {}
    # The evaluation after the last step, if there was one and the weights are still the same
    if not trainer.args.load_best_model_at_end:
        entries = (entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step)
        last = next((entry for entry in entries if "eval_loss" in entry), {})
    evaluated = {name: value for name, value in last.items() if name.startswith("eval_")} or trainer.evaluate()
    if "test" in run.blocks:
        trainer.compute_metrics = LanguageModelingMetrics(run.blocks["test"].bytes_per_token, objective)
        evaluated.update(trainer.evaluate(run.blocks["test"].dataset, metric_key_prefix="test"))
        evaluated["loss_parts"] = trainer.compute_metrics.loss_parts()
    if run.recipe.lora is not None:
        merge_lora(trainer)
    evaluated |= objective.evaluate_generation(trainer.model, trainer.processing_class, run.blocks["validation"])
    trainer.save_model()
    return evaluated


def _kernels(model: PreTrainedModel) -> str:
    """The code and the kernels that computed this process's part of a run, in one line."""
    module = type(model.config).__module__  # FSDP derives a class of the model
    if not module.startswith(f"{modeling_nlq.__name__}."):
        return f"code of {module.split('.')[0]}"
    names = (f"{operation} by {', '.join(kernels)}" for operation, kernels in used_kernels().items())
    return "; ".join((f"code of the package {modeling_nlq.__version__}", *names))


def _write_results(run: _Run, result: RunResult) -> None:
    """Writes plot, card, state and result. The result is last: a run that has it is finished."""
    folder, state = Path(run.trainer.args.output_dir), run.trainer.state
    conversion = run.recipe.conversion if run.recipe.trainable == "new" else None
    title = without_folders(run.recipe.model)
    plot_losses(state.log_history, folder / PLOT_FILE, title, objective_of(run.recipe).loss_unit)
    if conversion is not None:
        write_text(folder / CONVERSION_FILE, json.dumps(conversion, indent=2) + "\n")
    if result.losses.diverged_at is None:
        # With a LoRA, the saved model is smaller than the one that was trained
        size = run.size if run.recipe.lora is None else size_of(run.trainer.model)
        config = run.trainer.model.config
        card = render(folder.resolve().name, config, size, run.recipe.to_dict(), result, conversion, has_plot=True)
        write_text(folder / CARD_FILE, str(card))
    # Trainer's summary counts only the part of the run after the last interruption
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
