"""`nlq convert`: writes models of other families as NLQ models and back, and NLQ models with other switches."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ..disk import add_to_manifest, atomic_dir, delete, files_below, read_manifest, resolve_user_path, write_text
from ..files import (
    CARD_FILE,
    CONVERSION_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    VOCABULARIES,
    files_in,
    is_nonempty,
    model_files,
)
from ..models import check_model_folder, read_record, source_named
from ..run.data import check_vocabulary
from ..run.run_folder import RunFolder
from ..run.trained_on import read_trained_on
from ..sharing.card import base_model_of, render
from ..size import size_of
from ..text import one_line
from .families import FAMILIES
from .gguf_files import GGUF, find_gguf, load_gguf_tokenizer, read_gguf
from .nanogpt import from_paper, read_checkpoint
from .renaming import Draft, LossyConversion, nlq_config
from .sources import find_checkpoint, load_gguf, load_model, read_source
from .streaming import empty_model, find_weights, write_weights
from .upcycling import changed, largest_difference


# Relative to the largest output, in float32: sums in another order, and nothing more
_TOLERANCE = 1e-4
# Larger weights, in bytes, are not loaded to compare the outputs: both models in float32 would take four times as much
COMPARED_BELOW = 2**30


@dataclass
class Conversion:
    """The record of a conversion, which `conversion.json` holds.

    Attributes:
        source: a Hub name, or the last part of a path.
        source_class, target_class: classes of the models.
        base_model: the model on the Hub that the weights come from, if it is known.
        switches: fields that were changed.
        lost: the differences between the new model and the old one, in words; empty if both compute the same.
        dequantised: the type of a quantised source's weights, as llama.cpp names it.
        difference: largest difference of the outputs on random tokens, in float32, relative to the largest output;
            `None` if there is no other model to compare with, as for a checkpoint, or if it is too large.
        not_compared: why the outputs were not compared, although there is another model.
        parameters: number of parameters of the new model.
        has_tokenizer: whether there is a tokenizer beside the weights.
        added: names of the parameters that are new since the last training: the source has none of this name, or has
            it from an earlier conversion after which nothing was trained.
        enlarged: names of the parameters that are larger than before, in the same span of time.
        before: the record of that earlier conversion.
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

    If every parameter is only renamed, split, joined or added, weights in safetensors files are converted shard by
    shard.

    Args:
        source: folder or Hub name of an NLQ model or of one of `FAMILIES`, a GGUF file of one of them, or a checkpoint
            of the paper's code or of nanoGPT.
        target: folder to write.
        to: `"nlq"`, or the family to write, one of `FAMILIES`.
        upcycle: give it `upcycled` queries, which compute the same at first.
        switches: other fields of `NLQConfig` to change without changing the outputs.
        tokenizer: folder or Hub name of a tokenizer to put beside the weights; by default the source's own.
        allow_lossy: convert even if something is lost.
        overwrite: replace a model in the target; other files there are left alone.

    Returns:
        The record of the conversion.

    Raises:
        ImportError: for a GGUF file without the package gguf.
        ValueError: for a source that is none of these or is damaged, a target that is taken, switches that would
            change the outputs, or a family that has no such model. Nothing has been written then.
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
        replaced = {*model_files(target), *files_in(target, ("pytorch_model*.bin*", *card))}
        # --overwrite allows that
        add_to_manifest(target, sorted(path.relative_to(target).as_posix() for path in replaced))
        return _convert(source, target, to, switches, tokenizer, allow_lossy)


