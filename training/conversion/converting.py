"""`nlq convert`: writes GPT-2 and the paper's checkpoints as NLQ models, and NLQ models with other switches or as GPT-2."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GPT2ForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from modeling_nlq import NLQForSequenceClassification
from modeling_nlq.training.card import base_model_of, render
from modeling_nlq.training.conversion.gpt2 import GPT2_CLASSES, NLQ_CLASSES, LossyConversion, from_gpt2, to_gpt2
from modeling_nlq.training.conversion.paper import from_paper, read_checkpoint
from modeling_nlq.training.conversion.upcycling import largest_difference
from modeling_nlq.training.conversion.upcycling import upcycle as upcycle_model
from modeling_nlq.training.files import (
    CARD_FILE,
    CONVERSION_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    VOCABULARIES,
    is_taken,
    model_files,
    written_whole,
)
from modeling_nlq.training.models import read_conversion
from modeling_nlq.training.parameters import check_names, size_of
from modeling_nlq.training.run.tokenization import check_vocabulary
from modeling_nlq.training.text import first_line


logger = logging.get_logger(__name__)

PAPER_CHECKPOINT = "ckpt.pt"
# Relative to the largest output, in float32: sums in another order, and nothing more
_TOLERANCE = 1e-4


@dataclass
class Conversion:
    """The record of a conversion, which `conversion.json` holds.

    Attributes:
        source: a Hub name, or the last part of a path.
        source_class, target_class: classes of the models.
        base_model: the model on the Hub that the weights come from, if it is known.
        switches: fields that were changed.
        lost: the differences between the new model and the old one, in words; empty if both compute the same.
        difference: largest difference of the outputs on random tokens, in float32, relative to the largest output; `None` if
            there is no other model to compare with, as for a checkpoint.
        parameters: number of parameters of the new model.
        has_tokenizer: whether there is a tokenizer beside the weights.
        added: names of the parameters that are new since the last training: the source has none of this name, or has it from an
            earlier conversion after which nothing was trained.
        enlarged: names of the parameters that are larger than before, in the same span of time.
        before: the record of that earlier conversion.
    """

    source: str
    source_class: str
    target_class: str
    base_model: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    difference: float | None = None
    parameters: int = 0
    has_tokenizer: bool = False
    added: list[str] = field(default_factory=list)
    enlarged: list[str] = field(default_factory=list)
    before: dict[str, Any] | None = None


def convert(
    source: str | Path,
    target: str | Path,
    to: Literal["nlq", "gpt2"] = "nlq",
    upcycle: bool = False,
    switches: dict[str, Any] | None = None,
    tokenizer: str | None = None,
    allow_lossy: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Writes a model in another form, ready to load, train and share.

    Args:
        source: folder or Hub name of a GPT-2 or NLQ model, or a checkpoint of the paper's code or of nanoGPT.
        target: folder to write.
        to: write an NLQ model, or a GPT-2 model of Transformers.
        upcycle: give it `upcycled` queries, which compute the same at first.
        switches: other fields of `NLQConfig` to change without changing the outputs.
        tokenizer: folder or Hub name of a tokenizer to put beside the weights; by default the source's own.
        allow_lossy: convert even if something is lost.
        overwrite: replace a model in the target; other files there are left alone.

    Returns:
        The record of the conversion.

    Raises:
        ValueError: for a source that is none of these or is damaged, a target that is taken, or switches that would change the
            outputs. Nothing has been written then.
        LossyConversion: if something would be lost and `allow_lossy` is not set.
    """
    source, target = str(source), Path(target)
    switches = dict(switches or {})
    if upcycle and "query_projection" in switches:
        raise ValueError(f"--upcycle and --set query_projection={switches['query_projection']!r} contradict each other")
    if upcycle:
        switches["query_projection"] = "upcycled"
    if to not in ("nlq", "gpt2"):
        raise ValueError(f"to={to!r} must be 'nlq' or 'gpt2'")
    if to == "gpt2" and switches:
        raise ValueError(f"--to gpt2 takes no switches ({', '.join(switches)}): GPT-2 has none")
    _check_target(source, target, overwrite)

    old = load_source(source)
    lost: list[str] = []
    new = old
    is_checkpoint = find_checkpoint(source) is not None
    earlier = read_conversion(source, is_untrained=True) if old.config.model_type == "nlq" and not is_checkpoint else None
    added, enlarged = ((earlier or {}).get(name, []) for name in ("added", "enlarged"))
    if old.config.model_type == "gpt2":
        new, lost = _lossily(from_gpt2, old, allow_lossy)
    if switches:
        before, new = new, upcycle_model(new, switches)
        if before.config.to_dict() == new.config.to_dict():
            raise ValueError(f"{source} has {', '.join(f'{name}={value!r}' for name, value in switches.items())} already")
        added, enlarged = _new_parameters(before, new, added, enlarged)
    if to == "gpt2":
        new, more = _lossily(to_gpt2, new, allow_lossy)
        lost = [*lost, *more]
        added, enlarged = [], []  # a GPT-2 has no such parameters
    difference = None if new is old else largest_difference(old, new)
    # A matrix that is computed, such as W - I, is rounded to the precision of the weights
    tolerance = max(_TOLERANCE, torch.finfo(new.dtype).eps)
    if difference is not None and not lost and not difference <= tolerance:
        raise ValueError(
            f"{source}: the outputs would differ by {difference:.1e} of the largest: these weights cannot be moved"
        )
    own_tokenizer = _load_tokenizer(source, tokenizer, new)

    done = Conversion(
        source=source if not Path(source).exists() else Path(source).resolve().name,
        source_class="checkpoint" if is_checkpoint else type(old).__name__,
        target_class=type(new).__name__,
        base_model=base_model_of(source),
        switches=switches,
        lost=lost,
        difference=None if is_checkpoint else difference,
        parameters=new.num_parameters(),
        has_tokenizer=own_tokenizer is not None,
        added=added,
        enlarged=enlarged,
        before=earlier,
    )
    _write(new, own_tokenizer, done, target)
    return done


