"""Names the files of runs, conversions and comparisons, and reads and writes YAML and JSON."""

import ast
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from modeling_nlq.parts_user_nlq import default_auto_map, saved_auto_map

from ..configuration import suggestion
from .disk import MANIFEST, UNFINISHED, read_bytes, read_text, write_text
from .text import QUOTE_IT


# Suffixes of data files, before `.gz` if any, and the builder of `datasets` for each
DATA_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
BUILT_IN_CORPORA = ("python-stdlib", "python-docstrings", "cmudict")
SYNTHETIC = "synthetic:"  # before the name of a task
CARD_FILE = "README.md"
CHECKSUMS_FILE = "checksums.json"
CONVERSION_FILE = "conversion.json"
METRICS_FILE = "metrics.json"
PAGE_FILE = "explore.html"
PAGE_MARK = b'<meta name="generator" content="nlq explore">'  # in a page
PLOT_FILE = "loss.png"
RECIPE_FILE = "recipe.yaml"
STATE_FILE = "trainer_state.json"
COMPARISON_FILE = "comparison.yaml"
RESULTS_FILE = "results.json"
THREADS_FILE = "threads.txt"
RUNS_FILE = "runs.parquet"
VERDICTS_FILE = "verdicts.parquet"
REPORT_FILES = ("results.md", "figures/*.png")
TASKS_FILE = "tasks.json"
MODELS_FILE = "models.json"
LOCK_FILE = ".lock"
CHECKPOINT = "checkpoint-"
# Suffixes of the files beside a run's folder
LOG = ".log"
PROGRESS = ".progress.json"

