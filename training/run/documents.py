"""Documents: corpora, files and datasets of the Hub, split into training, validation and test documents."""

import codecs
import dataclasses
import errno
import gzip
import hashlib
import itertools
import json
import os
import reprlib
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
)
from datasets.data_files import DataFilesDict, DataFilesList, get_data_patterns
from datasets.exceptions import DatasetNotFoundError
from datasets.fingerprint import Hasher
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub import DatasetCard
from transformers.utils import logging

from ..files import BUILT_IN_CORPORA, CARD_FILE, DATA_FORMATS, data_format
from ..parameters import listed
from ..text import first_line, root_cause
from .recipe import Recipe


logger = logging.get_logger(__name__)

# Of a document: a tokenizer takes some hundred bytes of memory for each
MOST_CHARACTERS = 5_000_000
# Suffixes of files with text that only `datasets` reads, and not together with `DATA_FORMATS`
_OTHER_FORMATS = (".arrow", ".csv", ".ndjson", ".tsv")


def python_files(corpus: str) -> list[Path]:
    """The Python files of a built-in corpus, in a fixed order: `python-stdlib` is the running interpreter's standard library,
    `python-site-packages` what is installed beside it."""
    root = Path(sysconfig.get_paths()[BUILT_IN_CORPORA[corpus]])
    return sorted(path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)


def python_documents(corpus: str, fingerprint: str) -> Iterator[dict[str, str]]:
    """The documents of a built-in corpus: one per file that is valid Python source text. `datasets` caches by the arguments."""
    root = Path(sysconfig.get_paths()[BUILT_IN_CORPORA[corpus]])
    for path in python_files(corpus):
        try:
            with tokenize.open(path) as file:  # reads the encoding that the file declares
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
    """The documents of text files: paragraphs between blank lines. A line of white space is blank.

    Args:
        paths: UTF-8 files, with or without a byte order mark, and compressed if they end in `.gz`.
        fingerprints: hashes of their contents, by which `datasets` caches.
    """
    for path in paths:
        with _open(path, "rt", encoding="utf-8-sig") as file:
            for is_blank, lines in itertools.groupby(file, key=str.isspace):
                if not is_blank:
                    yield {"text": "".join(lines).removesuffix("\n")}


class Documents(dict[str, Dataset | IterableDataset]):
    """Documents by split.

    Attributes:
        fingerprint: hash of the text and of the fields of the recipe that shape the documents, without the place and the time
            of a file; for a dataset of the Hub that of `datasets`, and `None` for a stream from there.
    """

    def __init__(self, splits: dict[str, Dataset | IterableDataset], fingerprint: str | None):
        super().__init__(splits)
        self.fingerprint = fingerprint


def load_documents(recipe: Recipe, is_whole: bool = False) -> Documents:
    """Loads the documents in the splits `train`, `validation` and, if the recipe asks for one, `test`.

    Args:
        recipe: names the dataset.
        is_whole: put all documents into the split `validation`, the only one.

    Raises:
        ValueError: if the dataset is missing, empty, not text, lacks the column, or leaves a split without documents.
    """
    name, column = recipe.dataset, recipe.text_column
    files, content = _local_files(recipe)
    if name in BUILT_IN_CORPORA:
        rows = Dataset.from_generator(python_documents, gen_kwargs={"corpus": name, "fingerprint": content}, split="train")
        splits = {"train": rows.to_iterable_dataset() if recipe.streaming else rows}
    elif content is not None:
        splits = {split: _load_files(recipe, part) for split, part in files.items()}
    else:
        splits = _load_from_hub(recipe)
    if "train" not in splits:
        raise ValueError(f"dataset {name!r} has no split 'train', only {', '.join(splits)}")
    if splits["train"].column_names is not None and column not in splits["train"].column_names:
        columns = ", ".join(splits["train"].column_names)
        raise ValueError(f"dataset {name!r} has no column {column!r}; set text_column to one of {columns}")
    if recipe.streaming and _load(recipe, next, iter(splits["train"]), None) is None:
        raise ValueError(f"dataset {name!r} is empty")
    documents = {"validation": concatenate_datasets([*splits.values()])} if is_whole else _hold_out(splits, recipe)
    if recipe.max_validation_documents is not None:
        for split in documents.keys() - {"train"}:
            most = recipe.max_validation_documents
            documents[split] = documents[split].take(most if recipe.streaming else min(most, len(documents[split])))
    for split, dataset in documents.items():
        if not recipe.streaming and len(dataset) == 0:
            raise ValueError(f"dataset {name!r} leaves no documents for the split {split!r}; check validation_fraction")
    if content is None:
        return Documents(documents, None if recipe.streaming or is_whole else documents["train"]._fingerprint)
    return Documents(documents, _fingerprint(content, recipe, is_whole))


