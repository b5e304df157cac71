"""`nlq publish` and the model card, against the Hub on loopback: what arrives there, what a stranger makes of it, what fails.

The client is the real one and talks HTTP. Where tests need many commands, one process runs them all, for imports take
longer than publishing; it runs the command's `main` and hands back its exit status and all that reached its two outputs.
"""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.hub_server import Blob, HubServer
from support.remote_code import WITHOUT_THIS_PACKAGE
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.convert_slow_tokenizer import import_protobuf

import modeling_nlq
from modeling_nlq import NLQForCausalLM, NLQForSequenceClassification, NLQForTokenClassification, NLQModel
from modeling_nlq.configuration_nlq import AUTO_MAP
from modeling_nlq.training.cli import main
from modeling_nlq.training.comparison.local import compare
from modeling_nlq.training.comparison.plan import load_comparison
from modeling_nlq.training.comparison.report import write_report
from modeling_nlq.training.traces import check_for_traces


# As long as a real one, and with a word in it that no text has
TOKEN = "hf_" + "AnnasSecret" * 3 + "1"
OTHER_TOKEN = "hf_" + "BertsSecret" * 3 + "2"
AT_ONCE = {"Retry-After": "0"}

CODE = {
    "attention_nlq.py",
    "backends_nlq.py",
    "configuration_nlq.py",
    "linear_nlq.py",
    "loss_nlq.py",
    "modeling_nlq.py",
    "operators_nlq.py",
    "projections_nlq.py",
    "tiled_nlq.py",
    "triton_activations_nlq.py",
    "triton_kernels_nlq.py",
    "triton_nlq.py",
}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
RUN_FILES = {
    ".gitattributes",  # which every repository on the Hub has
    "README.md",
    "config.json",
    "generation_config.json",
    "loss.png",
    "metrics.json",
    "model.safetensors",
    "recipe.yaml",
    *CODE,
    *TOKENIZER,
}


@dataclass
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def sizes(self) -> dict[str, int]:
        """The files it lists, with their sizes."""
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
                from modeling_nlq.training.cli import main

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
        """Publishes something that can be published."""
        done = self("publish", *arguments)
        assert done.status == 0, done.err
        return done

    def python(self, code: str, *arguments: object) -> None:
        self.begin(arguments, code)
        done = self.end()
        assert done.status == 0, done.err

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server():
    with HubServer({TOKEN: "anna", OTHER_TOKEN: "bert"}) as server:
        yield server
    assert server.unknown == []


@pytest.fixture(scope="module")
def nlq(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("nlq") / "home"
    worker = Worker(home, server.client_environment(home, TOKEN))
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def stranger(server, tmp_path_factory):
    """A process without this package and without a token, and with caches of its own."""
    home = tmp_path_factory.mktemp("stranger") / "home"
    worker = Worker(home, {**server.client_environment(home), "PYTHONPATH": ""}, before=WITHOUT_THIS_PACKAGE)
    yield worker
    worker.close()


@pytest.fixture
def copy_run(run, tmp_path):
    """A function that makes a copy of the finished run, by name, for a test to change."""

    def copy(name: str = "copy") -> Path:
        return shutil.copytree(run[0], tmp_path / name, ignore=shutil.ignore_patterns("checkpoint-*"))

    return copy


def run_cli(environment: dict[str, str], *arguments: object) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "modeling_nlq.training", *map(str, arguments)],
        cwd=environment["HF_HOME"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def change_weights(folder: Path) -> None:
    """As if training had gone on."""
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: 1.5 * value for name, value in weights.items()}, path, metadata={"format": "pt"})


def change_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_inputs() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 50


test_inputs.__test__ = False


def outputs(folder: Path, auto_class: str = "AutoModelForCausalLM") -> torch.Tensor:
    """What a saved model computes, by the package."""
    torch.manual_seed(0)  # heads that the folder has no weights for are new
    with torch.no_grad():
        return getattr(transformers, auto_class).from_pretrained(folder).eval()(test_inputs())[0]


def write_card(folder: Path, text: str = "") -> Path:
    path = folder / "card.md"
    path.write_text(f"---\nlicense: mit\n---\n# My own card\n\n{text}\n")
    return path


FAKES = {
    "hugging face": "a token of Hugging Face",
    "github": "a token of GitHub",
    "gitlab": "a token of GitLab",
    "anthropic": "a token of Anthropic",
    "openai": "a token of OpenAI",
    "aws": "a key of AWS",
    "google": "a key of Google",
    "slack": "a token of Slack",
    "wandb": "a key of Weights & Biases",
    "key": "a private key",
}


def fake_tokens() -> dict[str, list[str]]:
    """Of no service, and in no file: put together here."""

    def letters(length: int, of: str = "aB3dE6gH9") -> str:
        return (of * length)[:length]

    key = "-----BEGIN {}PRIVATE KEY{}-----\\n" + letters(64)
    return {
        "hugging face": ["hf_" + letters(34), "hf_" + "oauth_" + letters(40)],
        "github": [f"gh{kind}_" + letters(36) for kind in "oprsu"] + ["github_" + f"pat_{letters(22)}_{letters(59)}"],
        "gitlab": ["glpat-" + letters(20)],
        "anthropic": ["sk-" + f"ant-api03-{letters(40)}-{letters(40)}_AA"],
        "openai": ["sk-" + letters(48), "sk-" + f"proj-{letters(40)}_{letters(40)}", "sk-" + "or-v1-" + letters(64, "0a1b")],
        "aws": ["AKIA" + letters(16, "Q7Z"), "aws_secret_access_key=" + letters(38) + "/+", "secretAccessKey=" + letters(40)],
        "google": ["AIza" + letters(35), "GOCSPX-" + letters(28)],
        "slack": ["xoxb-" + "123456789012-123456789012-" + letters(24), "xapp-" + "1-A012-345-" + letters(40, "0a1b")],
        "wandb": ["wandb_api_key=" + letters(40, "0a1b2c"), "wandb_v1_" + letters(60)],
        "key": [key.format("", ""), key.format("RSA ", ""), key.format("OPENSSH ", ""), key.format("PGP ", " BLOCK")],
    }


def write_secret(folder: Path, place: str, text: str, word: str) -> str:
    """Puts a text into a folder, or a word of it where there is room for that only; returns how the place is named."""
    if place == "recipe":
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        recipe["training"]["run_name"] = text
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return "recipe.yaml, field training.run_name"
    if place == "label":
        change_json(folder / "config.json", id2label={"0": text})
        return "config.json, field id2label.0"
    if place == "template":
        change_json(folder / "tokenizer_config.json", chat_template=text)
        return "tokenizer_config.json, field chat_template"
    if place in ("config", "metrics"):
        change_json(folder / f"{place}.json", task_specific_params={"all": [text]})
        return f"{place}.json, field task_specific_params.all.0"
    if place == "vocabulary":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"][word] = 600
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return "tokenizer.json, field model.vocab"
    if place == "code":
        code = (folder / "modeling_nlq.py").read_text()
        (folder / "modeling_nlq.py").write_text(f"NOTE = {text!r}\n{code}")
        return "modeling_nlq.py, line 1"
    if place == "weights":
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "note": text})
        return "model.safetensors, field metadata.note"
    if place == "picture":
        chunks = PngInfo()
        chunks.add_itxt("note", text, zip=True)
        Image.new("L", (4, 4)).save(folder / "loss.png", pnginfo=chunks)
        return "loss.png, field metadata.note"
    if place == "sentencepiece":
        model = import_protobuf().ModelProto()
        model.trainer_spec.input.append(text)
        model.pieces.add(piece=str(Path.home() / "x"), score=0.0)
        (folder / "tokenizer.model").write_bytes(model.SerializeToString())
        return "tokenizer.model"
    assert place == "file name"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / f"{word}.jinja").write_text("")
    return "additional_chat_templates/***.jinja"


