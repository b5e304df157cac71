"""`nlq convert`: writes models of other families as NLQ models and back, and NLQ models with other switches."""

import json
import os
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME, logging

from modeling_nlq import NLQConfig

from ..card import base_model_of, render
from ..files import (
    CARD_FILE,
    CONVERSION_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    VOCABULARIES,
    atomic_dir,
    files_in,
    is_nonempty,
    model_files,
)
from ..models import read_conversion
from ..parameters import shapes_of, size_of
from ..run.data import check_vocabulary
from ..run.run_folder import RunFolder
from ..run.trained_on import read_trained_on
from ..text import first_line, one_line
from .families import FAMILIES
from .gguf_files import GGUF, find_gguf, load_gguf_tokenizer, read_gguf
from .renaming import (
    LossyConversion,
    ParameterSource,
    chain,
    class_in_family,
    empty_model,
    from_nlq,
    from_nlq_origins,
    lost_by,
    nearest_in_family,
    nlq_class_of,
    parameter_shapes,
    to_nlq,
    to_nlq_origins,
)
from .rules import BIASED_PARTS
from .sources import find_checkpoint, load_checkpoint, load_gguf, load_model, read_source
from .streaming import Weights, add_new_parameters, find_weights, write_weights
from .upcycling import changed, largest_difference, only_adds
from .upcycling import upcycle as upcycle_model


logger = logging.get_logger(__name__)

# Relative to the largest output, in float32: sums in another order, and nothing more
_TOLERANCE = 1e-4
# Larger weights, in bytes, are not loaded to compare the outputs: both models in float32 would take four times as much
COMPARED_BELOW = 2**30


