"""Names, and text for a terminal: tables, durations, progress bars, and errors in one line."""

import math
import re
import sys
from collections.abc import Sequence
from typing import Any


QUOTE_IT = "quote it, because YAML reads off, no, null, numbers and dates as other values"
_ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
LONGEST_NAME = 200  # of a folder; its lock, its log and what is being written beside it have longer ones


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


def without_html(markdown: str) -> str:
    """Markdown in which no `<` begins HTML, as that of a name could, which may be a stranger's; blocks of code stay."""
    pattern = re.compile(r"^```\w+\n.*?^ {0,3}```|<(?=[A-Za-z/!?])", re.DOTALL | re.MULTILINE)
    return pattern.sub(lambda found: "&lt;" if found[0] == "<" else found[0], markdown)


def align(rows: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """Lines of a table with columns of equal width.

    Args:
        rows: cells; the first row is the header.
        right: whether all columns but the first are aligned at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = ["<", *(">" if right else "<" for _ in widths[1:])]
    return ["  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip() for row in rows]


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
    return {"mininterval": 1.0, "dynamic_ncols": True} if sys.stderr.isatty() else {"mininterval": math.inf, "ncols": 110}


def check_number(name: str, value: float | None, least: float = -math.inf, most: float = math.inf) -> None:
    """Raises `ValueError` for a number that is too small, too large, infinite or none; `None` passes."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number")
    if value is not None and not least <= value <= most:
        allowed = f"at least {least}" if most == math.inf else f"between {least} and {most}"
        raise ValueError(f"{name}={value} must be {allowed}")


def one_line(error: BaseException) -> str:
    """The message of an error in one line. The libraries of Hugging Face wrap the error that says what is wrong."""
    while error.__cause__ is not None and type(error).__module__.startswith(("huggingface_hub", "datasets")):
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of the message of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """The error that caused all others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