def card_of(server: HubServer, repo_id: str) -> ModelCard:
    return ModelCard(server.files(repo_id)["README.md"].decode(), ignore_metadata_errors=False)


def check_refused(done: Done, *words: str) -> None:
    """One line that says what is wrong, and nothing else."""
    assert done.status == 1 and done.out == ""
    assert re.fullmatch(r"nlq: error: [^\n]+\n", done.err), done.err
    for word in words:
        assert word in done.err
    # Names of Python's own that tell a user nothing
    assert not re.search(r"\b(KeyError|TypeError|AttributeError|IndexError)\b", done.err), done.err


@pytest.fixture
def refuses(server, nlq):
    """A function that publishes what cannot be: one line with these words, and not one request."""

    def check(*arguments: object, words: tuple[str, ...] = (), without: str | None = None) -> None:
        before = len(server.requests)
        done = nlq("publish", *arguments)
        check_refused(done, *words)
        assert without is None or without not in done.err
        assert server.requests[before:] == []

    return check


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


def load_elsewhere(stranger: Worker, folder: Path, wanted: list, script: str = "", token: str = "") -> dict:
    """What published models compute where this package is not, and what `script` adds to `results`."""
    out = folder / "results.pt"
    stranger.python(LOAD + script + "\ntorch.save(results, out)\n", json.dumps(wanted), out, token)
    return torch.load(out)


@dataclass
class Publication:
    """The finished run, published, and published once more with other weights."""

    folder: Path
    first: str
    second: str
    expected: dict[str, dict[str, torch.Tensor]]  # by revision and Auto class
    done: Done


MODELS = [name for name in AUTO_MAP if name != "AutoConfig"]


@pytest.fixture(scope="module")
def published(server, nlq, run, tmp_path_factory) -> Publication:
    folder = shutil.copytree(run[0], tmp_path_factory.mktemp("machine") / "runs" / "first")
    home = tmp_path_factory.mktemp("cli")
    expected = {name: outputs(folder, name) for name in MODELS}
    done = run_cli(server.client_environment(home, TOKEN), "publish", folder, "anna/model")
    assert done.status == 0, done.err
    assert TOKEN not in done.out + done.err
    first = server.commits("anna/model")[0]
    change_weights(folder)
    nlq.publish(folder, "anna/model")
    second = server.commits("anna/model")[0]
    expected = {first: expected, second: {name: outputs(folder, name) for name in MODELS}}
    return Publication(folder, first, second, expected, done)


ROUND_TRIP = """
repo = wanted[0][0]
assert transformers.AutoConfig.from_pretrained(repo, trust_remote_code=True).model_type == "nlq"
tokenizer = transformers.AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
results["tokens"] = tokenizer("import json")["input_ids"]
generate = transformers.pipeline("text-generation", repo, trust_remote_code=True)
results["text"] = generate("import json", max_new_tokens=5, do_sample=False)[0]["generated_text"]
"""


class TestRoundTrip:
    def test_a_stranger_computes_the_same_from_every_revision(self, stranger, published, tmp_path):
        expected = published.expected
        assert not torch.equal(*(expected[revision]["AutoModel"] for revision in (published.first, published.second)))
        wanted = [
            ("anna/model", published.first, MODELS),
            ("anna/model", published.second, MODELS),
            ("anna/model", "main", MODELS),
        ]
        results = load_elsewhere(stranger, tmp_path, wanted, ROUND_TRIP)
        for _, revision, names in wanted:
            for name in names:
                result = results["anna/model", revision, name]
                assert torch.equal(result, expected[published.second if revision == "main" else revision][name]), name

        model, tokenizer = (
            NLQForCausalLM.from_pretrained(published.folder).eval(),
            AutoTokenizer.from_pretrained(published.folder),
        )
        generated = model.generate(test_inputs(), max_new_tokens=5, do_sample=False)
        assert torch.equal(results["anna/model", "main", "generated"], generated)
        inputs = tokenizer("import json", return_tensors="pt")
        assert results["tokens"] == inputs["input_ids"][0].tolist()
        assert results["text"] == tokenizer.decode(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0])

    def test_each_publication_is_one_commit(self, server, published):
        assert len(server.commits("anna/model")) == 3, "with the Hub's own first one"
        assert published.first in published.done.out.splitlines()[-1], "the command ends with where it can be seen"
        before, after = (server.files("anna/model", revision) for revision in (published.first, published.second))
        assert {name for name in before if before[name] != after[name]} == {
            "model.safetensors"
        } and before.keys() == after.keys()

    def test_nothing_new_is_no_commit(self, server, nlq, copy_run):
        folder = copy_run()
        first, again = nlq.publish(folder, "anna/unchanged"), nlq.publish(folder, "anna/unchanged")
        assert len(server.commits("anna/unchanged")) == 2
        assert again.out == first.out

    def test_listing_tells_names_and_sizes(self, server, nlq, copy_run):
        folder = copy_run()
        planned, done = nlq.publish(folder, "anna/listed", "--dry-run"), nlq.publish(folder, "anna/listed")
        there = {name: len(data) for name, data in server.files("anna/listed").items() if name != ".gitattributes"}
        assert planned.sizes == done.sizes == there
        assert f"{sum(there.values()):,} bytes in {len(there)} files" in done.out
        assert "nothing was sent" in planned.out and "nothing was sent" not in done.out

    def test_branch_and_private_repository(self, server, nlq, stranger, copy_run, tmp_path):
        folder = copy_run()
        nlq.publish(folder, "anna/hidden", "--private")
        change_weights(folder)
        main_commits = server.commits("anna/hidden")
        nlq.publish(folder, "anna/hidden", "--revision", "longer/training")
        assert server.commits("anna/hidden") == main_commits
        assert server.commits("anna/hidden", "longer/training")[1:] == main_commits
        wanted = [("anna/hidden", revision, ["AutoModelForCausalLM"]) for revision in ("main", "longer/training")]
        closed = """
try:
    transformers.AutoConfig.from_pretrained("anna/hidden", trust_remote_code=True, cache_dir="empty")
except OSError as error:
    assert "private" in str(error) or "401" in str(error), error
else:
    raise AssertionError("anybody can read a private repository")
"""
        before = len(server.requests)
        results = load_elsewhere(stranger, tmp_path, wanted, closed, token=TOKEN)
        old, new = (results["anna/hidden", revision, "AutoModelForCausalLM"] for revision in ("main", "longer/training"))
        assert torch.equal(new, outputs(folder)) and not torch.equal(old, new)
        assert any("/anna/hidden/" in path and not with_token for _, path, with_token in server.requests[before:])
        assert nlq("publish", folder, "anna/hidden", "--revision", "longer/training").status == 0

    def test_a_repository_that_is_public_does_not_pass_for_private(self, server, nlq, copy_run):
        """Whoever asks for `--private` must not find out later that all could read it."""
        folder = copy_run()
        nlq.publish(folder, "anna/open")
        change_weights(folder)
        before = server.commits("anna/open")
        done = nlq("publish", folder, "anna/open", "--private")
        check_refused(done, "public")
        assert server.commits("anna/open") == before

    def test_sharded_and_whole_weights_replace_each_other(self, server, nlq, stranger, copy_run, tmp_path):
        whole, sharded = copy_run("whole"), copy_run("sharded")
        (sharded / "model.safetensors").unlink()
        NLQForCausalLM.from_pretrained(whole).save_pretrained(sharded, max_shard_size="70KB")
        shards = {path.name for path in sharded.glob("model-*")}
        assert len(shards) > 1
        nlq.publish(whole, "anna/shards")
        names = ("notes.txt", "notes.py", "examples/model.safetensors", "examples/modeling_nlq.py", "comparison/mine.png")
        own = dict.fromkeys(names, b"mine")
        (tmp_path / "own").mkdir()
        add = (
            "from huggingface_hub import HfApi\nHfApi().upload_file(path_or_fileobj=%r, path_in_repo=%r, repo_id='anna/shards')"
        )
        for name, data in own.items():
            nlq.python(add % (data, name))
        commits = len(server.commits("anna/shards"))

        expected = RUN_FILES | own.keys()
        nlq.publish(sharded, "anna/shards")
        middle = server.commits("anna/shards")[0]
        assert server.files("anna/shards").keys() == expected - {"model.safetensors"} | shards | {
            "model.safetensors.index.json"
        }
        nlq.publish(whole, "anna/shards")
        assert server.files("anna/shards").keys() == expected
        assert len(server.commits("anna/shards")) == commits + 2
        assert own.items() <= server.files("anna/shards").items()
        wanted = [("anna/shards", revision, ["AutoModelForCausalLM"]) for revision in (middle, "main")]
        results = load_elsewhere(stranger, tmp_path, wanted)
        for _, revision, (name,) in wanted:
            assert torch.equal(results["anna/shards", revision, name], outputs(whole))

    def test_somebody_else_commits_meanwhile(self, server, nlq, copy_run, monkeypatch):
        """Their work is not overwritten unseen."""
        folder = copy_run()
        nlq.publish(folder, "anna/shared")
        change_weights(folder)
        answer = server.answer

        def commit_first(request):
            if request.path.endswith("/anna/shared/preupload/main"):
                theirs = {**server._repos["anna/shared"].revision("main").files, "loss.png": Blob(b"theirs", is_lfs=True)}
                server._repos["anna/shared"].commit("main", theirs, "theirs", "", "anna")
            return answer(request)

        monkeypatch.setattr(server, "answer", commit_first)
        check_refused(nlq("publish", folder, "anna/shared"), "somebody else")
        assert server.files("anna/shared")["loss.png"] == b"theirs"
        monkeypatch.undo()
        nlq.publish(folder, "anna/shared")
        assert server.files("anna/shared")["loss.png"] == (folder / "loss.png").read_bytes()


