"""Tokenizers: trained on the corpus, or loaded, and checked against a model."""

from collections.abc import Iterator

from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..text import first_line, root_cause
from .documents import check_text
from .recipe import Recipe


END_OF_TEXT = "<|endoftext|>"


def make_tokenizer(recipe: Recipe, documents: dict[str, Dataset | IterableDataset]) -> PreTrainedTokenizerBase:
    """Makes the tokenizer of a recipe: trains it on the training documents (`bpe:SIZE`), or loads it.

    Raises:
        ValueError: if it cannot be loaded or has no end-of-text token.
    """
    if recipe.new_vocabulary_size is not None:
        # A stream costs as much to read again: its first documents are enough
        sample = documents["train"].take(20_000) if recipe.streaming else documents["train"]
        texts = (check_text(row[recipe.text_column], recipe) for row in sample)
        return train_byte_pair_encoding(texts, recipe.new_vocabulary_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {recipe.tokenizer!r} cannot be loaded: {first_line(root_cause(error))}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {recipe.tokenizer!r} has no end-of-text token (eos_token)")
    return tokenizer


def train_byte_pair_encoding(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level byte-pair encoding as in GPT-2, with one special token, end-of-text, that also pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of embeddings that a tokenizer needs: its largest id plus one. Where ids have gaps it has fewer tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str, config: PreTrainedConfig) -> None:
    """Raises `ValueError` if a tokenizer has ids for which a model has no embeddings; `name` names it in the message."""
    if (size := vocabulary_size(tokenizer)) > config.vocab_size:
        raise ValueError(
            f"tokenizer {name!r} has ids up to {size - 1}, too large for the model's vocab_size={config.vocab_size}"
        )
