"""`nlq train`: a recipe to a run folder that holds all one needs to load, judge and share the model."""

import errno
import functools
import itertools
import json
import math
import os
import platform
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

import modeling_nlq
from modeling_nlq import NLQConfig
from modeling_nlq.configuration import find
from modeling_nlq.training.card import CARD_FILE, base_model_of, render
from modeling_nlq.training.parameters import measure
from modeling_nlq.training.run.data import (
    BlockCollator,
    Blocks,
    check_vocabulary,
    load_documents,
    make_blocks,
    make_tokenizer,
    unigram_perplexity,
    vocabulary_size,
)
from modeling_nlq.training.run.evaluation import LanguageModelingMetrics, token_losses
from modeling_nlq.training.run.recipe import Recipe, ResolvedRecipe, is_saved_model, read_yaml
from modeling_nlq.training.run.record import RecordingTrainer, RunRecord, best_checkpoint, has_diverged, peak_memory
from modeling_nlq.training.run.stability import StabilityCallback
from modeling_nlq.training.traces import without_folders


logger = logging.get_logger(__name__)

RECIPE_FILE = "recipe.yaml"
METRICS_FILE = "metrics.json"
# Fields of a recipe that change neither the result nor its data: a run may be resumed with other values.
_FREE_FIELDS = {"num_proc", "disable_tqdm", "log_level", "report_to", "dataloader_num_workers"}
_LITTLE_SPACE = 2**26  # bytes on a disk that explain a failure
# Blocks of the validation split whose attention is looked at while training
_STABILITY_BLOCKS = 2


