"""Documents: corpora, files and datasets of the Hub, split into training, validation and test documents."""

import codecs
import errno
import functools
import hashlib
import itertools
import json
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

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
from datasets.data_files import DataFilesDict, DataFilesList
from datasets.exceptions import DatasetNotFoundError
from datasets.fingerprint import Hasher
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from modeling_nlq.training.files import BUILT_IN_CORPORA, DATA_FORMATS
from modeling_nlq.training.run.recipe import Recipe
from modeling_nlq.training.text import first_line, root_cause


def python_files(corpus: str) -> list[Path]:
    """The Python files of a built-in corpus, in a fixed order: `python-stdlib` is the running interpreter's standard library,
    `python-site-packages` what is installed beside it."""
    root = Path(sysconfig.get_paths()[BUILT_IN_CORPORA[corpus]])
    return sorted(path for path in root.rglob("*.py") if "site-packages" not in path.relative_to(root).parts)


def python_documents(corpus: str, fingerprint: str) -> Iterator[dict[str, str]]:
    """The documents of a built-in corpus: one per file that is valid Python source text.

    Args:
        corpus: a key of `BUILT_IN_CORPORA`.
        fingerprint: a hash of the files; `datasets` caches by it.
    """
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
        paths: UTF-8 files, with or without a byte order mark.
        fingerprints: hashes of their contents; `datasets` caches by them.
    """
    for path in paths:
        with open(path, encoding="utf-8-sig") as file:
            for is_blank, lines in itertools.groupby(file, key=str.isspace):
                if not is_blank:
                    yield {"text": "".join(lines).removesuffix("\n")}


class Documents(dict[str, Dataset | IterableDataset]):
    """Documents by split.

    Attributes:
        fingerprint: depends on the text and on the fields of the recipe that shape the documents, and not on the place or
            the time of a file; for a dataset of the Hub it is the one of `datasets`, and `None` for a stream from there.
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


def _load_file(recipe: Recipe) -> tuple[Dataset | IterableDataset, str]:
    """Loads the rows of a local file, with a hash of its content and format."""
    name, path = recipe.dataset, Path(recipe.dataset).absolute()
    file_format = DATA_FORMATS.get(path.suffix)
    if file_format is None:
        raise ValueError(f"dataset {name!r}: a local file must end in {', '.join(DATA_FORMATS)}")
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
    """Loads text files. The loader of `datasets` makes each line a document, or does not split at lines of white space."""
    if next(text_documents(paths, digests), None) is None:
        raise ValueError(f"dataset {recipe.dataset!r} is empty")
    kind = IterableDataset if recipe.streaming else Dataset
    options = {"gen_kwargs": {"paths": paths, "fingerprints": digests}, "features": Features({"text": Value("string")})}
    return _load(recipe, kind.from_generator, text_documents, **options, split="train")


def _load_folder(recipe: Recipe) -> tuple[dict, str]:
    """Loads the splits of a local dataset folder, with a hash of the content of its files."""
    name, path = recipe.dataset, Path(recipe.dataset).resolve()
    _check_path(path, name, "::", *"*?[")
    builder = _load(recipe, load_dataset_builder, str(path), recipe.dataset_config)
    files = {str(split): files for split, files in builder.config.data_files.items()}
    digests = {split: [_hash_file(Path(file), file) for file in paths] for split, paths in files.items()}
    content = f"{builder.name} {json.dumps(digests)}"
    if builder.name == "text":
        return {split: _load_texts(recipe, list(paths), digests[split]) for split, paths in files.items()}, content
    # By default `datasets` caches by the times of modification
    files = DataFilesDict({split: DataFilesList(paths, list(zip(digests[split]))) for split, paths in files.items()})
    splits = _load(recipe, load_dataset, str(path), recipe.dataset_config, data_files=files, streaming=recipe.streaming)
    return splits, content


def _load_from_hub(recipe: Recipe) -> dict:
    path = Path(recipe.dataset)
    if path.suffix in DATA_FORMATS or path.is_absolute():
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
    """Hashes the content of a file.

    Raises:
        ValueError: if it is a file of text and not UTF-8. The loaders would find that late in a stream, and not name the file.
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


def check_text(value, column: str) -> str:
    """Returns a value of the text column; raises `ValueError` if it is no text."""
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must hold text, not {value!r}")
    return value


def _lies_between(document: dict, column: str, first: float, last: float) -> bool:
    """Tells whether a hash of the document's text lies in `[first, last)` of [0, 1). It is the same in every process."""
    text = check_text(document[column], column)
    return first <= int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 < last


def _hold_out(splits: dict, recipe: Recipe) -> dict:
    """Takes the dataset's own splits, and holds out documents of its training split for the missing ones."""
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
            # By default `datasets` hashes the name of the function, and would reuse a result of another version of it
            identity = Hasher.hash((splits["train"]._fingerprint, "hash of text", column, first, last))
            options = {"num_proc": recipe.num_proc, "new_fingerprint": identity}
        documents[split] = splits["train"].filter(lies_here, **options)
    return documents


def _take(dataset, count: int):
    return dataset.take(count) if isinstance(dataset, IterableDataset) else dataset.select(range(min(count, len(dataset))))
