"""`transformers serve`, asked by OpenAI's client: completions, chat and streaming, one by one and by continuous batching."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.client_cases import WITHOUT_PACKAGE, greedy
from transformers import AutoModelForCausalLM, AutoTokenizer


# The command `transformers`, after a line that imports this package or makes that impossible
COMMAND = "from transformers.cli.transformers import main; main()"
BATCHING = ("--continuous-batching", "--cb-block-size", "16", "--cb-num-blocks", "32", "--cb-max-batch-tokens", "32")
PROMPTS = ("one two three", "four", "nine ten eleven twelve one two three four five six", "seven eight")
NEW_TOKENS = 6


@contextlib.contextmanager
def server(log, *options, package):
    """Runs `transformers serve` on a free port. Gives a client, which may ask for any folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = ("import modeling_nlq\n" if package else WITHOUT_PACKAGE) + COMMAND
    trust = () if package else ("--trust-remote-code",)
    place = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    with open(log, "w") as output:
        command = [sys.executable, "-c", source, "serve", *place, *trust, *options]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def complete(client, folder, prompt, stream=False):
    answer = client.completions.create(model=str(folder), prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=stream)
    return "".join(event.choices[0].text for event in answer) if stream else answer.choices[0].text


def chat(client, folder, prompt, stream=False):
    messages = [{"role": "user", "content": prompt}]
    options = {"model": str(folder), "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0}
    answer = client.chat.completions.create(**options, stream=stream)
    if stream:
        return "".join(event.choices[0].delta.content or "" for event in answer)
    return answer.choices[0].message.content


def check_answers(client, folder):
    """Several completions at once, and each other kind of request."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def expected(text):
        return tokenizer.decode(greedy(model, tokenizer(text, return_tensors="pt").input_ids[0], NEW_TOKENS))

    assert complete(client, folder, PROMPTS[0], stream=True) == expected(PROMPTS[0])
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(client, folder, prompt), PROMPTS))
    assert answers == [expected(prompt) for prompt in PROMPTS]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[1]}], tokenize=False)
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
    message = "ValueError: attention_activation='linear_attention' (layer 0, 1) has no continuous batching: "
    assert len(lines) == 1 and lines[0].startswith(message) and lines[0].endswith("; use generate")
