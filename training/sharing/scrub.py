"""Removes absolute paths from published files, and refuses files with tokens or paths of this machine."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from ..files import VOCABULARIES


_NAME = r"[^\s/\\\"'`,;:<>|]+"
# Matches an address, which is kept unless it begins with `file:`, or an absolute path or one below `~`. The characters
# before a path exclude relative paths, closing tags and variables.
_PATH = re.compile(
    r"(?P<address>\b(?!file:)[A-Za-z][\w+.-]+://[^\s:\"'`<>|,]*(?::\d+[^\s:\"'`<>|,]*)?)"
    rf"|(?:\bfile:/+{_NAME}|(?<![\w./\\~*)\]}}>$<^-])(?:~(?:[A-Za-z_][\w.-]*)?)?/+{_NAME})(?:/+{_NAME})*/*"
)
_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_(?:[a-z]+_)?[A-Za-z0-9]{30,}")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")  # of a character, in JSON, YAML and Python
_PASSWORD = re.compile(r"(?:https?://|://[^\s/?#@:{\"'`<>]+:)[^\s/?#@{\"'`<>]+@")
# A path may be an entry of a vocabulary, so these files are searched for tokens alone
_LISTS_OF_TOKENS = {*VOCABULARIES, "added_tokens.json", "merges.txt"}


def without_folders(value: Any) -> Any:
    """Cuts absolute paths in nested texts to their last component."""
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return _PATH.sub(_last_component, value) if isinstance(value, str) else value


def _last_component(match: re.Match) -> str:
    path = match[0]
    # Texts such as `/no_think`, `[/INST]` and "tokens /s" look like a path with one component
    is_single = path.startswith("/") and "/" not in path.strip("/")
    if match["address"] is not None or (is_single and not re.search(r"\.[A-Za-z]\w*$", path)):
        return path
    return path.rstrip("/").rpartition("/")[2] or path


def check_for_traces(folder: Path, contents: dict[str, Path | bytes]) -> None:
    """Raises `ValueError` for files with a token, a password, or the home, the working or the published `folder`.

    The error names file and line, but neither token nor password.
    """
    folders = {str(path) for each in (folder, Path.home(), Path.cwd()) for path in (each.absolute(), each.resolve())}
    known = "|".join(map(re.escape, sorted(folders - {"/"})))
    # The end of an address and the beginning of a longer name do not count
    path = re.compile(rf"(?:(?<![\w./-])|(?<=://))(?:{known})(?![\w-])[^\s\"'`,;<>|]*")
    token = get_token()
    for name, content in contents.items():
        if isinstance(content, Path):  # weights
            continue
        text = content.replace(b"\0", b"").decode(errors="replace")  # UTF-16 has zeros between letters
        for number, line in enumerate(text.splitlines(), start=1):
            problem = None
            line = _ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), line)
            if _TOKEN.search(line) or (token and token in line):
                problem = "holds what looks like a token of Hugging Face"
            elif name not in _LISTS_OF_TOKENS and _PASSWORD.search(line):
                problem = "holds an address with a password"
            elif name not in _LISTS_OF_TOKENS and (match := path.search(line)):
                problem = f"names {match[0].rstrip('.)]}!?*')!r}, a path of this machine"
            if problem is not None:
                raise ValueError(f"{name}, line {number}: {problem}; remove it first")