def _convert(
    source: str, target: Path, to: str, switches: dict[str, Any], tokenizer: str | None, allow_lossy: bool
) -> Conversion:
    """Converts as `convert` does, into a target that is this process's own."""
    checkpoint, gguf = find_checkpoint(source), None
    try:
        if checkpoint is not None:
            with source_named(str(checkpoint)):
                draft = Draft.of(from_paper(read_checkpoint(checkpoint)))
        elif (path := find_gguf(source)) is not None:
            gguf = read_gguf(path)
            model, lost = load_gguf(gguf, allow_lossy)
            draft = Draft.of(model, lost=lost)
        else:
            draft = _open(source)
        old, weights = draft.model, draft.weights
        if old.config.model_type in FAMILIES:
            draft = draft.to_nlq(allow_lossy)
        if switches:
            if changed(draft.model.config, switches).to_dict() == draft.model.config.to_dict():
                raise ValueError(
                    f"the model has {', '.join(f'{name}={value!r}' for name, value in switches.items())} already"
                )
            draft = draft.with_switches(switches)
        if to != "nlq":
            draft = draft.from_nlq(to, allow_lossy)
    except LossyConversion:
        raise
    except (ValueError, OSError, RuntimeError, EOFError, SafetensorError, StrictDataclassError) as error:
        text = one_line(error)
        raise ValueError(text if source in text else f"{source!r}: {text}") from error
    new = draft.model
    new.config.dtype = old.config.dtype or draft.weights.dtype
    is_nlq = old.config.model_type == "nlq" and checkpoint is None
    is_untrained = is_nlq and read_record(source, RECIPE_FILE) is None
    earlier = read_record(source, CONVERSION_FILE) if is_untrained else None
    added, enlarged = ((earlier or {}).get(name, []) for name in ("added", "enlarged"))
    if switches:
        added, enlarged = _new_parameters(empty_model(type(new), nlq_config(old.config)), new, added, enlarged)
    if to != "nlq":
        added, enlarged = [], []  # models of other families have no such parameters
    own_tokenizer = _load_tokenizer(source, tokenizer, new, gguf)
    done = Conversion(
        source=source if not Path(source).exists() else Path(source).resolve().name,
        source_class="checkpoint" if checkpoint is not None else type(old).__name__,
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
    # config.json is last: it makes a model of the folder
    with atomic_dir(target, last="config.json") as folder:
        new.config.architectures = [type(new).__name__]
        new.config.save_pretrained(folder)
        if new.can_generate():
            new.generation_config.save_pretrained(folder)
        write_weights(folder, new, draft.weights, draft.origins)
        if own_tokenizer is not None:
            own_tokenizer.save_pretrained(folder)
        if weights.bytes >= COMPARED_BELOW:
            done.not_compared = f"the weights take {weights.bytes / 2**30:.1f} GiB"
        # Of a checkpoint, there is no other model
        elif checkpoint is None and (switches or type(new) is not type(old)):
            old = old if weights.are_in_memory else load_model(source, old.config, type(old))
            done.difference = _compare(source, old, load_model(str(folder), new.config, type(new)), draft.lost)
        _write_records(folder, target, new, done)
        written = files_below(folder)
    for file in {*read_manifest(target)} - {*written}:  # of an older model
        delete(target / file)
    return done


def _open(source: str) -> Draft:
    """Opens a saved model: without its weights, and with their files; or in memory, if these have to be loaded as a
    whole.
    """
    config, model_class = read_source(source)
    model = empty_model(model_class, config)
    weights = find_weights(source, model)
    if weights is None:
        return Draft.of(load_model(source, config, model_class))
    if model.can_generate() and (settings := read_record(source, GENERATION_CONFIG_NAME)) is not None:
        model.generation_config = GenerationConfig.from_dict(settings)
    return Draft.of(model, weights)


def _new_parameters(
    before: PreTrainedModel, after: PreTrainedModel, added: list[str], enlarged: list[str]
) -> tuple[list[str], list[str]]:
    """Finds the parameters that a change of switches added or enlarged, with those of earlier changes."""
    # A tied LM head counts as there before, so that its own copy of the embeddings is not new
    old, new = (
        {name: value.shape for name, value in each.named_parameters(remove_duplicate=False)}
        for each in (before, after)
    )
    all_added = [name for name in new if name in added or name not in old]
    return all_added, [name for name in new if name not in all_added and (name in enlarged or old[name] != new[name])]


def _load_tokenizer(
    source: str, name: str | None, model: PreTrainedModel, gguf: GGUF | None
) -> PreTrainedTokenizerBase | None:
    """Loads the given tokenizer, and sets its special tokens in the model, or loads that of the source, if there is
    one.
    """
    if name is None and gguf is not None:
        tokenizer = load_gguf_tokenizer(gguf)
    elif name is None and Path(source).exists() and not any((Path(source) / file).is_file() for file in VOCABULARIES):
        return None
    else:
        tokenizer = AutoTokenizer.from_pretrained(name or source, trust_remote_code=False)
    check_vocabulary(tokenizer, name or source, model.config)
    # A classifier of sequences reads its answer off the last token that is not padding: its own stays
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
    """Returns the largest difference of the outputs; raises `ValueError` if it is more than rounding, and nothing was
    lost.
    """
    difference = largest_difference(old, new)
    # A matrix that is computed, such as W - I, is rounded to the precision of the weights
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
