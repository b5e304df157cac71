"""Documents to blocks of tokens: the tokenizer, encoding, packing and batches."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import GPT2Tokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ..disk import atomic_dir, write_text
from ..files import read_json
from ..models import load_tokenizer
from ..size import vocabulary_of
from ..text import first_line, root_cause
from .blocks import Blocks
from .documents import check_text, load_documents
from .objectives import objective_of
from .recipe import Recipe


END_OF_TEXT = "<|endoftext|>"
# Not end-of-text, to which a collator would then give no label
PAD = "<|pad|>"
MASK = "<|mask|>"
# Says that the blocks beside it are complete
BLOCKS_FILE = "blocks.json"


def make_tokenizer(recipe: Recipe, documents: dict[str, Dataset | IterableDataset]) -> PreTrainedTokenizerBase:
    """Makes the tokenizer of a recipe: trains it on the training documents (`bpe:SIZE`), or loads it.

    Raises:
        ValueError: if it cannot be loaded or has no end-of-text token, or no mask token where tokens are masked.
    """
    if recipe.new_vocabulary_size is not None:
        # A stream costs as much to read again: its first documents are enough
        sample = documents["train"].take(20_000) if recipe.streaming else documents["train"]
        texts = (check_text(row[column], recipe) for row in sample for column in recipe.text_columns.values())
        return train_byte_pair_encoding(texts, recipe.new_vocabulary_size)
    try:
        tokenizer = load_tokenizer(recipe.tokenizer_name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {recipe.tokenizer_name!r} cannot be loaded: {first_line(root_cause(error))}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {recipe.tokenizer_name!r} has no end-of-text token (eos_token)")
    objective_of(recipe).check_tokenizer(tokenizer, recipe.tokenizer_name)
    return tokenizer


def train_byte_pair_encoding(texts: Iterator[str], vocab_size: int) -> GPT2Tokenizer:
    """Byte-level byte-pair encoding as in GPT-2, with special tokens for end-of-text, padding and masked tokens.

    End-of-text stands between two texts that are encoded together, `tokenizer(a, b)`, and nothing is added to one
    text. `vocab_size` is the number of tokens, special ones included; at least 256 bytes and the special tokens are
    made.
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
    # The blank of a first word may come from `add_prefix_space=True`: it is not trimmed
    offsets = processors.ByteLevel(add_prefix_space=True, trim_offsets=True)
    ids = [(END_OF_TEXT, trained["vocab"][END_OF_TEXT])]
    pair = processors.TemplateProcessing(single="$A", pair=f"$A {END_OF_TEXT} $B:1", special_tokens=ids)
    # A class for which `from_pretrained(..., add_prefix_space=True)` has an effect
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


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of embeddings that a tokenizer needs: its largest id plus one. Where ids have gaps it has fewer
    tokens.
    """
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str, config: PreTrainedConfig) -> None:
    """Raises `ValueError` if a tokenizer, called `name`, has ids for which a model has no embeddings."""
    if (size := vocabulary_size(tokenizer)) > (known := vocabulary_of(config)):
        raise ValueError(f"tokenizer {name!r} has ids up to {size - 1}, too large for the model's vocab_size={known}")


class EndlessBlocks(torch.utils.data.IterableDataset):
    """A shuffled stream of blocks, read again and again, each time in another order.

    Trainer takes a dataset without length for one epoch of `max_steps`. If the stream were shorter, a resumed run
    could not skip what was trained on before.
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
    """Prepares a tokenizer and blocks by split, and returns with them the fingerprint of the documents (see
    `Documents`).

    Args:
        recipe: names the data.
        tokenizer_folder: the run's tokenizer lies there, or is saved there for its other processes and for a resumed
            run. If `save_blocks` saved the blocks there too, nothing is prepared.
        seed: of the order of a stream's documents; stored blocks are shuffled by `Trainer`.
    """
    if tokenizer_folder is not None and (tokenizer_folder / BLOCKS_FILE).is_file():
        return load_tokenizer(str(tokenizer_folder)), *_load_blocks(tokenizer_folder)
    documents = load_documents(recipe)
    if tokenizer_folder is not None and (tokenizer_folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(str(tokenizer_folder))
    else:
        tokenizer = make_tokenizer(recipe, documents)
        tokenizer.model_max_length = recipe.sample_lengths[0]
        if tokenizer_folder is not None:
            with atomic_dir(tokenizer_folder, last="tokenizer.json") as folder:
                tokenizer.save_pretrained(folder)
    if recipe.streaming:
        documents["train"] = documents["train"].shuffle(seed=seed, buffer_size=10_000)
    objective = objective_of(recipe)
    blocks = {split: objective.make_rows(dataset, tokenizer) for split, dataset in documents.items()}
    if recipe.streaming:
        blocks["train"].dataset = EndlessBlocks(blocks["train"].dataset)
    return tokenizer, blocks, documents.fingerprint


def save_blocks(blocks: dict[str, Blocks], fingerprint: str | None, folder: Path) -> None:
    """Saves the result of `prepare_data`, not of a stream, beside its tokenizer, for other machines; `BLOCKS_FILE`
    last.
    """
    for split, part in blocks.items():
        part.dataset.save_to_disk(str(folder / split))
    names = ("tokens", "bytes_per_token", "references")
    sizes = {split: {name: getattr(part, name) for name in names} for split, part in blocks.items()}
    write_text(folder / BLOCKS_FILE, json.dumps({"fingerprint": fingerprint, "splits": sizes}) + "\n")


def _load_blocks(folder: Path) -> tuple[dict[str, Blocks], str | None]:
    content = read_json(folder / BLOCKS_FILE)
    blocks = {
        split: Blocks(Dataset.load_from_disk(str(folder / split)), **sizes)  # in the format in which they were saved
        for split, sizes in content["splits"].items()
    }
    return blocks, content["fingerprint"]
