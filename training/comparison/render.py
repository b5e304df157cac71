"""A report as a list of sections: Markdown is made from them, and a page for a browser from that Markdown."""

import base64
import html
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from ..text import Markdown, plain


# Columns of words; columns of numbers are aligned at the right
_WORDS = {
    "factor",
    "interactions",
    "survives",
    "model",
    "task",
    "metric",
    "verdict",
    "learning rate",
    "kind",
    "outcome",
}


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        parts: its sentences as text, and its lists and tables as `Markdown`.
        is_folded: whether a page shows the heading alone until a reader opens it.
        figure: the name and the content of a figure that this report drew, in `figures/NAME.png`.
    """

    title: str
    parts: list[str]
    is_folded: bool = False
    figure: tuple[str, bytes] | None = None


def to_markdown(name: str, sections: Iterable[Section]) -> str:
    """Returns a report as one Markdown document with the heading `name`."""
    parts = [f"# {plain(name)}"]
    for section in sections:
        parts += [f"## {plain(section.title)}"] if section.title else []
        parts += [f"![{plain(section.title)}](figures/{section.figure[0]}.png)"] if section.figure else []
        parts += map(plain, section.parts)
    return "\n\n".join(parts) + "\n"


def to_page(name: str, sections: Iterable[Section]) -> str:
    """Returns a report as one HTML file that can be sent to anybody and opened anywhere: no script, no request."""
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    renderer.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
    renderer.add_render_rule("table_close", lambda *_: "</table></div>\n")
    body = []
    for section in sections:
        title, text = html.escape(section.title), renderer.render("\n\n".join(map(plain, section.parts)))
        if section.figure:
            text = _image(title, section.figure[1]) + text
        if section.is_folded:
            text = f"<details>\n<summary>{title}</summary>\n{text}</details>\n"
        elif title:
            text = f"<h2>{title}</h2>\n{text}"
        body.append(text)
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    title = html.escape(name)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n'
        f"<h1>{title}</h1>\n{''.join(body)}</body>\n</html>\n"
    )


def _image(title: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    return f'<p><span class="figure scroll"><img src="data:image/png;base64,{data}" alt="{title}"></span></p>\n'


def warning(text: str) -> Markdown:
    return Markdown(f"> **Warning:** {plain(text)}")


def bullets(sentences: Iterable[str]) -> Markdown:
    return Markdown("\n".join(f"* {plain(sentence)}" for sentence in sentences))


def markdown_table(rows: list[dict[str, str]]) -> Markdown:
    """Returns rows as a table; columns of words are aligned at the left."""
    columns = list(rows[0])
    lines = [columns, ["---" if name in _WORDS else "---:" for name in columns], *(row.values() for row in rows)]
    cells = [[plain(text).replace("|", "\\|") for text in line] for line in lines]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in cells))
