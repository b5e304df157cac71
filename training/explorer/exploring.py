"""`nlq explore`: reads models and text, and writes the page."""

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_nlq.configuration_nlq import NLQConfig

from ..conversion.renaming import to_nlq
from ..files import PAGE_FILE, data_format, write_text
from ..models import limits_length, load_model
from ..parameters import parts_in
from ..run.documents import load_documents, text_documents
from ..run.recipe import Recipe
from ..text import check_number, first_line
from .attention import Layer, measure_attention, tokens_to_ablate
from .measures import LossDifference, loss_difference, losses_of_documents, losses_of_tokens, repeated_tokens
from .page import ExploredModel, describe_difference, write_page


DEFAULT_TOKENS = 512
# Random tokens of the text for induction scores, which has them twice
INDUCTION_PERIOD = 64


@dataclass
class Exploration:
    """What `explore` found.

    Attributes:
        page: the HTML.
        models: the models, with their layers.
        tokens: the text of each token.
        difference: of the losses on all documents, if there are two models.
    """

    page: str
    models: list[ExploredModel]
    tokens: list[str]
    difference: LossDifference | None


def explore(
    model: str | Path,
    other: str | Path | None = None,
    *,
    text: str | None = None,
    file: str | Path | None = None,
    output: str | Path | None = PAGE_FILE,
    max_tokens: int | None = None,
    trust_remote_code: bool = False,
) -> Exploration:
    """Shows what the attention of one model does with a text, or of two models side by side, as a page.

    Args:
        model, other: folders or Hub names of saved causal language models; the two must have one tokenizer.
        text: the text.
        file: a text instead, whose documents are its paragraphs; or a `.jsonl` or `.parquet` file, whose documents are its
            rows, of which the page shows the first. The losses of two models are compared on all documents.
        output: the HTML file to write; `None` writes none.
        max_tokens: the page shows the first tokens of the text, and documents are read in pieces of this length; by default
            512, or as many as the models have positions for.
        trust_remote_code: as in `load_model`.

    Raises:
        ValueError: for a model that cannot be loaded or has no attention to show, different tokenizers, a text without
            tokens, and more tokens than positions. Nothing is written then.
    """
    if (text is None) == (file is None):
        raise ValueError("give either --text TEXT or --file FILE")
    if max_tokens is not None and not isinstance(max_tokens, int):
        raise ValueError(f"max_tokens={max_tokens!r} must be a whole number")
    check_number("max_tokens", max_tokens, 2)
    if output is not None:
        _check_output(output := Path(output).resolve())
    source = Text(text, [text]) if text is not None else read_text(Path(file))
    models, tokenizer = load_subjects([str(name) for name in (model, other) if name is not None], trust_remote_code)
    done = explore_text(models, tokenizer, source, max_tokens)
    if output is not None:
        write_text(output, done.page)
    return done


@dataclass
class Text:
    """A text to show, and the documents to compare two models on."""

    shown: str
    documents: list[str]


@dataclass
class Subject:
    """A model that is ready to be looked at, in float32.

    Attributes:
        model: an NLQ model where there is one that computes the same.
        description: what it is.
    """

    model: PreTrainedModel
    description: str


def load_subjects(names: Sequence[str], trust_remote_code: bool = False) -> tuple[dict[str, Subject], PreTrainedTokenizerBase]:
    """Loads models by the names that a page gives them, and their tokenizer; raises as `explore` does."""
    models, tokenizers = zip(*(load_model(name, trust_remote_code) for name in names))
    if len(names) > 1 and _identity(tokenizers[0]) != _identity(tokenizers[1]):
        raise ValueError(f"models {names[0]!r} and {names[1]!r} have different tokenizers: their tokens cannot be compared")
    return dict(zip(_labels(names), map(prepare, models))), tokenizers[0]


