"""Text to blocks of tokens: corpora, the split of documents, tokenizers and packing, all through `datasets`."""

import codecs
import errno
import functools
import hashlib
import itertools
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
)
from datasets.data_files import DataFilesDict, DataFilesList
from datasets.exceptions import DatasetNotFoundError
from datasets.fingerprint import Hasher
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_nlq.training.run.recipe import Recipe


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


def text_documents(paths: list[str], fingerprints: list[str]) -> Iterator[dict[str, str]]:
    """The documents of text files: their runs of lines that are not blank. A line of blanks is a blank line.

    Args:
        paths: of UTF-8 files, with or without a byte order mark.
        fingerprints: of their contents; `datasets` caches by them.
    """
    for path in paths:
        with open(path, encoding="utf-8-sig") as file:
            for is_blank, lines in itertools.groupby(file, key=str.isspace):
                if not is_blank:
                    yield {"text": "".join(lines).removesuffix("\n")}


class Documents(dict[str, Dataset | IterableDataset]):
    """Documents by split.

    Attributes:
        fingerprint: follows from the text and from the fields of the recipe that shape the documents, not from where and when
            a file was written; for a dataset of the Hub it is that of `datasets`, and `None` for a stream from there.
    """

    def __init__(self, splits: dict[str, Dataset | IterableDataset], fingerprint: str | None):
        super().__init__(splits)
        self.fingerprint = fingerprint


def load_documents(recipe: Recipe, is_whole: bool = False) -> Documents:
    """The documents in the splits `train`, `validation` and, if the recipe asks for one, `test`.

    Args:
        recipe: names the dataset.
        is_whole: whether all documents are the split `validation`, and there is no other.

    Raises:
        ValueError: if the dataset is missing, empty, not text, lacks the column, or leaves a split without documents.
    """
    name = recipe.dataset
    if name in BUILT_IN_CORPORA:
        content = _fingerprint_of_files(python_files(name))
        splits = Dataset.from_generator(python_documents, gen_kwargs={"corpus": name, "fingerprint": content}, split="train")
        splits = splits.to_iterable_dataset() if recipe.streaming else splits
    elif Path(name).is_file():
        splits, content = _load_file(recipe)
    elif Path(name).is_dir():
        splits, content = _load_folder(recipe)
    else:
        splits, content = _load_from_hub(recipe), None
    if isinstance(splits, (Dataset, IterableDataset)):
        splits = {"train": splits}
    if "train" not in splits:
        raise ValueError(f"dataset {name!r} has no split 'train', only {', '.join(splits)}")

    column = recipe.text_column
    if splits["train"].column_names is not None and column not in splits["train"].column_names:
        columns = ", ".join(splits["train"].column_names)
        raise ValueError(f"dataset {name!r} has no column {column!r}; set text_column to one of {columns}")
    if recipe.streaming and _load(recipe, next, iter(splits["train"]), None) is None:
        raise ValueError(f"dataset {name!r} is empty")
    documents = {"validation": concatenate_datasets([*splits.values()])} if is_whole else _hold_out(splits, recipe)
    if recipe.max_validation_documents is not None:
        for split in documents.keys() - {"train"}:
            documents[split] = _take(documents[split], recipe.max_validation_documents)
    if not recipe.streaming:
        for split, dataset in documents.items():
            if len(dataset) == 0:
                raise ValueError(f"dataset {name!r} leaves no documents for the split {split!r}; check validation_fraction")
    if content is None:
        return Documents(documents, None if recipe.streaming or is_whole else documents["train"]._fingerprint)
    shape = [content, column, recipe.validation_fraction, recipe.test_fraction, recipe.max_validation_documents, is_whole]
    return Documents(documents, Hasher.hash_bytes(json.dumps(shape).encode()))


