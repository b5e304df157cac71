"""A report as a list of sections: Markdown is made from them, and a page for a browser from that Markdown."""

import base64
import html
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from ..disk import write_text
from ..text import Markdown, plain, printable


# Columns of words, aligned at the left; numbers are aligned at the right
_WORDS = ("factor", "interactions", "survives", "model", "condition", "conditions", "task", "metric", "verdict")
_WORDS += ("learning rate", "kind", "outcome", "study", "optimizer")

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Section:
    title: str
    parts: list[str | Rows]
    is_folded: bool = False  # a page shows the heading alone until a reader opens it
    figure: tuple[str, bytes] | None = None  # name and content of `figures/NAME.png`, which this report drew


def to_text(parts: Iterable[str | Rows]) -> Markdown:
    return Markdown("\n\n".join(_table(part) if isinstance(part, list) else plain(part) for part in parts))


def to_markdown(name: str, sections: Iterable[Section]) -> str:
    parts = [Markdown(f"# {plain(name)}")]
    for section in sections:
        title = plain(section.title)
        parts += [Markdown(f"## {title}")] if title else []
        parts += [Markdown(f"![{title}](figures/{section.figure[0]}.png)")] if section.figure else []
        parts += section.parts
    return to_text(parts) + "\n"


def to_page(name: str, sections: Iterable[Section]) -> str:
    """Returns a report as one HTML file that needs no other: no script, no request."""
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    renderer.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
    renderer.add_render_rule("table_close", lambda *_: "</table></div>\n")
    body = []
    for section in sections:
        title, text = html.escape(printable(section.title)), renderer.render(to_text(section.parts))
        if section.figure:
            data = base64.b64encode(section.figure[1]).decode()
            image = f'<img src="data:image/png;base64,{data}" alt="{title}">'
            text = f'<p><span class="figure scroll">{image}</span></p>\n{text}'
        if section.is_folded:
            text = f"<details>\n<summary>{title}</summary>\n{text}</details>\n"
        elif title:
            text = f"<h2>{title}</h2>\n{text}"
        body.append(text)
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    title = html.escape(printable(name))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n'
        f"<h1>{title}</h1>\n{''.join(body)}</body>\n</html>\n"
    )


def write_sections(folder: Path, name: str, sections: list[Section], link: Markdown | None = None) -> None:
    """Writes a report as `results.md` and `report.html`; the page alone has the link, behind the first section."""
    write_text(folder / "results.md", to_markdown(name, sections))
    links = [] if link is None else [Section("", [link])]
    write_text(folder / "report.html", to_page(name, [*sections[:1], *links, *sections[1:]]))


def warning(text: str) -> Markdown:
    return Markdown(f"> **Warning:** {plain(text)}")


def bullets(sentences: Iterable[str]) -> Markdown:
    return Markdown("\n".join(f"* {plain(sentence)}" for sentence in sentences))


def _table(rows: Rows) -> Markdown:
    columns = list(rows[0])
    lines = [columns, ["---" if name in _WORDS else "---:" for name in columns], *(row.values() for row in rows)]
    cells = [[plain(text).replace("|", "\\|") for text in line] for line in lines]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in cells))
