"""`nlq explore`: reads models and text, and writes the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_nlq import NLQConfig, NLQForCausalLM, NLQForConditionalGeneration

from ..conversion.renaming import to_nlq
from ..disk import read_text, resolve_user_path, write_text
from ..files import PAGE_FILE
from ..models import load_model
from ..size import parts_in, positions_of
from ..text import check_number
from .attention import measure_attention, tokens_to_ablate
from .measures import losses_of_tokens, repeated_tokens
from .page import ExploredModel, write_page


DEFAULT_TOKENS = 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Random tokens of the text for induction scores, which has them twice
INDUCTION_PERIOD = 64


@dataclass
class Exploration:
    """What `explore` found.

    Attributes:
        models: the models, with their layers.
        tokens: the text of each token.
    """

    page: str
    models: list[ExploredModel]
    tokens: list[str]


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
    """Shows what the attention of one model does with a text, or of two models side by side, as a page.

    Args:
        model, other: folders or Hub names of saved language models, NLQ or of a family that converts to it; the two
            must have one tokenizer.
        file: a UTF-8 text file instead.
        target: for encoders with decoders, whose source is the text: the page shows how this target sees it. By
            default it is the text that the first model generates.
        output: the HTML file to write; `None` writes none.
        max_tokens: the page shows the first tokens of the text; by default 512, or as many as the models have
            positions for.

    Raises:
        ValueError: for a model that cannot be loaded or converted, different tokenizers, a text without tokens, and
            more tokens than positions. Nothing is written then.
        OSError: for a file that cannot be read.
    """
    if (text is None) == (file is None):
        raise ValueError("give either --text TEXT or --file FILE")
    check_number("max_tokens", max_tokens, 2)
    if file is not None:
        text = read_text(resolve_user_path(file))
    models, tokenizer = load_subjects([str(name) for name in (model, other) if name is not None], trust_remote_code)
    shown, source = _tokens(tokenizer, text), None
    if not shown:
        raise ValueError("the text is empty: it has no token")
    if (pair := next(iter(models.values())).pair) is not None:
        source = [*shown, tokenizer.eos_token_id]
        if target is None:
            options = {"max_new_tokens": min(64, pair.config.decoder.max_position_embeddings - 1), "do_sample": False}
            shown = pair.generate(torch.tensor([source], device=DEVICE), **options)[0].tolist()
        else:
            shown = [pair.config.decoder_start_token_id, *_tokens(tokenizer, target), tokenizer.eos_token_id]
    elif target is not None:
        raise ValueError("--target: only an encoder with a decoder has a target")
    done = explore_tokens(models, tokenizer, shown, max_tokens, source=source)
    if output is not None:
        # The user did not type the default name, which may be a link
        write_text(Path(output) if output == PAGE_FILE else resolve_user_path(output), done.page)
    return done


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # As in training: some tokenizers would put special tokens around a text, or read one that is written in it
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


@dataclass
class Subject:
    """A model that is ready to be looked at, in float32.

    Attributes:
        model: an NLQ model; of an encoder and decoder, the decoder.
        description: what it is.
        pair: the encoder and decoder.
    """

    model: PreTrainedModel
    description: str
    pair: NLQForConditionalGeneration | None = None


def load_subjects(
    names: Sequence[str], trust_remote_code: bool = False
) -> tuple[dict[str, Subject], PreTrainedTokenizerBase]:
    """Loads models by the names that a page gives them, and their tokenizer; raises as `explore` does."""
    models, tokenizers = zip(*(load_model(name, trust_remote_code) for name in names))
    if any(tokenizer.get_vocab() != tokenizers[0].get_vocab() for tokenizer in tokenizers):
        raise ValueError(
            f"models {names[0]!r} and {names[1]!r} have different tokenizers: their tokens cannot be compared"
        )
    subjects = list(map(prepare, models))
    if len({subject.pair is None for subject in subjects}) > 1:
        raise ValueError(f"{names[0]!r} and {names[1]!r}: an encoder with a decoder is shown beside another only")
    labels = [Path(name).resolve().name for name in names]
    if len(set(labels)) < len(labels):
        labels = list(names)
    return dict(zip(labels, subjects)), tokenizers[0]


def explore_tokens(
    models: Mapping[str, Subject],
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[int],
    max_tokens: int | None = None,
    notes: Sequence[str] = (),
    source: Sequence[int] | None = None,
) -> Exploration:
    """Makes the page of one or two models.

    Args:
        models: by the names that the page gives them.
        tokenizer: the tokenizer of both.
        shown: the tokens of the shown text.
        notes: what the page should say besides.
        source: the tokens that encoders read, if the models are decoders with cross-attention.

    Raises:
        ValueError: for more tokens than a model has positions for, and losses that are not finite.
    """
    configs = [subject.model.config for subject in models.values()]
    positions = min(filter(None, map(positions_of, configs)), default=None)
    period = INDUCTION_PERIOD
    if positions is not None:
        check_number("max_tokens", max_tokens, 2, positions)
        max_tokens, period = max_tokens or min(DEFAULT_TOKENS, positions), min(period, positions // 2)
    max_tokens = max_tokens or DEFAULT_TOKENS
    input_ids = torch.tensor([list(shown[:max_tokens])])
    length = input_ids.shape[1]
    notes = list(notes)
    if length < len(shown):
        notes.append(f"This page shows the first {length:,} of {len(shown):,} tokens.")
    if period < INDUCTION_PERIOD:
        notes.append(
            f"Scores of the previous token and of induction are measured on {period} random tokens, repeated once."
        )
    vocab_size = min(len(tokenizer), *(config.vocab_size for config in configs))
    random_ids = repeated_tokens(vocab_size, tokenizer.all_special_ids, period)
    pages = []
    for name, subject in models.items():
        config = subject.model.config
        if not config.is_causal and config.mask_token_id is None:
            raise ValueError(
                f"model {name!r}: mask_token_id=None must be the id of the token that stands for a masked one"
            )
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
            notes.append(
                f"The loss of a token by {name}, an encoder, is that of masking this token alone; the first has none."
            )
        pages.append(ExploredModel(name, subject.description, losses, layers, config.is_causal))
    tokens, read = (token_texts(tokenizer, ids) for ids in (input_ids[0].tolist(), source or ()))
    return Exploration(write_page(f"Attention of {' and '.join(models)}", notes, tokens, pages, read), pages, tokens)


@torch.no_grad()
def show_source(subject: Subject, source: Sequence[int]) -> None:
    """Gives the hidden states of a source, `(1, source, hidden)`, to each later call of a subject's decoder."""
    states = subject.pair.get_encoder()(torch.tensor([list(source)], device=DEVICE)).last_hidden_state

    def give(_, inputs: tuple, given: dict) -> tuple[tuple, dict]:
        return inputs, {**given, "encoder_hidden_states": states.expand(len(given["input_ids"]), -1, -1)}

    subject.model.register_forward_pre_hook(give, with_kwargs=True)