def _load(recipe: Recipe, load: Callable, *arguments, **options):
    """What a function of `datasets` loads, with errors that name the dataset."""
    name = recipe.dataset
    try:
        return load(*arguments, **options)
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        what = f"cannot be read: {_first_line(error)}"  # unreadable content, unknown configuration
        if isinstance(error, (DatasetNotFoundError, ConnectionError, FileNotFoundError)) and not Path(name).exists():
            what = f"is neither {' nor '.join(BUILT_IN_CORPORA)}, a local file or folder, nor to be had from the Hub"
        raise ValueError(f"dataset {name!r} {what}") from error


def _load_file(recipe: Recipe) -> tuple[Dataset | IterableDataset, str]:
    """The rows of a local file, and a hash of its content and format."""
    name, path = recipe.dataset, Path(recipe.dataset).absolute()
    file_format = _FILE_FORMATS.get(path.suffix)
    if file_format is None:
        raise ValueError(f"dataset {name!r}: a local file must end in {', '.join(_FILE_FORMATS)}")
    digest = _hash_file(path, name)
    if path.stat().st_size == 0:
        raise ValueError(f"dataset {name!r} is empty")
    if file_format == "text":
        rows = _load_texts(recipe, [str(path)], [digest])
    else:
        _check_path(path, name, "::")
        # Given as a string, the path would be a pattern: `g[1].jsonl` is then the name of `g1.jsonl`
        files = DataFilesDict(train=DataFilesList([str(path)], [(digest,)]))
        rows = _load(recipe, load_dataset, file_format, data_files=files, streaming=recipe.streaming, split="train")
    return rows, f"{file_format} {digest}"


def _load_texts(recipe: Recipe, paths: list[str], digests: list[str]) -> Dataset | IterableDataset:
    """The documents of text files. The loader of `datasets` takes each line for one, or keeps lines of blanks inside."""
    if next(text_documents(paths, digests), None) is None:
        raise ValueError(f"dataset {recipe.dataset!r} is empty")
    kind = IterableDataset if recipe.streaming else Dataset
    options = {"gen_kwargs": {"paths": paths, "fingerprints": digests}, "features": Features({"text": Value("string")})}
    return _load(recipe, kind.from_generator, text_documents, **options, split="train")


def _load_folder(recipe: Recipe) -> tuple[dict, str]:
    """The splits of a local dataset folder, and a hash of its files' content."""
    name, path = recipe.dataset, Path(recipe.dataset).resolve()
    _check_path(path, name, "::", *"*?[")
    builder = _load(recipe, load_dataset_builder, str(path), recipe.dataset_config)
    files = {str(split): files for split, files in builder.config.data_files.items()}
    digests = {split: [_hash_file(Path(file), file) for file in paths] for split, paths in files.items()}
    content = f"{builder.name} {json.dumps(digests)}"
    if builder.name == "text":
        return {split: _load_texts(recipe, list(paths), digests[split]) for split, paths in files.items()}, content
    # `datasets` would cache by times of modification
    files = DataFilesDict({split: DataFilesList(paths, list(zip(digests[split]))) for split, paths in files.items()})
    splits = _load(recipe, load_dataset, str(path), recipe.dataset_config, data_files=files, streaming=recipe.streaming)
    return splits, content


def _load_from_hub(recipe: Recipe) -> dict:
    path = Path(recipe.dataset)
    if path.suffix in _FILE_FORMATS or path.is_absolute():
        raise ValueError(f"dataset {recipe.dataset!r}: there is no such file or folder")
    if recipe.dataset in _PACKAGED_DATASETS_MODULES:
        # `datasets` would read whatever lies in the working directory
        raise ValueError(f"dataset {recipe.dataset!r} is the name of a file format, and there is no such folder")
    return _load(recipe, load_dataset, recipe.dataset, recipe.dataset_config, streaming=recipe.streaming)


def _check_path(path: Path, name: str, *patterns: str) -> None:
    """Raises `ValueError` for a path that `datasets` would take for a pattern or a chain of addresses."""
    if found := [pattern for pattern in patterns if pattern in str(path)]:
        raise ValueError(f"dataset {name!r}: {str(path)!r} holds {' and '.join(found)}: rename it, `datasets` cannot read it")


