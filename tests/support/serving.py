"""`transformers serve` in a process of its own, and OpenAI's client."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request

import openai
from support.client_cases import WITHOUT_PACKAGE


# The command `transformers`, after a line that imports this package or makes that impossible
COMMAND = "from transformers.cli.transformers import main; main()"
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
    answer = client.completions.create(
        model=str(folder), prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=stream
    )
    return "".join(event.choices[0].text for event in answer) if stream else answer.choices[0].text


def chat(client, folder, prompt, stream=False):
    messages = [{"role": "user", "content": prompt}]
    options = {"model": str(folder), "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0}
    answer = client.chat.completions.create(**options, stream=stream)
    if stream:
        return "".join(event.choices[0].delta.content or "" for event in answer)
    return answer.choices[0].message.content