def local_fingerprint(recipe: Recipe) -> str | None:
    """The fingerprint of the documents of a recipe, without loading them; `None` for a dataset of the Hub."""
    _, content = _local_files(recipe)
    return None if content is None else _fingerprint(content, recipe)


def files_by_split(recipe: Recipe) -> dict[str, list[Path]]:
    """The files of a built-in or local dataset by split, found by their names; none are known of a dataset of the Hub.

    Raises:
        ValueError: if the folder holds other files with text, or files that belong to no split.
    """
    path = Path(recipe.dataset)
    if recipe.dataset in BUILT_IN_CORPORA:
        return {"train": python_files(recipe.dataset)}
    if not path.is_dir():
        return {"train": [path]} if path.is_file() else {}
    found = _find_files(recipe, path.resolve()) or {}
    return {split: list(map(Path, files)) for split, files in found.items()}


def has_own_splits(recipe: Recipe) -> bool:
    """Tells whether the files of a local dataset make splits, so that none is cut from the training documents."""
    try:
        return bool(_local_files(recipe)[0].keys() - {"train"})
    except ValueError:  # it cannot be read at all
        return False


def _fingerprint(content: str, recipe: Recipe, is_whole: bool = False) -> str:
    shape = [content, recipe.text_column, recipe.validation_fraction, recipe.test_fraction, recipe.max_validation_documents]
    return Hasher.hash_bytes(json.dumps([*shape, is_whole]).encode())


def _load(recipe: Recipe, load: Callable, *arguments, **options):
    """Calls a function of `datasets`, with errors that name the dataset."""
    name = recipe.dataset
    try:
        return load(*arguments, **options)
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        what = f"cannot be read: {first_line(root_cause(error))}"  # unreadable content, unknown configuration
        if isinstance(error, (DatasetNotFoundError, ConnectionError, FileNotFoundError)) and not Path(name).exists():
            what = f"is neither {' nor '.join(BUILT_IN_CORPORA)}, a local file or folder, nor available from the Hub"
        raise ValueError(f"dataset {name!r} {what}") from error


@dataclass(frozen=True)
class _File:
    """A local file of a dataset.

    Attributes:
        path: absolute path.
        reader: a value of `DATA_FORMATS`, or the folder of a dataset that only `datasets` can read.
        digest: hash of the content.
    """

    path: str
    reader: str
    digest: str


def _local_files(recipe: Recipe) -> tuple[dict[str, list[_File]], str | None]:
    """The files of a local dataset by split, and a text that follows their content and formats; `None` for one of the Hub.

    Of a built-in corpus there is the text alone.

    Raises:
        ValueError: if there are none that can be read, or some would be left out.
    """
    name, path = recipe.dataset, Path(recipe.dataset)
    if name in BUILT_IN_CORPORA:
        return {}, _fingerprint_of_files(python_files(name))
    if not path.exists():
        return {}, None
    if path.is_file():
        reader = data_format(path)
        if reader is None:
            raise ValueError(f"dataset {name!r}: a local file must end in {', '.join(DATA_FORMATS)}, or one of these and .gz")
        if reader != "text":
            _check_path(path.absolute(), name, "::")
        digest = _hash_file(path, name)
        return {"train": [_File(str(path.absolute()), reader, digest)]}, f"{reader} {digest}"
    path = path.resolve()
    _check_path(path, name, "::", *"*?[")
    found, kind = _find_files(recipe, path), None
    if found is None:
        builder = _load(recipe, load_dataset_builder, str(path), recipe.dataset_config)
        found, kind = {str(split): list(paths) for split, paths in builder.config.data_files.items()}, builder.name
    reader = str(path) if kind not in (None, "text") else kind
    files = {
        split: [_File(file, reader or data_format(file), _hash_file(Path(file), file)) for file in paths]
        for split, paths in found.items()
    }
    kind = kind or "+".join(sorted({file.reader for file in itertools.chain(*files.values())}))
    return files, f"{kind} {json.dumps({split: [file.digest for file in part] for split, part in files.items()})}"