DECOYS = (
    ".env",
    ".git/config",
    ".metrics.json.123.unfinished",
    ".token",
    "adapter_model.bin",
    "all_results.json",
    "checkpoint-2/model.safetensors",
    "comparison/results.md",
    "events.out.tfevents.1.machine",
    "extra_nlq.py",
    "figures/curves.png",
    "huggingface/token",
    "model.safetensors.bak",
    "nested/config.json",
    "nested/tokenizer.json",
    "notes.py",
    "optimizer.pt",
    "other.png",
    "pytorch_model.bin",
    "results.json",
    "rng_state.pth",
    "runs/now/events.out.tfevents.2.machine",
    "scheduler.pt",
    "secrets.txt",
    "token",
    "trainer_state.json",
    "training_args.bin",
    "vocab.bin",
    "xmodel.safetensors",
)
PLACES = {"_name_or_path": "/home/somebody/model", "name_or_path": "/home/somebody/model"}


class TestNothingLeaks:
    @pytest.fixture(scope="class")
    def files(self, server, nlq, run, tmp_path_factory) -> dict[str, bytes]:
        """What arrives of a run folder that has much in it that must not."""
        folder = shutil.copytree(run[0], tmp_path_factory.mktemp("private") / "run")
        for name in DECOYS:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text(f"{TOKEN} {folder}")
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            change_json(folder / name, **PLACES)
        change_json(folder / "metrics.json", resumed_from="/home/somebody/checkpoint-4")
        assert (folder / "checkpoint-8" / "optimizer.pt").is_file()
        nlq.publish(folder, "anna/clean")
        return server.files("anna/clean")

    def test_exactly_these_files(self, files, published, server):
        assert files.keys() == RUN_FILES
        assert server.files("anna/model", published.first).keys() == RUN_FILES

    def test_files_are_those_of_the_run(self, files, run):
        for name in (*CODE, "model.safetensors", "loss.png", "tokenizer.json"):
            assert files[name] == (run[0] / name).read_bytes(), name
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert json.loads(files[name]) == json.loads((run[0] / name).read_text()), name
        assert json.loads(files["metrics.json"]) == {**run[1], "resumed_from": "checkpoint-4"}

    def test_no_pickle(self, files):
        safetensors.torch.load(files["model.safetensors"])
        assert files["loss.png"].startswith(b"\x89PNG")
        for name, data in files.items():
            if name not in ("model.safetensors", "loss.png"):
                assert "\0" not in data.decode(), name

    def test_no_trace_of_the_machine(self, files, server, run, recipe_file, corpus, published):
        folders = {
            run[0],
            recipe_file.parent,
            corpus.parent,
            Path.home(),
            Path.cwd(),
            Path(modeling_nlq.__file__).parent.parent,
        }
        for revision in (files, server.files("anna/model", published.first)):
            for name, data in revision.items():
                for text in (*map(str, folders), "/home/somebody", "pytest-of", TOKEN, "AnnasSecret", "tfevents"):
                    assert text.encode() not in data, (name, text)
            for name in ("metrics.json", "recipe.yaml", "config.json", "README.md", "tokenizer_config.json"):
                for word in (getpass.getuser(), socket.gethostname()):
                    assert not re.search(rf"\b{re.escape(word)}\b", revision[name].decode()), (name, word)

    def test_recipe_keeps_the_last_part_of_a_path(self, files, run):
        given, there = yaml.safe_load((run[0] / "recipe.yaml").read_text()), yaml.safe_load(files["recipe.yaml"])
        assert Path(given["dataset"]).is_absolute() and Path(given["model"]).is_absolute()
        assert there == {**given, "dataset": "corpus.jsonl", "model": "model.json"}
        assert "- corpus.jsonl" not in files["README.md"].decode(), "which is no dataset of the Hub"

    @pytest.mark.parametrize(
        "name", ["card.md", "chat_template.jinja", "modeling_nlq.py", "special_tokens_map.json", "tokenizer.json"]
    )
    @pytest.mark.parametrize("secret", ["folder", "link", "home", "elsewhere", "address", "token", "login"])
    def test_what_somebody_wrote_into_a_file(self, secret, name, copy_run, tmp_path, tmp_path_factory, refuses):
        """Files that are uploaded as they are must not tell more than their author thought."""
        folder = copy_run()
        link = tmp_path_factory.mktemp("links") / "link"
        link.symlink_to(tmp_path)
        secrets = {
            "folder": str(folder / "corpus.jsonl"),
            "link": str(link / "copy" / "corpus.jsonl"),
            "home": str(Path.home() / "corpus.jsonl"),
            "elsewhere": str(tmp_path_factory.mktemp("elsewhere")),
            "address": f"file://{tmp_path_factory.mktemp('elsewhere')}/corpus.jsonl",
            "token": "hf_" + "x" * 34,
            "login": TOKEN,
        }
        text = secrets[secret]
        if name == "card.md":
            arguments = ("--card", write_card(tmp_path, f"Trained on {text}."))
        elif name.endswith(".json"):
            path = folder / name
            path.write_text(path.read_text() if path.exists() else "{}")
            change_json(path, added=text)
            arguments = ()
        else:
            path = folder / name
            path.write_text(f"{path.read_text() if path.exists() else ''}\n# {text}\n")
            arguments = ()
        word = "token" if secret in ("token", "login") else "a path of this machine"
        given = link / "copy" if secret == "link" else folder
        refuses(given, "anna/secrets", *arguments, words=("README.md" if name == "card.md" else name, word))

    def test_paths_are_cut_wherever_they_stand(self, server, nlq, copy_run, comparison, tmp_path):
        """In values below others, and within a text."""
        folder, compared = copy_run(), shutil.copytree(comparison[0], tmp_path / "compared")
        # By the name of a field; whether there is such a folder does not matter
        given = {
            "whole": "/data/private/my corpus.txt",
            "listed": [{"deep": ["/data/private/"]}],
            "option": "--dataset=/data/private/x.txt --device cpu",
            "address": "file:///data/private/x.txt, zip://*.txt::/data/private/x.zip",
            "home": "from ~/private/x.txt and ~anna/private",
            "two": "/data/private/a b.txt and /data/private/c.txt",
            "windows": r"C:\Users\private\x.txt or D:/private/x.txt",
            "share": r"\\private\data\x.txt",
            "short": "/x.txt",
        }
        expected = {
            "whole": "my corpus.txt",
            "listed": [{"deep": ["private"]}],
            "option": "--dataset=x.txt --device cpu",
            "address": "x.txt, zip://*.txt::x.zip",
            "home": "from x.txt and private",
            "two": "a b.txt and c.txt",
            "windows": "x.txt or x.txt",
            "share": "x.txt",
            "short": "x.txt",
        }
        same = {
            "name": "owner/name",
            "relative": "runs/demo/x.txt",
            "formula": r"use \\(x\\) and ^/usr/bin$",
            "template": "<s>[INST] {} [/INST]</s> /no_think",
            "link": "https://example.org:80/data/private?x=/data/private",
            "ratio": "1/2 and/or ~50/50, 3 / 4 tokens /s",
        }
        settings = ("config.json", "generation_config.json", "tokenizer_config.json", "metrics.json")
        for name in settings:
            change_json(folder / name, origin=given | same)
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "training": given | same}))
        with (compared / "results.md").open("a") as report:
            report.write("\nRun on `/data/private/corpus.txt`.\n")

        nlq.publish(folder, "anna/cut", "--comparison", compared)
        files = server.files("anna/cut")
        for name in settings:
            assert json.loads(files[name])["origin"] == expected | same, name
        assert yaml.safe_load(files["recipe.yaml"])["training"] == expected | same
        recipe = re.search(r"```yaml\n(.*?)```", files["README.md"].decode(), flags=re.DOTALL)[1]
        assert yaml.safe_load(recipe)["training"] == expected | same
        assert files["comparison/results.md"].endswith(b"\nRun on `corpus.txt`.\n")

    def test_what_a_model_computes_with_stays(self, server, nlq, copy_run, tmp_path):
        """A path in a vocabulary is a token, and another label, stop string or template makes another model."""
        folder, places = copy_run(), (f"{Path.home()}/corpus", str(tmp_path), "/usr/bin")
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] |= {place: 600 + index for index, place in enumerate(places)}
        tokenizer["model"]["merges"] += [[place, "/"] for place in places]
        tokenizer["added_tokens"] += [{"id": 700, "content": str(tmp_path), "special": True}]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        for name in ("vocab.json", "added_tokens.json"):
            (folder / name).write_text(json.dumps(tokenizer["model"]["vocab"]))
        (folder / "merges.txt").write_text("".join(f"{place} /\n" for place in places))
        labels = {0: "/location/location/contains", 1: "/"}
        change_json(folder / "config.json", id2label=labels, label2id={label: index for index, label in labels.items()})
        change_json(folder / "generation_config.json", stop_strings=["</s>", "/stop/here"])
        template = "{# /mnt/nobody/has/this #}You may run `/usr/bin/env` or https://example.org/api/v1; write to /dev/null."
        tokens = {"eos_token": str(tmp_path), "extra_special_tokens": [str(tmp_path)]}
        change_json(folder / "tokenizer_config.json", chat_template=template, **tokens)
        text = f"{template}\n\n```sh\ncd /path/to/models && nlq generate ~/models/demo 'x /y'\n```\nSee https://example.org{tmp_path}"
        card = write_card(tmp_path, text)
        nlq.publish(folder, "anna/computes", "--card", card)
        files = server.files("anna/computes")
        for name in ("tokenizer.json", "vocab.json", "added_tokens.json", "merges.txt"):
            assert files[name] == (folder / name).read_bytes(), name
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert json.loads(files[name]) == json.loads((folder / name).read_text()), name
        assert files["README.md"] == card.read_bytes()

    @pytest.mark.parametrize("place", ["label", "template", "weights", "picture", "sentencepiece"])
    def test_path_where_it_cannot_be_cut(self, place, copy_run, tmp_path, refuses):
        folder, path = copy_run(), str(tmp_path / "corpus.txt")
        where = write_secret(folder, place, f"from {path}", path)
        refuses(folder, "anna/paths", words=(where, path, "a path of this machine"))

    @pytest.mark.parametrize(
        "place",
        [
            "recipe",
            "config",
            "metrics",
            "template",
            "code",
            "weights",
            "picture",
            "vocabulary",
            "sentencepiece",
            "file name",
            "card",
            "report",
        ],
    )
    def test_token_of_another_service(self, place, copy_run, comparison, tmp_path, refuses):
        """Found where it stands, by a dry run too, and not printed."""
        folder, token, arguments = copy_run(), fake_tokens()["github"][0], ()
        if place == "card":
            arguments, where = ("--card", write_card(tmp_path, token)), "README.md, line 6"
        elif place == "report":
            compared = shutil.copytree(comparison[0], tmp_path / "compared")
            (compared / "results.md").write_text(f"\n{token}\n")
            arguments, where = ("--comparison", compared), "comparison/results.md, line 2"
        else:
            where = write_secret(folder, place, f"first\n{token}", token)
        for options in ((), ("--dry-run",)):
            refuses(folder, "anna/tokens", *arguments, *options, words=(where, "a token of GitHub"), without=token[-30:])

    @pytest.mark.parametrize("service", [*FAKES])
    def test_tokens_of_services(self, service, tmp_path):
        for fake in fake_tokens()[service]:
            for text in (fake, f"x = '{fake}'", f"TOKEN_{fake}.", f'print("first\\n{fake}")'):
                with pytest.raises(ValueError, match=rf"^code\.py, line 2: holds what looks like {FAKES[service]}") as error:
                    check_for_traces(tmp_path, {"code.py": f"\n{text}\n".encode()})
                assert fake[-20:] not in str(error.value)
            name, separator, value = fake.partition("=")
            if separator:  # a key that is known by its name, which is a field's
                with pytest.raises(ValueError, match=rf"field at\.{name}: holds what looks like {FAKES[service]}"):
                    check_for_traces(tmp_path, {"metrics.json": json.dumps({"at": {name: value}}).encode()})

    def test_what_is_no_token(self, tmp_path):
        digits = "0123456789abcdef"
        texts = [
            f"dataset_fingerprint: {digits}",
            f"token_stream: {digits * 4}",
            f"commit {digits * 2}{digits[:8]}, wandb run {digits}",
            "run_id: 01234567-89ab-cdef-0123-456789abcdef",
            f"disk-{digits * 2} task-specific-parameters-of-a-model sk-learn hf_hub_download hf_transfer ghp_ AKIA sk-proj-",
            "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
            "secret_access_key=YOUR_KEY wandb_api_key=... pad_token: <|endoftext|>",
        ]
        check_for_traces(tmp_path, {"card.md": "\n".join(texts).encode(), "notes.json": json.dumps(texts).encode()})

    def test_what_training_draws_and_writes(self, recipe_file, tmp_path, monkeypatch):
        """The title of the plot too is seen by all."""
        titles = []
        monkeypatch.setattr(modeling_nlq.training.run.trainer, "plot_losses", lambda history, path, title: titles.append(title))
        options = ("--max_steps", "1", "--run_name", "on file:///data/private/x.txt")
        assert main(["train", str(recipe_file), "--output_dir", str(tmp_path / "run"), *options]) == 0
        assert titles == ["model.json"]
        card = (tmp_path / "run" / "README.md").read_text()
        assert "run_name: on x.txt\n" in card and str(recipe_file.parent) not in card

    def test_own_card_is_uploaded_as_it_is(self, server, nlq, copy_run, tmp_path):
        card = write_card(tmp_path, "Trained on a corpus, see https://example.org/runs/copy. hf_hub_download works.")
        nlq.publish(copy_run(), "anna/own-card", "--card", card)
        assert server.files("anna/own-card")["README.md"] == card.read_bytes()

    def test_shards_of_another_model_beside_these(self, server, nlq, copy_run):
        """What loads is published, and nothing that nobody checked."""
        folder = copy_run()
        NLQForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="70KB")
        (folder / "model.safetensors").unlink()
        shards = {path.name for path in folder.glob("model-*")}
        (folder / "model-00001-of-00009.safetensors").write_bytes(b"\x80\x04 not checked")
        nlq.publish(folder, "anna/shards-of-two")
        expected = RUN_FILES - {"model.safetensors"} | shards | {"model.safetensors.index.json"}
        assert server.files("anna/shards-of-two").keys() == expected

    def test_index_of_shards_that_are_gone(self, server, nlq, copy_run):
        folder = copy_run()
        NLQForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="70KB")
        (folder / "model.safetensors").unlink()
        NLQForCausalLM.from_pretrained(folder).save_pretrained(folder)
        assert (folder / "model.safetensors.index.json").exists() and not list(folder.glob("model-*")), (
            "as Transformers leaves it"
        )
        nlq.publish(folder, "anna/whole-again")
        assert server.files("anna/whole-again").keys() == RUN_FILES


