"""Text to blocks of tokens: corpora, the split of documents, tokenizers and packing, all through `datasets`."""

import functools
import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, List, Value, load_dataset
from datasets.exceptions import DatasetNotFoundError
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_nlq.training.recipe import Recipe


END_OF_TEXT = "<|endoftext|>"
_TOKENS = Features({"input_ids": List(Value("int32"))})
_FILE_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


# The built-in corpora, and where of `sysconfig.get_paths()` their Python files lie.
BUILT_IN_CORPORA = {"python-stdlib": "stdlib", "python-site-packages": "purelib"}


def python_files(corpus: str) -> list[Path]:
    """The Python files of a built-in corpus, in a fixed order: `python-stdlib` is the running interpreter's standard library,
    `python-site-packages` what is installed beside it."""
    root = Path(sysconfig.get_paths()[BUILT_IN_CORPORA[corpus]])
    return sorted(path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)


def python_documents(corpus: str, fingerprint: str) -> Iterator[dict[str, str]]:
    """The documents of a built-in corpus: one per file that is valid Python source text.

    Args:
        corpus: a key of `BUILT_IN_CORPORA`.
        fingerprint: of the files; `datasets` caches by it.
    """
    root = Path(sysconfig.get_paths()[BUILT_IN_CORPORA[corpus]])
    for path in python_files(corpus):
        try:
            with tokenize.open(path) as file:  # honours the encoding that the file declares
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # the standard library tests itself with broken files
        if text.strip():
            yield {"path": path.relative_to(root).as_posix(), "text": text}


def _fingerprint_of_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def load_documents(recipe: Recipe, allow_empty: bool = False) -> DatasetDict | IterableDatasetDict:
    """The documents in the splits `train`, `validation` and, if the recipe asks for one, `test`.

    Args:
        recipe: names the dataset.
        allow_empty: whether a split may hold no documents.

    Raises:
        ValueError: if the dataset is missing, empty, lacks the column, or leaves a split without documents.
    """
    name = recipe.dataset
    if name in BUILT_IN_CORPORA:
        fingerprint = _fingerprint_of_files(python_files(name))
        splits = Dataset.from_generator(
            python_documents, gen_kwargs={"corpus": name, "fingerprint": fingerprint}, split="train"
        )
        splits = splits.to_iterable_dataset() if recipe.streaming else splits
    else:
        splits = _load_splits(recipe)
    if isinstance(splits, (Dataset, IterableDataset)):
        splits = {"train": splits}
    if "train" not in splits:
        raise ValueError(f"dataset {name!r} has no split 'train', only {', '.join(splits)}")

    column = recipe.text_column
    if splits["train"].column_names is not None and column not in splits["train"].column_names:
        columns = ", ".join(splits["train"].column_names)
        raise ValueError(f"dataset {name!r} has no column {column!r}; set text_column to one of {columns}")
    documents = _hold_out(splits, recipe)
    if recipe.max_validation_documents is not None:
        for split in documents.keys() - {"train"}:
            documents[split] = _take(documents[split], recipe.max_validation_documents)
    kind = IterableDatasetDict if recipe.streaming else DatasetDict
    documents = kind(documents)
    if not recipe.streaming:
        for split, dataset in documents.items():
            if len(dataset) == 0 and not allow_empty:
                raise ValueError(f"dataset {name!r} leaves no documents for the split {split!r}; check validation_fraction")
    return documents


