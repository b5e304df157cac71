"""Names, values of files, and text for a terminal and for Markdown: tables, durations, and errors in one line."""

import math
import re
import sys
from collections.abc import Sequence
from typing import Any


QUOTE_IT = "quote it, because YAML reads off, no, null, numbers and dates as other values"
_ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|unexpected pos \d+ vs")
LONGEST_NAME = 200  # of a folder; its lock, its log and what is being written beside it have longer ones
# What a terminal acts on, what turns or ends a line, and halves of surrogates
_CONTROLS = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Where Markdown may see more than text
_MARKUP = re.compile(r"[`*~]|(?<![^\W_])_|_(?![^\W_])|\\(?=[!-/:-@[-`{-~]|$)|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\](?=[(:[])")


def check_name(source: str, name: Any) -> None:
    """Raises `ValueError` for a name that cannot be that of a folder on every machine.

    Args:
        source: what has the name, for messages.
        name: the name of a comparison, a scale, a model, a factor or a recipe.
    """
    if not isinstance(name, str):
        raise ValueError(f"{source} {name!r}: a name must be text; {QUOTE_IT}")
    if not re.fullmatch(r"[\w+=]([\w+=., -]*[\w+=])?", name, flags=re.ASCII) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{source} {name!r}: a name must be made of at most {LONGEST_NAME} letters, digits, spaces and _ + = . , -"
        )


def unescape(text: str) -> str:
    r"""Reads `\n`, `\t` and `\\`, which a shell leaves as they are, as YAML does in double quotes."""
    return re.sub(r"\\[nt\\]", lambda found: _ESCAPES[found[0]], text)


def escape(text: str) -> str:
    """Writes a text for a command line: the inverse of `unescape`."""
    return re.sub(r"[\n\t\\]", lambda found: {char: written for written, char in _ESCAPES.items()}[found[0]], text)


def printable(text: str) -> str:
    """Writes what a terminal would act on as escapes."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class Markdown(str):
    """Text that is Markdown already; reports and cards show any other as it stands."""


def plain(text: str) -> Markdown:
    """Returns Markdown, in one line, that shows a text as it stands; Markdown stays."""
    if isinstance(text, Markdown):
        return text
    return Markdown(_MARKUP.sub(r"\\\g<0>", printable(" ".join(text.split()))))


def code(text: Any, language: str = "") -> Markdown:
    """Returns Markdown that shows a value as code: within a line, or with a language as a block of lines."""
    text = printable(str(text) if language else " ".join(str(text).splitlines()) or " ")
    fence = "`" * max(3 if language else 1, 1 + max(map(len, re.findall("`+", text)), default=0))
    space = f"{language}\n" if language else " " * (text.strip("`") != text)
    return Markdown(f"{fence}{space}{text}{'' if language else space}{fence}")


def align(rows: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """Lines of a table with columns of equal width.

    Args:
        rows: cells; the first row is the header.
        right: whether all columns but the first are aligned at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = ["<", *(">" if right else "<" for _ in widths[1:])]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip() for row in rows
    ]


def duration(seconds: float) -> str:
    """A duration in the units that suit it: 12 s, 3 min, 2 h 10 min, 4 d 3 h."""
    if seconds < 99.5:
        return f"{max(seconds, 0.1):.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"


def bar_options() -> dict[str, Any]:
    """Options of a progress bar over many runs: a terminal shows it every second, a log file at its end."""
    return (
        {"mininterval": 1.0, "dynamic_ncols": True} if sys.stderr.isatty() else {"mininterval": math.inf, "ncols": 110}
    )


def check_number(name: str, value: float | None, least: float = -math.inf, most: float = math.inf) -> None:
    """Raises `ValueError` for a number that is too small, too large, infinite or none; `None` passes."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number")
    if value is not None and not least <= value <= most:
        allowed = f"at least {least}" if most == math.inf else f"between {least} and {most}"
        raise ValueError(f"{name}={value} must be {allowed}")


def is_disk_full(error: BaseException | None) -> bool:
    """Tells whether an error, or one that led to it, is that of a full disk."""
    return error is not None and bool(
        _DISK_FULL.search(str(error)) or is_disk_full(error.__cause__ or error.__context__)
    )


def one_line(error: BaseException) -> str:
    """The message of an error in one line. The libraries of Hugging Face wrap the error that says what is wrong."""
    while error.__cause__ is not None and type(error).__module__.startswith(("huggingface_hub", "datasets")):
        error = error.__cause__
    return "the disk is full: " * is_disk_full(error) + (
        printable(" ".join(str(error).split())) or type(error).__name__
    )


def first_line(error: BaseException) -> str:
    """The first line of the message of an error."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def root_cause(error: BaseException) -> BaseException:
    """The error that caused all others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
