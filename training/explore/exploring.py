"""`nlq explore`: reads models and text, and writes the page."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_nlq.configuration_nlq import NLQConfig
from modeling_nlq.part_table_nlq import parts_of

from ..conversion.renaming import to_nlq
from ..files import PAGE_FILE, data_format, write_text
from ..models import limits_length, load_model
from ..run.documents import load_documents, text_documents
from ..run.trained_on import recipe_of
from ..text import check_number, first_line
from .attention import ablated_tokens, look
from .measures import LossDifference, loss_difference, losses_of_documents, losses_of_tokens
from .page import Shown, write_page


DEFAULT_TOKENS = 512


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
    models: list[Shown]
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
) -> Exploration:
    """Shows what the attention of one model does with a text, or of two models side by side, as a page.

    Args:
        model, other: folders or Hub names of saved causal language models; the two must have one tokenizer.
        text: the text.
        file: a text instead: a `.txt` file, whose documents are between blank lines, or a `.jsonl` or `.parquet` file. The page
            shows its first document; the losses of two models are compared on all.
        output: the HTML file to write; `None` writes none.
        max_tokens: the page shows the first tokens of the text, and documents are read in pieces of this length; by default
            512, or as many as the models have positions for.

    Raises:
        ValueError: for a model that cannot be loaded or has no attention to show, two tokenizers, a text without tokens, and
            more tokens than positions. Nothing is written then.
    """
    if (text is None) == (file is None):
        raise ValueError("give a text by --text, or a file by --file, and not both")
    check_number("max_tokens", max_tokens, 2)
    if output is not None:
        _check_output(Path(output))
    texts = [text] if text is not None else read_texts(Path(file))
    models, tokenizer = load_subjects([str(name) for name in (model, other) if name is not None])
    done = explore_texts(models, tokenizer, texts, max_tokens)
    if output is not None:
        write_text(Path(output), done.page)
    return done


@dataclass
class Subject:
    """A model that is ready to be looked at, in float32.

    Attributes:
        model: an NLQ model where there is one that computes the same.
        description: what it is.
    """

    model: PreTrainedModel
    description: str


def load_subjects(names: Sequence[str]) -> tuple[dict[str, Subject], PreTrainedTokenizerBase]:
    """Loads models by the names that a page gives them, and their tokenizer.

    Raises:
        ValueError: for a model that cannot be loaded, and for two tokenizers.
    """
    models, tokenizers = zip(*(load_model(name) for name in names))
    if len(names) > 1 and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise ValueError(f"models {names[0]!r} and {names[1]!r} have two tokenizers: their tokens cannot be compared")
    return dict(zip(_labels(names), map(prepare, models))), tokenizers[0]


def explore_texts(
    models: Mapping[str, Subject], tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_tokens: int | None = None
) -> Exploration:
    """Makes the page of models from the text to show, and the documents to compare two models on, if they are others."""
    # As in training: some tokenizers would put special tokens around a text, or read one that is written in it
    encoded = [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"] for text in texts
    ]
    if not encoded[0]:
        raise ValueError("the text is empty: it has no token")
    return explore_tokens(models, tokenizer, encoded[0], encoded[1:] or encoded, max_tokens)


def explore_tokens(
    models: Mapping[str, Subject],
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[int],
    documents: Sequence[Sequence[int]],
    max_tokens: int | None = None,
) -> Exploration:
    """Makes the page of one or two models.

    Args:
        models: by the names that the page gives them.
        tokenizer: the tokenizer of both.
        shown: the tokens of the shown text.
        documents: the tokens of the documents on which two models are compared.
        max_tokens: as in `explore`.
    """
    configs = {name: subject.model.config for name, subject in models.items()}
    limits = {name: getattr(config, "max_position_embeddings", None) for name, config in configs.items()}
    limits = {name: limit for name, limit in limits.items() if limit is not None and limits_length(configs[name])}
    limit = min(limits.values(), default=None)
    if max_tokens is not None and limit is not None and max_tokens > limit:
        name = next(name for name, positions in limits.items() if positions == limit)
        raise ValueError(f"max_tokens={max_tokens} exceeds the {limit} positions of model {name!r}; set at most {limit}")
    max_tokens = max_tokens or min(DEFAULT_TOKENS, limit or DEFAULT_TOKENS)
    input_ids = torch.tensor([list(shown[:max_tokens])])
    length = input_ids.shape[1]
    notes = [f"The first {length:,} of {len(shown):,} tokens."] if length < len(shown) else []
    pieces = [part for document in documents for part in _cut(document, max_tokens)]
    sizes = [sum(len(part) - 1 for part in _cut(document, max_tokens)) for document in documents]

    pages, losses = [], []
    for name, subject in models.items():
        model = subject.model
        count = ablated_tokens(model, length) if isinstance(model.config, NLQConfig) else 0
        layers = look(model, tokenizer, input_ids, count)
        if all(layer.weights is None and not layer.numbers for layer in layers):
            raise ValueError(f"model {name!r} has no attention to show: its layers return no weights")
        pages.append(Shown(name, subject.description, losses_of_tokens(model, input_ids)[0], layers))
        if len(models) > 1:
            losses.append(torch.cat(losses_of_documents(model, pieces)).split(sizes))
        if 0 < count < length:
            notes.append(f"The heads of {name} were removed on the first {count} tokens, for the time that it takes.")
    difference = loss_difference(*losses) if losses and sum(sizes) else None
    tokens = [_written(tokenizer, token) for token in input_ids[0].tolist()]
    title = f"Attention of {' and '.join(models)}"
    return Exploration(write_page(title, notes, tokens, pages, difference), pages, tokens, difference)


def read_texts(file: Path) -> list[str]:
    """Reads the text of a file to show, and all of its documents.

    Raises:
        ValueError: if there is no such file, or it is empty or no text.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    kind = data_format(file)
    if kind not in (None, "text"):
        documents = load_documents(recipe_of({}, dataset=str(file)), is_whole=True)["validation"]["text"]
        return [documents[0], *documents]
    try:
        documents = [document["text"] for document in text_documents([str(file)], [""])]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {first_line(error)}") from error
    return ["\n\n".join(documents), *documents]


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
            model.set_attn_implementation("eager")  # others return no weights
            note = "; not an NLQ model and none that converts to it, so only its weights can be shown"
    return Subject(model.to("cuda" if torch.cuda.is_available() else "cpu"), f"{description}{note}")


def _describe(model: PreTrainedModel) -> str:
    config = model.config
    parts = [f"{config.model_type}, {model.num_parameters():,} parameters"]
    heads = getattr(config, "num_attention_heads", None)
    parts.append(f"{config.num_hidden_layers} layers" + ("" if heads is None else f" of {heads} heads"))
    if isinstance(config, NLQConfig):
        layers = config.per_layer_config
        parts.append("/".join(dict.fromkeys(layer.attention_activation for layer in layers)))
        parts.append(f"{'/'.join(dict.fromkeys(layer.query_projection for layer in layers))} queries")
        parts += dict.fromkeys(part.name for layer in layers for part in parts_of(layer))
    return ", ".join(parts)


def _written(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of a token. Part of a character has none: then it is what the tokenizer writes for its bytes."""
    text = tokenizer.decode([token])
    return tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text or not text else text


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"output {str(path)!r} is a folder; name a file, such as {path / PAGE_FILE}")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"output {str(path)!r} cannot be written: {folder} is no folder that can be written to")