def _identity(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What two tokenizers must share to read every text alike."""
    if not tokenizer.is_fast:
        return tokenizer.get_vocab()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return [content[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")]


def explore_text(
    models: Mapping[str, Subject], tokenizer: PreTrainedTokenizerBase, text: Text, max_tokens: int | None = None
) -> Exploration:
    """Makes the page of models from a text; raises as `explore` does."""
    try:
        text.shown.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode: {first_line(error)}") from error

    def encode(text: str) -> list[int]:
        # As in training: some tokenizers would put special tokens around a text, or read one that is written in it
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    shown = encode(text.shown)
    if not shown:
        raise ValueError("the text is empty: it has no token")
    return explore_tokens(models, tokenizer, shown, map(encode, text.documents) if len(models) > 1 else (), max_tokens)


def explore_tokens(
    models: Mapping[str, Subject],
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[int],
    documents: Iterable[Sequence[int]] = (),
    max_tokens: int | None = None,
    unit: str = "document",
    notes: Sequence[str] = (),
) -> Exploration:
    """Makes the page of one or two models.

    Args:
        models: by the names that the page gives them.
        tokenizer: the tokenizer of both.
        shown: the tokens of the shown text.
        documents: the tokens of the documents on which two models are compared.
        max_tokens: as in `explore`.
        unit: what a document is called.
        notes: what the page should say besides.
    """
    max_tokens, period = _check_length(models, max_tokens)
    input_ids = torch.tensor([list(shown[:max_tokens])])
    length = input_ids.shape[1]
    notes = list(notes)
    if length < len(shown):
        notes.append(f"This page shows the first {length:,} of {len(shown):,} tokens.")
    cut = [_cut(document, max_tokens) for document in documents] if len(models) > 1 else []

    if period < INDUCTION_PERIOD:
        notes.append(f"Scores of the previous token and of induction are measured on {period} random tokens, repeated once.")
    vocab_size = min(
        len(tokenizer), *(subject.model.config.get_text_config(decoder=True).vocab_size for subject in models.values())
    )
    random_ids = repeated_tokens(vocab_size, tokenizer.all_special_ids, period)

    pages, losses = [], []
    for name, subject in models.items():
        model = subject.model
        count = tokens_to_ablate(model, length) if isinstance(model.config, NLQConfig) else 0
        try:
            own = losses_of_tokens(model, input_ids)[0]
            if not own.isfinite().all():
                raise ValueError("its losses are infinite or not a number: its training diverged")
            layers = measure_attention(model, input_ids, random_ids, count)
            found = iter(losses_of_documents(model, [piece for pieces in cut for piece in pieces]))
        except (ValueError, RuntimeError, IndexError) as error:  # of any library's model
            raise ValueError(f"model {name!r} cannot be explored: {first_line(error)}") from error
        if not layers:
            raise ValueError(f"model {name!r} has no attention to show: its layers return no weights")
        notes += _notes(name, model, layers, count, length)
        pages.append(ExploredModel(name, subject.description, own, layers))
        losses.append([torch.cat([torch.empty(0), *(next(found) for _ in pieces)]) for pieces in cut])
    difference = loss_difference(*losses) if any(cut) else None
    if difference is not None:
        notes.append(describe_difference(difference, list(models), unit))
    tokens = token_texts(tokenizer, input_ids[0].tolist())
    title = f"Attention of {' and '.join(models)}"
    return Exploration(write_page(title, notes, tokens, pages), pages, tokens, difference)


def _check_length(models: Mapping[str, Subject], max_tokens: int | None) -> tuple[int, int]:
    """Returns how many tokens are read at once, and how many random tokens, which are repeated, for all models alike.

    Raises:
        ValueError: for more tokens than a model has positions for.
    """
    limits = {}
    for name, subject in models.items():
        config = subject.model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None) or 0
        if positions > 0 and limits_length(config):
            limits[name] = positions
    smallest = min(limits, key=limits.get, default=None)
    if smallest is None:
        return max_tokens or DEFAULT_TOKENS, INDUCTION_PERIOD
    positions = limits[smallest]
    if max_tokens is not None and max_tokens > positions:
        raise ValueError(
            f"max_tokens={max_tokens} exceeds the {positions} positions of model {smallest!r}; set at most {positions}"
        )
    return max_tokens or min(DEFAULT_TOKENS, positions), min(INDUCTION_PERIOD, positions // 2)


def _notes(name: str, model: PreTrainedModel, layers: list[Layer], ablated_tokens: int, length: int) -> list[str]:
    """What a page must say of the numbers of a model. Where heads were not removed, the layers get the reason."""
    if not isinstance(model.config, NLQConfig):
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        said = (
            f"Only {len(layers)} of the {count} layers of {name} return attention weights. Only they are shown, and the others"
        )
        return [f"{said} are not counted."] if len(layers) < count else []
    if ablated_tokens < 2:
        reason = "the text has a single token" if length < 2 else "it would take too long for a model of this size"
        for layer in layers:
            layer.missing["ablation"] = reason
    elif ablated_tokens < length:
        return [f"Ablation of {name} uses the first {ablated_tokens} tokens only, to save time."]
    return []


def read_text(file: Path) -> Text:
    """Reads a file: its whole text and its paragraphs, or of a table the first row and all rows.

    Raises:
        ValueError: if there is no such file, or it is empty or no text.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r}")
    if data_format(file) not in (None, "text"):
        rows = load_documents(Recipe("-", str(file)), is_whole=True)["validation"]["text"]
        documents = [text for text in rows if text]
        if wrong := [text for text in documents if not isinstance(text, str)]:
            raise ValueError(f"{file}: the column 'text' holds {wrong[0]!r}, which is no text")
        text = documents[0] if documents else ""
    else:
        try:
            with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
                text = stream.read().decode("utf-8-sig")
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{file} is not UTF-8 text: {first_line(error)}") from error
        documents = [document["text"] for document in text_documents([str(file)], [""])]
    if not text.strip():
        raise ValueError(f"{file} is empty")
    return Text(text, documents)


