"""Traces of a machine in files that are published: absolute paths, and tokens of services."""

import codecs
import html
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import get_token
from safetensors import safe_open

from .files import parse_yaml


# Fields and files that hold tokens of a vocabulary, as every field does whose name ends in `_token`
_VOCABULARY = (
    "added_tokens",
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "merges",
    "model_specific_special_tokens",
    "special_tokens",
    "vocab",
)
_VOCABULARY_FILES = ("added_tokens.json", "merges.txt", "spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")
# Fields that a model or its tokenizer computes with, which must stay as they are
_FIXED = (
    "chat_template",
    "id2label",
    "label2id",
    "response_schema",
    "response_template",
    "stop_strings",
    "task_specific_params",
)

_NAME = r"[^\s\x00-\x1f/\\\"'`,;:<>|]+"
# Not inside a relative path, an address or a closing tag, and not after a variable
_START = r"(?<![\w./\\~*)\]}>$<^-])"
# A local address; another address, which is no path; a drive; a share; a home; a path from the root
_PATH = re.compile(
    rf"\b(?:file:/+|[A-Za-z][\w+.-]{{1,30}}:///+)(?:[A-Za-z]:/+)?{_NAME}(?:/+{_NAME})*/*"
    r"|(?P<address>\b[A-Za-z][\w+.-]{1,30}://[^\s:\"'`<>|,]*(?::\d+[^\s:\"'`<>|,]*)?)"
    rf"|(?<!\w)[A-Za-z]:[\\/]+{_NAME}(?:[\\/]+{_NAME})*[\\/]*"
    rf"|(?<![\w\\:])\\\\[\w.-]+(?:\\+{_NAME})+\\*"
    rf"|{_START}~(?:[A-Za-z_][\w.-]*)?(?:/+{_NAME})+/*"
    rf"|{_START}/+{_NAME}(?:/+{_NAME})*/*"
)
# A text that is only one path: it may contain blanks, and may be relative
_WHOLE = re.compile(
    r"(?:~(?:[A-Za-z_][\w.-]*)?/|\.{1,2}/|/+[^/\n]*[^/\s]/|[A-Za-z]:[\\/]|\\\\[\w.-]+\\)(?:(?!\s(?:[/~\\]|[A-Za-z]:[\\/]))[^\n])*"
)
# First parts of paths that are the same on all machines
_SYSTEM = ("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr", "Applications", "Library", "System", "Windows")

# Between the name of a key and its value
_IS = r"[\"'`\s\])]{0,20}[:=,]?[\"'`\s]{0,20}"
# Patterns of tokens by service. A token without a form of its own (40 letters, like a commit) is recognised by its name
_TOKENS = {
    "a token of Hugging Face": r"hf_(?:[a-z]+_)?[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}",
    "a token of GitHub": r"gh[oprsu]_[A-Za-z0-9]{36,}|github_pat_\w{36,}",
    "a token of GitLab": r"glpat-[\w-]{20,}",
    "a token of Anthropic": r"sk-ant-[\w-]{20,}",
    "a token of OpenAI": r"sk-(?:proj|svcacct|admin)-[\w-]{20,}|sk-(?:or-v1-)?[A-Za-z0-9]{32,}",
    "a key of AWS": r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    rf"|(?i:(?:aws[ _.-]?)?secret[ _.-]?(?:access[ _.-]?)?key){_IS}[A-Za-z0-9/+]{{40}}(?![A-Za-z0-9/+=])",
    "a key of Google": r"AIza[\w-]{35}|GOCSPX-[\w-]{20,}",
    "a token of Slack": r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-\d-[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/T\w+/B\w+/\w+",
    "a key of Weights & Biases": rf"wandb_v1_\w{{20,}}|(?i:wandb.{{0,20}}key){_IS}[0-9a-f]{{40}}(?!\w)",
    "a password in an address": r"[A-Za-z][\w+.-]{1,30}://[^\s/@:\"'`<>{}]{0,99}:[^\s/@\"'`<>{}$*]{1,99}@",
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[\s\S]{0,200}?[A-Za-z0-9+/=]{40}",
}
_KINDS = dict(zip((f"kind{index}" for index in range(len(_TOKENS))), _TOKENS))
# At the beginning of a word, or after a line break as code writes it
_TOKEN = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))(?:" + "|".join(f"(?P<{group}>{_TOKENS[kind]})" for group, kind in _KINDS.items()) + ")"
)


