"""`transformers serve`, asked by OpenAI's client: completions, chat and streaming, one by one and by continuous
batching.
"""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.client_cases import continuation
from support.serving import NEW_TOKENS, chat, complete, server
from transformers import AutoTokenizer


BATCHING = ("--continuous-batching", "--cb-block-size", "16", "--cb-num-blocks", "32", "--cb-max-batch-tokens", "32")
PROMPTS = ("one two three", "four", "nine ten eleven twelve one two three four five six", "seven eight")


def check_answers(client, folder):

    def expected(text):
        return continuation(folder, text, NEW_TOKENS)

    assert complete(client, folder, PROMPTS[0], stream=True) == expected(PROMPTS[0])
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(client, folder, prompt), PROMPTS))
    assert answers == [expected(prompt) for prompt in PROMPTS]
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": PROMPTS[1]}], tokenize=False
    )
    for stream in (False, True):
        assert chat(client, folder, PROMPTS[1], stream) == expected(rendered)


@pytest.mark.parametrize("package", [True, False], ids=["package", "remote_code"])
def test_one_request_after_the_other(package, trained, tmp_path):
    cases = (("sigmoid", "nonlinear"), ("linear_attention", "nonlinear")) if package else (("squared", "linear"),)
    with server(tmp_path / "log", package=package) as client:
        for activation, query in cases:
            check_answers(client, trained(activation, query))


def test_continuous_batching(trained, tmp_path):
    log = tmp_path / "log"
    with server(log, *BATCHING, package=False) as client:
        check_answers(client, trained("sigmoid", "nonlinear"))
        check_answers(client, trained("softmax", "upcycled"))
        with pytest.raises(openai.InternalServerError):
            complete(client, trained("linear_attention", "nonlinear"), PROMPTS[0])
    lines = [line for line in log.read_text().splitlines() if line.startswith("ValueError: ")]
    message = "ValueError: attention_activation='linear_attention' (layer 0) has no continuous batching; "
    assert len(lines) == 1 and lines[0].startswith(message) and lines[0].endswith("; use generate")
