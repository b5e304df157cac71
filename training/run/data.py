"""Documents to blocks of tokens: the tokenizer, encoding, packing and batches."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForSeq2Seq,
    GPT2Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..disk import atomic_dir, write_text
from ..files import read_json
from ..models import load_tokenizer
from ..size import vocabulary_of
from ..text import first_line, root_cause
from .documents import check_text, is_conversation, load_documents
from .masked import check_mask_token
from .pairs import Blocks, make_pairs
from .recipe import Recipe


END_OF_TEXT = "<|endoftext|>"
# Not end-of-text, to which a collator would then give no label
PAD = "<|pad|>"
MASK = "<|mask|>"
# Says that the blocks beside it are complete
BLOCKS_FILE = "blocks.json"
_TOKENS = Features({"input_ids": List(Value("int32"))})
_ENCODED = Features({**_TOKENS, "length": Value("int64"), "bytes": Value("int64")})


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
    if recipe.objective == "masked":
        check_mask_token(tokenizer, recipe.tokenizer_name)
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


def make_blocks(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    keep_remainder: bool = False,
) -> Blocks:
    """Joins documents by end-of-text into one stream, and cuts the stream into blocks; with `objective: seq2seq`,
    makes pairs.

    A special token that is written in a document, such as `<|endoftext|>`, is read as text. Tokenizers whose model
    looks up whole words (`Unigram`, `WordLevel`) still read it as a special token. The blocks of a `Dataset` do not
    depend on the number of processes. An `IterableDataset` is cut a thousand documents at a time, and the rest that
    fills no block at the end of each thousand is dropped.

    Args:
        documents: a split.
        tokenizer: a fast one.
        recipe: names the column of text and the block size.
        keep_remainder: whether two or more tokens that fill no block are a shorter last one; not of an
            `IterableDataset`.

    Raises:
        ValueError: if the documents make no block.
    """
    if recipe.objective == "seq2seq":
        return make_pairs(documents, tokenizer, recipe)
    column, block_size, end = recipe.text_column, recipe.block_size, tokenizer.eos_token_id
    too_few = (
        f"tokens in a split: block_size={block_size} fits none; give more text, or raise "
        f"validation_fraction={recipe.validation_fraction} and test_fraction={recipe.test_fraction}"
    )

    def encode(batch: dict) -> dict:
        is_chat = is_conversation(batch[column][0])
        texts = _chat_texts(batch[column], tokenizer, recipe) if is_chat else batch[column]
        texts = [check_text(text, recipe) for text in texts]
        # The special tokens of a template are meant; those that are written in a document are text
        ids = tokenizer(texts, add_special_tokens=False, split_special_tokens=not is_chat, verbose=False)["input_ids"]
        sizes = {"length": [len(document) + 1 for document in ids], "bytes": [len(text.encode()) for text in texts]}
        return {"input_ids": [[*document, end] for document in ids], **sizes}

    if isinstance(documents, IterableDataset):

        def cut_batch(batch: dict) -> dict:
            stream = np.concatenate([np.asarray(document, dtype=np.int32) for document in batch["input_ids"]])
            count = len(stream) // block_size
            return {"input_ids": stream[: count * block_size].reshape(count, block_size)}

        encoded = documents.map(
            encode, batched=True, remove_columns=documents.column_names or [column], features=_ENCODED
        )
        encoded = encoded.select_columns("input_ids")
        blocks = encoded.map(cut_batch, batched=True, batch_size=1000, features=_TOKENS)
        if next(iter(blocks), None) is None:
            raise ValueError(f"dataset {recipe.dataset!r} has too few {too_few}")
        return Blocks(blocks)

    # By default `datasets` hashes the pickle of a tokenizer, which changes with use; its serialised form does not
    is_text = isinstance(documents.features[column], Value)
    kind = "special tokens split" if is_text else tokenizer.chat_template
    identity = Hasher.hash((documents._fingerprint, tokenizer.backend_tokenizer.to_str(), column, end, kind))
    encoded = documents.map(
        encode,
        batched=True,
        num_proc=recipe.num_proc,
        remove_columns=documents.column_names,
        features=_ENCODED,
        new_fingerprint=identity,
        desc="Tokenizing",
    ).with_format("numpy")
    ends = np.cumsum(encoded["length"][:])
    tokens = int(ends[-1])
    has_remainder = keep_remainder and tokens % block_size > 1  # one token alone has no loss
    count = tokens // block_size + has_remainder
    if count == 0:
        raise ValueError(f"dataset {recipe.dataset!r} has only {tokens} {too_few}")

    def cut(indices: list[int]) -> dict:
        begin, end = indices[0] * block_size, min((indices[-1] + 1) * block_size, tokens)
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        stream = np.concatenate(list(encoded[int(first) : int(last) + 1]["input_ids"]))
        skipped = begin - (ends[first - 1] if first else 0)
        stream = stream[skipped : skipped + end - begin]
        if len(stream) % block_size:
            return {"input_ids": np.split(stream, range(block_size, len(stream), block_size))}
        return {"input_ids": stream.reshape(-1, block_size)}

    fingerprint = Hasher.hash((identity, block_size, *(["remainder"] if has_remainder else [])))
    folder = os.path.dirname(encoded.cache_files[0]["filename"]) if encoded.cache_files else None
    blocks = Dataset.from_dict({"block": range(count)}).map(
        lambda _, indices: cut(indices),
        batched=True,
        with_indices=True,
        num_proc=recipe.num_proc,
        remove_columns=["block"],
        features=_TOKENS,
        new_fingerprint=fingerprint,
        cache_file_name=None if folder is None else os.path.join(folder, f"blocks-{fingerprint}.arrow"),
        desc="Cutting blocks",
    )
    return Blocks(blocks.with_format("numpy"), tokens, float(encoded["bytes"][:].sum() / tokens))


def _chat_texts(conversations: list, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> list[str]:
    """Writes conversations by the tokenizer's chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"text_column={recipe.text_column!r} holds messages, and tokenizer {recipe.tokenizer_name!r} has no chat "
            "template to join them; name one that has, or another column"
        )
    return [
        tokenizer.apply_chat_template(row, tokenize=False) if is_conversation(row) else row for row in conversations
    ]


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
        tokenizer.model_max_length = recipe.max_source_length if recipe.objective == "seq2seq" else recipe.block_size
        if tokenizer_folder is not None:
            with atomic_dir(tokenizer_folder, last="tokenizer.json") as folder:
                tokenizer.save_pretrained(folder)
    if recipe.streaming:
        documents["train"] = documents["train"].shuffle(seed=seed, buffer_size=10_000)
    blocks = {split: make_blocks(dataset, tokenizer, recipe) for split, dataset in documents.items()}
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