def _load_splits(recipe: Recipe):
    name, path = recipe.dataset, Path(recipe.dataset)
    file_format = _FILE_FORMATS.get(path.suffix)
    try:
        if path.is_file():
            if file_format is None:
                raise ValueError(f"dataset {name!r}: a local file must end in {', '.join(_FILE_FORMATS)}")
            if path.stat().st_size == 0:
                raise ValueError(f"dataset {name!r} is empty")
            options = {"sample_by": "paragraph"} if file_format == "text" else {}
            return load_dataset(file_format, data_files=str(path), streaming=recipe.streaming, **options)
        if file_format is not None or path.is_absolute():
            raise ValueError(f"dataset {name!r}: there is no such file")
        return load_dataset(name, recipe.dataset_config, streaming=recipe.streaming)
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"dataset {name!r} is neither {' nor '.join(BUILT_IN_CORPORA)}, a local file, nor to be had from the Hub"
        ) from error
    except Exception as error:
        if type(error).__module__.startswith("datasets"):  # unreadable content, unknown configuration
            raise ValueError(f"dataset {name!r} cannot be read: {_first_line(error)}") from error
        raise


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _lies_between(document: dict, column: str, first: float, last: float) -> bool:
    """Whether a hash of a document's path, or of its text, lies in a part of [0, 1): the same in every process and order."""
    key = document.get("path") or document[column]
    if not isinstance(document[column], str) or not isinstance(key, str):
        raise ValueError(f"column {column!r} must hold text, not {document[column]!r}")
    return first <= int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64 < last


def _hold_out(splits: dict, recipe: Recipe) -> dict:
    """The dataset's own splits, and held-out documents of its training split for those that it has not."""
    column = recipe.text_column
    wanted = {"validation": recipe.validation_fraction, "test": recipe.test_fraction}
    documents, bounds, end = {"train": splits["train"]}, {}, 0.0
    for split, fraction in wanted.items():
        if fraction > 0.0 and split in splits:
            documents[split] = splits[split]
        elif fraction > 0.0:
            bounds[split] = (end, end + fraction)
            end += fraction
    options = {} if recipe.streaming else {"num_proc": recipe.num_proc}
    for split, (first, last) in ({**bounds, "train": (end, 1.0)} if bounds else {}).items():
        lies_here = functools.partial(_lies_between, column=column, first=first, last=last)
        documents[split] = splits["train"].filter(lies_here, **options)
    return documents


def _take(dataset, count: int):
    return dataset.take(count) if isinstance(dataset, IterableDataset) else dataset.select(range(min(count, len(dataset))))


def make_tokenizer(recipe: Recipe, documents: DatasetDict | IterableDatasetDict) -> PreTrainedTokenizerBase:
    """The tokenizer a recipe names: trained on the training documents (`bpe:SIZE`), or a saved one.

    Raises:
        ValueError: if it is not to be had or has no end-of-text token.
    """
    if recipe.tokenizer.startswith("bpe:"):
        size = recipe.tokenizer.removeprefix("bpe:")
        if not size.isdecimal() or int(size) < 257:
            raise ValueError(f"tokenizer={recipe.tokenizer!r}: SIZE must be at least 257 (256 bytes and end-of-text)")
        # A stream cannot be read twice at no cost: its first documents must do
        sample = documents["train"].take(20_000) if recipe.streaming else documents["train"]
        return train_byte_pair_encoding((row[recipe.text_column] for row in sample), int(size))
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {recipe.tokenizer!r} cannot be loaded: {_first_line(error)}") from error
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


@dataclass
class Blocks:
    """What a split becomes.

    Attributes:
        dataset: rows `input_ids` of `block_size` tokens.
        tokens: number of tokens, the remainder that fills no block included; `None` for a stream.
        bytes_per_token: UTF-8 bytes of the documents over their tokens, end-of-text included; `None` for a stream.
    """

    dataset: Dataset | IterableDataset
    tokens: int | None = None
    bytes_per_token: float | None = None


