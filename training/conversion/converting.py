"""`nlq convert`: converts models of other families to NLQ and back, and NLQ models to other switches."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

import modeling_nlq

from ..disk import add_to_manifest, atomic_dir, delete, files_below, read_manifest, resolve_user_path, write_text
from ..files import (
    CARD_FILE,
    CONVERSION_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    SETTINGS,
    TOKENIZER,
    VOCABULARIES,
    WEIGHTS,
    files_in,
    is_nonempty,
)
from ..models import check_model_folder, load_tokenizer, read_record, source_named
from ..run.data import check_vocabulary
from ..run.run_folder import RunFolder
from ..run.trained_on import read_trained_on
from ..sharing.card import base_model_of, render
from ..size import size_of
from ..text import one_line
from .draft import Draft, LossyConversion, nlq_config
from .families import FAMILIES
from .gguf_files import GGUF, find_gguf, load_gguf_tokenizer, read_gguf
from .nanogpt import from_paper, read_checkpoint
from .sources import find_checkpoint, load_gguf, load_model, read_source
from .streaming import empty_model, find_weights, write_weights
from .upcycling import changed, largest_difference


# Largest difference of the outputs, relative to the largest, that another order of summation explains in float32
_TOLERANCE = 1e-4
# From this size of the weights, in bytes, the outputs are not compared: both models in float32 take four times as much
COMPARED_BELOW = 2**30
# A model that --overwrite replaces, as patterns. What `auto_map` names besides may be the user's
_MODEL = (*WEIGHTS, "pytorch_model*.bin*", *SETTINGS, *TOKENIZER, CONVERSION_FILE)
_MODEL += tuple(path.name for path in Path(modeling_nlq.__file__).parent.glob("*_nlq.py"))


@dataclass
class Conversion:
    """The record of a conversion, as in `conversion.json`.

    Attributes:
        source: a Hub name, or the last part of a path.
        base_model: the model on the Hub that the weights come from, if it is known.
        switches: fields that were changed.
        lost: the differences between the new model and the old one, in words; empty if both compute the same.
        dequantised: the type of a quantised source's weights, as llama.cpp names it.
        difference: largest difference of the outputs on random tokens, in float32, relative to the largest output;
            `None` if the source is a checkpoint or too large.
        not_compared: why the outputs were not compared.
        has_tokenizer: whether the folder has a tokenizer.
        added: names of the parameters that the source did not have when it was last trained.
        enlarged: names of the parameters that are larger than then.
        before: the record of an earlier conversion, after which the model was not trained.
        trained_on: what the source was trained on, see `read_trained_on`.
    """

    source: str
    source_class: str
    target_class: str
    base_model: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    dequantised: str | None = None
    difference: float | None = None
    not_compared: str | None = None
    parameters: int = 0
    has_tokenizer: bool = False
    added: list[str] = field(default_factory=list)
    enlarged: list[str] = field(default_factory=list)
    before: dict[str, Any] | None = None
    trained_on: list[dict[str, Any]] = field(default_factory=list)


def convert(
    source: str | Path,
    target: str | Path,
    to: str = "nlq",
    upcycle: bool = False,
    switches: dict[str, Any] | None = None,
    tokenizer: str | None = None,
    allow_lossy: bool = False,
    overwrite: bool = False,
) -> Conversion:
    """Writes a model in another form, ready to load, train and share.

    Weights in safetensors files are converted shard by shard, unless the new switches change their values.

    Args:
        source: folder or Hub name of an NLQ model or of one of `FAMILIES`, a GGUF file, or a checkpoint of the paper's
            code or of nanoGPT.
        target: folder to write.
        to: `"nlq"`, or the family to write, one of `FAMILIES`.
        upcycle: make the queries `upcycled`, which compute the same at first.
        switches: other fields of `NLQConfig` to change without changing the outputs.
        tokenizer: folder or Hub name of a tokenizer to put beside the weights; by default the source's own.
        allow_lossy: convert even if something is lost.
        overwrite: replace a model in the target; other files stay.

    Raises:
        ImportError: for a GGUF file without the package gguf.
        ValueError: for another or a damaged source, a target that is not empty, switches that would change the
            outputs, or a family without such a model. Nothing has been written then.
        LossyConversion: if something would be lost and `allow_lossy` is not set.
    """
    source, target = str(source), resolve_user_path(target)
    switches = {**(switches or {}), **({"query_projection": "upcycled"} if upcycle else {})}
    if to not in (known := ("nlq", *sorted(FAMILIES))):
        raise ValueError(f"to={to!r} must be one of {', '.join(known)}")
    if to != "nlq" and switches:
        raise ValueError(f"--to {to} takes no switches ({', '.join(switches)}): they are those of NLQ models")
    _check_target(source, target, overwrite)
    check_model_folder(source)
    with RunFolder(target, plan=None).held():
        card = (CARD_FILE,) if (target / CONVERSION_FILE).is_file() else ()
        model = {path.relative_to(target).as_posix() for path in files_in(target, (*_MODEL, *card))}
        written = read_manifest(target)
        add_to_manifest(target, sorted(model))  # --overwrite allows to replace them
        older = model if written is None else model.intersection(written)
        return _convert(source, target, to, switches, tokenizer, allow_lossy, older)


def _convert(
    source: str,
    target: Path,
    to: str,
    switches: dict[str, Any],
    tokenizer: str | None,
    allow_lossy: bool,
    older: set[str],
) -> Conversion:
    """Converts as `convert` does, while the lock of the target is held, and deletes files of the older model."""
    try:
        opened, gguf = _open(source, allow_lossy)
        draft = _change(opened, to, switches, allow_lossy)
    except LossyConversion:
        raise
    except (ValueError, OSError, RuntimeError, EOFError, SafetensorError, StrictDataclassError) as error:
        text = one_line(error)
        raise ValueError(text if source in text else f"{source!r}: {text}") from error
    old, new = opened.model, draft.model
    new.config.dtype = old.config.dtype or draft.weights.dtype
    is_checkpoint = find_checkpoint(source) is not None
    is_nlq = old.config.model_type == "nlq" and not is_checkpoint
    is_untrained = is_nlq and read_record(source, RECIPE_FILE) is None
    earlier = read_record(source, CONVERSION_FILE) if is_untrained else None
    added, enlarged = ((earlier or {}).get(name, []) for name in ("added", "enlarged"))
    if switches:
        added, enlarged = _new_parameters(empty_model(type(new), nlq_config(old.config)), new, added, enlarged)
    if to != "nlq":
        added, enlarged = [], []
    own_tokenizer = _load_tokenizer(source, tokenizer, new, gguf)
    done = Conversion(
        source=source if not Path(source).exists() else Path(source).resolve().name,
        source_class="checkpoint" if is_checkpoint else type(old).__name__,
        target_class=type(new).__name__,
        base_model=base_model_of(source),
        switches=switches,
        lost=draft.lost,
        dequantised=gguf.weights if gguf is not None and gguf.is_quantised else None,
        parameters=new.num_parameters(),
        has_tokenizer=own_tokenizer is not None,
        added=added,
        enlarged=enlarged,
        before=earlier,
        trained_on=read_trained_on(source) if is_nlq or Path(source).is_dir() else [],
    )
    # config.json is last: a folder without it is not a model
    with atomic_dir(target, last="config.json") as folder:
        new.config.architectures = [type(new).__name__]
        new.config.save_pretrained(folder)
        if new.can_generate():
            new.generation_config.save_pretrained(folder)
        write_weights(folder, new, draft.weights)
        if own_tokenizer is not None:
            own_tokenizer.save_pretrained(folder)
        if opened.weights.nbytes >= COMPARED_BELOW:
            done.not_compared = f"the weights take {opened.weights.nbytes / 2**30:.1f} GiB"
        elif not is_checkpoint and (switches or type(new) is not type(old)):
            old = old if opened.weights.are_in_memory else load_model(source, old.config, type(old))
            done.difference = _compare(source, old, load_model(str(folder), new.config, type(new)), draft.lost)
        _write_records(folder, target, new, done)
        written = files_below(folder)
    for file in older.difference(written):
        delete(target / file)
    return done


def _open(source: str, allow_lossy: bool) -> tuple[Draft, GGUF | None]:
    """Opens a source: the files of a saved model, or the model in memory if it cannot be converted file by file.

    Returns also the header of a GGUF file.
    """
    if (checkpoint := find_checkpoint(source)) is not None:
        with source_named(str(checkpoint)):
            return Draft.of(from_paper(read_checkpoint(checkpoint))), None
    if (path := find_gguf(source)) is not None:
        gguf = read_gguf(path)
        return Draft.of(*load_gguf(gguf, allow_lossy)), gguf
    config, model_class = read_source(source)
    model = empty_model(model_class, config)
    weights = find_weights(source, model)
    if weights is None:
        return Draft.of(load_model(source, config, model_class)), None
    if model.can_generate() and (settings := read_record(source, GENERATION_CONFIG_NAME)) is not None:
        model.generation_config = GenerationConfig.from_dict(settings)
    return Draft(model, weights), None


def _change(draft: Draft, to: str, switches: dict[str, Any], allow_lossy: bool) -> Draft:
    """Converts an opened source to NLQ, to other switches, and to another family."""
    if draft.model.config.model_type in FAMILIES:
        draft = draft.to_nlq(allow_lossy)
    if switches:
        if changed(draft.model.config, switches).to_dict() == draft.model.config.to_dict():
            values = ", ".join(f"{name}={value!r}" for name, value in switches.items())
            raise ValueError(f"the model has {values} already")
        draft = draft.with_switches(switches)
    return draft if to == "nlq" else draft.from_nlq(to, allow_lossy)


def _new_parameters(
    before: PreTrainedModel, after: PreTrainedModel, added: list[str], enlarged: list[str]
) -> tuple[list[str], list[str]]:
    """Returns the parameters that this change of switches, or an earlier one, added and enlarged."""
    # A tied LM head counts as a parameter, so that untying does not add one
    old, new = (
        {name: value.shape for name, value in each.named_parameters(remove_duplicate=False)}
        for each in (before, after)
    )
    all_added = [name for name in new if name in added or name not in old]
    return all_added, [name for name in new if name not in all_added and (name in enlarged or old[name] != new[name])]


def _load_tokenizer(
    source: str, name: str | None, model: PreTrainedModel, gguf: GGUF | None
) -> PreTrainedTokenizerBase | None:
    """Loads the source's tokenizer if it has one, or the named one, whose special tokens the model takes over."""
    if name is None and gguf is not None:
        tokenizer = load_gguf_tokenizer(gguf)
    elif name is None and Path(source).exists() and not any((Path(source) / file).is_file() for file in VOCABULARIES):
        return None
    else:
        tokenizer = load_tokenizer(name or source)
    check_vocabulary(tokenizer, name or source, model.config)
    # A sequence classifier reads its answer off the last token that is not padding, so it keeps its padding token
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    kinds = ("bos_token_id", "eos_token_id") if is_classifier else ("bos_token_id", "eos_token_id", "pad_token_id")
    for kind in kinds if name is not None else ():
        for settings in filter(None, (model.config, getattr(model, "generation_config", None))):
            setattr(settings, kind, getattr(tokenizer, kind))
    return tokenizer