@dataclass
class BlockCollator:
    """Makes a batch of blocks, in which every token is its own label. Shorter ones are padded by tokens without a
    label.

    Attributes:
        end_of_text: the token after each document.
        restart: whether positions, and so attention, begin anew after each end of text. The first token of a document
            then has no label, since it would be predicted from a document it cannot see.
        is_causal: false for encoders, in which other tokens would see padding, and each token of the text keeps its
            label.
    """

    end_of_text: int
    restart: bool = False
    is_causal: bool = True

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        blocks = [torch.tensor(np.asarray(row["input_ids"]), dtype=torch.int64) for row in rows]
        # At the right, where no other token of a decoder sees them
        input_ids = pad_sequence(blocks, batch_first=True, padding_value=self.end_of_text)
        batch = {"input_ids": input_ids, "labels": pad_sequence(blocks, batch_first=True, padding_value=-100)}
        is_padding = batch["labels"] == -100
        hides_padding = not self.is_causal and bool(is_padding.any())
        if self.restart:
            starts = torch.zeros_like(input_ids, dtype=torch.bool)
            starts[:, 1:] = input_ids[:, :-1] == self.end_of_text
            if hides_padding:  # it is a document of its own
                starts = (starts & ~is_padding) | (is_padding & ~is_padding.roll(1, dims=1))
            index = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            batch["position_ids"] = index - torch.where(starts, index, 0).cummax(dim=-1).values
            if self.is_causal:
                batch["labels"] = batch["labels"].masked_fill(starts, -100)
        elif hides_padding:
            batch["attention_mask"] = (~is_padding).long()
        return batch


def make_collator(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> BlockCollator | DataCollatorForSeq2Seq:
    """Makes the collator of a recipe's objective."""
    if recipe.objective == "seq2seq":
        return DataCollatorForSeq2Seq(tokenizer, model)
    return BlockCollator(tokenizer.eos_token_id, recipe.packing == "documents", is_causal=recipe.objective == "causal")