def _new_parameters(
    before: PreTrainedModel, after: PreTrainedModel, added: list[str], enlarged: list[str]
) -> tuple[list[str], list[str]]:
    """Finds the parameters that a change of switches added, and those that it enlarged.

    Args:
        before, after: the model with the old switches, and the one with the new; their weights are not read.
        added, enlarged: those of earlier changes, which count if the parameters are still there.
    """
    # A tied LM head counts as there before, so that its own copy of the embeddings is not new
    shapes = {name: parameter.shape for name, parameter in before.named_parameters(remove_duplicate=False)}
    new_shapes = {name: parameter.shape for name, parameter in after.named_parameters(remove_duplicate=False)}
    all_added = {*added, *(new_shapes.keys() - shapes.keys())}
    all_enlarged = {*enlarged, *(name for name, shape in new_shapes.items() if shapes.get(name, shape) != shape)}
    return (
        [name for name in new_shapes if name in all_added],
        [name for name in new_shapes if name in all_enlarged - all_added],
    )


def load_source(source: str) -> PreTrainedModel:
    """Loads a model from a folder, the Hub, or a checkpoint of the paper's code or of nanoGPT, in its own precision.

    Raises:
        ValueError: if it is no such model, naming the parts that are missing, damaged or unknown.
    """
    path = find_checkpoint(source)
    if path is not None:
        try:
            return from_paper(read_checkpoint(path))
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"{source} holds neither a config.json nor a {PAPER_CHECKPOINT}")
    if not Path(source).exists() and (source.startswith((".", "/", "~")) or source.endswith((".pt", ".pth", ".bin"))):
        raise ValueError(f"there is no folder or file {source!r}")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        place = "" if Path(source).exists() else "neither a folder here nor a model of the Hub, or "
        raise ValueError(f"{source!r} is {place}no model that can be read: {first_line(error)}") from error
    if config.model_type not in ("gpt2", "nlq"):
        raise ValueError(f"{source!r} is a model of type {config.model_type!r}; only GPT-2 and NLQ models can be converted")
    return _load_weights(source, config)


def find_checkpoint(source: str) -> Path | None:
    """The checkpoint file of a source, which is the file or its folder; `None` if there is none."""
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file() and (path / PAPER_CHECKPOINT).is_file():
        return path / PAPER_CHECKPOINT
    return path if path.is_file() else None