def prepare(model: PreTrainedModel) -> Subject:
    """Makes a model ready to be looked at: it is changed to float32, and an NLQ model is made of one that converts.

    Raises:
        ValueError: for a model that does not convert.
    """
    shown, note, pair = model.float().eval(), "", None
    if isinstance(model, NLQForConditionalGeneration):
        pair = model.to(DEVICE)
        with torch.device("meta"):
            shown = NLQForCausalLM(model.config.decoder).eval()
        shown.model, shown.lm_head = model.model.decoder, model.lm_head
    elif not isinstance(model.config, NLQConfig):
        shown, note = to_nlq(model), "; shown by its exact conversion to an NLQ model"
    return Subject(shown.to(DEVICE), f"{_describe(model)}{note}", pair)


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
    """The text that each token adds to those before it.

    Some tokenizers leave out the space of a token that is decoded alone. Of a character whose bytes are several
    tokens, the first has the character, and the others have no text. Bytes that are no character are written as the
    tokenizer writes them.
    """
    texts, before, parts = [], "", 0
    for count, token in enumerate(tokens, 1):
        whole = tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False)
        added = whole[len(before) :] if whole.startswith(before) else ""
        if added and "\ufffd" not in added:
            texts[len(texts) - parts :] = [added[0], *[""] * (parts - 1), added[1:]] if parts else [added]
            before, parts = whole, 0
        else:
            texts.append(tokenizer.convert_ids_to_tokens(token))
            is_part = added.endswith("\ufffd") and parts < 3  # of a character of up to four bytes
            before, parts = (before, parts + 1) if is_part else (whole, 0)
    return texts