def _find_files(recipe: Recipe, folder: Path) -> dict[str, list[str]] | None:
    """Finds the files of a folder by split, of all `DATA_FORMATS`, where `datasets` would read those of one format only.

    It is `None` if there are none, or if the card of the folder says which files to read: that is left to `datasets`.
    """
    name, card = recipe.dataset, folder / CARD_FILE
    if recipe.dataset_config is not None or (card.is_file() and DatasetCard.load(card).data.get("configs")):
        return None
    try:
        splits = DataFilesDict.from_patterns(get_data_patterns(str(folder)), str(folder))
        every = DataFilesList.from_patterns(["**"], str(folder))
    except FileNotFoundError:
        return None
    found = {str(split): [file for file in files if data_format(file)] for split, files in splits.items()}
    if not any(found.values()):
        return None
    if others := {suffix for file in every for suffix in Path(file).suffixes if suffix.lower() in _OTHER_FORMATS}:
        known = sorted({Path(file).suffix for file in every if data_format(file)})
        formats = ", ".join([*known, *sorted(others)])
        raise ValueError(f"dataset {name!r} holds {formats}: only {', '.join(DATA_FORMATS)} can be read together")
    left = {file for file in every if data_format(file)} - set(itertools.chain(*found.values()))
    if left:
        shown = listed(sorted(os.path.relpath(file, folder) for file in left))
        raise ValueError(
            f"dataset {name!r}: {shown} would be left out, because other files are named after splits ({', '.join(found)}); "
            "name all of them so, or none"
        )
    if len(kinds := sorted({Path(file).suffix for files in found.values() for file in files})) > 1:
        logger.warning(f"dataset {name!r}: reading the files in {' and '.join(kinds)} together")
    return {split: files for split, files in found.items() if files}


def _load_files(recipe: Recipe, files: list[_File]) -> Dataset | IterableDataset:
    """Loads the rows of local files, one format after the other. Of several formats, only the text is read."""
    by_reader: dict[str, list[_File]] = {}
    for file in files:
        if not _is_empty(file):
            by_reader.setdefault(file.reader, []).append(file)
    if not by_reader:
        raise ValueError(f"dataset {recipe.dataset!r} is empty")
    parts = [_load_format(recipe, reader, part) for reader, part in by_reader.items()]
    if len(parts) == 1:
        return parts[0]
    column = recipe.text_column
    for reader, part in zip(by_reader, parts):
        columns = part.column_names or [*next(iter(part))]
        if column not in columns:
            raise ValueError(
                f"dataset {recipe.dataset!r}: its files of format {reader!r} have no column {column!r}, only "
                f"{', '.join(columns)}"
            )
    return _load(recipe, concatenate_datasets, [part.select_columns([column]) for part in parts])


def _load_format(recipe: Recipe, reader: str, files: list[_File]) -> Dataset | IterableDataset:
    paths, digests = [file.path for file in files], [file.digest for file in files]
    if reader == "text":
        # The loader of `datasets` makes each line a document, or does not split at lines of white space
        kind = IterableDataset if recipe.streaming else Dataset
        options = {"gen_kwargs": {"paths": paths, "fingerprints": digests}, "features": Features({"text": Value("string")})}
        return _load(recipe, kind.from_generator, text_documents, **options, split="train")
    # Given as a string, the path would be a pattern: `g[1].jsonl` is then the name of `g1.jsonl`. By default `datasets` caches
    # by the times of modification
    data_files = DataFilesDict(train=DataFilesList(paths, list(zip(digests))))
    config = recipe.dataset_config if Path(reader).is_absolute() else None
    return _load(recipe, load_dataset, reader, config, data_files=data_files, streaming=recipe.streaming, split="train")


def _is_empty(file: _File) -> bool:
    if file.reader == "text":
        return next(text_documents([file.path], [file.digest]), None) is None
    with _open(file.path, "rb") as content:
        return not content.read(1)


def _open(path: str | Path, mode: str, **options) -> IO:
    return (gzip.open if str(path).lower().endswith(".gz") else open)(path, mode, **options)


def _load_from_hub(recipe: Recipe) -> dict:
    path = Path(recipe.dataset)
    if data_format(path) is not None or path.is_absolute():
        raise ValueError(f"dataset {recipe.dataset!r}: there is no such file or folder")
    if recipe.dataset in _PACKAGED_DATASETS_MODULES:
        # `datasets` would read the files in the working directory
        raise ValueError(f"dataset {recipe.dataset!r} is the name of a file format, and there is no such folder")
    return _load(recipe, load_dataset, recipe.dataset, recipe.dataset_config, streaming=recipe.streaming)


