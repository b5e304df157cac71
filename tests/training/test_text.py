"""Text that somebody else may have written, in Markdown and in a terminal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_nlq.training.text import Markdown, code, plain, printable


markdown_it = pytest.importorskip("markdown_it")
PARTS = ["`", "``", "```\n", "![x](y.png)", "[a](javascript:b)", "[a]: b", "<img src=x>", "<http://a.b>", "&lt;"]
PARTS += ["\\", "|", "*", "_", "~~", "a", " ", "\n", "# ", "\x1b[2J", "\u202e", "\ud800"]
texts = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


def shown(markdown: str, kind: str) -> str:
    """What a reader sees of a paragraph that has nothing but text, and code if `kind` is `code_inline`."""
    paragraph = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).parse(markdown)
    assert [token.type for token in paragraph] == ["paragraph_open", "inline", "paragraph_close"]
    assert {token.type for token in paragraph[1].children} <= {"text", "text_special", kind}
    return "".join(token.content for token in paragraph[1].children)


@settings(deadline=None)
@given(text=texts)
def test_markdown_shows_texts_as_they_stand(text):
    assert shown(f"a {plain(text)} b", "text").split() == ["a", *printable(" ".join(text.split())).split(), "b"]
    assert plain(Markdown(text)) == text
    words = printable(" ".join(text.splitlines())).split()
    assert shown(f"a {code(text)} b", "code_inline").split() == ["a", *words, "b"]
    block = markdown_it.MarkdownIt().parse(f"{code(text + chr(10), 'yaml')}\n\nb")
    assert [token.type for token in block] == ["fence", "paragraph_open", "inline", "paragraph_close"]


def test_a_terminal_gets_no_controls():
    assert printable("\x1b[2J\x9b\x07\u202e\u2066\r\ud800") == r"\x1b[2J\x9b\x07\u202e\u2066\r\ud800"
    assert printable(text := "é\t\r\n \u05e9\u05dc\u200f \U0001f469\u200d\U0001f4bb") == text