@dataclass(frozen=True)
class _Plan:
    """A conversion shard by shard.

    Attributes:
        weights: those of the source.
        new: the new model, without weights.
        origins: what each of its parameters is made from.
        lost: what is lost, in words.
    """

    weights: Weights
    new: PreTrainedModel
    origins: dict[str, ParameterSource]
    lost: list[str]


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
        difference: largest difference of the outputs on random tokens, in float32, relative to the largest output; `None` if
            there is no other model to compare with, as for a checkpoint, or if it is too large.
        not_compared: why the outputs were not compared, although there is another model.
        parameters: number of parameters of the new model.
        has_tokenizer: whether there is a tokenizer beside the weights.
        added: names of the parameters that are new since the last training: the source has none of this name, or has it from an
            earlier conversion after which nothing was trained.
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

    If every parameter is only renamed, split, joined or added, weights in safetensors files are converted shard by shard.

    Args:
        source: folder or Hub name of an NLQ model or of one of `FAMILIES`, a GGUF file of one of them, or a checkpoint of the
            paper's code or of nanoGPT.
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
        ValueError: for a source that is none of these or is damaged, a target that is taken, switches that would change the
            outputs, or a family that has no such model. Nothing has been written then.
        LossyConversion: if something would be lost and `allow_lossy` is not set.
    """
    source, target = str(source), Path(target)
    switches = dict(switches or {})
    if upcycle and "query_projection" in switches:
        raise ValueError(f"--upcycle and --set query_projection={switches['query_projection']!r} contradict each other")
    if upcycle:
        switches["query_projection"] = "upcycled"
    if to not in (known := ("nlq", *sorted(FAMILIES))):
        raise ValueError(f"to={to!r} must be one of {', '.join(known)}")
    if to != "nlq" and switches:
        raise ValueError(f"--to {to} takes no switches ({', '.join(switches)}): they are those of NLQ models")
    _check_target(source, target, overwrite)
    with RunFolder(target, plan=None).held():
        _check_target(source, target, overwrite)  # another process may have written there since
        return _convert(source, target, to, switches, tokenizer, allow_lossy)


def _convert(
    source: str, target: Path, to: str, switches: dict[str, Any], tokenizer: str | None, allow_lossy: bool
) -> Conversion:
    """Converts as `convert` does, into a target that is this process's own."""
    checkpoint, gguf, not_read, plan = find_checkpoint(source), None, [], None
    if checkpoint is not None:
        old = load_checkpoint(checkpoint)
    elif (path := find_gguf(source)) is not None:
        gguf = read_gguf(path)
        old, not_read = load_gguf(gguf, allow_lossy)
    else:
        config, model_class = read_source(source)
        old, plan = _open(source, config, model_class, switches, to, allow_lossy)
    new, lost = (plan.new, plan.lost) if plan is not None else _convert_in_memory(old, switches, to, allow_lossy)
    is_nlq = old.config.model_type == "nlq" and checkpoint is None
    earlier = read_conversion(source, is_untrained=True) if is_nlq else None
    added, enlarged = ((earlier or {}).get(name, []) for name in ("added", "enlarged"))
    if switches:
        added, enlarged = _new_parameters(empty_model(type(new), _nlq_config(old.config)), new, added, enlarged)
    if to != "nlq":
        added, enlarged = [], []  # models of other families have no such parameters
    own_tokenizer = _load_tokenizer(source, tokenizer, new, gguf)
    done = Conversion(
        source=source if not Path(source).exists() else Path(source).resolve().name,
        source_class="checkpoint" if checkpoint is not None else type(old).__name__,
        target_class=type(new).__name__,
        base_model=base_model_of(source),
        switches=switches,
        lost=[*not_read, *lost],
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
        if plan is None:
            new.save_pretrained(folder)
        else:
            _write_shards(folder, plan)
        if own_tokenizer is not None:
            own_tokenizer.save_pretrained(folder)
        size = plan.weights.bytes if plan is not None else sum(value.nbytes for value in old.state_dict().values())
        if size >= COMPARED_BELOW:
            done.not_compared = f"the weights take {size / 2**30:.1f} GiB"
        elif new is not old and (switches or type(new) is not type(old)):
            if plan is not None:
                old, new = load_model(source, config, model_class), load_model(str(folder), new.config, type(new))
            done.difference = _compare(source, old, new, lost)
        if checkpoint is not None:
            done.difference = None  # there was no other model
        _write_records(folder, target, new, done)
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


def _nlq_config(config: PreTrainedConfig) -> NLQConfig:
    return FAMILIES[config.model_type].read(config) if config.model_type in FAMILIES else config


def _open(
    source: str,
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    switches: dict[str, Any],
    to: str,
    allow_lossy: bool,
) -> tuple[PreTrainedModel, _Plan | None]:
    """Plans a conversion shard by shard, and returns with it the old model without weights; or the whole model, and no plan."""
    try:
        empty = empty_model(model_class, config)
        weights = find_weights(source)
        if weights is not None and weights.belong_to(empty):
            plan = _plan(weights, empty, switches, to, allow_lossy)
            if plan is not None:
                _take_generation_config(plan.new, source, empty)
                return empty, plan
    except LossyConversion:
        raise
    except (ValueError, OSError, StrictDataclassError) as error:
        raise ValueError(f"{source!r}: {one_line(error)}") from error
    return load_model(source, config, model_class), None


def _plan(weights: Weights, old: PreTrainedModel, switches: dict[str, Any], to: str, allow_lossy: bool) -> _Plan | None:
    """Plans a conversion in which no number changes; `None` if there is none."""
    new, lost, origins = old, [], {name: ParameterSource((name,)) for name in parameter_shapes(old)}
    if old.config.model_type in FAMILIES:
        lost = lost_by(type(old), old.config)
        if lost and not allow_lossy:
            raise LossyConversion(lost)
        new = empty_model(nlq_class_of(type(old)), _nlq_config(old.config))
        origins = to_nlq_origins(old, new)
    if switches:
        config = changed(new.config, switches)
        _check_changed(new.config, config, switches)
        if not only_adds(new.config, config):
            return None
        new = empty_model(type(new), config)
        origins = add_new_parameters(origins, new, weights.dtype)
    if to != "nlq":
        config, plain = nearest_in_family(to, new.config)
        if not only_adds(new.config, plain):
            return None
        theirs = empty_model(class_in_family(to, type(new)), config)
        new, origins = theirs, chain(origins, from_nlq_origins(theirs, new))
    new.config.dtype = old.config.dtype or weights.dtype
    return _Plan(weights, new, origins, lost)


def _convert_in_memory(
    model: PreTrainedModel, switches: dict[str, Any], to: str, allow_lossy: bool
) -> tuple[PreTrainedModel, list[str]]:
    """Converts a model, and returns with it the list of losses."""
    lost: list[str] = []
    if model.config.model_type in FAMILIES:
        model, lost = _lossily(to_nlq, model, allow_lossy)
    if switches:
        before, model = model, upcycle_model(model, switches)
        _check_changed(before.config, model.config, switches)
    if to != "nlq":
        model, more = _lossily(partial(from_nlq, family=to), model, allow_lossy)
        lost = [*lost, *more]
    return model, lost


def _lossily(conversion, model: PreTrainedModel, allow_lossy: bool) -> tuple[PreTrainedModel, list[str]]:
    """Converts a model, and returns with it the list of losses."""
    try:
        return conversion(model), []
    except LossyConversion as error:
        if not allow_lossy:
            raise
        return conversion(model, allow_lossy=True), error.lost


def _load_tokenizer(source: str, name: str | None, model: PreTrainedModel, gguf: GGUF | None) -> PreTrainedTokenizerBase | None:
    """Loads the given tokenizer, and sets its special tokens in the model, or loads that of the source, if there is one."""
    if name is None and gguf is not None:
        tokenizer = load_gguf_tokenizer(gguf)
        try:
            check_vocabulary(tokenizer, source, model.config)
        except ValueError as error:  # where the vocabulary lacks it, Transformers adds GPT-2's token of unknown text
            raise ValueError(f"{error}; give one by --tokenizer") from None
        return tokenizer
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
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
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
    if is_nonempty(target):
        if not overwrite:
            raise ValueError(
                f"{target} exists and is not empty; choose another target, or replace the model in it by --overwrite"
            )
        if not (target / "config.json").is_file():
            raise ValueError(f"{target} holds no model that --overwrite could replace; choose another target")
        if any((target / name).exists() for name in (METRICS_FILE, RECIPE_FILE)) or any(target.glob("checkpoint-*")):
            raise ValueError(f"{target} holds a training run, which --overwrite does not replace; choose another target")
        _replaced_files(target)  # none of them may be a link to elsewhere


def _replaced_files(target: Path) -> set[Path]:
    """The files of the model in a target, with its card; raises `ValueError` for a link that leads out of it."""
    return {*model_files(target), *files_in(target, ("pytorch_model*.bin*", CARD_FILE))}


def _check_changed(before: PreTrainedConfig, after: PreTrainedConfig, switches: dict[str, Any]) -> None:
    if before.to_dict() == after.to_dict():
        raise ValueError(f"the model has {', '.join(f'{name}={value!r}' for name, value in switches.items())} already")
    if list(switches) == ["use_bias"] and shapes_of(before) == shapes_of(after):
        own = ", ".join(f"{part}_bias={getattr(before, f'{part}_bias')}" for part in BIASED_PARTS)
        raise ValueError(f"use_bias={switches['use_bias']} changes no part of this model, because {own}; set these fields")


def _compare(source: str, old: PreTrainedModel, new: PreTrainedModel, lost: list[str]) -> float:
    """Returns the largest difference of the outputs; raises `ValueError` if it is more than rounding, and nothing was lost."""
    difference = largest_difference(old, new)
    # A matrix that is computed, such as W - I, is rounded to the precision of the weights
    if not lost and not difference <= max(_TOLERANCE, torch.finfo(new.dtype).eps):
        raise ValueError(
            f"{source}: the outputs would differ by {difference:.1e} of the largest: these weights cannot be moved"
        )
    return difference


def _take_generation_config(new: PreTrainedModel, source: str, old: PreTrainedModel) -> None:
    """Sets the generation settings of the source, as Transformers would load them."""
    if not old.can_generate() or not new.can_generate():
        return
    if Path(source).exists() and not (file := Path(source) / GENERATION_CONFIG_NAME).is_file():
        new.generation_config = old.generation_config  # those that follow from the configuration
        return
    try:
        new.generation_config = GenerationConfig.from_pretrained(source)
    except OSError as error:
        if Path(source).exists():
            raise ValueError(f"{file.name} cannot be read: {first_line(error)}") from error
        new.generation_config = old.generation_config
    except TypeError as error:
        raise ValueError(f"{GENERATION_CONFIG_NAME} must hold fields and values") from error


def _write_shards(folder: Path, plan: _Plan) -> None:
    config = plan.new.config
    config.architectures = [type(plan.new).__name__]
    config.save_pretrained(folder)
    if plan.new.can_generate():
        plan.new.generation_config.save_pretrained(folder)
    write_weights(folder, plan.new, plan.weights, plan.origins)


def _write_records(folder: Path, target: Path, model: PreTrainedModel, done: Conversion) -> None:
    """Writes the record and the card, and removes the files of an older model from the target."""
    record = asdict(done)
    (folder / CONVERSION_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    card = render(target.resolve().name, model.config, size_of(model), conversion=record, has_tokenizer=done.has_tokenizer)
    card.save(folder / CARD_FILE)
    for path in _replaced_files(target) - {target / path.relative_to(folder) for path in folder.rglob("*")}:
        path.unlink(missing_ok=True)