@pytest.fixture(scope="module")
def comparison(recipe_file, corpus, tmp_path_factory) -> tuple[Path, dict]:
    """A finished comparison, whose command line names a file of this machine."""
    fields = {
        "recipe": str(recipe_file),
        "baseline": "base",
        "models": {"base": None, "linear queries": {"switches": {"query_projection": "linear"}}},
        "learning_rates": [1e-2],
        "seeds": [0, 1],
        "training": {"max_steps": 4, "save_steps": 4, "eval_steps": 4, "report_to": "none"},
    }
    path = tmp_path_factory.mktemp("comparison") / "queries.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False))
    folder = tmp_path_factory.mktemp("compared") / "results"
    results = compare(load_comparison(str(path), ["--dataset", str(corpus)]), folder)
    write_report(results, folder)
    return folder, results


@pytest.fixture(scope="module")
def converted(nlq, run, tmp_path_factory) -> tuple[Path, Path]:
    """A GPT-2 whose card says what it was made from, and one without card, both converted; both have the run's tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {
        "vocab_size": 512,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for name in ("with-card", "without"):
        GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(run[0]).save_pretrained(folder / name)
        done = nlq("convert", folder / name, folder / f"{name}-nlq")
        assert done.status == 0, done.err
        if name == "with-card":
            shutil.rmtree(folder / f"{name}-nlq")
            (folder / name / "README.md").write_text("---\nlicense: mit\nbase_model: openai-community/gpt2\n---\n# Mine\n")
            assert nlq("convert", folder / name, folder / f"{name}-nlq", "--upcycle").status == 0
    return folder / "with-card-nlq", folder / "without-nlq"


@pytest.fixture(scope="module")
def fine_tune(nlq, recipe_file, tmp_path_factory):
    """A function that trains on from a saved model, by folder or name, for two steps."""

    def make(model: str | Path) -> Path:
        folder = tmp_path_factory.mktemp("tuned") / "run"
        recipe = {**yaml.safe_load(recipe_file.read_text()), "model": str(model), "tokenizer": str(model)}
        recipe["training"].update(max_steps=2, save_steps=2, eval_steps=2, report_to="none")
        (folder.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        done = nlq("train", folder.parent / "recipe.yaml", "--output_dir", folder)
        assert done.status == 0, done.err
        return folder

    return make


@pytest.fixture(scope="module")
def heads(server, nlq, run, make_model, tmp_path_factory) -> dict[str, str]:
    """Models with other heads, published: repository by Auto class."""
    tokenizer = AutoTokenizer.from_pretrained(run[0])
    sizes = {"vocab_size": 512, "pad_token_id": 0, "num_labels": 3, "tie_word_embeddings": False}
    config = make_model(**sizes).config
    repositories = {}
    for head in (NLQForSequenceClassification, NLQForTokenClassification, NLQModel):
        folder = tmp_path_factory.mktemp("heads") / head.__name__
        head(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        auto_class = "Auto" + head.__name__.replace("NLQ", "Model", 1).replace("ModelModel", "Model")
        repositories[auto_class] = f"anna/{head.__name__}"
        nlq.publish(folder, repositories[auto_class])
    return repositories


# Each block of Python of a card, as it stands, in a namespace of its own
SNIPPETS = """
import re
import sys
from huggingface_hub import ModelCard

