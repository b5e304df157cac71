"""Checks names and numbers, and writes text for a terminal and for Markdown."""

import math
import re
import sys
from collections.abc import Sequence
from typing import Any


QUOTE_IT = "quote it, because YAML reads off, no, null, numbers and dates as other values"
_ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|unexpected pos \d+ vs")
LONGEST_NAME = 200  # of a folder, because the files beside it add suffixes to its name
# Control characters except line breaks and tabs, separators, directions of text, surrogates
_CONTROLS = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Characters that Markdown may read as markup
_MARKUP = re.compile(r"[`*~]|(?<![^\W_])_|_(?![^\W_])|\\(?=[!-/:-@[-`{-~]|$)|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\](?=[(:[])")


def check_name(source: str, name: Any) -> None:
    """Raises `ValueError` for a name that a folder cannot have on every machine."""
    if not isinstance(name, str):
        raise ValueError(f"{source} {name!r}: a name must be text; {QUOTE_IT}")
    if not re.fullmatch(r"[\w+=]([\w+=., -]*[\w+=])?", name, flags=re.ASCII) or len(name) > LONGEST_NAME:
        allowed = f"at most {LONGEST_NAME} ASCII letters, digits, spaces and _ + = . , -"
        raise ValueError(f"{source} {name!r}: a name must be made of {allowed}")


def unescape(text: str) -> str:
    r"""Reads `\n`, `\t` and `\\`, which a shell leaves, as YAML does."""
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match[0]], text)


def escape(text: str) -> str:
    """The inverse of `unescape`, for a command line."""
    for escaped, character in reversed(_ESCAPES.items()):  # the backslash first
        text = text.replace(character, escaped)
    return text


def printable(text: str) -> str:
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


class Markdown(str):
    """Text that is Markdown already; any other is escaped."""


def plain(text: str) -> Markdown:
    """Returns one line of Markdown that shows a text literally."""
    if isinstance(text, Markdown):
        return text
    return Markdown(_MARKUP.sub(r"\\\g<0>", printable(" ".join(text.split()))))


def code(text: Any, language: str = "") -> Markdown:
    """Returns Markdown that shows a value as code: within a line, or with a language as a block of lines."""
    text = printable(str(text) if language else " ".join(str(text).splitlines()) or " ")
    fence = "`" * max(3 if language else 1, 1 + max(map(len, re.findall("`+", text)), default=0))
    if language:
        return Markdown(f"{fence}{language}\n{text}{fence}")
    space = " " if text.strip("`") != text else ""
    return Markdown(f"{fence}{space}{text}{space}{fence}")


def align(rows: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """Returns the lines of a table; all columns but the first are at the right if `right`."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) if right else cell.ljust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Returns a text such as 12 s, 2 h 10 min, 4 d 3 h."""
    if seconds < 9.95:
        return f"{max(seconds, 0.1):.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"


def bar_options() -> dict[str, Any]:
    """Returns options of a progress bar, which a terminal shows every second, a log file at its end."""
    if sys.stderr.isatty():
        return {"mininterval": 1.0, "dynamic_ncols": True}
    return {"mininterval": math.inf, "ncols": 110}


def check_number(name: str, value: float | None, least: float = -math.inf, most: float = math.inf) -> None:
    """Raises `ValueError` for a number out of bounds, infinite or NaN; `None` passes."""
    if value is None:
        return
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number")
    if not least <= value <= most:
        allowed = f"at least {least}" if most == math.inf else f"between {least} and {most}"
        raise ValueError(f"{name}={value} must be {allowed}")


def is_disk_full(error: BaseException | None) -> bool:
    while error is not None and not _DISK_FULL.search(str(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def one_line(error: BaseException) -> str:
    """Returns in one line the message of an error, or of its cause in Hugging Face's libraries."""
    while error.__cause__ is not None and type(error).__module__.startswith(("huggingface_hub", "datasets")):
        error = error.__cause__
    prefix = "the disk is full: " if is_disk_full(error) else ""
    return prefix + (printable(" ".join(str(error).split())) or type(error).__name__)


def first_line(error: BaseException) -> str:
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
