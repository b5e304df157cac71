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

from ..disk import (
    add_to_manifest,
    atomic_dir,
    delete,
    files_below,
    not_in_manifest,
    read_manifest,
    resolve_user_path,
    write_text,
)
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
from ..loading import check_model_folder, load_tokenizer, read_record, source_named
from ..run.data import check_vocabulary
from ..run.provenance import read_trained_on
from ..run.run_folder import RunFolder
from ..sharing.card import base_model_of, render
from ..size import empty_model, size_of
from ..text import one_line
from .draft import Draft, load_model, read_source
from .families import FAMILIES
from .gguf_files import GGUF, load_gguf, load_gguf_tokenizer, read_gguf
from .nanogpt import from_paper, read_checkpoint
from .streaming import find_weights, write_weights
from .upcycling import largest_difference


# Largest relative difference of the outputs that another order of summation explains in float32
_TOLERANCE = 1e-4
# From this size of the weights, in bytes, the outputs are not compared: both models take four times as much
COMPARED_BELOW = 2**30
# A model that --overwrite replaces, as patterns. What `auto_map` names besides may be the user's
_MODEL = (*WEIGHTS, "pytorch_model*.bin*", *SETTINGS, *TOKENIZER, CONVERSION_FILE)
_MODEL += tuple(path.name for path in Path(modeling_nlq.__file__).parent.glob("*_nlq.py"))


@dataclass
class Conversion:
    """The content of `conversion.json`.

    Attributes:
        source: a Hub name, or the last part of a path.
        base_model: the model on the Hub that the weights come from, if it is known.
        lost: differences between both models in words.
        dequantised: the type of a quantised source's weights, as llama.cpp names it.
        not_compared: why `difference`, of the outputs, was not measured.
        added, enlarged: names of the parameters that are new, or have grown, since the source was last trained.
        before: the record of an earlier conversion, after which the model was not trained.
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

    def describe(self) -> str:
        """Returns what became of the model, and a line for each loss."""
        facts = [f"{self.target_class} from {self.source_class}", f"{self.parameters:,} parameters"]
        if self.difference is not None:
            within = f"within {self.difference:.1e} of" if self.difference else "equal to"
            facts.append(f"outputs on random tokens {within} the source's")
        if self.not_compared is not None:
            facts.append(f"outputs were not compared: {self.not_compared}")
        facts.append("tokenizer beside it" if self.has_tokenizer else "no tokenizer: give one by --tokenizer")
        lines = [", ".join(facts)]
        if self.dequantised is not None:
            lines.append(f"weights of type {self.dequantised} became float32: the model is no longer quantised")
        lines += [f"lost: {text}" for text in self.lost]
        return "\n".join(lines)


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
    """Converts a saved model to another family or to other switches, and writes it with its tokenizer.

    Args:
        source: folder or Hub name of an NLQ model or of one of `FAMILIES`, a GGUF file, or a checkpoint of the paper's
            code or of nanoGPT.
        to: `"nlq"`, or one of `FAMILIES`.
        upcycle: make the queries `upcycled`, which compute the same at first.
        switches: other fields of `NLQConfig` to change without changing the outputs.
        tokenizer: folder or Hub name; by default the source's.
        overwrite: replace a model in the target; other files stay.

    Raises:
        ImportError: for a GGUF file without the package gguf.
        ValueError: if the source cannot be converted, or the target is not empty. Nothing is written then.
        LossyConversion: if something would be lost, unless `allow_lossy` is set.
    """
    source = str(source)
    target = resolve_user_path(target)
    switches = dict(switches or {})
    if upcycle:
        switches["query_projection"] = "upcycled"
    if to not in (known := ("nlq", *sorted(FAMILIES))):
        raise ValueError(f"to={to!r} must be one of {', '.join(known)}")
    if to != "nlq" and switches:
        raise ValueError(f"--to {to} takes no switches of NLQ models: {', '.join(switches)}")
    _check_target(source, target, overwrite)
    check_model_folder(source)
    with RunFolder(target, plan=None).held():
        try:
            opened, gguf = _open(source)
            nlq = opened.to_nlq() if opened.model.config.model_type in FAMILIES else opened
            draft = nlq.with_switches(switches) if switches else nlq
            if to != "nlq":
                draft = nlq.from_nlq(to)
        except (ValueError, OSError, RuntimeError, EOFError, SafetensorError, StrictDataclassError) as error:
            text = one_line(error)
            raise ValueError(text if source in text else f"{source!r}: {text}") from error
        draft.check_exact(allow_lossy)
        draft.model.config.dtype = opened.model.config.dtype or draft.weights.dtype
        loaded_tokenizer = _load_tokenizer(source, tokenizer, draft.model, gguf)
        record = _make_record(source, opened.model, nlq.model, draft, switches)
        record.dequantised = gguf and gguf.quantised
        record.has_tokenizer = loaded_tokenizer is not None
        _write(target, source, opened, draft, loaded_tokenizer, record)
    return record


def _make_record(
    source: str, old: PreTrainedModel, nlq: PreTrainedModel, draft: Draft, switches: dict[str, Any]
) -> Conversion:
    is_checkpoint = Path(source).is_file() and not source.endswith(".gguf")
    is_nlq = old.config.model_type == "nlq" and not is_checkpoint
    is_untrained = is_nlq and read_record(source, RECIPE_FILE) is None
    record = Conversion(
        source=Path(source).resolve().name if Path(source).exists() else source,
        source_class="checkpoint" if is_checkpoint else type(old).__name__,
        target_class=type(draft.model).__name__,
        base_model=base_model_of(source),
        switches=switches,
        lost=draft.lost,
        parameters=draft.model.num_parameters(),
        before=read_record(source, CONVERSION_FILE) if is_untrained else None,
        trained_on=read_trained_on(source) if is_nlq or Path(source).is_dir() else [],
    )
    if draft.model.config.model_type == "nlq":
        earlier = {"added": [], "enlarged": [], **(record.before or {})}
        before = _shapes(nlq)
        for name, shape in _shapes(draft.model).items():
            if name in earlier["added"] or name not in before:
                record.added.append(name)
            elif name in earlier["enlarged"] or shape != before[name]:
                record.enlarged.append(name)
    return record


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    # A tied LM head counts as a parameter, so that untying does not add one
    return {name: value.shape for name, value in model.named_parameters(remove_duplicate=False)}


def _write(
    target: Path,
    source: str,
    opened: Draft,
    draft: Draft,
    tokenizer: PreTrainedTokenizerBase | None,
    record: Conversion,
) -> None:
    """Writes the new model with its record and card, and deletes what remains of an older one.

    Files that are missing in a manifest may be the user's, and are not deleted.
    """
    patterns = [*_MODEL, CARD_FILE] if (target / CONVERSION_FILE).is_file() else _MODEL
    older = {path.relative_to(target).as_posix() for path in files_in(target, patterns)}
    old, new = opened.model, draft.model
    # config.json is last: a folder without it is not a model
    with atomic_dir(target, last="config.json") as folder:
        new.config.architectures = [type(new).__name__]
        new.config.save_pretrained(folder)
        if new.can_generate():
            new.generation_config.save_pretrained(folder)
        write_weights(folder, new, draft.weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if opened.weights.nbytes >= COMPARED_BELOW:
            record.not_compared = f"the weights take {opened.weights.nbytes / 2**30:.1f} GiB"
        elif record.source_class != "checkpoint" and (record.switches or type(new) is not type(old)):
            old = old if opened.weights.are_in_memory else load_model(source, old.config, type(old))
            loaded = load_model(str(folder), new.config, type(new))
            record.difference = largest_difference(old, loaded)
            # Computed matrices such as W - I are rounded
            if not draft.lost and not record.difference <= max(_TOLERANCE, torch.finfo(loaded.dtype).eps):
                raise ValueError(f"{source}: the outputs would differ by {record.difference:.1e} of the largest")
        content = asdict(record)
        write_text(folder / CONVERSION_FILE, json.dumps(content, indent=2) + "\n")
        name = target.resolve().name
        card = render(name, new.config, size_of(new), conversion=content, has_tokenizer=record.has_tokenizer)
        card.save(folder / CARD_FILE)
        written = files_below(folder)
        known = read_manifest(target)
        deletable = older if known is None else older.intersection(known)
        add_to_manifest(target, sorted(not_in_manifest(target, deletable | older.intersection(written))))
    for file in deletable.difference(written):
        delete(target / file)


def _open(source: str) -> tuple[Draft, GGUF | None]:
    """Returns the model of a source, in memory if it cannot be converted shard by shard, and a GGUF file's header."""
    path = Path(source)
    if path.is_file() and path.suffix == ".gguf":
        gguf = read_gguf(path)
        return Draft.of(*load_gguf(gguf)), gguf
    if path.is_file():
        with source_named(source):
            return Draft.of(from_paper(read_checkpoint(path))), None
    config, model_class = read_source(source)
    model = empty_model(config, model_class=model_class)
    weights = find_weights(source, model)
    if weights is None:
        return Draft.of(load_model(source, config, model_class)), None
    if model.can_generate() and (settings := read_record(source, GENERATION_CONFIG_NAME)) is not None:
        model.generation_config = GenerationConfig.from_dict(settings)
    return Draft(model, weights), None