def _check_target(source: str, target: Path, overwrite: bool) -> None:
    if Path(source).exists() and target.exists() and os.path.samefile(source, target):
        raise ValueError(f"{target} is the source itself; choose another target")
    if is_nonempty(target):
        if not overwrite:
            raise ValueError(
                f"{target} exists and is not empty; choose another target, or replace the model in it by --overwrite"
            )
        if not (target / "config.json").is_file():
            raise ValueError(f"{target} holds no model that --overwrite could replace; choose another target")
        if (target / METRICS_FILE).exists() or any(target.glob("checkpoint-*")):
            raise ValueError(
                f"{target} holds a training run, which --overwrite does not replace; choose another target"
            )


def _compare(source: str, old: PreTrainedModel, new: PreTrainedModel, lost: list[str]) -> float:
    """Returns the largest difference of the outputs; raises `ValueError` if it is neither rounding nor `lost`."""
    difference = largest_difference(old, new)
    # Computed matrices, such as W - I, are rounded to the precision of the weights
    if not lost and not difference <= max(_TOLERANCE, torch.finfo(new.dtype).eps):
        raise ValueError(
            f"{source}: the outputs would differ by {difference:.1e} of the largest: these weights cannot be moved"
        )
    return difference


def _write_records(folder: Path, target: Path, model: PreTrainedModel, done: Conversion) -> None:
    """Writes the record and the card."""
    record = asdict(done)
    write_text(folder / CONVERSION_FILE, json.dumps(record, indent=2) + "\n")
    card = render(
        target.resolve().name, model.config, size_of(model), conversion=record, has_tokenizer=done.has_tokenizer
    )
    card.save(folder / CARD_FILE)