for repo in arguments:
    card = ModelCard.load(repo)
    card.validate()
    blocks = re.findall(r"```python\\n(.*?)```", card.text, flags=re.DOTALL)
    assert len(blocks) == 2 and "import modeling_nlq" in blocks[1], blocks
    for block in blocks if sys.modules.get("modeling_nlq") else blocks[:1]:
        names = {}
        exec(block, names)
        assert names["model"].config.model_type == "nlq"
"""


class TestCard:
    def test_of_a_run(self, server, published, run):
        card, metrics = card_of(server, "anna/model"), run[1]
        index = card.data.to_dict().pop("model-index")
        assert {name: value for name, value in card.data.to_dict().items() if name != "model-index"} == {
            "library_name": "transformers",
            "license": "apache-2.0",
            "pipeline_tag": "text-generation",
            "tags": ["nlq", "custom_code", "attention"],
        }
        measured = {"loss", "perplexity", "bits_per_byte", "token_accuracy"}
        assert index[0]["name"] == "model" and len(index) == 1
        assert {
            metric["type"]: (metric["value"], result["dataset"]["type"], result["dataset"]["split"], result["task"]["type"])
            for result in index[0]["results"]
            for metric in result["metrics"]
        } == {name: (metrics[f"eval_{name}"], "corpus.jsonl", "validation", "text-generation") for name in measured}
        assert json.loads(server.files("anna/model")["metrics.json"]) == metrics
        assert "# model\n" in card.text and '"anna/model"' in card.text and f"{metrics['parameters']:,} parameters" in card.text
        assert f"{metrics['eval_perplexity']:.4f}" in card.text and f"{metrics['tokens_seen']:,} tokens in 8 steps" in card.text
        assert "![Training and validation loss](loss.png)" in card.text
        assert "`query_projection` | `nonlinear`" in card.text and metrics["dataset_fingerprint"] in card.text
        assert "## Comparison" not in card.text and "## Origin" not in card.text
        assert "learning_rate: 0.01" in card.text and "@misc{karbevski2026nonlinear" in card.text
        assert str(published.folder) not in card.content and published.folder.name not in card.content
        assert "{{" not in card.content and "{%" not in card.content and "None" not in card.text

    def test_of_a_run_of_a_comparison(self, server, nlq, comparison):
        folder, results = comparison
        name, model = "linear queries", results["models"]["linear queries"]
        nlq.publish(folder / model["runs"][1]["folder"], "anna/compared")
        files, card = server.files("anna/compared"), card_of(server, "anna/compared")
        figures = {f"comparison/figures/{name}.png" for name in ("curves", "flops", "parameters", "stability")}
        assert files.keys() == RUN_FILES | {"comparison/results.md"} | figures
        section = re.search(r"^## Comparison\n(.*?)^## ", card.text, flags=re.DOTALL | re.MULTILINE)[1]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
        verdict = results["statistics"]["effects"][name]["verdict"]
        assert [row[:2] for row in rows[2:]] == [["base", "baseline"], [f"**{name}** (this model)", verdict]]
        assert "noise floor" in section.lower() and "2 seeds" in section and f"{results['tokens_per_run']:,} tokens" in section
        assert "(comparison/results.md)" in section
        assert "no more" in card.text and "One run with one seed" not in card.text
        for target in re.findall(r"\]\(([^)#]+)\)", card.text):
            assert target.startswith("https://") or target in files, target
        for target in re.findall(r"\]\(([^)#]+)\)", files["comparison/results.md"].decode()):
            assert target.startswith("https://") or f"comparison/{target}" in files, target
        losses = {(each.metric_type, each.dataset_split): each.metric_value for each in card.data.eval_results}
        assert losses["loss", "test"] == model["runs"][1]["test_loss"] and ("loss", "validation") in losses

    def test_what_a_comparison_uploads_names_no_folder(self, server, nlq, comparison, corpus):
        folder, results = comparison
        nlq.publish(folder / results["models"]["base"]["runs"][0]["folder"], "anna/compared-paths")
        for name, data in server.files("anna/compared-paths").items():
            for path in (corpus.parent, folder, folder.parent):
                assert str(path).encode() not in data, name

    def test_of_another_run_beside_a_comparison(self, server, nlq, comparison, copy_run):
        """The verdicts are reported and none is this model's; without the option they go again, with their files."""
        folder = copy_run()
        nlq.publish(folder, "anna/beside", "--comparison", comparison[0])
        card = card_of(server, "anna/beside")
        assert "| base | baseline |" in card.text and "this model" not in card.text
        assert any(name.startswith("comparison/") for name in server.files("anna/beside"))
        nlq.publish(folder, "anna/beside")
        assert server.files("anna/beside").keys() == RUN_FILES
        assert "## Comparison" not in card_of(server, "anna/beside").text

    def test_place_of_a_run_beside_other_results(self, nlq, comparison, copy_run, tmp_path):
        """Runs of a comparison lie in its folder `runs`, and nothing else does."""
        shutil.copy(comparison[0] / "results.json", tmp_path)
        (tmp_path / "models").mkdir()
        planned = nlq.publish(copy_run("models/mine/copy"), "anna/elsewhere", "--dry-run")
        assert planned.sizes.keys() == RUN_FILES - {".gitattributes"}

    def test_of_a_converted_model(self, server, nlq, converted):
        for folder, base_model in zip(converted, ("openai-community/gpt2", None)):
            nlq.publish(folder, f"anna/{folder.name}")
            card = card_of(server, f"anna/{folder.name}")
            assert card.data.base_model == base_model and card.data.license is None and card.data.eval_results is None
            assert card.data.datasets is None
            assert "## Origin" in card.text and "GPT2LMHeadModel" in card.text and "Nothing was measured" in card.text
            assert "## Training" not in card.text and "## Results" not in card.text
            weights = safetensors.torch.load(server.files(f"anna/{folder.name}")["model.safetensors"])
            assert f"{sum(value.numel() for value in weights.values()):,} parameters" in card.text
        assert "`query_projection: upcycled`" in card_of(server, "anna/with-card-nlq").text
        expected = RUN_FILES - {"loss.png", "metrics.json", "recipe.yaml"} | {"conversion.json"}
        files = server.files("anna/with-card-nlq")
        assert files.keys() == expected
        assert b"/" not in files["conversion.json"].replace(b"openai-community/gpt2", b"")

    def test_of_a_model_trained_on_from_the_hub(self, server, nlq, published, fine_tune):
        folder = fine_tune("anna/model")
        nlq.publish(folder, "anna/tuned", "--license", "mit")
        card = card_of(server, "anna/tuned")
        assert card.data.base_model == "anna/model" and card.data.license == "mit"
        assert "starting from `anna/model`" in card.text
        nlq.publish(folder, "anna/tuned")
        assert card_of(server, "anna/tuned").data.license is None, "whose weights have one of their own"

    def test_of_a_model_trained_on_from_a_conversion(self, server, nlq, converted, fine_tune):
        for folder, base_model in zip(converted, ("openai-community/gpt2", None)):
            nlq.publish(fine_tune(folder), f"anna/tuned-{folder.name}")
            card = card_of(server, f"anna/tuned-{folder.name}")
            assert card.data.base_model == base_model
            assert card.data.license is None, "whoever made the weights gives the license"
            assert str(folder.parent) not in card.content

    def test_of_a_run_without_plot(self, server, nlq, copy_run):
        folder = copy_run()
        (folder / "loss.png").unlink()
        nlq.publish(folder, "anna/no-plot")
        assert server.files("anna/no-plot").keys() == RUN_FILES - {"loss.png"}
        assert "loss.png" not in card_of(server, "anna/no-plot").text

    def test_license(self, server, nlq, copy_run, converted):
        for folder, name in ((copy_run(), "licensed"), (converted[0], "licensed-conversion")):
            nlq.publish(folder, f"anna/{name}", "--license", "cc-by-sa-4.0")
            assert card_of(server, f"anna/{name}").data.license == "cc-by-sa-4.0"

    @pytest.mark.parametrize(
        "dataset, listed",
        [
            ("allenai/c4", ["allenai/c4"]),
            ("wikitext", ["wikitext"]),
            ("mlfoundations/dclm-baseline-1.0", ["mlfoundations/dclm-baseline-1.0"]),
            ("python-stdlib", None),
            ("python-site-packages", None),
            ("corpora/mine.parquet", None),
            ("/corpora/mine.txt", None),
            ("~/mine.jsonl", None),
        ],
    )
    def test_datasets_are_those_of_the_hub(self, dataset, listed, server, nlq, copy_run):
        folder = copy_run()
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "dataset": dataset}))
        nlq.publish(folder, "anna/dataset")
        card = card_of(server, "anna/dataset")
        assert card.data.datasets == listed
        shown = Path(dataset).name if dataset[0] in "/~" else dataset
        assert {result.dataset_type for result in card.data.eval_results} == {shown}
        assert f"Trained on `{shown}`" in card.text
        assert ('tokenizer("import "' in card.text) == dataset.startswith("python-")

    def test_of_other_heads(self, server, heads):
        tags = {
            "AutoModelForSequenceClassification": "text-classification",
            "AutoModelForTokenClassification": "token-classification",
            "AutoModel": "feature-extraction",
        }
        assert heads.keys() == tags.keys()
        for auto_class, repo in heads.items():
            card = card_of(server, repo)
            assert card.data.pipeline_tag == tags[auto_class]
            assert f"{auto_class}.from_pretrained(" in card.text and "generate(" not in card.text
            assert "generation_config.json" not in server.files(repo)

    def test_parameters_are_those_of_the_weights(self, server, heads):
        for repo in heads.values():
            weights = safetensors.torch.load(server.files(repo)["model.safetensors"])
            total = sum(value.numel() for value in weights.values())
            body = total - sum(value.numel() for name, value in weights.items() if "embed_" in name)
            assert f"{total:,} parameters, {body:,} without embeddings" in card_of(server, repo).text

    def test_snippets_run_as_they_stand(self, nlq, stranger, published, heads, converted):
        nlq.publish(converted[0], "anna/with-card-nlq")
        repositories = ["anna/model", "anna/with-card-nlq", *heads.values()]
        for reader in (nlq, stranger):
            reader.python(SNIPPETS, *repositories)

    def test_without_tokenizer_none_is_claimed(self, server, nlq, run, tmp_path):
        NLQForCausalLM.from_pretrained(run[0]).save_pretrained(tmp_path / "bare")
        nlq.publish(tmp_path / "bare", "anna/bare")
        card = card_of(server, "anna/bare")
        assert server.files("anna/bare").keys() == RUN_FILES - TOKENIZER - {"loss.png", "metrics.json", "recipe.yaml"}
        assert 'AutoTokenizer.from_pretrained("anna/bare"' not in card.text
        assert "there is none in this folder" in card.text
        assert card.data.eval_results is None and card.data.datasets is None and "Nothing was measured" in card.text
        assert "## Training" not in card.text and "## Results" not in card.text