def _load_tokenizer(
    source: str, name: str | None, model: PreTrainedModel, gguf: GGUF | None
) -> PreTrainedTokenizerBase | None:
    """Loads the source's tokenizer, if any, or the named one, whose special tokens the model gets."""
    if name is None and gguf is not None:
        tokenizer = load_gguf_tokenizer(gguf)
    elif name is None and Path(source).exists() and not any((Path(source) / file).is_file() for file in VOCABULARIES):
        return None
    else:
        tokenizer = load_tokenizer(name or source)
    check_vocabulary(tokenizer, name or source, model.config)
    if name is not None:
        for settings in filter(None, (model.config, getattr(model, "generation_config", None))):
            settings.bos_token_id = tokenizer.bos_token_id
            settings.eos_token_id = tokenizer.eos_token_id
            # A sequence classifier reads its answer off the last token before its padding tokens
            if not type(model).__name__.endswith("ForSequenceClassification"):
                settings.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _check_target(source: str, target: Path, overwrite: bool) -> None:
    if Path(source).exists() and target.exists() and os.path.samefile(source, target):
        problem = "is the source itself;"
    elif is_nonempty(target) and not overwrite:
        problem = "exists and is not empty; replace its model by --overwrite, or"
    elif is_nonempty(target) and not (target / "config.json").is_file():
        problem = "does not hold a model that --overwrite could replace;"
    elif (target / METRICS_FILE).exists() or any(target.glob("checkpoint-*")):
        problem = "holds a training run, which --overwrite does not replace;"
    else:
        return
    raise ValueError(f"{target} {problem} choose another target")
