"""Traces of a machine in files that are published: absolute paths, and tokens of Hugging Face."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from .disk import read_bytes
from .files import TOKENIZER


_NAME = r"[^\s/\\\"'`,;:<>|]+"
# An address, which is no path unless it begins with `file:`; or a path from the root or the home folder, but not the
# rest of a relative path, of a closing tag or of a variable
_PATH = re.compile(
    r"(?P<address>\b(?!file:)[A-Za-z][\w+.-]+://[^\s:\"'`<>|,]*(?::\d+[^\s:\"'`<>|,]*)?)"
    rf"|(?:\bfile:/+{_NAME}|(?<![\w./\\~*)\]}}>$<^-])(?:~(?:[A-Za-z_][\w.-]*)?)?/+{_NAME})(?:/+{_NAME})*/*"
)
_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_(?:[a-z]+_)?[A-Za-z0-9]{30,}")
_PASSWORD = re.compile(r"(?:https?://|://[^\s/?#@:{\"'`<>]+:)[^\s/?#@{\"'`<>]+@")  # in an address


def without_folders(value: Any) -> Any:
    """Cuts absolute paths to their last part, which is all that a reader on another machine needs.

    Args:
        value: a text, or mappings and lists of texts and other values.
    """
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return _PATH.sub(_cut, value) if isinstance(value, str) else value


def _cut(match: re.Match) -> str:
    path = match[0]
    # Many texts of one part are no paths: `/no_think`, `[/INST]`, "tokens /s"
    is_short = path.startswith("/") and "/" not in path.strip("/")
    if match["address"] is not None or (is_short and not re.search(r"\.[A-Za-z]\w*$", path)):
        return path
    return path.rstrip("/").rpartition("/")[2] or path


def check_for_traces(folder: Path, contents: dict[str, Path | bytes]) -> None:
    """Looks for tokens, addresses with a password, and the home folder, the working folder and the folder that is
    published.

    Weights are not read. In a vocabulary, a path is a token of it, and only the others are looked for.

    Args:
        folder: the folder that is published.
        contents: files, or the bytes that are uploaded instead, by name.

    Raises:
        ValueError: naming the file and the line, but not the token or password itself.
    """
    places = {
        str(path) for place in (folder, Path.home(), Path.cwd()) for path in (place.absolute(), place.resolve())
    } - {"/"}
    # Not the end of an address, and not the beginning of another name
    path = re.compile(
        rf"(?:(?<![\w./-])|(?<=://))(?:{'|'.join(map(re.escape, sorted(places)))})(?![\w-])[^\s\"'`,;<>|]*"
    )
    token = get_token()
    for name, content in contents.items():
        if name.endswith(".safetensors"):
            continue
        is_vocabulary = name in set(TOKENIZER) - {
            "chat_template.jinja",
            "special_tokens_map.json",
            "tokenizer_config.json",
        }
        data = read_bytes(content) if isinstance(content, Path) else content
        text = data.replace(b"\0", b"").decode(errors="replace")  # also UTF-16, which puts zeros between letters
        for number, line in enumerate(text.splitlines(), start=1):
            if _TOKEN.search(line) or (token and token in line):
                raise ValueError(
                    f"{name}, line {number}: holds what looks like a token of Hugging Face; remove it first"
                )
            if not is_vocabulary and _PASSWORD.search(line):
                raise ValueError(f"{name}, line {number}: holds an address with a password; remove it first")
            if not is_vocabulary and (found := path.search(line)):
                shown = found[0].rstrip(".)]}!?*")
                raise ValueError(f"{name}, line {number}: names {shown!r}, a path of this machine; remove it first")