STOCK = """
import sys
from datasets import Dataset
from transformers import AutoTokenizer, Trainer, TrainingArguments
from modeling_nlq import NLQForCausalLM

source, folder = arguments
model, tokenizer = NLQForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
model.push_to_hub("anna/pushed")
tokenizer.push_to_hub("anna/pushed")
data = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": [[1, 2, 3, 4]] * 8})
options = {"max_steps": 2, "report_to": "none", "push_to_hub": True, "hub_model_id": "anna/trained", "use_cpu": True}
trainer = Trainer(model, TrainingArguments(folder, **options), train_dataset=data, processing_class=tokenizer)
trainer.train()
trainer.push_to_hub()
"""


class TestStockWays:
    def test_what_transformers_pushes_loads_as_well(self, server, nlq, stranger, run, tmp_path):
        nlq.python(STOCK, run[0], tmp_path / "trained")
        wanted = [(repo, "main", ["AutoModelForCausalLM", "AutoModel"]) for repo in ("anna/pushed", "anna/trained")]
        tokenizers = """
for repo, *_ in wanted:
    tokenizer = transformers.AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
    results[repo] = tokenizer("import json")["input_ids"]
"""
        results = load_elsewhere(stranger, tmp_path, wanted, tokenizers)
        tokens = AutoTokenizer.from_pretrained(run[0])("import json")["input_ids"]
        for (repo, revision, names), folder in zip(wanted, (run[0], tmp_path / "trained")):
            assert server.files(repo).keys() >= CODE | TOKENIZER
            assert results[repo] == tokens
            for name in names:
                assert torch.equal(results[repo, revision, name], outputs(folder, name)), (repo, name)
        assert not torch.equal(outputs(run[0]), outputs(tmp_path / "trained"))

    def test_training_does_not_publish(self, recipe_file, tmp_path, capsys):
        arguments = ["train", str(recipe_file), "--output_dir", str(tmp_path / "run"), "--push_to_hub", "true"]
        status = main(arguments)
        out, err = capsys.readouterr()
        check_refused(Done(status, out, err), "push_to_hub", "nlq publish")
        assert not (tmp_path / "run").exists()