def make_blocks(documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> Blocks:
    """Documents joined by end-of-text into one stream, and the stream cut into blocks.

    A `Dataset` gives the same blocks whatever the number of processes. An `IterableDataset` is cut a thousand documents at a
    time, and what fills no block at the end of each thousand is dropped.

    Raises:
        ValueError: if the documents fill no block.
    """
    column, block_size, end = recipe.text_column, recipe.block_size, tokenizer.eos_token_id

    def encode(batch: dict) -> dict:
        ids = tokenizer(batch[column], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*document, end] for document in ids]}

    def encode_with_sizes(batch: dict) -> dict:
        ids = encode(batch)["input_ids"]
        sizes = {"length": [len(document) for document in ids], "bytes": [len(text.encode()) for text in batch[column]]}
        return {"input_ids": ids, **sizes}

    if isinstance(documents, IterableDataset):

        def cut_batch(batch: dict) -> dict:
            stream = np.concatenate([np.asarray(document, dtype=np.int32) for document in batch["input_ids"]])
            count = len(stream) // block_size
            return {"input_ids": stream[: count * block_size].reshape(count, block_size)}

        encoded = documents.map(encode, batched=True, remove_columns=documents.column_names or [column], features=_TOKENS)
        return Blocks(encoded.map(cut_batch, batched=True, batch_size=1000, features=_TOKENS))

    # Fingerprints of our own: a tokenizer's pickle changes with use, its serialised form does not
    identity = Hasher.hash((documents._fingerprint, tokenizer.backend_tokenizer.to_str(), column, end))
    encoded = documents.map(
        encode_with_sizes,
        batched=True,
        num_proc=recipe.num_proc,
        remove_columns=documents.column_names,
        features=Features({**_TOKENS, "length": Value("int64"), "bytes": Value("int64")}),
        new_fingerprint=identity,
        desc="Tokenizing",
    ).with_format("numpy")
    ends = np.cumsum(encoded["length"][:])
    tokens = int(ends[-1])
    count = tokens // block_size
    if count == 0:
        raise ValueError(f"dataset {recipe.dataset!r} has only {tokens} tokens in a split: block_size={block_size} fits none")

    def cut(indices: list[int]) -> dict:
        begin, end = indices[0] * block_size, (indices[-1] + 1) * block_size
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        stream = np.concatenate(list(encoded[int(first) : int(last) + 1]["input_ids"]))
        skipped = begin - (ends[first - 1] if first else 0)
        return {"input_ids": stream[skipped : skipped + end - begin].reshape(-1, block_size)}

    fingerprint = Hasher.hash((identity, block_size))
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


def _count_tokens(blocks: Dataset, vocab_size: int, max_tokens: int) -> np.ndarray:
    """How often each token occurs, `(vocabulary,)`, in the first blocks."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in blocks.iter(batch_size=1000):
        counts += np.bincount(batch["input_ids"].reshape(-1), minlength=vocab_size)
        if counts.sum() >= max_tokens:
            break
    return counts


def unigram_perplexity(train: Dataset, validation: Dataset, vocab_size: int, max_tokens: int = 2**27) -> float:
    """Perplexity on the validation tokens of their frequencies in the training tokens, plus one each.

    The baseline that knows which tokens are common and nothing else.

    Args:
        train, validation: blocks.
        vocab_size: number of tokens.
        max_tokens: how many tokens of each to count, enough for frequencies.
    """
    seen, held_out = (_count_tokens(blocks, vocab_size, max_tokens) for blocks in (train, validation))
    return float(np.exp(-(held_out * np.log((seen + 1) / (seen + 1).sum())).sum() / held_out.sum()))


@dataclass
class BlockCollator:
    """Blocks to a batch, every token its own label.

    Attributes:
        end_of_text: the token after each document.
        restart: whether positions, and so attention, restart after each end of text; the first token of a document then has
            no label, since it would be predicted from a document it cannot see.
    """

    end_of_text: int
    restart: bool = False

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        input_ids = torch.from_numpy(np.stack([np.asarray(row["input_ids"]) for row in rows]).astype(np.int64))
        batch = {"input_ids": input_ids, "labels": input_ids.clone()}
        if self.restart:
            starts = torch.zeros_like(input_ids, dtype=torch.bool)
            starts[:, 1:] = input_ids[:, :-1] == self.end_of_text
            index = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            batch["position_ids"] = index - torch.where(starts, index, 0).cummax(dim=-1).values
            batch["labels"] = batch["labels"].masked_fill(starts, -100)
        return batch