def _hash_file(path: Path, name: str) -> str:
    """A hash of a file's content.

    Raises:
        ValueError: if it is a file of text and not UTF-8. The loaders would not name it, and in a stream only find it late.
    """
    digest, decoder, line = xxhash.xxh64(), codecs.getincrementaldecoder("utf-8")(), 1
    is_text = path.suffix in (".txt", ".jsonl", ".json", ".csv", ".tsv")
    with path.open("rb") as file:
        while True:
            chunk = file.read(2**20)
            digest.update(chunk)
            try:
                if is_text:
                    decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                byte = error.object[error.start]
                raise ValueError(f"dataset {name!r} is not UTF-8: byte 0x{byte:02x} in line {line}") from error
            if not chunk:
                return digest.hexdigest()
            line += chunk.count(b"\n")


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check_text(value, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must hold text, not {value!r}")
    return value


def _lies_between(document: dict, column: str, first: float, last: float) -> bool:
    """Whether a hash of a document's text lies in a part of [0, 1): the same in every process and order, and for every copy."""
    text = _check_text(document[column], column)
    return first <= int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 < last


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
    for split, (first, last) in ({**bounds, "train": (end, 1.0)} if bounds else {}).items():
        lies_here = functools.partial(_lies_between, column=column, first=first, last=last)
        options = {}
        if not recipe.streaming:
            # `datasets` would hash the function's name, and reuse what was cached with another body
            identity = Hasher.hash((splits["train"]._fingerprint, "hash of text", column, first, last))
            options = {"num_proc": recipe.num_proc, "new_fingerprint": identity}
        documents[split] = splits["train"].filter(lies_here, **options)
    return documents


def _take(dataset, count: int):
    return dataset.take(count) if isinstance(dataset, IterableDataset) else dataset.select(range(min(count, len(dataset))))


def make_tokenizer(recipe: Recipe, documents: dict[str, Dataset | IterableDataset]) -> PreTrainedTokenizerBase:
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
        column = recipe.text_column
        return train_byte_pair_encoding((_check_text(row[column], column) for row in sample), int(size))
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


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many embeddings a tokenizer needs: its largest id and one more. Where ids have gaps it has fewer tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str, config: PreTrainedConfig) -> None:
    """Raises `ValueError` if a tokenizer, named by `name`, has ids for which a model has no embeddings."""
    if (size := vocabulary_size(tokenizer)) > config.vocab_size:
        raise ValueError(
            f"tokenizer {name!r} has ids up to {size - 1}, too large for the model's vocab_size={config.vocab_size}"
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

    A special token that is written in a document, as `<|endoftext|>` may be, is text there. Tokenizers whose model looks up
    whole words (`Unigram`, `WordLevel`) find it all the same.
    A `Dataset` gives the same blocks whatever the number of processes. An `IterableDataset` is cut a thousand documents at a
    time, and what fills no block at the end of each thousand is dropped.

    Raises:
        ValueError: if the documents fill no block.
    """
    column, block_size, end = recipe.text_column, recipe.block_size, tokenizer.eos_token_id
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {recipe.tokenizer!r} is a {type(tokenizer).__name__}: only fast tokenizers can be used")

    def encode(batch: dict) -> dict:
        texts = [_check_text(text, column) for text in batch[column]]
        ids = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
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
        blocks = encoded.map(cut_batch, batched=True, batch_size=1000, features=_TOKENS)
        if next(iter(blocks), None) is None:
            raise ValueError(f"dataset {recipe.dataset!r} has too few tokens in a split: block_size={block_size} fits none")
        return Blocks(blocks)

    # Fingerprints of our own: a tokenizer's pickle changes with use, its serialised form does not
    identity = Hasher.hash((documents._fingerprint, tokenizer.backend_tokenizer.to_str(), column, end, "special tokens split"))
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
        vocab_size: as of `vocabulary_size`.
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