# Method and path of what may fail while publishing, by what it does
STEPS = {
    "create": ("POST", "/api/repos/create"),
    "look": ("GET", "/api/models/anna/faulty"),
    "prepare": ("POST", "/preupload/main"),
    "announce": ("POST", "/info/lfs/objects/batch"),
    "upload": ("PUT", "/upload/"),
    "commit": ("POST", "/commit/main"),
}
# What a user must be told
WORDS = {
    401: "log in",
    403: "may not write",
    404: "no such",
    409: "somebody else",
    413: "large",
    500: "problem of its own",
}


def check_not_published(done: Done, repo: str, *words: str) -> None:
    """In one line, before which the client may have told of each of its attempts."""
    attempts = r"(?:.*(?:thrown while requesting|Retrying in|Rate limited\. Waiting).*\n)*"
    found = re.fullmatch(rf"{attempts}(nlq: error: .*\n)", done.err)
    assert found, done.err
    check_refused(Done(done.status, done.out, found[1]), f"{repo} was not published", *words)


class TestFaults:
    @pytest.fixture(scope="class")
    def folder(self, nlq, run, tmp_path_factory) -> Path:
        """A run that was published before, and has other weights now."""
        folder = tmp_path_factory.mktemp("faulty") / "run"
        shutil.copytree(run[0], folder, ignore=shutil.ignore_patterns("checkpoint-*"))
        nlq.publish(folder, "anna/faulty")
        return folder

    @pytest.fixture(scope="class", autouse=True)
    def dropped(self, run, tmp_path_factory):
        """A publication whose large file never arrives. The client tries for half a minute: it does so meanwhile."""
        home = tmp_path_factory.mktemp("dropped") / "home"
        with HubServer({TOKEN: "anna"}) as server:
            server.drop("PUT", "/upload/", after=1000, times=None)
            worker = Worker(home, server.client_environment(home, TOKEN))
            worker.begin(("publish", run[0], "anna/dropped"))
            yield server, worker
            worker.close()

    def check(self, server, nlq, folder, *words: str, repo: str = "anna/faulty") -> None:
        """It fails in one line, nothing has changed, and after the fault the same command succeeds."""

        def state() -> tuple[list[str], dict[str, bytes]]:
            return (server.commits(repo), server.files(repo)) if repo in server._repos else ([], {})

        change_weights(folder)
        before = state()
        done = nlq("publish", folder, repo)
        server.heal()
        check_not_published(done, repo, *words)
        assert state() == before
        nlq.publish(folder, repo)
        assert len(server.commits(repo)) == (len(before[0]) or 1) + 1
        assert server.files(repo)["model.safetensors"] == (folder / "model.safetensors").read_bytes()

    @pytest.mark.parametrize("status", WORDS)
    @pytest.mark.parametrize("step", STEPS)
    def test_the_hub_refuses(self, step, status, server, nlq, folder):
        server.fail(*STEPS[step], status, times=None, headers=AT_ONCE)
        if step == "create":
            # Who may write to a repository need not be allowed to make it; and a conflict means here that it was there before
            words = () if status == 409 else (str(status), WORDS[status])
            self.check(server, nlq, folder, *words, repo=f"anna/new-{status}")
        else:
            self.check(server, nlq, folder, str(status), WORDS[status])

    @pytest.mark.parametrize("step", ["create", "look", "commit"])
    def test_the_connection_breaks(self, step, server, nlq, folder):
        server.drop(*STEPS[step], after=10)
        self.check(server, nlq, folder, "connection", server.endpoint)

    @pytest.mark.parametrize("step", ["prepare", "announce", "upload"])
    def test_a_connection_that_breaks_once_is_made_again(self, step, server, nlq, folder):
        change_weights(folder)
        server.drop(*STEPS[step], after=1000)
        nlq.publish(folder, "anna/faulty")
        assert server.files("anna/faulty")["model.safetensors"] == (folder / "model.safetensors").read_bytes()

    @pytest.mark.parametrize("step", STEPS)
    def test_a_server_that_repeats_what_it_was_sent(self, step, server, nlq, folder):
        """`Worker` finds the token wherever it is printed."""
        server.fail(*STEPS[step], 400, times=None, message=f"What is this? Authorization: Bearer {TOKEN}")
        self.check(server, nlq, folder, "400", "What is this?")

    def test_nothing_is_there_of_a_new_repository(self, server, nlq, folder):
        server.fail("POST", "/commit/main", 500)
        check_refused(nlq("publish", folder, "anna/unborn"), "500")
        assert server.files("anna/unborn").keys() == {".gitattributes"}
        nlq.publish(folder, "anna/unborn")
        assert server.files("anna/unborn").keys() == RUN_FILES

    def test_somebody_elses_repository(self, server, nlq, folder):
        check_refused(nlq("publish", folder, "bert/model"), "403", "owner")

    def test_token_that_is_none(self, nlq, folder):
        wrong = "hf_" + "WrongSecret" * 3
        done = nlq("publish", folder, "anna/wrong", HF_TOKEN=wrong)
        check_refused(done, "401", "log in")
        assert wrong not in done.err

    def test_a_large_file_that_never_arrives(self, dropped, run):
        """Last of its class: it has waited meanwhile."""
        server, worker = dropped
        check_not_published(worker.end(), "anna/dropped", "connection", server.endpoint)
        assert server.files("anna/dropped").keys() == {".gitattributes"}
        server.heal()
        worker.publish(run[0], "anna/dropped")
        assert server.files("anna/dropped").keys() == RUN_FILES


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def change_config(**fields: object):
    return lambda folder: change_json(folder / "config.json", **fields)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    NLQForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="70KB")
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