def without_folders(value: Any) -> Any:
    """Cuts absolute paths to their last part, which is all that a reader on another machine needs.

    Args:
        value: a text, or mappings and lists of texts and other values. Texts that a model or its tokenizer computes with
            (tokens, labels and templates, by the name of their field) stay as they are.
    """
    if isinstance(value, dict):
        return {
            without_folders(key): item if _is_vocabulary(key) or key in _FIXED else without_folders(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    return _last_part(value) if _WHOLE.fullmatch(value) else _PATH.sub(_cut, value)


def _cut(match: re.Match) -> str:
    path = match[0]
    if match["address"] is not None:
        return path
    # Many texts of one part are no paths: `/no_think`, `[/INST]`, "tokens /s"
    is_short = path.startswith("/") and "/" not in path.strip("/")
    if is_short and not re.search(r"\.[A-Za-z]\w*$", path) and not os.path.exists(path):
        return path
    return _last_part(path)


def _last_part(path: str) -> str:
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1] or path


def check_for_traces(folder: Path, contents: dict[str, Path | bytes]) -> None:
    """Looks for tokens of services, and for paths of this machine.

    Args:
        folder: the folder that is published.
        contents: files, or the bytes that are uploaded instead, by name.

    Raises:
        ValueError: naming the file and the line or field, but not the token itself.
    """
    texts = [(name, *found) for name, content in contents.items() for found in _texts(name, content)]
    # In UTF-16 without a mark, a zero byte stands between two letters
    texts += [(name, where, text.replace("\0", ""), kind) for name, where, text, kind in texts if "\0" in text]
    token = get_token()
    for name, where, text, _ in texts:
        found = _TOKEN.search(text)
        kind = _KINDS[found.lastgroup] if found else "a token of Hugging Face"
        position = found.start() if found else text.find(token) if token else -1
        if position >= 0:
            place = _TOKEN.sub("***", f"{name}, {where or _line(text, position)}")
            place = place.replace(token, "***") if token else place
            raise ValueError(f"{place}: holds what looks like {kind}; remove it first")
    places = {str(path) for place in (folder, Path.home(), Path.cwd()) for path in (place.absolute(), place.resolve())}
    for name, where, text, is_vocabulary in texts:
        found = None if is_vocabulary else _path_of_this_machine(text, places - {"/"})
        if found is not None:
            position, path = found
            raise ValueError(
                f"{name}, {where or _line(text, position)}: names {path!r}, a path of this machine; remove it first"
            )


def _line(text: str, position: int) -> str:
    return f"line {text.count(chr(10), 0, position) + 1}"


def _path_of_this_machine(text: str, places: set[str]) -> tuple[int, str] | None:
    """Position and text of the first path that is below one of the places, or whose first two parts exist on this machine."""
    for place in sorted(places):
        # Not the end of an address, not the beginning of another name; `/root` or `/app` alone reveals nothing
        end = r"(?![\w-])" if len(Path(place).parts) > 2 else "(?=/)"
        if found := re.search(rf"(?:(?<![\w./-])|(?<=://)){re.escape(place)}{end}[^\s\"'`,;<>|]*", text):
            return found.start(), found[0].rstrip(".)]}!?*")
    for found in _PATH.finditer(text):
        path = re.sub(r"^[A-Za-z][\w+.-]+:/+", "/", found[0]).rstrip(".)]}!?*")
        path = path.removeprefix("/") if re.match("/[A-Za-z]:", path) else path
        parsed = (PurePosixPath if path.startswith("/") else PureWindowsPath)(path)
        if found["address"] is not None or not parsed.is_absolute() or len(parsed.parts) < 3 or parsed.parts[1] in _SYSTEM:
            continue
        if os.path.exists(os.path.join(*parsed.parts[:3])):
            return found.start(), path
    return None


def _texts(name: str, content: Path | bytes) -> Iterator[tuple[str | None, str, bool]]:
    """The texts in a file: their place (`None`: count the lines), themselves, and whether they are tokens of a vocabulary."""
    yield "its name", name, False
    suffix = Path(name).suffix
    if suffix == ".safetensors":
        with safe_open(content, framework="pt") as file:
            yield from _fields(file.metadata() or {}, "metadata")
        return
    data = content.read_bytes() if isinstance(content, Path) else content
    is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if is_utf_16 else "utf-8", errors="replace")
    if name in _VOCABULARY_FILES:
        yield None, text, True
    elif suffix == ".json":
        try:
            yield from _fields(json.loads(text))
        except ValueError as error:
            raise ValueError(f"{name} is damaged: {error}") from error
    elif suffix == ".yaml":
        yield from _fields(parse_yaml(text))
    elif suffix == ".html":  # a page of `nlq explore`, which has packed numbers, and a text token by token
        yield None, html.unescape(re.sub(r'"[A-Za-z0-9+/=]{200,}"', '""', text)), False
        if found := re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL):
            yield "its text", "".join(map(str, json.loads(found[1])["tokens"])), False
    else:
        yield None, text, False


def _fields(value: Any, field: str = "") -> Iterator[tuple[str, str, bool]]:
    """The texts of a nested value by their fields. Each key stands before its value: some tokens are found by their name."""
    name = field.rpartition(".")[2]
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            below = f"{field}.{key}" if field else str(key)
            if isinstance(value, dict) and _is_vocabulary(key):
                yield f"field {below}", "\n".join(_leaves(item)), True
            elif isinstance(item, dict | list):
                yield f"field {below}", str(key), False
                yield from _fields(item, below)
            else:
                yield f"field {below}", f"{key}: {item}" if isinstance(value, dict) else f"{name}: {item}", False


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield str(value)


def _is_vocabulary(key: Any) -> bool:
    return key in _VOCABULARY or str(key).endswith("_token")
