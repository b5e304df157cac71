"""`nlq explore`: measures the attention of one or two models on a text, and writes the page."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_nlq import NLQConfig, NLQForConditionalGeneration

from ..conversion.draft import to_nlq
from ..disk import read_bytes, read_text, resolve_user_path, write_text
from ..files import PAGE_FILE, PAGE_MARK
from ..loading import load_model
from ..run.documents import load_documents
from ..run.objectives import objective_of
from ..run.recipe import Recipe
from ..size import empty_model, parts_in, positions_of
from ..text import check_number, one_line
from .attention import measure_attention, tokens_to_ablate
from .measures import losses_of_tokens, repeated_tokens
from .page import ExploredModel, write_page


logger = logging.get_logger(__name__)

DEFAULT_TOKENS = 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_RUN = re.compile(r"(trial-\d+-)?rate-.+-seed-\d+")  # the folder of a run in a comparison
INDUCTION_PERIOD = 64  # random tokens, repeated once


@dataclass
class Exploration:
    """The HTML page and what it shows."""

    page: str
    models: list[ExploredModel]
    tokens: list[str]


@dataclass
class Subject:
    """An NLQ model to measure, the decoder of `pair` if that is set."""

    model: PreTrainedModel
    description: str
    pair: NLQForConditionalGeneration | None = None


def explore(
    model: str | Path,
    other: str | Path | None = None,
    *,
    text: str | None = None,
    file: str | Path | None = None,
    target: str | None = None,
    output: str | Path | None = PAGE_FILE,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> Exploration:
    """Shows on a page what the attention of one or two models does with a text.

    Args:
        model, other: folders or Hub names of models with one tokenizer, NLQ or of a family that converts to it.
        file: a UTF-8 text file instead of `text`.
        target: of an encoder and decoder, whose source is the text; by default what the first model generates.
        output: the HTML file to write, if any.
        max_tokens: tokens to show; by default 512, or as many as the models have positions for.

    Raises:
        ValueError: if a model cannot be loaded or converted, tokenizers differ, or the text is empty.
    """
    if (text is None) == (file is None):
        raise ValueError("give either --text TEXT or --file FILE")
    if file is not None:
        text = read_text(resolve_user_path(file))
    models, tokenizer = _load_subjects([str(name) for name in (model, other) if name is not None], trust_remote_code)
    shown = _tokens(tokenizer, text)
    if not shown:
        raise ValueError("the text is empty: it has no token")
    source = None
    pair = next(iter(models.values())).pair
    if pair is not None:
        source = [*shown, tokenizer.eos_token_id]
        if target is None:
            new_tokens = min(64, pair.config.decoder.max_position_embeddings - 1)
            source_ids = torch.tensor([source], device=DEVICE)
            shown = pair.generate(source_ids, max_new_tokens=new_tokens, do_sample=False)[0].tolist()
        else:
            shown = [pair.config.decoder_start_token_id, *_tokens(tokenizer, target), tokenizer.eos_token_id]
    elif target is not None:
        raise ValueError("--target: only an encoder with a decoder has a target")
    exploration = explore_tokens(models, tokenizer, shown, max_tokens, source=source)
    if output is not None:
        # The user did not type the default name
        path = Path(output) if output == PAGE_FILE else resolve_user_path(output)
        if path.is_file() and PAGE_MARK not in read_bytes(path):
            raise ValueError(f"{path} exists and is not a page of `nlq explore`; move it, or choose another --output")
        write_text(path, exploration.page)
    return exploration


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Training adds no special tokens around a text either, and reads none from it
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def _load_subjects(names: list[str], trust_remote_code: bool) -> tuple[dict[str, Subject], PreTrainedTokenizerBase]:
    models, tokenizers = zip(*(load_model(name, trust_remote_code) for name in names))
    if tokenizers[0].get_vocab() != tokenizers[-1].get_vocab():
        raise ValueError(f"models {names[0]!r} and {names[1]!r} have different tokenizers, and cannot be compared")
    labels = short_names(names)
    subjects = list(map(prepare, models))
    for name, label, subject in zip(names, labels, subjects):
        if (folder := Path(name).resolve().name) != label:
            subject.description = f"{folder}: {subject.description}"
    if (subjects[0].pair is None) != (subjects[-1].pair is None):
        raise ValueError(f"{names[0]!r} and {names[1]!r}: an encoder and decoder is shown beside another only")
    return dict(zip(labels, subjects)), tokenizers[0]


def short_names(names: Sequence[str]) -> list[str]:
    """Returns what differs between folders or Hub names: their last parts, or those of the folders that hold them.

    A run of a comparison, `MODEL/rate-0.004-seed-0`, has its model's name, or beside another run of it its own.
    """
    paths = [Path(name).resolve().parts for name in names]
    if len(set(paths)) < len(paths):
        return list(names)
    if len({path[:-1] for path in paths}) == len(paths):
        paths = [path[:-1] if _RUN.fullmatch(path[-1]) else path for path in paths]
    while len({path[-1] for path in paths}) < len(paths):
        paths = [path[:-1] for path in paths]
    return [path[-1] for path in paths]


def explore_tokens(
    models: Mapping[str, Subject],
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[int],
    max_tokens: int | None = None,
    notes: Sequence[str] = (),
    source: Sequence[int] | None = None,
) -> Exploration:
    """Makes the page of one or two models, by their names on it, for the tokens `shown` of a text.

    Encoders of pairs read the tokens `source`. Raises `ValueError` if `max_tokens` exceeds the positions, or a loss is
    not finite.
    """
    configs = [subject.model.config for subject in models.values()]
    positions = min(filter(None, map(positions_of, configs)), default=math.inf)
    check_number("max_tokens", max_tokens, 2, positions)
    input_ids = torch.tensor([list(shown[: max_tokens or min(DEFAULT_TOKENS, positions)])])
    length = input_ids.shape[1]
    notes = [*notes]
    if length < len(shown):
        notes.append(f"This page shows the first {length:,} of {len(shown):,} tokens.")
    period = int(min(INDUCTION_PERIOD, positions / 2))
    if period < INDUCTION_PERIOD:
        notes.append(f"Previous-token and induction scores are measured on {period} random tokens, repeated once.")
    vocab_size = min(len(tokenizer), *(config.vocab_size for config in configs))
    random_ids = repeated_tokens(vocab_size, tokenizer.all_special_ids, period)
    explored = []
    for name, subject in models.items():
        config = subject.model.config
        if not config.is_causal and config.mask_token_id is None:
            raise ValueError(f"model {name!r}: mask_token_id=None must be the id of the token for masked ones")
        if source is not None:
            show_source(subject, source)
        losses = losses_of_tokens(subject.model, input_ids)[0]
        if not losses.isfinite().all():
            raise ValueError(f"model {name!r}: its losses are infinite or not a number: its training diverged")
        count = tokens_to_ablate(subject.model, length)
        layers = measure_attention(subject.model, input_ids, random_ids, count)
        if count < 2:
            reason = "the text has a single token" if length < 2 else "it would take too long for a model of this size"
            for layer in layers:
                layer.missing["ablation"] = reason
        elif count < length:
            notes.append(f"Ablation of {name} uses the first {count} tokens only, to save time.")
        if not config.is_causal:
            notes.append(f"{name} is an encoder: the loss of a token is measured with this token alone masked.")
        explored.append(ExploredModel(name, subject.description, losses, layers, config.is_causal))
    tokens = token_texts(tokenizer, input_ids[0].tolist())
    title = f"Attention of {' and '.join(models)}"
    page = write_page(title, notes, tokens, explored, token_texts(tokenizer, source or ()))
    return Exploration(page, explored, tokens)


@torch.no_grad()
def show_source(subject: Subject, source: Sequence[int]) -> None:
    """Makes later calls of a decoder attend to the source."""
    states = subject.pair.get_encoder()(torch.tensor([list(source)], device=DEVICE)).last_hidden_state

    def add_states(_, inputs: tuple, keywords: dict) -> tuple[tuple, dict]:
        return inputs, {**keywords, "encoder_hidden_states": states.expand(len(keywords["input_ids"]), -1, -1)}

    subject.model.register_forward_pre_hook(add_states, with_kwargs=True)


def prepare(model: PreTrainedModel) -> Subject:
    """Converts a model to float32, in place, and to NLQ; raises `ValueError` if it cannot."""
    model = model.float().eval()
    if isinstance(model, NLQForConditionalGeneration):
        model.to(DEVICE)
        decoder = empty_model(model.config.decoder).eval()
        decoder.model = model.model.decoder
        decoder.lm_head = model.lm_head
        return Subject(decoder, _describe(model), model)
    if isinstance(model.config, NLQConfig):
        return Subject(model.to(DEVICE), _describe(model))
    return Subject(to_nlq(model).to(DEVICE), f"{_describe(model)}; shown by its exact conversion to an NLQ model")


def _describe(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    parts = [f"{model.config.model_type}, {model.num_parameters():,} parameters"]
    if config is not model.config:
        parts.append("decoder")
    parts.append(f"{config.num_hidden_layers} layers of {config.num_attention_heads} heads")
    if isinstance(config, NLQConfig):
        layers = config.per_layer_config
        parts.append("/".join(dict.fromkeys(layer.attention_activation for layer in layers)))
        parts.append(f"{'/'.join(dict.fromkeys(layer.query_projection for layer in layers))} queries")
        parts += [part.name for part in parts_in(config)]
    return ", ".join(parts)


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """Returns the text that each token adds. If several make one character, the first gets it."""
    texts = []
    before = ""  # the text of the tokens so far
    parts = 0  # tokens since then, which may make one character
    for count, token in enumerate(tokens, 1):
        whole = tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False)
        added = whole[len(before) :] if whole.startswith(before) else ""
        if added and "\ufffd" not in added:
            texts[len(texts) - parts :] = [added[0], *[""] * (parts - 1), added[1:]] if parts else [added]
        else:
            texts.append(tokenizer.convert_ids_to_tokens(token))
            if added.endswith("\ufffd") and parts < 3:  # a character has up to four bytes
                parts += 1
                continue
        before = whole
        parts = 0
    return texts


def explore_runs(
    recipe: Recipe, runs: Mapping[str, Path], split: str, target: Path, notes: Sequence[str] = ()
) -> bool:
    """Writes the page of one or two runs into `target`, and returns whether it did; a failure is a warning.

    It shows the first block or pair of a split; with `packing: documents`, the longest document in the first block.
    `runs` are folders of models, by the names on the page.
    """
    try:
        loaded = {name: load_model(str(folder)) for name, folder in runs.items()}
        model, tokenizer = next(iter(loaded.values()))
        subjects = {name: prepare(each) for name, (each, _) in loaded.items()}
        objective = objective_of(recipe)
        row = next(iter(objective.make_rows(load_documents(recipe)[split], tokenizer).dataset))
        shown, source = objective.tokens_to_explore(row, tokenizer, model.config)
        write_text(target / PAGE_FILE, explore_tokens(subjects, tokenizer, shown, notes=notes, source=source).page)
        return True
    except Exception as error:  # the runs are finished, so no error of a library may end the command
        logger.warning(f"no page of attention was made: {type(error).__name__}: {one_line(error)}")
        return False
