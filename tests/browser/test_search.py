"""The search of the site: a whole question is sent without the words that no page is about."""

import pytest
from support.paths import REPOSITORY


@pytest.mark.parametrize(
    ("question", "sent"),
    [
        ("how many seeds do I need?", "seeds"),
        ("Resume after Ctrl-C", "Resume Ctrl"),
        ("batch size", "batch size"),
        ("how do I", "how do I"),
    ],
)
def test_a_whole_question_is_sent_by_its_words(browser, question, sent):
    page = browser.new_page()
    page.add_script_tag(path=REPOSITORY / "docs" / "search.js")
    ask = """([type, data]) => new Promise((resolve) => {
        const echo = new Blob(["onmessage = (event) => postMessage(event.data.data)"]);
        const worker = new Worker(URL.createObjectURL(echo));
        worker.onmessage = (event) => resolve(event.data);
        worker.postMessage({ type, data });
    })"""
    assert page.evaluate(ask, [2, question]) == sent
    assert page.evaluate(ask, [0, question]) == question, "the index, which is a message of another type, is untouched"
    page.close()