def _load_weights(source: str, config: PreTrainedConfig) -> PreTrainedModel:
    classes = {
        model_class.__name__: model_class for model_class in (GPT2_CLASSES if config.model_type == "gpt2" else NLQ_CLASSES)
    }
    default = "GPT2LMHeadModel" if config.model_type == "gpt2" else "NLQForCausalLM"
    name = (config.architectures or [default])[0].removeprefix("FSDP")
    if name not in classes:
        raise ValueError(f"{source!r}: architectures names {name!r}, which is none of {', '.join(classes)}")
    model_class = classes[name]
    try:
        model, found = model_class.from_pretrained(
            source, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (SafetensorError, OSError, EOFError, RuntimeError, KeyError) as error:
        raise ValueError(f"{source!r}: the weights cannot be read: {first_line(error)}") from error
    except Exception as error:
        # torch has a long message for a pickle that holds more than tensors
        if "weights_only" not in str(error) and "Unsupported" not in str(error):
            raise
        raise ValueError(
            f"{source!r}: the weights ask for more than tensors, which could run code; they were not read"
        ) from None
    if found["mismatched_keys"]:
        name, there, expected = min(found["mismatched_keys"])
        raise ValueError(f"{source!r}: {name} has the shape {tuple(there)}, and config.json says {tuple(expected)}")
    missing = set(found["missing_keys"])
    # Transformers saved the value of masked scores until 4.27; it is no parameter
    unexpected = {name for name in found["unexpected_keys"] if not name.endswith(".attn.masked_bias")}
    try:
        check_names(missing, unexpected)
    except ValueError as error:
        raise ValueError(f"{source!r}: {error}") from None
    return model.eval()


def _lossily(conversion, model: PreTrainedModel, allow_lossy: bool) -> tuple[PreTrainedModel, list[str]]:
    """Converts a model, and returns with it the list of losses."""
    try:
        return conversion(model), []
    except LossyConversion as error:
        if not allow_lossy:
            raise
        return conversion(model, allow_lossy=True), error.lost


def _load_tokenizer(source: str, name: str | None, model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Loads the given tokenizer, and sets its special tokens in the model, or loads that of the source, if there is one."""
    if name is None and Path(source).exists() and not any((Path(source) / file).is_file() for file in VOCABULARIES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name or source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if name is None and not Path(source).exists():
            logger.warning(f"{source} has no tokenizer that can be read; give one by --tokenizer")
            return None
        raise ValueError(f"tokenizer {name or source!r} cannot be read: {first_line(error)}") from error
    check_vocabulary(tokenizer, name or source, model.config)
    # A classifier of sequences reads its answer off the last token that is not padding: its own stays
    is_classifier = isinstance(model, NLQForSequenceClassification | GPT2ForSequenceClassification)
    kinds = ("bos_token_id", "eos_token_id") if is_classifier else ("bos_token_id", "eos_token_id", "pad_token_id")
    for kind in kinds if name is not None else ():
        for settings in filter(None, (model.config, getattr(model, "generation_config", None))):
            setattr(settings, kind, getattr(tokenizer, kind))
    return tokenizer


def _check_target(source: str, target: Path, overwrite: bool) -> None:
    if Path(source).exists() and target.exists() and os.path.samefile(source, target):
        raise ValueError(f"{target} is the source itself; choose another target")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; choose another target")
    if is_taken(target):
        if not overwrite:
            raise ValueError(
                f"{target} exists and is not empty; choose another target, or replace the model in it by --overwrite"
            )
        if not (target / "config.json").is_file():
            raise ValueError(f"{target} holds no model that --overwrite could replace; choose another target")
        if any((target / name).exists() for name in (METRICS_FILE, RECIPE_FILE)) or any(target.glob("checkpoint-*")):
            raise ValueError(f"{target} holds a training run, which --overwrite does not replace; choose another target")


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, done: Conversion, target: Path) -> None:
    """Writes the new model into the target, and removes the files of an older one."""
    # config.json is last: it makes a model of the folder
    with written_whole(target, last="config.json") as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        record = asdict(done)
        (folder / CONVERSION_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        card = render(target.resolve().name, model.config, size_of(model), conversion=record, has_tokenizer=done.has_tokenizer)
        card.save(folder / CARD_FILE)
        stale = {*model_files(target), *target.glob("pytorch_model*.bin*"), target / CARD_FILE}
        for path in stale - {target / path.relative_to(folder) for path in folder.rglob("*")}:
            path.unlink(missing_ok=True)
