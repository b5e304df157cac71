"""Files of runs, conversions and comparisons: their names, how they are read, and how they are written whole or not at
all.
"""

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from modeling_nlq.configuration_nlq import default_auto_map, saved_auto_map

from ..configuration import suggestion
from .disk import MANIFEST, UNFINISHED, read_bytes, read_text, write_text
from .text import QUOTE_IT


# The datasets that a recipe can name besides those of the Hub: suffixes of local files, before `.gz` or at the end,
# with the builder of `datasets` that reads them; and the built-in corpus with the key of `sysconfig.get_paths()` for
# the folder of their Python files
DATA_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
BUILT_IN_CORPORA = {"python-stdlib": "stdlib", "python-docstrings": "stdlib"}
CARD_FILE = "README.md"
CHECKSUMS_FILE = "checksums.json"
CONVERSION_FILE = "conversion.json"
METRICS_FILE = "metrics.json"
PAGE_FILE = "explore.html"
PLOT_FILE = "loss.png"
RECIPE_FILE = "recipe.yaml"
STATE_FILE = "trainer_state.json"
COMPARISON_FILE = "comparison.yaml"
RESULTS_FILE = "results.json"
TASKS_FILE = "tasks.json"
MODELS_FILE = "models.json"  # of a comparison: what the names of models stand for
LOCK_FILE = ".lock"  # of the process that writes into a folder
# The folders of a run's checkpoints begin so; its log and its progress lie beside its folder, and end so
CHECKPOINT, LOG, PROGRESS = "checkpoint-", ".log", ".progress.json"

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
# A folder with one of these holds a tokenizer
VOCABULARIES = ("spiece.model", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
RECORDS = (METRICS_FILE, RECIPE_FILE, CONVERSION_FILE, PLOT_FILE)

# Fields of a recipe and of a configuration that change neither the result nor its data: a run may resume with other
# values
_FREE_FIELDS = {"explore", "num_proc", "disable_tqdm", "log_level", "report_to", "dataloader_num_workers"}
_FREE_FIELDS |= {"architectures", "dtype", "nlq_version", "transformers_version", "use_cache", "_name_or_path"}


def data_format(path: str | Path) -> str | None:
    """The format of a local file of data by its name, a value of `DATA_FORMATS`; `None` for any other file."""
    return DATA_FORMATS.get(Path(Path(path).name.lower().removesuffix(".gz")).suffix)


def yaml_text(content: dict[str, Any]) -> str:
    """Returns a mapping as YAML, in its own order."""
    return yaml.dump(content, Dumper=_YamlDumper, sort_keys=False)


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Writes a mapping as YAML, whole or not at all."""
    write_text(path, yaml_text(content))


def is_nonempty(path: Path) -> bool:
    """Tells whether a path is a file, or a folder with more than a lock, a manifest and temporary files."""
    try:
        return any(
            content.suffix != UNFINISHED and content.name not in (LOCK_FILE, MANIFEST) for content in path.iterdir()
        )
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


class YamlLoader(yaml.SafeLoader):
    """Reads `2e-5` as a number, and refuses a key that is given twice, and what would fill the memory.

    YAML 1.1 reads `2e-5` as text (a number needs `2.0e-5`), and PyYAML keeps the last of two equal keys silently.
    """

    _values = _level = _deepest = 0  # values and levels so far, with those that an alias repeats

    def compose_node(self, parent, index):
        self._level += 1
        is_alias, values, deepest, self._deepest = (
            self.check_event(yaml.AliasEvent),
            self._values,
            self._deepest,
            self._level,
        )
        node = super().compose_node(parent, index)
        if not is_alias:
            node.size = (self._values - values + 1, self._deepest - self._level)
        size, height = getattr(node, "size", (10**6, 0))  # none yet: it contains itself
        self._values, self._deepest = values + size, max(deepest, self._level + height)
        self._level -= 1
        is_long = node.tag.endswith((":int", ":float")) and len(node.value) > 1000
        if self._values > 50_000 or self._deepest > 100 or is_long:
            raise ValueError(_TOO_LARGE)
        return node

    def construct_mapping(self, node, deep=False):
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE)
        if twice := sorted(key for key, count in keys.items() if count > 1):
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _YamlDumper(yaml.SafeDumper):
    """Puts quotes around texts that `YamlLoader` would read as numbers."""


_MERGE = "tag:yaml.org,2002:merge"
_TOO_LARGE = (
    "more than 4,000,000 characters, 50,000 values (with those that aliases repeat), 100 levels or 1,000 digits"
)
for _kind in (YamlLoader, _YamlDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def parse_yaml(text: str) -> Any:
    """Reads YAML; raises `yaml.YAMLError` or `ValueError` if the text is not YAML, or too large."""
    if len(text) > 4_000_000:
        raise ValueError(_TOO_LARGE)
    try:
        return yaml.load(text, Loader=YamlLoader)
    except RecursionError:
        raise ValueError(_TOO_LARGE) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file.

    Raises:
        ValueError: if the file cannot be read or holds anything else.
    """
    try:
        content = parse_yaml(read_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold fields and values, not {type(content).__name__}")
    return read_section(content, str(path))


def merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings of fields; of an encoder and decoder, the fields of each half too."""
    halves = [
        name
        for name in ("encoder", "decoder")
        if isinstance(fields.get(name), dict) and isinstance(more.get(name), dict)
    ]
    return {**fields, **more, **{name: {**fields[name], **more[name]} for name in halves}}


def read_section(section: Any, source: str) -> dict[str, Any]:
    """Copies a mapping inside a YAML file; a missing one is empty.

    Raises:
        ValueError: if it is anything else, or has a name that is not text.
    """
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"{source} must hold fields and values, not {section!r}")
    if wrong := [name for name in section or {} if not isinstance(name, str)]:
        raise ValueError(f"{source}: the name {wrong[0]!r} must be text; {QUOTE_IT}")
    return dict(section or {})


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file.

    Raises:
        ValueError: if it is no JSON or holds no fields, naming the file.
    """
    data = read_bytes(path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it must hold fields and values, not {type(content).__name__}")
    return content


def check_keys(source: str, keys, known) -> None:
    """Raises `ValueError` for an unknown key, with the nearest known one."""
    for key in keys:
        if key not in known:
            raise ValueError(f"{source}: unknown field {key!r}; {suggestion(str(key), known)}")


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Lists the fields that differ between what a folder holds and what is asked for now; empty if they agree."""
    before, now = _flatten(before), _flatten(now)
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    shown = {key: [_short(fields.get(key)) for fields in (before, now)] for key in changed}
    return ", ".join(f"{key}: {there} there, {here} now" for key, (there, here) in shown.items())


def _short(value: Any) -> str:
    """A value in one line; of a text of several lines a hash."""
    if isinstance(value, str) and "\n" in value:
        return f"a file with the hash {hashlib.sha256(value.encode()).hexdigest()[:12]}"
    return repr(value)


def _flatten(given: dict[str, Any], section: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in given.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{section}{name}."))
        elif name not in _FREE_FIELDS:
            flat[f"{section}{name}"] = value
    return flat


def files_in(folder: Path, patterns: Sequence[str]) -> set[Path]:
    """The files of a folder by patterns."""
    return {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}


def code_files(folder: Path) -> set[Path]:
    """The files that the Auto classes load from a folder: their own, and those that they import. Some may be missing.

    Raises:
        ValueError: if one is a link, or no Python.
    """
    settings = folder / "config.json"
    fields = read_json(settings) if settings.is_file() else {}
    classes = (*default_auto_map(fields).values(), *saved_auto_map(folder, fields).values())
    waiting, found = {name.partition(".")[0] for name in classes}, set()
    while waiting:
        found.add(path := folder / f"{waiting.pop()}.py")
        if path.is_file():
            waiting |= relative_imports(path) - {path.stem for path in found}
    return found


def relative_imports(path: Path) -> set[str]:
    """The modules of a file's own folder that it imports. A text that only looks like an import is none.

    Raises:
        ValueError: if the file is a link, or no Python.
    """
    try:
        nodes = ast.walk(ast.parse(read_bytes(path)))
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module}
    return set(filter(str.isidentifier, names))
