"""A report as a list of sections: Markdown is made from them, and a page for a browser from that Markdown."""

import base64
import html
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from ..text import without_html


# Columns of words; columns of numbers are aligned at the right
_WORDS = {"factor", "interactions", "survives", "model", "task", "metric", "verdict", "learning rate", "kind", "outcome"}


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: its heading; empty for what stands before the first one.
        parts: its sentences, lists, tables and figures, as Markdown.
        is_folded: whether a page shows the heading alone until a reader opens it.
    """

    title: str
    parts: list[str]
    is_folded: bool = False


def to_markdown(name: str, sections: Iterable[Section]) -> str:
    """Returns a report as one Markdown document with the heading `name`."""
    return without_html("\n\n".join([f"# {name}", *(_text(section, section.title) for section in sections)]) + "\n")


def _text(section: Section, title: str = "") -> str:
    return "\n\n".join(filter(None, [f"## {title}" if title else "", *section.parts]))


def to_page(name: str, sections: Iterable[Section], folder: Path) -> str:
    """Returns a report as one HTML file that can be sent to anybody and opened anywhere: no script, no request.

    Args:
        name: the heading.
        sections: the sections. HTML in them is shown as text, for names come from users.
        folder: the folder that the paths of figures begin at.
    """
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    renderer.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
    renderer.add_render_rule("table_close", lambda *_: "</table></div>\n")
    renderer.add_render_rule("image", lambda _, tokens, index, *rest: _image(tokens[index], folder))
    body = []
    for section in sections:
        if section.is_folded:
            text = renderer.render(_text(section))
            body.append(f"<details>\n<summary>{html.escape(section.title)}</summary>\n{text}</details>\n")
        else:
            body.append(renderer.render(_text(section, section.title)))
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    title = html.escape(name)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n'
        f"<h1>{title}</h1>\n{''.join(body)}</body>\n</html>\n"
    )


def _image(token, folder: Path) -> str:
    """A figure within the page itself."""
    path, title = folder / str(token.attrs["src"]), html.escape(token.content, quote=True)
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<span class="figure scroll"><img src="data:image/png;base64,{data}" alt="{title}"></span>'


def warning(text: str) -> str:
    """Returns a sentence as a warning."""
    return f"> **Warning:** {text}"


def bullets(sentences: Iterable[str]) -> str:
    """Returns sentences as a list."""
    return "\n".join(f"* {sentence}" for sentence in sentences)


def figure(title: str, name: str, caption: str) -> Section:
    """Returns the section of a figure, `figures/NAME.png`."""
    return Section(title, [f"![{title}](figures/{name}.png)", caption])


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Returns rows as a table; columns of words are aligned at the left."""
    columns = list(rows[0])
    lines = [columns, ["---" if name in _WORDS else "---:" for name in columns], *(row.values() for row in rows)]
    # The text of a cell may be a name that the user gave
    cells = [[" ".join(text.split()).replace("|", "\\|") for text in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