def _check_path(path: Path, name: str, *patterns: str) -> None:
    """Raises `ValueError` for a path that `datasets` would read as a pattern or a chain of addresses."""
    if found := [pattern for pattern in patterns if pattern in str(path)]:
        raise ValueError(f"dataset {name!r}: {str(path)!r} holds {' and '.join(found)}: rename it, `datasets` cannot read it")


def _hash_file(path: Path, name: str) -> str:
    """Hashes the content of a file, unpacked.

    Raises:
        ValueError: if it cannot be unpacked, or is a file of text and not UTF-8. The loaders would find that late in a stream,
            and not name the file.
    """
    digest, decoder, line = xxhash.xxh64(), codecs.getincrementaldecoder("utf-8")(), 1
    is_text = Path(path.name.lower().removesuffix(".gz")).suffix in (".txt", ".jsonl", ".json", ".csv", ".tsv")
    try:
        with _open(path, "rb") as file:
            while True:
                chunk = file.read(2**20)
                digest.update(chunk)
                if is_text:
                    decoder.decode(chunk, final=not chunk)
                if not chunk:
                    return digest.hexdigest()
                line += chunk.count(b"\n")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        byte = error.object[error.start]
        raise ValueError(f"dataset {name!r} is not UTF-8: byte 0x{byte:02x} in line {line}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"dataset {name!r} cannot be unpacked: {first_line(error)}") from error


def check_text(value, recipe: Recipe) -> str:
    """Returns a value of the text column; raises `ValueError`, which says where it is, if it is no text, or too long a one."""
    if not isinstance(value, str):
        raise ValueError(
            f"dataset {recipe.dataset!r}{_place_without_text(recipe)}: column {recipe.text_column!r} must hold text, not "
            f"{reprlib.repr(value)}"
        )
    if len(value) > MOST_CHARACTERS:
        raise ValueError(
            f"dataset {recipe.dataset!r} holds a document of {len(value):,} characters (it begins with {value[:40]!r}), and at "
            f"most {MOST_CHARACTERS:,} are read as one; cut it into several"
        )
    return value


def _place_without_text(recipe: Recipe) -> str:
    """Reads a dataset again, file by file, up to the first row that holds no text."""
    recipe = dataclasses.replace(recipe, streaming=True)
    if Path(recipe.dataset).exists():
        files = [file for part in _local_files(recipe)[0].values() for file in part if not _is_empty(file)]
        parts = {os.path.relpath(file.path, recipe.dataset): _load_files(recipe, [file]) for file in files}
    else:
        parts = {f"split {split}": rows for split, rows in _load_from_hub(recipe).items()}
    for place, rows in parts.items():
        for number, row in enumerate(rows, 1):
            if not isinstance(row.get(recipe.text_column), str):
                return f", row {number}" if place == "." else f", {place}, row {number}"
    return ""


def _lies_between(document: dict, recipe: Recipe, first: float, last: float) -> bool:
    """Tells whether a hash of the document's text lies in `[first, last)` of [0, 1). It is the same in every process."""
    text = check_text(document[recipe.text_column], recipe)
    return first <= int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 < last


def _hold_out(splits: dict, recipe: Recipe) -> dict:
    """Takes the dataset's own splits, and holds out documents of its training split for the missing ones."""
    wanted = {"validation": recipe.validation_fraction, "test": recipe.test_fraction}
    documents, bounds, end = {"train": splits["train"]}, {}, 0.0
    for split, fraction in wanted.items():
        if fraction > 0.0 and split in splits:
            documents[split] = splits[split]
        elif fraction > 0.0:
            bounds[split] = (end, end + fraction)
            end += fraction
    for split, (first, last) in ({**bounds, "train": (end, 1.0)} if bounds else {}).items():
        options = {}
        if not recipe.streaming:
            # By default `datasets` hashes the name of the function, and would reuse a result of another version of it
            identity = Hasher.hash((splits["train"]._fingerprint, "hash of text", recipe.text_column, first, last))
            options = {"num_proc": recipe.num_proc, "new_fingerprint": identity}
        lies_here = {"recipe": recipe, "first": first, "last": last}
        documents[split] = splits["train"].filter(_lies_between, fn_kwargs=lies_here, **options)
    return documents