def load_config(name: str, switches: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A shipped configuration, a config.json or that of a saved model, with some fields set anew.

    Raises:
        ValueError: if there is no such configuration or no such field, or a value is not allowed.
    """
    path = name if is_saved_model(name) else str(find("models", name))
    try:
        values, _ = PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        raise ValueError(f"model {name!r}: {str(error).splitlines()[0]}") from error
    if "model_type" not in values:
        raise ValueError(f"{path}: is no model configuration, it has no 'model_type'")
    config = AutoConfig.for_model(**values)
    for key in switches or {}:
        if key != "per_layer_config" and not config._hasattr_without_heterogeneous_validation(key):
            raise ValueError(f"model {name!r}: there is no field {key!r} to set")
    return AutoConfig.for_model(**{**values, **(switches or {})}) if switches else config


def check_recipe(resolved: ResolvedRecipe, config: PreTrainedConfig) -> None:
    """Finds every conflict between settings before anything heavy starts.

    Raises:
        ValueError: naming them all.
    """
    recipe, arguments = resolved.recipe, resolved.training_arguments
    conflicts = []
    if getattr(config, "position_embedding", "learned") == "learned" and recipe.block_size > config.max_position_embeddings:
        conflicts.append(f"block_size={recipe.block_size} exceeds max_position_embeddings={config.max_position_embeddings}")
    size = recipe.tokenizer.removeprefix("bpe:")
    if size != recipe.tokenizer and size.isdecimal() and int(size) > config.vocab_size:
        conflicts.append(f"tokenizer={recipe.tokenizer!r} exceeds the model's vocab_size={config.vocab_size}")
    if size != recipe.tokenizer and is_saved_model(recipe.model):
        conflicts.append(f"tokenizer={recipe.tokenizer!r} would be new, and the weights of {recipe.model!r} know another")
    if recipe.record_stability and not isinstance(config, NLQConfig):
        conflicts.append(f"record_stability needs an NLQ model, and {recipe.model!r} is of type {config.model_type!r}")
    if arguments.push_to_hub:
        conflicts.append("push_to_hub would upload more than the model; share the finished run by `nlq publish`")
    if arguments.max_steps == 0 or (arguments.max_steps < 0 and arguments.num_train_epochs <= 0):
        conflicts.append(
            f"max_steps={arguments.max_steps} and num_train_epochs={arguments.num_train_epochs} leave nothing to train; "
            "set one of them above 0"
        )
    if arguments.restore_callback_states_from_checkpoint:
        conflicts.append(
            "restore_callback_states_from_checkpoint=True would replace the record of the run, which checkpoints keep anyway; "
            "remove it"
        )
    if arguments.prediction_loss_only:
        conflicts.append("prediction_loss_only=True leaves out the perplexity and accuracy that a run reports; remove it")
    if recipe.streaming and arguments.max_steps <= 0:
        conflicts.append("streaming needs max_steps")
    if recipe.streaming and recipe.max_validation_documents is None:
        conflicts.append("streaming needs max_validation_documents")
    if conflicts:
        raise ValueError("; ".join(conflicts))


def _claim_run_folder(folder: Path, given: dict[str, Any], is_main_process: bool) -> None:
    """Makes the run folder, or checks that what is there is this very run.

    Raises:
        ValueError: if it holds another run or something else; nothing in it is touched.
    """
    recipe_file = folder / RECIPE_FILE
    has_begun = any(True for pattern in (METRICS_FILE, "checkpoint-*", "*.safetensors") for _ in folder.glob(pattern))
    if recipe_file.is_file() and not has_begun:
        # An attempt that failed before it saved any weights: nothing is lost by beginning anew
        if is_main_process:
            (folder / "tokenizer.json").unlink(missing_ok=True)
            write_text(recipe_file, yaml.safe_dump(given, sort_keys=False))
    elif recipe_file.is_file():
        if changes := differences(read_yaml(recipe_file), given):
            raise ValueError(f"{folder} holds a run of another recipe ({changes}); choose another --output_dir")
    elif is_taken(folder):
        raise ValueError(f"{folder} exists and is no run of `nlq train`; choose another --output_dir")
    elif is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(recipe_file, yaml.safe_dump(given, sort_keys=False))


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, whenever the power goes."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def is_taken(folder: Path) -> bool:
    """Whether there is something at a path: a file, or a folder with more in it than `write_text` leaves when it is killed."""
    if not folder.is_dir():
        return folder.exists()
    return any(path.suffix != ".unfinished" for path in folder.iterdir())


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The fields that differ between what lies in a folder and what is asked for now, in words; empty if there are none."""
    before, now = _flatten(before), _flatten(now)
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return ", ".join(f"{key}: {before.get(key)!r} there, {now.get(key)!r} now" for key in changed)


def _flatten(given: dict[str, Any], section: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in given.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{section}{name}."))
        elif name not in _FREE_FIELDS:
            flat[f"{section}{name}"] = value
    return flat


def is_complete_checkpoint(folder: Path) -> bool:
    """Whether Trainer finished writing a checkpoint, and what it resumes from can be read.

    That is its state, written last, the headers of its weights (sharded ones lie in folders of their own), and the archives of
    optimizer, scheduler and random state.
    """
    try:
        state = TrainerState.load_from_json(str(folder / "trainer_state.json"))
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*"), *folder.glob("global_step*")]
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass
    except (OSError, ValueError, TypeError, SafetensorError):
        return False
    sharded = any(path.is_dir() for path in folder.iterdir())
    archives = [folder / "scheduler.pt", *([] if sharded else [folder / "optimizer.pt"]), *folder.glob("rng_state*.pth")]
    return bool(weights) and state.global_step > 0 and all(zipfile.is_zipfile(path) for path in archives)


def last_complete_checkpoint(run_folder: Path) -> Path | None:
    """The newest checkpoint of a run that is complete; half-written ones are passed over with a warning."""
    folders = [path for path in run_folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        if is_complete_checkpoint(folder):
            return folder
        logger.warning(f"{folder} is incomplete or damaged: passing over it")
    return None


def prepare_data(
    recipe: Recipe, tokenizer_folder: Path | None = None, seed: int = 0
) -> tuple[PreTrainedTokenizerBase, dict[str, Blocks], str | None]:
    """Tokenizer, blocks by split, and the fingerprint of the documents, `None` for a stream from the Hub.

    Args:
        recipe: what data to prepare.
        tokenizer_folder: where the run's tokenizer is, or will be kept for its other processes and for a resumed run.
        seed: of the order of a stream's documents; stored blocks are shuffled by `Trainer`.
    """
    documents = load_documents(recipe)
    if tokenizer_folder is not None and (tokenizer_folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    else:
        tokenizer = make_tokenizer(recipe, documents)
        tokenizer.model_max_length = recipe.block_size
        if tokenizer_folder is not None:
            _save_tokenizer(tokenizer, tokenizer_folder)
    if recipe.streaming:
        documents["train"] = documents["train"].shuffle(seed=seed, buffer_size=10_000)
    blocks = {split: make_blocks(dataset, tokenizer, recipe) for split, dataset in documents.items()}
    return tokenizer, blocks, documents.fingerprint


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves a tokenizer such that `tokenizer.json` is there once all is, whenever the power goes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(suffix=".unfinished", dir=folder) as unfinished:
        tokenizer.save_pretrained(unfinished)
        for path in sorted(Path(unfinished).iterdir(), key=lambda path: path.name == "tokenizer.json"):
            path.replace(folder / path.name)


def _check_same_model(checkpoint: Path, config: PreTrainedConfig) -> None:
    """Raises `ValueError` where the model that is to go on differs from the one in the checkpoint."""
    free = {"architectures", "dtype", "nlq_version", "transformers_version", "use_cache", "_name_or_path"}
    before = type(config).from_pretrained(str(checkpoint)).to_dict()
    now = config.to_dict()
    known = now.keys() - free
    if changes := differences({key: before.get(key) for key in known}, {key: now[key] for key in known}):
        raise ValueError(f"{checkpoint} holds another model ({changes}); choose another --output_dir")


def _check_same_conditions(checkpoint: Path, state: TrainerState, record: RunRecord, is_asked_for: bool) -> None:
    """Raises `ValueError` where a run would go on with other data or in another order; warns if it was asked to."""
    before = record.conditions_of(state)
    found = None
    if before is None:
        found = f"{checkpoint} does not say with which dataset and how many processes it was made"
    elif changes := differences(before, {name: record.conditions[name] for name in before}):
        found = f"{checkpoint} was made with another dataset or number of processes ({changes})"
    if found is not None and is_asked_for:
        logger.warning(f"{found}: the run goes on all the same")
    elif found is not None:
        raise ValueError(
            f"{found}; restore what it was, choose another --output_dir, or go on all the same by --resume_from_checkpoint "
            f"{checkpoint}"
        )


@contextmanager
def _naming_a_full_disk(folder: Path) -> Iterator[None]:
    """Replaces the libraries' various messages for a full disk by one of ours."""
    try:
        yield
    except Exception as error:  # of `tokenizers` it is no other
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        is_cut_short = "inline_container" in str(error) and shutil.disk_usage(folder).free < _LITTLE_SPACE  # PyTorch's archives
        if is_full or is_cut_short:
            raise OSError(
                f"the disk of {folder} is full; make room, and the same command goes on from the last complete checkpoint"
            ) from error
        raise


def make_model(resolved: ResolvedRecipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A new model of the recipe's configuration, or the saved one it names, that knows the tokenizer's special tokens.

    Raises:
        ValueError: if the tokenizer has ids for which the model has no embeddings.
    """
    recipe = resolved.recipe
    config = load_config(recipe.model, resolved.switches)
    check_vocabulary(tokenizer, recipe.tokenizer, config)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if is_saved_model(recipe.model):
        model, found = AutoModelForCausalLM.from_pretrained(
            recipe.model,
            config=config,
            dtype=torch.float32,
            attn_implementation=recipe.attn_implementation,
            output_loading_info=True,
        )
        if changed := sorted({*found["missing_keys"], *found["unexpected_keys"]}):
            raise ValueError(
                f"model {recipe.model!r} does not have the weights of a language model with these switches: {changed[0]} for "
                "one is missing, or too many; `nlq convert MODEL TARGET --set SWITCH=VALUE` makes a model to go on from"
            )
        return model
    return AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attn_implementation)


def train(
    resolved: ResolvedRecipe, tokenizer_folder: Path | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    """Trains, evaluates and saves; goes on from the last complete checkpoint of the same recipe.

    A run whose loss becomes infinite or no number stops there and saves no weights.

    Args:
        resolved: the recipe.
        tokenizer_folder: where the tokenizer lies that several runs share; by default the run makes or loads its own.
        callbacks: more callbacks for `Trainer`.

    Returns:
        What `metrics.json` holds.

    Raises:
        ValueError: for conflicting settings, data or a tokenizer that are not to be had, or a folder that holds another run.
    """
    recipe, arguments = resolved.recipe, resolved.training_arguments
    folder = Path(arguments.output_dir)
    is_main_process = arguments.process_index == 0
    check_recipe(resolved, load_config(recipe.model, resolved.switches))
    with arguments.main_process_first(local=False):
        _claim_run_folder(folder, resolved.given, is_main_process)
    if (folder / METRICS_FILE).is_file():
        logger.warning(f"{folder} is finished: nothing to do")
        return json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    with _naming_a_full_disk(folder):
        return _train(resolved, folder, tokenizer_folder, callbacks)


def _train(
    resolved: ResolvedRecipe, folder: Path, tokenizer_folder: Path | None, callbacks: Sequence[TrainerCallback]
) -> dict[str, Any]:
    """`train` in a folder that is claimed."""
    recipe, arguments = resolved.recipe, resolved.training_arguments
    with arguments.main_process_first(local=False, desc="data preparation"):
        tokenizer, blocks, fingerprint = prepare_data(recipe, tokenizer_folder or folder, arguments.seed)
    set_seed(arguments.seed)
    model = make_model(resolved, tokenizer)
    size = measure(model.config, recipe.block_size)
    arguments.batch_eval_metrics = True
    arguments.logging_nan_inf_filter = False
    collate = BlockCollator(tokenizer.eos_token_id, restart=recipe.packing == "documents")
    global_batch_size = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    record = RunRecord(arguments.world_size, global_batch_size, fingerprint)
    smoothing = arguments.label_smoothing_factor
    trainer = RecordingTrainer(
        record=record,
        model=model,
        args=arguments,
        train_dataset=blocks["train"].dataset,
        eval_dataset=blocks["validation"].dataset,
        data_collator=collate,
        processing_class=tokenizer,
        # Trainer itself shifts the labels of model classes it knows by name, which `torch_compile` and FSDP2 change
        compute_loss_func=functools.partial(LabelSmoother(smoothing), shift_labels=True) if smoothing else None,
        compute_metrics=LanguageModelingMetrics(blocks["validation"].bytes_per_token),
        preprocess_logits_for_metrics=token_losses,
    )
    if recipe.record_stability:
        probe = collate(list(itertools.islice(blocks["validation"].dataset, _STABILITY_BLOCKS)))
        trainer.add_callback(
            StabilityCallback(trainer, probe["input_ids"], recipe.stability_steps, position_ids=probe.get("position_ids"))
        )
    for callback in callbacks:
        trainer.add_callback(callback)

    checkpoint = last_complete_checkpoint(folder)
    if arguments.resume_from_checkpoint is not None:
        checkpoint = Path(arguments.resume_from_checkpoint)
        if not is_complete_checkpoint(checkpoint):
            raise ValueError(f"resume_from_checkpoint={str(checkpoint)!r} is no complete checkpoint")
    state = None
    if checkpoint is not None:
        _check_same_model(checkpoint, model.config)
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        _check_same_conditions(checkpoint, state, record, is_asked_for=arguments.resume_from_checkpoint is not None)
        best = best_checkpoint(state, arguments.output_dir) if arguments.load_best_model_at_end else None
        if best is not None and not is_complete_checkpoint(Path(best)):
            raise ValueError(f"{best}, the best checkpoint so far, is missing or damaged; load_best_model_at_end needs it")
        logger.warning(f"Going on from {checkpoint}")
        record.restore(state)
    if state is not None and (state.global_step >= state.max_steps or record.diverged_at is not None):
        # Cut off after its last step: Trainer would take one more
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = state
        if best is not None:
            state.best_model_checkpoint = best
            trainer._load_best_model()
        model.to(arguments.device)
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    evaluated = {}
    if record.diverged_at is None:
        evaluated = _last_evaluation(trainer) or trainer.evaluate()
        if "test" in blocks:
            trainer.compute_metrics = LanguageModelingMetrics(blocks["test"].bytes_per_token)
            evaluated.update(trainer.evaluate(blocks["test"].dataset, metric_key_prefix="test"))
        trainer.save_model()
    diverged = record.diverged_at is not None or has_diverged(evaluated["eval_loss"], model.config.vocab_size)

    unigram = None
    if trainer.is_world_process_zero() and not recipe.streaming:
        unigram = unigram_perplexity(blocks["train"].dataset, blocks["validation"].dataset, vocabulary_size(tokenizer))
    metrics = {
        # JSON knows no NaN
        **{
            name: value if math.isfinite(value) else None
            for name, value in evaluated.items()
            if name.startswith(("eval_", "test_"))
        },
        "diverged": diverged,
        "diverged_at": record.diverged_at,
        "unigram_perplexity": unigram,
        "train_loss": next(
            (entry["loss"] for entry in reversed(trainer.state.log_history) if math.isfinite(entry.get("loss", math.nan))), None
        ),
        "steps": trainer.state.global_step,
        "tokens_seen": record.tokens_seen,
        "token_stream": record.token_stream,
        "train_seconds": record.seconds,
        "tokens_per_second": record.tokens_seen / record.seconds if record.seconds else None,
        "peak_memory": peak_memory(arguments.device),
        **{f"{split}_tokens": part.tokens for split, part in blocks.items()},
        "dataset_fingerprint": fingerprint,
        "is_fine_tuned": is_saved_model(recipe.model),
        "base_model": base_model_of(recipe.model) if is_saved_model(recipe.model) else None,
        "parameters": size.total,
        "non_embedding_parameters": size.non_embedding,
        "flops_per_token": size.flops_per_token,
        "attn_implementation": model.config._attn_implementation,
        "processes": arguments.world_size,
        "device": torch.cuda.get_device_name() if arguments.device.type == "cuda" else arguments.device.type,
        "versions": {
            "python": platform.python_version(),
            "nlq": modeling_nlq.__version__,
            **{name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "tokenizers")},
        },
    }
    if trainer.is_world_process_zero():
        plot_losses(trainer.state.log_history, folder / "loss.png", without_folders(recipe.model))
        if evaluated:
            card = render(folder.resolve().name, model.config, size, resolved.given, metrics, has_plot=True)
            card.save(folder / CARD_FILE)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
        # Last: a run that has its metrics is finished
        write_text(folder / METRICS_FILE, json.dumps(metrics, indent=2, allow_nan=False) + "\n")
    return metrics


def _last_evaluation(trainer: Trainer) -> dict[str, float] | None:
    """What was measured on the validation split after the last step, if it was and these are still the weights."""
    for entry in reversed(trainer.state.log_history):
        if "eval_loss" in entry:
            is_last = entry["step"] == trainer.state.global_step and not trainer.args.load_best_model_at_end
            return {name: value for name, value in entry.items() if name.startswith("eval_")} if is_last else None
    return None


def evaluate_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, batch_size: int, is_whole: bool = False
) -> dict[str, float]:
    """Loss, perplexity, bits per byte and token accuracy of a model on the validation split of a recipe's dataset.

    Args:
        model: any causal language model.
        tokenizer: its own.
        recipe: names the dataset, block size and packing.
        batch_size: blocks per device.
        is_whole: whether to evaluate on all documents instead.
    """
    validation = make_blocks(load_documents(recipe, is_whole)["validation"], tokenizer, recipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                per_device_eval_batch_size=batch_size,
                batch_eval_metrics=True,
                dataloader_pin_memory=torch.cuda.is_available(),
                report_to="none",
            ),
            data_collator=BlockCollator(tokenizer.eos_token_id, restart=recipe.packing == "documents"),
            compute_metrics=LanguageModelingMetrics(validation.bytes_per_token),
            preprocess_logits_for_metrics=token_losses,
        )
        return trainer.evaluate(validation.dataset)


def plot_losses(log_history: list[dict[str, float]], path: Path, title: str) -> None:
    """Training and validation loss over steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for key, label, style in (("loss", "training", {"alpha": 0.6}), ("eval_loss", "validation", {"marker": "o"})):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a name may hold a dollar
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
