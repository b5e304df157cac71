"""The Hub of the tests behaves as the Hub does towards its real client, which runs in processes of its own."""

import base64
import http.client
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.hub_server import HubServer


TOKEN = "hf_anna"


@pytest.fixture
def server():
    with HubServer(tokens={TOKEN: "anna", "hf_bert": "bert"}, part_size=100_000) as server:
        yield server
    assert server.unknown == []


# Runs before each script
HELPERS = """
import hashlib
import io
import random
import sys
import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import *
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import get_session

def add(path, content):
    return CommitOperationAdd(path, content if isinstance(content, bytes) else content.encode())

def commit(repo, *operations, api=None, **options):
    return (api or HfApi()).create_commit(repo, operations, commit_message="change", **options).oid

def refused(error, call, *arguments, status=None, says="", **options):
    try:
        call(*arguments, **options)
    except error as raised:
        assert says in str(raised), raised
        assert status is None or raised.response.status_code == status, raised
    else:
        raise AssertionError(f"no {error.__name__}")

def read(*arguments, **options):
    return open(hf_hub_download(*arguments, **options), "rb").read()

api = HfApi()
large = random.Random(0).randbytes(250_000)
"""


def run_client(server: HubServer, home: Path, script: str) -> None:
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", HELPERS + script],
        cwd=home,
        env={**os.environ, **server.client_environment(home, TOKEN), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


SHARE = """
assert api.whoami()["name"] == "anna"
assert api.create_repo("model", private=True).repo_id == "anna/model"
api.create_repo("anna/model", exist_ok=True)
refused(HfHubHTTPError, api.create_repo, "anna/model", status=409, says="already created")
api.create_repo("anna/open")
assert api.model_info("anna/open").private is False
assert api.model_info("anna/model").private is True

card = "---\\nlicense: apache-2.0\\ntags: [small]\\n---\\n# A model\\n"
weights = add("w.safetensors", large), add("w.bin", b"1")
first = commit("anna/model", add("README.md", card), add("code/x.py", "x = 1\\n"), *weights)
assert ModelCard.load("anna/model").data.license == "apache-2.0"
info = api.model_info("anna/model", files_metadata=True)
assert info.sha == first and info.tags == ["small", "license:apache-2.0"]
files = {file.rfilename: file for file in info.siblings}
assert list(files) == [".gitattributes", "README.md", "code/x.py", "w.bin", "w.safetensors"]
assert sorted(api.list_repo_files("anna/model")) == list(files)
assert files["w.safetensors"].lfs.size == 250_000 and files["README.md"].lfs is None
tree = {entry.path: entry for entry in api.list_repo_tree("anna/model")}
assert list(tree) == ["code", ".gitattributes", "README.md", "w.bin", "w.safetensors"]
assert [entry.path for entry in api.list_repo_tree("anna/model", "code")] == ["code/x.py"]
refused(RemoteEntryNotFoundError, lambda: list(api.list_repo_tree("anna/model", "nowhere")))
assert [entry.path for entry in api.get_paths_info("anna/model", ["code", "w.bin", "nowhere"])] == ["code", "w.bin"]

api.create_branch("anna/model", branch="try/other")
api.create_branch("anna/model", branch="try/other", exist_ok=True)
second = commit("anna/model", add("code/x.py", "x = 2\\n"), parent_commit=first)
third = commit("anna/model", add("only", "here"), add("w.safetensors", large[::-1]), revision="try/other")
api.create_tag("anna/model", tag="v1", revision=first)
refs = api.list_repo_refs("anna/model")
assert {ref.name: ref.target_commit for ref in refs.branches} == {"main": second, "try/other": third}
assert [(tag.ref, tag.target_commit) for tag in refs.tags] == [("refs/tags/v1", first)]
assert [each.commit_id for each in api.list_repo_commits("anna/model")][:2] == [second, first]
commit("anna/model", add("code/x.py", "x = 2\\n"), add("w.safetensors", large))  # nothing new: the client makes no commit
assert api.model_info("anna/model").sha == second

assert read("anna/model", "code/x.py") == b"x = 2\\n"
for revision in (first, "v1", "try/other"):
    assert read("anna/model", "code/x.py", revision=revision) == b"x = 1\\n"
assert read("anna/model", "w.safetensors") == large
assert read("anna/model", "w.safetensors") == large
assert read("anna/model", "w.safetensors", revision="try/other") == large[::-1]
folder = snapshot_download("anna/model", revision="try/other")
assert folder.endswith(third) and open(folder + "/only").read() == "here"
metadata = api.get_hf_file_metadata(url=f"{api.endpoint}/anna/model/resolve/main/w.safetensors")
assert metadata.etag == hashlib.sha256(large).hexdigest() and metadata.size == 250_000
assert metadata.commit_hash == second and metadata.xet_file_data is None

for span, content in {"10-19": large[10:20], "-5": large[-5:], "249990-": large[-10:], "250000-": None}.items():
    answer = get_session().get(metadata.location, headers={"Range": f"bytes={span}"})
    assert answer.status_code == (206 if content else 416), span
    assert content in (None, answer.content), span
part = io.BytesIO(large[:1000])
part.seek(1000)
http_get(metadata.location, part, resume_size=1000, expected_size=250_000)
assert part.getvalue() == large

commit("anna/model", CommitOperationDelete("w.bin"), CommitOperationDelete("code/"))
assert api.list_repo_files("anna/model") == [".gitattributes", "README.md", "w.safetensors"]
assert read("anna/model", "w.bin", revision=first) == b"1"
refused(RemoteEntryNotFoundError, read, "anna/model", "w.bin")
api.upload_folder(repo_id="anna/open", folder_path=folder, path_in_repo="copy")
assert "copy/code/x.py" in api.list_repo_files("anna/open")
api.delete_repo("anna/open")
refused(RepositoryNotFoundError, api.model_info, "anna/open", status=404)
"""


def test_share_and_load(server, tmp_path, capfd):
    run_client(server, tmp_path / "home", SHARE)

    assert set(server.files("anna/model")) == {".gitattributes", "README.md", "w.safetensors"}
    latest, second, first, initial = server.commits("anna/model")
    assert server.files("anna/model", second)["code/x.py"] == b"x = 2\n"
    assert server.files("anna/model", first) == server.files("anna/model", "v1")
    assert set(server.files("anna/model", initial)) == {".gitattributes"}
    assert server.commits("anna/model", "try/other")[1:] == [first, initial]
    assert len(latest) == 40

    asked = [(method, path.rsplit("/", 1)[-1]) for method, path, _ in server.requests if "/anna/model/resolve/main/" in path]
    assert asked.count(("HEAD", "w.safetensors")) == 3
    assert asked.count(("GET", "x.py")) == 1
    content = [path for _, path, _ in server.requests if path.startswith("/content/") and path.endswith("w.safetensors")]
    assert len(content) == 2 + 5, "a second download finds the first in the cache; then another branch, and five parts"
    assert sum(path.endswith(("/1", "/2", "/3")) for method, path, _ in server.requests if method == "PUT") == 2 * 3 + 3
    in_storage = [with_token for _, path, with_token in server.requests if path.startswith(("/content/", "/upload/"))]
    assert in_storage and not any(in_storage)
    assert capfd.readouterr() == ("", "")


REFUSALS = """
from huggingface_hub.lfs import UploadInfo

api.create_repo("secret", private=True)
api.create_repo("open")
head = commit("anna/open", add("a.txt", "a"))
other, anonymous, wrong = HfApi(token="hf_bert"), HfApi(token=False), HfApi(token="hf_wrong")

refused(RepositoryNotFoundError, anonymous.model_info, "anna/secret", status=401)
refused(RepositoryNotFoundError, other.model_info, "anna/secret", status=404)
refused(RepositoryNotFoundError, api.model_info, "anna/missing", status=404)
refused(RepositoryNotFoundError, anonymous.hf_hub_download, "anna/secret", "a.txt", status=401)
refused(RepositoryNotFoundError, anonymous.snapshot_download, "anna/missing", status=401)
refused(HfHubHTTPError, wrong.whoami, status=401)
refused(HfHubHTTPError, wrong.model_info, "anna/open", status=401, says="Invalid credentials")
refused(HfHubHTTPError, anonymous.create_repo, "anna/new", status=401)
refused(HfHubHTTPError, other.create_repo, "anna/new", status=403, says="the rights to create a model")
assert other.create_repo("anna/open", exist_ok=True).repo_id == "anna/open"
refused(HfHubHTTPError, commit, "anna/open", add("a.txt", "b"), api=other, status=403, says="no permission")
refused(RepositoryNotFoundError, commit, "anna/open", add("a.txt", "b"), api=anonymous, status=401)
refused(RepositoryNotFoundError, commit, "anna/missing", add("a.txt", "b"), status=404)
refused(RepositoryNotFoundError, other.delete_repo, "anna/secret", status=404)
assert anonymous.list_repo_files("anna/open") == [".gitattributes", "a.txt"]
assert not api.repo_exists("anna/missing") and not api.file_exists("anna/open", "b.txt")
refused(RevisionNotFoundError, read, "anna/open", "a.txt", revision="nowhere", status=404)
refused(RevisionNotFoundError, commit, "anna/open", add("a.txt", "b"), revision="nowhere", status=404)
refused(RemoteEntryNotFoundError, read, "anna/open", "b.txt", status=404)

# None of these changes anything
refused(HfHubHTTPError, commit, "anna/open", add("a.txt", "b"), parent_commit="0" * 40, status=412, says="has happened since")
refused(RemoteEntryNotFoundError, commit, "anna/open", add("new", "b"), CommitOperationDelete("b.txt"), says="doesn't exist")
for size in (100, 250_000):  # whole and in parts
    false = add("w.bin", large[:size])
    false.upload_info = UploadInfo(size=size, sample=b"", sha256=bytes(32))
    refused(RuntimeError, commit, "anna/open", add("new", "b"), false)
for metadata in ("license: [", "license: 3", "- a list", "model-index: [{name: x}]", "model-index: 3"):
    card = f"---\\n{metadata}\\n---\\n"
    refused(ValueError, commit, "anna/open", add("new", "b"), add("README.md", card), says="Invalid metadata")
result = "{task: {type: t}, dataset: {type: d, name: d}, metrics: [{type: accuracy, value: 1.0}]}"
if int(huggingface_hub.__version__.split(".")[0]) >= 2:  # before, cards are always sent to huggingface.co
    ModelCard(f"---\\nlicense: mit\\nmodel-index: [{{name: x, results: [{result}]}}]\\n---\\n").validate()
    refused(ValueError, ModelCard("---\\nlicense: 3\\n---\\n").validate, says="must be a string")
assert api.model_info("anna/open").sha == head
"""


def test_refusals(server, tmp_path):
    run_client(server, tmp_path / "home", REFUSALS)
    assert len(server.commits("anna/open")) == 2
    assert set(server.files("anna/open")) == {".gitattributes", "a.txt"}


def ask(server: HubServer, method: str, path: str, body: bytes | None = None, token: str = TOKEN) -> tuple[int, str]:
    """What no real client sends."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(server.endpoint + path, body, headers, method=method))
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    "key, value, complaint",
    [
        ("lfsFile", {"path": "w.bin", "algo": "sha256", "oid": "0" * 64, "size": 3}, "was not uploaded"),
        ("file", {"path": "README.md", "content": base64.b64encode(b"---\nlicense: 3\n---").decode()}, "Invalid metadata"),
        ("file", {"path": "../a", "content": ""}, "Invalid path"),
        ("file", {"path": "a", "content": base64.b64encode(bytes(2000)).decode()}, "too large"),
        ("renamed", {"path": "a"}, "Unknown operation"),
    ],
    ids=["lfs", "card", "path", "size", "key"],
)
def test_commit_is_all_or_nothing(key, value, complaint):
    with HubServer({TOKEN: "anna"}, lfs_threshold=1000) as server:
        ask(server, "POST", "/api/repos/create", b'{"name": "model"}')
        good = {"key": "file", "value": {"path": "good", "content": ""}}
        lines = [{"key": "header", "value": {"summary": "change"}}, good, {"key": key, "value": value}]
        for last, expected in (lines[2], 400), (good, 200):
            body = "\n".join(json.dumps(line) for line in [*lines[:2], last]).encode()
            status, text = ask(server, "POST", "/api/models/anna/model/commit/main", body)
            assert status == expected, text
            assert (complaint in text) == (expected == 400)
            assert set(server.files("anna/model")) == ({".gitattributes"} if expected == 400 else {".gitattributes", "good"})


FAULTS = """
try:
    import httpx2 as httpx
except ImportError:
    import httpx  # of huggingface_hub 1

for name in ("once", "dropped", "down", "refused", "cut"):
    api.create_repo(name)
commit("anna/once", add("w.bin", large))
commit("anna/dropped", add("w.bin", large))
try:
    commit("anna/down", add("w.bin", b"w"))
except RuntimeError as error:  # of the thread that uploaded
    assert error.__cause__.response.status_code == 503 and "out of order" in str(error.__cause__)
else:
    raise AssertionError("the upload succeeded")
refused(HfHubHTTPError, commit, "anna/refused", add("a", "a"), status=500, says="on purpose")
try:
    commit("anna/cut", add("a", "a"))
except httpx.TransportError:  # not repeated by the client: the commit may have happened
    pass
else:
    raise AssertionError("the commit succeeded")
commit("anna/cut", add("a", "b"))
"""


@pytest.mark.slow
def test_faults(server, tmp_path):
    at_once = {"Retry-After": "0"}
    server.fail("PUT", "/upload/anna/once/.*/2$", 503)
    server.drop("PUT", "/upload/anna/dropped/.*/3$", after=1000)
    server.fail("PUT", "/upload/anna/down/", 503, times=None, message="out of order", headers=at_once)
    server.fail("POST", "/anna/refused/commit/main", 500)
    server.drop("POST", "/anna/cut/commit/main", after=10)
    run_client(server, tmp_path / "home", FAULTS)

    large = server.files("anna/once")["w.bin"]
    assert len(large) == 250_000 and server.files("anna/dropped")["w.bin"] == large
    paths = [path for method, path, _ in server.requests if method == "PUT"]
    counts = {name: sum(f"/{name}/" in path for path in paths) for name in ("once", "dropped", "down")}
    assert counts == {"once": 4, "dropped": 4, "down": 6}
    assert len(server.commits("anna/down")) == len(server.commits("anna/refused")) == 1
    assert server.files("anna/cut")["a"] == b"b" and len(server.commits("anna/cut")) == 2


def test_faults_end(server):
    server.fail("GET", "whoami", 503, times=2)
    server.fail("GET", "/api/", 418, times=None)
    statuses = []
    for _ in range(5):
        if len(statuses) == 4:
            server.heal()
        statuses.append(ask(server, "GET", "/api/whoami-v2")[0])
    assert statuses == [503, 503, 418, 418, 200]

    server.drop("GET", "whoami")
    with pytest.raises(ConnectionResetError) as raised:
        ask(server, "GET", "/api/whoami-v2")
    assert raised.type is ConnectionResetError, "a connection that only ends is RemoteDisconnected, which inherits from it"


TRANSFORMERS = """
import json
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

sizes = {"vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
model.push_to_hub("anna/gpt", private=True)
loaded = AutoModelForCausalLM.from_pretrained("anna/gpt")
inputs = torch.arange(8)[None]
assert torch.equal(loaded(inputs).logits, model(inputs).logits)

code = '''
from transformers import GPT2Config, GPT2LMHeadModel
from .size_own import SCALE

class OwnConfig(GPT2Config):
    model_type = "own"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
    scale = SCALE
'''
names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
config = json.dumps({**model.config.to_dict(), "model_type": "own", "auto_map": names})
commit("anna/gpt", add("config.json", config), add("modeling_own.py", code), add("size_own.py", "SCALE = 3\\n"))
own = AutoModelForCausalLM.from_pretrained("anna/gpt", trust_remote_code=True)
assert type(own).__name__ == "OwnModel" and own.scale == 3
assert torch.equal(own(inputs).logits, model(inputs).logits)
"""


def test_transformers_push_and_load(server, tmp_path):
    run_client(server, tmp_path / "home", TRANSFORMERS)
    assert {"config.json", "model.safetensors", "modeling_own.py", "README.md"} <= set(server.files("anna/gpt"))


def test_ends_with_its_threads_though_a_connection_is_open():
    threads = set(threading.enumerate())
    with HubServer({TOKEN: "anna"}) as server:
        connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"))
        for _ in range(2):
            connection.request("GET", "/api/models/anna/missing", headers={"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            assert (answer.status, answer.headers["X-Error-Code"]) == (404, "RepoNotFound")
            assert json.loads(answer.read()) == {"error": "Repository not found"}
        assert len(set(threading.enumerate()) - threads) == 3, "one for each address and one for the connection"
    assert set(threading.enumerate()) == threads
    connection.close()


def test_errors_of_the_server_itself_do_not_pass_for_answers_of_the_hub():
    with pytest.raises(RuntimeError, match="Hub server itself"), HubServer({TOKEN: "anna"}) as server:
        assert ask(server, "POST", "/api/validate-yaml", b"no JSON")[0] == 500