def damage_the_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


def rename_a_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.final_norm.weight"] = weights.pop("model.norm.weight")
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


def stop_before_the_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "metrics.json", "model.safetensors", "README.md", "loss.png"):
        (folder / name).unlink()


class TestBadInput:
    @pytest.mark.parametrize(
        "repo_id",
        [
            "name",
            "a/b/c",
            "..",
            "anna/..",
            "anna/",
            "/model",
            "",
            "anna/my model",
            "an na/model",
            "anna/model.git",
            "anna/a--b",
        ],
    )
    def test_name_of_the_repository(self, repo_id, run, refuses):
        refuses(run[0], repo_id, words=(repr(repo_id), "form" if repo_id == "name" else ""))

    @pytest.mark.parametrize(
        "damage, words",
        [
            (remove("config.json"), ("config.json",)),
            (remove("model.safetensors"), ("model.safetensors", "did not finish")),
            (stop_before_the_end, ("config.json", "did not finish")),
            (cut, ("model.safetensors", "damaged")),
            (lose_a_shard, ("model-00002-of-",)),
            (damage_the_index, ("model.safetensors.index.json",)),
            (change_config(num_hidden_layers=3), ("missing", "model.layers.2.mlp.fc1.weight")),
            (change_config(num_hidden_layers=1), ("not known", "model.layers.1.mlp.fc1.weight")),
            (rename_a_weight, ("missing: model.norm.weight", "not known: model.final_norm.weight")),
            (change_config(intermediate_size=64), ("mlp.fc1.weight", "(128, 32)", "(64, 32)")),
            (change_config(model_type="gpt2"), ("'gpt2'",)),
            (change_config(model_type="mine"), ("'mine'",)),
            (change_config(architectures=["LlamaForCausalLM"]), ("LlamaForCausalLM",)),
            (remove("modeling_nlq.py"), ("modeling_nlq.py",)),
            (remove("configuration_nlq.py"), ("configuration_nlq.py",)),
            (remove("attention_nlq.py"), ("attention_nlq.py",)),
            (lambda folder: [path.unlink() for path in folder.glob("*.py")], ("modeling_nlq.py", "save_pretrained")),
            (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
            (lambda folder: (folder / "metrics.json").write_text("{"), ("metrics.json", "damaged")),
            (lambda folder: (folder / "recipe.yaml").write_text("["), ("recipe.yaml",)),
        ],
        ids=[
            "no config",
            "no weights",
            "unfinished",
            "cut",
            "shard",
            "index",
            "too few",
            "too many",
            "renamed",
            "shape",
            "gpt2",
            "other type",
            "other class",
            "no modeling code",
            "no configuration code",
            "no attention code",
            "no code",
            "config",
            "metrics",
            "recipe",
        ],
    )
    def test_folder(self, damage, words, copy_run, refuses):
        folder = copy_run()
        damage(folder)
        refuses(folder, "anna/bad", words=words)
        refuses(folder, "anna/bad", "--dry-run", words=words)

    def test_folder_that_is_none(self, tmp_path, refuses):
        refuses(tmp_path / "nowhere", "anna/bad", words=("nowhere",))

    @pytest.mark.parametrize("auto_map", [None, {"AutoConfig": "somewhere.Else"}, {**AUTO_MAP, "AutoModel": "a/b--c.D"}])
    def test_code_is_named_whatever_the_folder_says(self, auto_map, server, nlq, copy_run):
        """Without it, nobody without this package can load the model."""
        folder = copy_run()
        change_json(folder / "config.json", auto_map=auto_map)
        nlq.publish(folder, "anna/auto-map")
        assert json.loads(server.files("anna/auto-map")["config.json"])["auto_map"] == AUTO_MAP

    def test_run_that_diverged(self, recipe_file, tmp_path_factory, nlq, refuses):
        """It has finished, in no number, and saved no weights: that is what its author must hear."""
        folder = tmp_path_factory.mktemp("ended") / "run"
        assert nlq("train", recipe_file, "--output_dir", folder, "--learning_rate", "1e30").status == 0
        assert json.loads((folder / "metrics.json").read_text())["diverged"]
        refuses(folder, "anna/ended", words=("diverged",))

    def test_comparison_and_card(self, run, tmp_path, refuses):
        refuses(run[0], "anna/bad", "--comparison", tmp_path, words=(str(tmp_path), "no finished comparison"))
        (tmp_path / "results.json").write_text("{}")
        refuses(run[0], "anna/bad", "--comparison", tmp_path, words=("results.json",))
        refuses(run[0], "anna/bad", "--card", tmp_path / "none.md", words=("none.md",))
        (tmp_path / "bad.md").write_text("---\nlicense: [\n---\n")
        refuses(run[0], "anna/bad", "--card", tmp_path / "bad.md", words=("bad.md",))

    def test_card_that_the_hub_refuses(self, server, nlq, copy_run, tmp_path):
        folder = copy_run()
        nlq.publish(folder, "anna/bad-card")
        before = server.commits("anna/bad-card")
        (tmp_path / "bad.md").write_text("---\nlicense: 3\n---\n# A card\n")
        check_refused(nlq("publish", folder, "anna/bad-card", "--card", tmp_path / "bad.md"), "license")
        assert server.commits("anna/bad-card") == before

    def test_without_login_or_network(self, server, nlq, run, tmp_path):
        """A dry run needs neither."""
        before = len(server.requests)
        environment = {**server.client_environment(tmp_path / "home", TOKEN), "HF_HUB_OFFLINE": "1"}
        offline = Worker(tmp_path / "home", environment)
        try:
            for worker, variables, word in ((nlq, {"HF_TOKEN": ""}, "login"), (offline, {}, "HF_HUB_OFFLINE")):
                planned = worker("publish", run[0], "anna/nobody", "--dry-run", **variables)
                assert planned.status == 0 and planned.sizes.keys() == RUN_FILES - {".gitattributes"}
                check_refused(worker("publish", run[0], "anna/nobody", **variables), "anna/nobody was not published", word)
        finally:
            offline.close()
        assert server.requests[before:] == []
