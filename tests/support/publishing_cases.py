"""Publishes to the Hub on loopback by the real client, in processes of their own, and loads from there.

One process runs many commands, since imports take longer than publishing. It runs the command's `main`, and returns
its exit status and all that reached its two outputs.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import transformers
from huggingface_hub import ModelCard
from support.hub_server import HubServer

import modeling_nlq
from modeling_nlq.parts_user_nlq import AUTO_MAP


# As long as real ones, and with a word in them that no text has
TOKEN, OTHER_TOKEN = "hf_" + "AnnasSecret" * 3 + "1", "hf_" + "BertsSecret" * 3 + "2"
# Of a model that is no encoder with a decoder
CODE = {path.name for path in Path(modeling_nlq.__file__).parent.glob("*_nlq.py") if "seq2seq" not in path.name}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
# With the file that every repository on the Hub has
RUN_FILES = {".gitattributes", "README.md", "config.json", "generation_config.json", "loss.png", "metrics.json"}
RUN_FILES |= {"model.safetensors", "recipe.yaml", *CODE, *TOKENIZER}
MODELS = [name for name in AUTO_MAP if name not in ("AutoConfig", "AutoModelForMaskedLM")]  # of a decoder


@dataclass
class Done:
    status: int
    out: str
    err: str

    @property
    def sizes(self) -> dict[str, int]:
        lines = [line.split() for line in self.out.splitlines()[:-1]]
        return {name: int(size.replace(",", "")) for size, name in lines}


WORKER = """
import json
import os
import sys
import tempfile
import traceback

answers = os.fdopen(os.dup(1), "w")
usual = dict(os.environ)
for line in sys.stdin:
    arguments, code, variables = json.loads(line)
    os.environ.update(variables)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        status = 0
        try:
            if code is None:
                from nlq import main

                status = main(arguments)
            else:
                exec(code, {"__name__": "__main__", "arguments": arguments})
        except SystemExit as error:
            status = error.code
        except BaseException:
            status = -1
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    os.environ.update(usual)
    print(json.dumps([status, *texts]), file=answers, flush=True)
"""


class Worker:
    """A process that runs `nlq` commands, and other code with the client's environment, one after the other."""

    def __init__(self, home: Path, environment: dict[str, str], before: str = ""):
        home.mkdir(exist_ok=True)
        self.home = home
        self._process = subprocess.Popen(
            [sys.executable, "-c", before + WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=home,
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
        )

    def begin(self, arguments: tuple, code: str | None = None, variables: dict[str, str] | None = None) -> None:
        message = [[str(argument) for argument in arguments], code, variables or {}]
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def end(self) -> Done:
        done = Done(*json.loads(self._process.stdout.readline()))
        assert TOKEN not in done.out + done.err
        return done

    def __call__(self, *arguments: object, **variables: str) -> Done:
        self.begin(arguments, variables=variables)
        return self.end()

    def publish(self, *arguments: object) -> Done:
        done = self("publish", *arguments)
        assert done.status == 0, done.err
        return done

    def python(self, code: str, *arguments: object) -> None:
        self.begin(arguments, code)
        done = self.end()
        assert done.status == 0, done.err

    def close(self) -> None:
        self._process.kill()  # ending by itself, it would first finish importing, and wait for threads
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@dataclass
class Publication:
    """The finished run, published, and published once more with other weights."""

    folder: Path
    first: str
    second: str
    expected: dict[str, dict[str, torch.Tensor]]  # by revision and Auto class


_CHANGES = itertools.count(2)


def change_weights(folder: Path) -> None:
    """Makes weights that the server has not seen, so that they are uploaded, in whatever order tests run."""
    path, factor = folder / "model.safetensors", 1 + 1 / next(_CHANGES)
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file(
        {name: factor * value for name, value in weights.items()}, path, metadata={"format": "pt"}
    )


def change_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def write_card(folder: Path, text: str = "") -> Path:
    path = folder / "card.md"
    path.write_text(f"---\nlicense: mit\n---\n# My own card\n\n{text}\n")
    return path


def input_tokens() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 50


def outputs(folder: Path, auto_class: str = "AutoModelForCausalLM") -> torch.Tensor:
    torch.manual_seed(0)  # heads that the folder has no weights for are new
    with torch.no_grad():
        return getattr(transformers, auto_class).from_pretrained(folder).eval()(input_tokens())[0]


def card_of(server: HubServer, repo_id: str) -> ModelCard:
    return ModelCard(server.files(repo_id)["README.md"].decode(), ignore_metadata_errors=False)


def check_refused(done: Done, *words: str) -> None:
    """One line that says what is wrong, and nothing else."""
    assert done.status == 1 and done.out == ""
    # PyTorch warns of torchao, where that is installed
    own = re.sub(r"^W\d{4} .*\n", "", done.err, flags=re.MULTILINE)
    assert re.fullmatch(r"nlq: error: [^\n]+\n", own), done.err
    for word in words:
        assert word in done.err
    # Names of Python's own that tell a user nothing
    assert not re.search(r"\b(KeyError|TypeError|AttributeError|IndexError)\b", done.err), done.err


# Loads models by (repository, revision, Auto classes) as somebody would who has nothing but Transformers and PyTorch
LOAD = """
import json
import sys
import torch
import transformers

wanted, out, token = arguments
wanted = json.loads(wanted)
inputs = torch.arange(12).reshape(2, 6) % 50
results = {}
for repo, revision, names in wanted:
    options = {"revision": revision, "trust_remote_code": True, "token": token or None}
    for name in names:
        torch.manual_seed(0)
        model = getattr(transformers, name).from_pretrained(repo, **options).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        with torch.no_grad():
            results[repo, revision, name] = model(inputs)[0]
            if name == "AutoModelForCausalLM":
                results[repo, revision, "generated"] = model.generate(inputs, max_new_tokens=5, do_sample=False)
assert sys.modules["modeling_nlq"] is None
"""


def load_elsewhere(elsewhere: Worker, folder: Path, wanted: list, script: str = "", token: str = "") -> dict:
    """What published models compute where this package is not, and what `script` adds to `results`."""
    out = folder / "results.pt"
    elsewhere.python(LOAD + script + "\ntorch.save(results, out)\n", json.dumps(wanted), out, token)
    return torch.load(out)