def _cut(document: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cuts a document into pieces of at most `size` tokens, of at least 2 each."""
    pieces = [document[start : start + size] for start in range(0, len(document), size)]
    return [piece for piece in pieces if len(piece) > 1]


def _labels(names: Sequence[str]) -> list[str]:
    """Short names of the models: as many last parts of their paths as tell them apart."""
    parts = [Path(name).resolve().parts if Path(name).exists() else Path(name).parts for name in names]
    for count in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-count:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{Path(name).name} ({place})" for place, name in zip(("first", "second"), names)]


def prepare(model: PreTrainedModel) -> Subject:
    """Makes a model ready to be looked at: it is changed to float32, and an NLQ model is made of one that converts."""
    description, note = _describe(model), ""
    model = model.float().eval()
    if not isinstance(model.config, NLQConfig):
        try:
            model, note = to_nlq(model).eval(), "; shown by its exact conversion to an NLQ model"
        except (ValueError, StrictDataclassError):
            model = _with_weights(model)
            note = "; not an NLQ model and none that converts to it, so only its weights can be shown"
    return Subject(model.to("cuda" if torch.cuda.is_available() else "cpu"), f"{description}{note}")


def _with_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the implementation of attention that returns its weights; some choose it only when they are made."""
    if not model.name_or_path:
        model.set_attn_implementation("eager")
        return model
    return type(model).from_pretrained(model.name_or_path, attn_implementation="eager", dtype=torch.float32).eval()


def _describe(model: PreTrainedModel) -> str:
    config = model.config.get_text_config(decoder=True)
    parts = [f"{model.config.model_type}, {model.num_parameters():,} parameters"]
    heads = getattr(config, "num_attention_heads", None)
    parts.append(f"{config.num_hidden_layers} layers" + ("" if heads is None else f" of {heads} heads"))
    if isinstance(config, NLQConfig):
        layers = config.per_layer_config
        parts.append("/".join(dict.fromkeys(layer.attention_activation for layer in layers)))
        parts.append(f"{'/'.join(dict.fromkeys(layer.query_projection for layer in layers))} queries")
        parts += [part.name for part in parts_in(config)]
    return ", ".join(parts)


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it.

    Some tokenizers leave out the space of a token that is decoded alone. A part of a character has no text, and is written as
    the tokenizer writes its bytes.
    """
    texts, before = [], ""
    for count, token in enumerate(tokens, 1):
        whole = tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False)
        added = whole[len(before) :] if whole.startswith(before) else ""
        texts.append(added if added and "\ufffd" not in added else tokenizer.convert_ids_to_tokens(token))
        before = whole
    return texts


def _check_output(path: Path) -> None:
    """Raises `ValueError` for a page that could not be written, before models are loaded; no folder is made yet."""
    if path.is_dir() or not path.name:
        raise ValueError(f"output {str(path)!r} is a folder; name a file, such as {path / PAGE_FILE}")
    if path.exists() and not path.is_file():
        raise ValueError(f"output {str(path)!r} is no file that can be replaced")
    folder = next(folder for folder in path.parents if folder.exists())
    if not folder.is_dir() or not all(os.access(place, os.W_OK) for place in (folder, path) if place.exists()):
        raise ValueError(f"output {str(path)!r} cannot be written: {folder} is not a folder, or you may not write to it")
