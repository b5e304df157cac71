"""Names, and text for a terminal: tables, durations, progress bars, and errors in one line."""

import math
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO


LONGEST_NAME = 200  # of a folder; its lock, its log and what is being written beside it have longer ones


def check_name(source: str, name: Any) -> None:
    """Raises `ValueError` for a name that cannot be that of a folder on every machine.

    Args:
        source: what has the name, for messages.
        name: the name of a comparison, a scale, a model, a factor or a recipe.
    """
    if not isinstance(name, str):
        raise ValueError(f"{source} {name!r}: a name must be a text; put it in quotes, as YAML reads off as False")
    if not re.fullmatch(r"[\w+=]([\w+=., -]*[\w+=])?", name, flags=re.ASCII) or len(name) > LONGEST_NAME:
        shown = name if len(name) <= LONGEST_NAME else f"{name[:20]}..."
        raise ValueError(
            f"{source} {shown!r}: a name must be made of at most {LONGEST_NAME} letters, digits, spaces and _ + = . , - (it "
            "names a folder)"
        )


def printable(text: str) -> str:
    """A text with its control characters as escapes, so that a name in it, which may be a stranger's, steers no terminal."""
    # Also C1, which some terminals obey, and what turns the direction of writing
    steering = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
    return re.sub(steering, lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableOutput:
    """Standard output of a terminal, to which each text goes as `printable` makes it.

    Args:
        stream: the stream, which keeps all else.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def without_html(markdown: str) -> str:
    """Markdown in which no `<` begins HTML, as that of a name could, which may be a stranger's; blocks of code stay."""
    pattern = re.compile(r"^```\w+\n.*?^ {0,3}```|<(?=[A-Za-z/!?])", re.DOTALL | re.MULTILINE)
    return pattern.sub(lambda found: "&lt;" if found[0] == "<" else found[0], markdown)


_LONGEST_MESSAGE = 2000  # characters


def align(rows: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """Lines of a table with columns of equal width.

    Args:
        rows: cells; the first row is the header.
        right: whether all columns but the first are aligned at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if right and index else cell.ljust(width) for index, (cell, width) in enumerate(zip(row, widths))
        )
        lines.append("  ".join(cells) if right else "  ".join(cells).rstrip())
    return lines


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
    """The message of an error in one line. The libraries of Hugging Face wrap the error that says what is wrong.

    The middle of a long message is left out: it quotes a value, which a file may make as long as it likes.
    """
    while error.__cause__ is not None and type(error).__module__.startswith(("huggingface_hub", "datasets")):
        error = error.__cause__
    text = str(error)
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE // 2]} [...] {text[-_LONGEST_MESSAGE // 2 :]}"
    return printable(" ".join(text.split())) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of the message of an error."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def root_cause(error: BaseException) -> BaseException:
    """The error that caused all others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
