"""Blocks of tokens: documents joined and cut into rows of one length, and batches of them."""

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from .documents import check_text, is_conversation


if TYPE_CHECKING:
    from .recipe import Recipe


_TOKENS = Features({"input_ids": List(Value("int32"))})
_ENCODED = Features({**_TOKENS, "length": Value("int64"), "bytes": Value("int64")})


@dataclass
class Blocks:
    """The tokens of a split: rows of `input_ids`, and of `labels` for pairs.

    Attributes:
        tokens: their number, with the remainder that fills no block; `None` for a stream.
        bytes_per_token: UTF-8 bytes of the documents over their tokens, end-of-text included; `None` for a stream.
        references: the whole targets of the first `GENERATED_ROWS` pairs.
    """

    dataset: Dataset | IterableDataset
    tokens: int | None = None
    bytes_per_token: float | None = None
    references: list[str] | None = None


def make_blocks(
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    recipe: "Recipe",
    keep_remainder: bool = False,
) -> Blocks:
    """Joins documents by end-of-text into one stream, and cuts the stream into blocks.

    Reads a special token in a document, such as `<|endoftext|>`, as text, unless the tokenizer looks up whole words.
    An `IterableDataset` is cut a thousand documents at a time. `keep_remainder` keeps two or more tokens at the end of
    a `Dataset` as a shorter block; other remainders are dropped.
    """
    column = recipe.text_column
    block_size = recipe.block_size
    end_of_text = tokenizer.eos_token_id
    too_few = (
        f"tokens in a split: block_size={block_size} fits none; check "
        f"validation_fraction={recipe.validation_fraction} and test_fraction={recipe.test_fraction}"
    )

    def encode(batch: dict) -> dict:
        is_chat = is_conversation(batch[column][0])
        texts = _chat_texts(batch[column], tokenizer, recipe) if is_chat else batch[column]
        texts = [check_text(text, recipe) for text in texts]
        # A chat template writes special tokens, but a document contains them as text
        ids = tokenizer(texts, add_special_tokens=False, split_special_tokens=not is_chat, verbose=False)["input_ids"]
        sizes = {"length": [len(document) + 1 for document in ids], "bytes": [len(text.encode()) for text in texts]}
        return {"input_ids": [[*document, end_of_text] for document in ids], **sizes}

    if isinstance(documents, IterableDataset):

        def cut_batch(batch: dict) -> dict:
            stream = np.concatenate([np.asarray(document, dtype=np.int32) for document in batch["input_ids"]])
            count = len(stream) // block_size
            return {"input_ids": stream[: count * block_size].reshape(count, block_size)}

        columns = documents.column_names or [column]
        encoded = documents.map(encode, batched=True, remove_columns=columns, features=_ENCODED)
        encoded = encoded.select_columns("input_ids")
        blocks = encoded.map(cut_batch, batched=True, batch_size=1000, features=_TOKENS)
        if next(iter(blocks), None) is None:
            raise ValueError(f"dataset {recipe.dataset!r} has too few {too_few}")
        return Blocks(blocks)

    # The pickle of a tokenizer, which `datasets` would hash, changes with use
    is_text = isinstance(documents.features[column], Value)
    kind = "special tokens split" if is_text else tokenizer.chat_template
    identity = Hasher.hash((documents._fingerprint, tokenizer.backend_tokenizer.to_str(), column, end_of_text, kind))
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
    has_remainder = keep_remainder and tokens % block_size > 1  # a single token does not have a loss
    count = tokens // block_size + has_remainder
    if count == 0:
        raise ValueError(f"dataset {recipe.dataset!r} has only {tokens} {too_few}")

    def cut(indices: list[int]) -> dict:
        begin = indices[0] * block_size
        end = min((indices[-1] + 1) * block_size, tokens)
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        stream = np.concatenate(list(encoded[int(first) : int(last) + 1]["input_ids"]))
        skipped = begin - (ends[first - 1] if first else 0)
        stream = stream[skipped : skipped + end - begin]
        return {"input_ids": np.split(stream, range(block_size, len(stream), block_size))}

    fingerprint = Hasher.hash((identity, block_size, *(["remainder"] if has_remainder else [])))
    file = None
    if encoded.cache_files:
        file = os.path.join(os.path.dirname(encoded.cache_files[0]["filename"]), f"blocks-{fingerprint}.arrow")
    blocks = Dataset.from_dict({"block": range(count)}).map(
        cut,
        input_columns="block",
        batched=True,
        num_proc=recipe.num_proc,
        remove_columns=["block"],
        features=_TOKENS,
        new_fingerprint=fingerprint,
        cache_file_name=file,
        desc="Cutting blocks",
    )
    return Blocks(blocks.with_format("numpy"), tokens, float(encoded["bytes"][:].sum() / tokens))


def _chat_texts(conversations: list, tokenizer: PreTrainedTokenizerBase, recipe: "Recipe") -> list[str]:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"text_column={recipe.text_column!r} holds messages, and tokenizer {recipe.tokenizer_name!r} has no chat "
            "template to join them"
        )
    join = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    return [join(row) if is_conversation(row) else row for row in conversations]


@dataclass
class BlockCollator:
    """Makes a batch of blocks, with each token as its own label. Pads shorter blocks by tokens without labels.

    `restart` lets positions, and so attention, restart after each end of text; a decoder then does not predict the
    first token of a document. Encoders, without `is_causal`, get a mask of padding.
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
