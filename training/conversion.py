"""`nlq convert`, folder to folder: GPT-2 and the paper's checkpoints to NLQ, NLQ to other switches or to GPT-2."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import modeling_nlq
from modeling_nlq.training.card import CARD_FILE, base_model_of, render
from modeling_nlq.training.gpt2 import LossyConversion, check_names, from_gpt2, to_gpt2
from modeling_nlq.training.paper import from_paper, read_checkpoint
from modeling_nlq.training.parameters import size_of
from modeling_nlq.training.publishing import CONVERSION_FILE, files_to_publish
from modeling_nlq.training.train import is_taken, write_text
from modeling_nlq.training.upcycling import largest_difference
from modeling_nlq.training.upcycling import upcycle as upcycle_model


logger = logging.get_logger(__name__)

PAPER_CHECKPOINT = "ckpt.pt"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
# Relative to the largest output, in float32: sums in another order, and nothing more
_TOLERANCE = 1e-4


@dataclass
class Conversion:
    """What was converted to what; `conversion.json` holds it.

    Attributes:
        source: a Hub name, or the last part of a path.
        source_class, target_class: of the models.
        base_model: the model on the Hub that the weights come from, if that is known.
        switches: fields that were set anew.
        lost: what the new model cannot do as the old one did; empty if both compute the same.
        difference: of the outputs on random tokens, in float32, relative to the largest; `None` if there was no other model.
        parameters: of the new model.
        has_tokenizer: whether there is a tokenizer beside the weights.
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
        to: what to write, an NLQ model or a GPT-2 model of Transformers.
        upcycle: whether to give it `upcycled` queries, which compute the same at first.
        switches: other fields of `NLQConfig` to set without changing what the model computes.
        tokenizer: folder or Hub name of a tokenizer to put beside the weights; by default the source's own.
        allow_lossy: whether to go on where the new model cannot do what the old one did.
        overwrite: whether to replace a model that is in the target; other files there are left alone.

    Returns:
        What was done.

    Raises:
        ValueError: for a source that is none of these or is damaged, a target that is taken, or switches that would change what
            the model computes. Nothing has been written then.
        LossyConversion: where something would be lost, and that is not allowed.
    """
    source, target = str(source), Path(target)
    switches = {**({"query_projection": "upcycled"} if upcycle else {}), **(switches or {})}
    if to not in ("nlq", "gpt2"):
        raise ValueError(f"to={to!r} must be 'nlq' or 'gpt2'")
    if to == "gpt2" and switches:
        raise ValueError(f"--to gpt2 takes no switches ({', '.join(switches)}): GPT-2 has none")
    _check_target(source, target, overwrite)

    old = load_source(source)
    lost: list[str] = []
    new = old
    if old.config.model_type == "gpt2":
        new, lost = _lossily(from_gpt2, old, allow_lossy)
    if switches:
        new = upcycle_model(new, switches)
    if to == "gpt2":
        new, more = _lossily(to_gpt2, new, allow_lossy)
        lost = [*lost, *more]
    own_tokenizer = _load_tokenizer(source, tokenizer, new)
    difference = None if new is old else largest_difference(old, new)
    if difference is not None and not lost and not difference <= _TOLERANCE:
        raise ValueError(
            f"{source}: the outputs would differ by {difference:.1e} of the largest: these weights cannot be moved"
        )

    done = Conversion(
        source=source if not Path(source).exists() else Path(source).resolve().name,
        source_class=type(old).__name__ if not Path(source).is_file() else "checkpoint",
        target_class=type(new).__name__,
        base_model=base_model_of(source),
        switches=switches,
        lost=lost,
        difference=difference,
        parameters=new.num_parameters(),
        has_tokenizer=own_tokenizer is not None,
    )
    _write(new, own_tokenizer, done, target)
    return done


def load_source(source: str) -> PreTrainedModel:
    """The model in a folder, on the Hub, or in a checkpoint of the paper's code or of nanoGPT, in its own precision.

    Raises:
        ValueError: if it is no such model, naming what is missing, damaged or too much.
    """
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file() and (path / PAPER_CHECKPOINT).is_file():
        path = path / PAPER_CHECKPOINT
    if path.is_file():
        try:
            return from_paper(read_checkpoint(path))
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{source} holds neither a config.json nor a {PAPER_CHECKPOINT}")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source!r} is no model that can be read: {str(error).splitlines()[0]}") from error
    if config.model_type not in ("gpt2", "nlq"):
        raise ValueError(f"{source!r} is a model of type {config.model_type!r}; only GPT-2 and NLQ models can be converted")
    return _load_weights(source, config)


def _load_weights(source: str, config: PreTrainedConfig) -> PreTrainedModel:
    library = transformers if config.model_type == "gpt2" else modeling_nlq
    default = "GPT2LMHeadModel" if config.model_type == "gpt2" else "NLQForCausalLM"
    name = (config.architectures or [default])[0]
    model_class = getattr(library, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ValueError(f"{source!r}: there is no model class {name!r}")
    try:
        model, found = model_class.from_pretrained(
            source, config=config, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (SafetensorError, OSError, EOFError, RuntimeError) as error:
        raise ValueError(f"{source!r}: the weights cannot be read: {str(error).splitlines()[0]}") from error
    except Exception as error:
        # Of a pickle that asks for more than tensors, torch says so at length
        if "weights_only" not in str(error) and "Unsupported" not in str(error):
            raise
        raise ValueError(
            f"{source!r}: the weights ask for more than tensors, which could run code; they were not read"
        ) from None
    if found["mismatched_keys"]:
        name, there, expected = min(found["mismatched_keys"])
        raise ValueError(f"{source!r}: {name} has the shape {tuple(there)}, and config.json says {tuple(expected)}")
    missing = set(found["missing_keys"])
    # The value of hidden scores, which Transformers saved until 4.27, is no parameter
    unexpected = {name for name in found["unexpected_keys"] if not name.endswith(".attn.masked_bias")}
    try:
        check_names(missing, unexpected)
    except ValueError as error:
        raise ValueError(f"{source!r}: {error}") from None
    return model.eval()


def _lossily(conversion, model: PreTrainedModel, allow_lossy: bool) -> tuple[PreTrainedModel, list[str]]:
    """A conversion, and what it lost."""
    try:
        return conversion(model), []
    except LossyConversion as error:
        if not allow_lossy:
            raise
        return conversion(model, allow_lossy=True), error.lost


def _load_tokenizer(source: str, name: str | None, model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer asked for, whose special tokens the model then knows, or that of the source, if there is one."""
    if name is None and Path(source).exists() and not any((Path(source) / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name or source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if name is None and not Path(source).exists():
            logger.warning(f"{source} has no tokenizer that can be read; give one by --tokenizer")
            return None
        raise ValueError(f"tokenizer {name or source!r} cannot be read: {str(error).splitlines()[0]}") from error
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"tokenizer {name or source!r} has {len(tokenizer)} tokens, more than the model's vocab_size="
            f"{model.config.vocab_size}"
        )
    for kind in ("bos_token_id", "eos_token_id", "pad_token_id") if name is not None else ():
        for settings in filter(None, (model.config, model.generation_config)):
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


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, done: Conversion, target: Path) -> None:
    """Writes all files beside the target, and moves them there once they are complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".unfinished", dir=target.parent) as unfinished:
        folder = Path(unfinished)
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        record = asdict(done)
        write_text(folder / CONVERSION_FILE, json.dumps(record, indent=2) + "\n")
        card = render(target.resolve().name, model.config, size_of(model), conversion=record, has_tokenizer=done.has_tokenizer)
        card.save(folder / CARD_FILE)
        target.mkdir(exist_ok=True)
        written = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        stale = {*files_to_publish(target), *target.glob("pytorch_model*.bin*"), target / CARD_FILE}
        for path in stale - {target / name for name in written}:
            path.unlink(missing_ok=True)
        for name in sorted(written, key=lambda name: name.name == "config.json"):  # last: it makes a model of the folder
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).replace(target / name)