# Files of a saved model, as patterns
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
SETTINGS = ("config.json", "generation_config.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # as PEFT names them
TOKENIZER = (
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# Each of these shows that a folder holds a tokenizer
VOCABULARIES = ("spiece.model", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
RECORDS = (METRICS_FILE, RECIPE_FILE, CONVERSION_FILE, PLOT_FILE)

# Fields of recipes with which a run may resume, because they do not change the result
_FREE_FIELDS = {"explore", "num_proc", "disable_tqdm", "log_level", "report_to", "dataloader_num_workers"}
_NOT_SET = object()


def data_format(path: str | Path) -> str | None:
    return DATA_FORMATS.get(Path(Path(path).name.lower().removesuffix(".gz")).suffix)


def is_synthetic(dataset: Any) -> bool:
    return str(dataset).startswith(SYNTHETIC)


def is_built_in(dataset: str) -> bool:
    return dataset in BUILT_IN_CORPORA or is_synthetic(dataset)


def is_repository_name(text: str) -> bool:
    """Whether a repository of the Hub could have this name, with or without its owner."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text, re.ASCII) is not None


def yaml_text(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_YamlDumper, sort_keys=False)


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    write_text(path, yaml_text(content))


def is_nonempty(path: Path) -> bool:
    """Tells whether a path is a file, or a folder with more than lock, manifest and temporary files."""
    try:
        entries = list(path.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True
    return any(entry.suffix != UNFINISHED and entry.name not in (LOCK_FILE, MANIFEST) for entry in entries)


class YamlLoader(yaml.SafeLoader):
    """Reads `2e-5` as a number; refuses repeated keys, and documents that would fill the memory."""

    def compose_document(self):
        node = super().compose_document()
        values, levels = self._size(node, {})
        if values > 50_000 or levels > 100:
            raise ValueError(_TOO_LARGE)
        return node

    def _size(self, node, sizes):
        """Returns the numbers of values and levels; aliases count."""
        if node in sizes:
            return sizes[node]
        sizes[node] = (10**6, 0)  # until counted: children may repeat it
        if node.tag.endswith((":int", ":float")) and len(node.value) > 1000:
            raise ValueError(_TOO_LARGE)
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain(*children)
        total, depth = 1, 0
        for child in children:
            values, levels = self._size(child, sizes)
            total, depth = total + values, max(depth, levels)
        sizes[node] = (total, 1 + depth)
        return sizes[node]

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", node.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _YamlDumper(yaml.SafeDumper):  # quotes texts that `YamlLoader` would read as numbers
    pass


_MERGE = "tag:yaml.org,2002:merge"
_TOO_LARGE = "more than 4,000,000 characters, 50,000 values (aliases repeat them), 100 levels or 1,000 digits"
for _kind in (YamlLoader, _YamlDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def parse_yaml(text: str) -> Any:
    """Reads YAML; raises `yaml.YAMLError`, or `ValueError` for too much of it."""
    if len(text) > 4_000_000:
        raise ValueError(_TOO_LARGE)
    try:
        return yaml.load(text, Loader=YamlLoader)
    except RecursionError:
        raise ValueError(_TOO_LARGE) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file; raises `ValueError` for anything else."""
    try:
        content = parse_yaml(read_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold fields and values, not {type(content).__name__}")
    return read_section(content, str(path))


def merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings of fields, and their halves."""
    result = {**fields, **more}
    for half in ("encoder", "decoder"):
        if isinstance(fields.get(half), dict) and isinstance(more.get(half), dict):
            result[half] = {**fields[half], **more[half]}
    return result


def read_section(section: Any, source: str) -> dict[str, Any]:
    """Copies a mapping of YAML, which may be missing; raises `ValueError` for another value or name."""
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"{source} must hold fields and values, not {section!r}")
    for name in section or {}:
        if not isinstance(name, str):
            raise ValueError(f"{source}: the name {name!r} must be text; {QUOTE_IT}")
    return dict(section or {})


def read_json(path: Path) -> dict[str, Any]:
    """Reads the mapping in a JSON file; raises `ValueError` for anything else."""
    data = read_bytes(path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it must hold fields and values, not {type(content).__name__}")
    return content


def check_keys(source: str, keys, known) -> None:
    for key in keys:
        if key not in known:
            raise ValueError(f"{source}: unknown field {key!r}; {suggestion(str(key), known)}")


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Lists the fields that differ; null is a value, for it may undo that of another section."""

    def short(value: Any) -> str:
        if value is _NOT_SET:
            return "not set"
        is_file = isinstance(value, str) and "\n" in value
        return f"a file with the hash {hashlib.sha256(value.encode()).hexdigest()[:12]}" if is_file else repr(value)

    before, now = flatten(before), flatten(now)
    pairs = ((key, before.get(key, _NOT_SET), now.get(key, _NOT_SET)) for key in sorted(before.keys() | now.keys()))
    return ", ".join(f"{key}: {short(one)} there, {short(other)} now" for key, one, other in pairs if one != other)


def flatten(fields: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Returns fields and those of their sections, such as `training.seed`, without any that changes no result."""
    flat = {}
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{section}{name}."))
        elif name not in _FREE_FIELDS:
            flat[f"{section}{name}"] = value
    return flat


def files_in(folder: Path, patterns: Sequence[str]) -> set[Path]:
    return {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}


def code_files(folder: Path) -> set[Path]:
    """Returns the files that the Auto classes load, and their imports; raises `ValueError` for a link or no Python."""
    settings = folder / "config.json"
    fields = read_json(settings) if settings.is_file() else {}
    classes = (*default_auto_map(fields).values(), *saved_auto_map(folder, fields).values())
    waiting = {name.partition(".")[0] for name in classes}
    modules = set()
    while waiting:
        modules.add(module := waiting.pop())
        if (path := folder / f"{module}.py").is_file():
            waiting |= relative_imports(path) - modules
    return {folder / f"{module}.py" for module in modules}


def relative_imports(path: Path) -> set[str]:
    """Returns the modules beside a file that it imports; raises as `code_files`."""
    try:
        nodes = ast.walk(ast.parse(read_bytes(path)))
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module}
    return set(filter(str.isidentifier, names))
