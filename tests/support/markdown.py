"""What a reader of Markdown takes for HTML, by an independent parser."""

import pytest


def html_in(markdown: str) -> list[str]:
    """The raw HTML of a text, as GitHub's Markdown has it."""
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(markdown)
    tokens += [child for token in tokens for child in token.children or ()]
    return [token.content for token in tokens if token.type.startswith("html")]
