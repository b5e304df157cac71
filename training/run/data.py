"""Documents to blocks of tokens: the tokenizer, encoding, packing and batches."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import GPT2Tokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from ..disk import atomic_dir, write_text
from ..files import read_json
from ..loading import load_tokenizer
from ..size import vocabulary_of
from ..text import first_line, root_cause
from .blocks import Blocks
from .documents import check_text, load_documents
from .objectives import objective_of
from .recipe import Recipe
from .synthetic import SPECIAL


logger = logging.get_logger(__name__)

END_OF_TEXT = "<|endoftext|>"
# A token other than end-of-text, because a collator gives padding no label
PAD = "<|pad|>"
MASK = "<|mask|>"
# Says that the blocks beside it are complete
BLOCKS_FILE = "blocks.json"


def make_tokenizer(recipe: Recipe, documents: dict[str, Dataset | IterableDataset]) -> PreTrainedTokenizerBase:
    """Trains the tokenizer of a recipe on the training documents (`bpe:SIZE`), makes that of a task, or loads it."""
    if recipe.synthetic is not None:
        return make_word_tokenizer(recipe.synthetic.tokens)
    if recipe.new_vocabulary_size is not None:
        # A tokenizer learns from the first documents of a stream, which is read again
        sample = documents["train"].take(20_000) if recipe.streaming else documents["train"]
        texts = (check_text(row[column], recipe) for row in sample for column in recipe.text_columns.values())
        return train_byte_pair_encoding(texts, recipe.new_vocabulary_size)
    name = recipe.tokenizer_name
    try:
        tokenizer = load_tokenizer(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {first_line(root_cause(error))}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {name!r} has no end-of-text token (eos_token)")
    objective_of(recipe).check_tokenizer(tokenizer, name)
    return tokenizer


def train_byte_pair_encoding(texts: Iterator[str], vocab_size: int) -> GPT2Tokenizer:
    """Trains byte-level byte-pair encoding as in GPT-2, with special tokens for end-of-text, padding and masks.

    End-of-text separates two texts, `tokenizer(a, b)`; a single text gets no special token. `vocab_size` counts the
    special tokens and the 256 bytes, which are always in the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    # A first word's blank, perhaps of `add_prefix_space=True`, is not trimmed
    offsets = processors.ByteLevel(add_prefix_space=True, trim_offsets=True)
    ids = [(END_OF_TEXT, trained["vocab"][END_OF_TEXT])]
    pair = processors.TemplateProcessing(single="$A", pair=f"$A {END_OF_TEXT} $B:1", special_tokens=ids)
    # This class supports `from_pretrained(..., add_prefix_space=True)`
    return GPT2Tokenizer(
        trained["vocab"],
        [tuple(merge) for merge in trained["merges"]],
        unk_token=None,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        mask_token=AddedToken(MASK, lstrip=True, special=True),  # of a word with its blank
        post_processor=processors.Sequence([offsets, pair]),
        clean_up_tokenization_spaces=False,
    )


def make_word_tokenizer(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """Makes the tokenizer of a synthetic task, whose words have blanks between them, from its vocabulary."""
    end, pad, blank = tokens[: len(SPECIAL)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, blank))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": end, "eos_token": end, "pad_token": pad, "unk_token": blank}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str, config: PreTrainedConfig) -> None:
    """Raises `ValueError` if the tokenizer with this name has ids beyond the embeddings of a model."""
    largest, known = max(tokenizer.get_vocab().values()), vocabulary_of(config)  # ids may have gaps
    if largest >= known:
        raise ValueError(f"tokenizer {name!r} has ids up to {largest}, too large for the model's vocab_size={known}")


def warn_of_spare_ids(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Warns if a new model has many more ids than its tokenizer. Some are left where sizes are multiples of 128."""
    tokens, known = max(tokenizer.get_vocab().values()) + 1, vocabulary_of(recipe.config)
    if not recipe.has_weights and known - tokens >= 128:
        logger.warning_once(
            f"vocab_size={known:,}, and tokenizer {recipe.tokenizer_name!r} has {tokens:,} tokens: no text has the "
            f"other {known - tokens:,} ids, which have parameters too"
        )


class EndlessBlocks(torch.utils.data.IterableDataset):
    """A stream of blocks that repeats, each time in another order, without end.

    Trainer takes it for one epoch; a resumed run could not skip what it has seen in a shorter one.
    """

    def __init__(self, blocks: IterableDataset):
        self.blocks = blocks

    def __iter__(self) -> Iterator[dict]:
        for epoch in itertools.count():
            self.blocks.set_epoch(epoch)
            is_empty = True
            for row in self.blocks:
                is_empty = False
                yield row
            if is_empty:  # a worker without a part of the stream
                return


def prepare_data(
    recipe: Recipe, tokenizer_folder: Path | None = None, seed: int = 0
) -> tuple[PreTrainedTokenizerBase, dict[str, Blocks], str | None]:
    """Returns the tokenizer, the blocks by split, and the fingerprint of the documents.

    Tokenizer and saved blocks are loaded from `tokenizer_folder`, where a new tokenizer is saved. `seed` shuffles a
    stream.
    """
    folder = tokenizer_folder
    has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer else None
    if has_tokenizer and (folder / BLOCKS_FILE).is_file():
        content = read_json(folder / BLOCKS_FILE)
        splits = content["splits"].items()
        blocks = {split: Blocks(Dataset.load_from_disk(str(folder / split)), **sizes) for split, sizes in splits}
        return tokenizer, blocks, content["fingerprint"]
    documents = load_documents(recipe)
    if tokenizer is None:
        tokenizer = make_tokenizer(recipe, documents)
        tokenizer.model_max_length = recipe.sample_lengths[0]
        if folder is not None:
            with atomic_dir(folder, last="tokenizer.json") as unfinished:
                tokenizer.save_pretrained(unfinished)
    if recipe.streaming:
        documents["train"] = documents["train"].shuffle(seed=seed, buffer_size=10_000)
    objective = objective_of(recipe)
    blocks = {split: objective.make_rows(dataset, tokenizer) for split, dataset in documents.items()}
    if recipe.streaming:
        blocks["train"].dataset = EndlessBlocks(blocks["train"].dataset)
    return tokenizer, blocks, documents.fingerprint


def save_blocks(blocks: dict[str, Blocks], fingerprint: str | None, folder: Path) -> None:
    """Saves the blocks of `prepare_data` beside their tokenizer, for other machines, `BLOCKS_FILE` last."""
    for split, part in blocks.items():
        part.dataset.save_to_disk(str(folder / split))
    names = ("tokens", "bytes_per_token", "references")
    sizes = {split: {name: getattr(part, name) for name in names} for split, part in blocks.items()}
    write_text(folder / BLOCKS_FILE, json.dumps({"fingerprint": fingerprint, "splits": sizes}) + "\n")
