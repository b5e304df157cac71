"""Publishing sends no path, token or other file of this machine."""

import dataclasses
import getpass
import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from support.publishing_cases import CODE, RUN_FILES, TOKEN, change_json, write_card

import modeling_nlq
from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.api import publish
from modeling_nlq.training.run import train as train_module
from modeling_nlq.training.sharing import publishing
from modeling_nlq.training.sharing.scrub import check_for_traces, without_folders
from nlq import main


DECOYS = (
    ".env .git/config .metrics.json.123.unfinished adapter_model.bin checkpoint-2/model.safetensors extra_nlq.py "
    "comparison/results.md figures/curves.png huggingface/token model.safetensors.bak nested/config.json notes.py "
    "optimizer.pt other.png pytorch_model.bin results.json runs/now/events.out.tfevents.2.machine secrets.txt "
    "trainer_state.json training_args.bin vocab.bin xmodel.safetensors"
)
PLACES = {"_name_or_path": "/home/somebody/model", "name_or_path": "/home/somebody/model"}
# Texts, and what is published in their place
PATHS = {
    "/data/private/corpus.txt": "corpus.txt",
    "/data/private/": "private",
    "--dataset=/data/private/x.txt --device cpu": "--dataset=x.txt --device cpu",
    "file:///data/private/x.txt, zip://*.txt::/data/private/x.zip": "x.txt, zip://*.txt::x.zip",
    "from ~/private/x.txt and ~anna/private": "from x.txt and private",
    "/data/private/a b.txt and /data/private/c.txt": "a b.txt and c.txt",
    "/x.txt": "x.txt",
}
NO_PATHS = ["owner/name", "../demo/x.txt", r"use \\(x\\) and ^/usr/bin$", "<s>[INST] {} [/INST]</s> /no_think"]
NO_PATHS += ["https://example.org:80/data/private?x=/data/private", "1/2 and/or ~50/50, 3 / 4 tokens /s"]


class TestNothingLeaks:
    @pytest.fixture(scope="class")
    def files(self, server, nlq, run, tmp_path_factory) -> dict[str, bytes]:
        folder = shutil.copytree(run[0], tmp_path_factory.mktemp("private") / "run")
        for name in DECOYS.split():
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text(f"{TOKEN} {folder}")
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            change_json(folder / name, **PLACES)
        change_json(folder / "metrics.json", resumed_from="/home/somebody/checkpoint-4")
        assert (folder / "checkpoint-8" / "optimizer.pt").is_file()
        nlq.publish(folder, "anna/clean")
        return server.files("anna/clean")

    def test_files_are_those_of_the_run(self, files, run, published, server):
        assert files.keys() == server.files("anna/model", published.first).keys() == RUN_FILES
        for name in (*CODE, "model.safetensors", "loss.png", "tokenizer.json"):
            assert files[name] == (run[0] / name).read_bytes(), name
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert json.loads(files[name]) == json.loads((run[0] / name).read_text()), name
        assert json.loads(files["metrics.json"]) == {**dataclasses.asdict(run[1]), "resumed_from": "checkpoint-4"}
        given, there = yaml.safe_load((run[0] / "recipe.yaml").read_text()), yaml.safe_load(files["recipe.yaml"])
        assert there == {**given, "dataset": "corpus.jsonl", "model": "model.json"}

    def test_no_trace_of_the_machine(self, files, server, run, recipe_file, corpus, published):
        package = Path(modeling_nlq.__file__).parents[1]
        folders = {run[0], recipe_file.parent, corpus.parent, Path.home(), Path.cwd(), package}
        for revision in (files, server.files("anna/model", published.first)):
            for name, data in revision.items():
                for text in (*map(str, folders), "/home/somebody", "pytest-of", TOKEN, "AnnasSecret", "tfevents"):
                    assert text.encode() not in data, (name, text)
            for name in ("metrics.json", "recipe.yaml", "config.json", "README.md", "tokenizer_config.json"):
                for word in (getpass.getuser(), socket.gethostname()):
                    assert not re.search(rf"\b{re.escape(word)}\b", revision[name].decode()), (name, word)

    @pytest.mark.parametrize(
        "name, secret", [("card.md", "home"), ("modeling_nlq.py", "link"), ("tokenizer_config.json", "login")]
    )
    def test_what_somebody_wrote_into_a_file(self, secret, name, copy_run, tmp_path, tmp_path_factory, refuses):
        folder, link = copy_run(), tmp_path_factory.mktemp("links") / "link"
        link.symlink_to(tmp_path)
        secrets = {"link": str(link / "copy" / "corpus.jsonl"), "home": str(Path.home() / "corpus.jsonl")}
        text = {**secrets, "login": TOKEN}[secret]
        path, arguments = folder / name, ()
        if name == "card.md":
            arguments = ("--card", write_card(tmp_path, f"Trained on {text}."))
        elif name.endswith(".json"):
            change_json(path, added=text)
        else:
            path.write_text(f"# {text}\n{path.read_text()}")
        word = "token" if secret == "login" else f"names {text!r}, a path of this machine"
        place = {"card.md": "README.md, line 6", "tokenizer_config.json": name}.get(name, f"{name}, line 1")
        given = link / "copy" if secret == "link" else folder
        refuses(given, "anna/secrets", *arguments, words=(f"{place}", word), without=TOKEN)

    def test_what_training_draws_and_writes(self, recipe_file, corpus, tmp_path, monkeypatch):
        titles = []
        monkeypatch.setattr(train_module, "plot_losses", lambda history, path, title, unit: titles.append(title))
        options = ("--max_steps", "1", "--dataset_config", "on file:///data/private/x.txt")
        assert main(["train", str(recipe_file), "--output_dir", str(tmp_path / "run"), *options]) == 0
        card = (tmp_path / "run" / "README.md").read_text()
        assert titles == ["model.json"] and "dataset_config: on x.txt\n" in card
        for name in ("README.md", "metrics.json", "trainer_state.json"):
            text = (tmp_path / "run" / name).read_text()
            assert not [
                folder for folder in (recipe_file.parent, corpus.parent, Path.home()) if str(folder) in text
            ], name

    def test_shards_that_are_not_these_weights(self, server, nlq, copy_run):
        """What loads is published: neither shards of another model, nor the index that Transformers leaves of earlier
        ones.
        """
        folder = copy_run()
        NLQForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="70KB")
        (folder / "model.safetensors").unlink()
        (folder / "model-00001-of-00009.safetensors").write_bytes(b"\x80\x04 not checked")
        shards = {path.name for path in folder.glob("model*.safetensors*")} - {"model-00001-of-00009.safetensors"}
        nlq.publish(folder, "anna/shards")
        assert server.files("anna/shards").keys() == RUN_FILES - {"model.safetensors"} | shards
        NLQForCausalLM.from_pretrained(folder).save_pretrained(folder)
        nlq.publish(folder, "anna/shards")
        assert server.files("anna/shards").keys() == RUN_FILES


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "../out.safetensors"])
def test_links_below_the_folder(name, copy_run, tmp_path):
    """Only files of the folder itself are sent, which may be named by a link."""
    folder, secret = copy_run(), tmp_path / "out.safetensors"
    (tmp_path / "named").symlink_to(folder)
    assert publish(tmp_path / "named", "anna/x", dry_run=True).files.keys() == RUN_FILES - {".gitattributes"}
    if ".." in name:
        (folder / "model.safetensors").rename(secret)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"x": name}}))
    else:
        (folder / name).rename(secret)
        (folder / name).symlink_to(secret)
    what = "is a path outside" if ".." in name else "is a symbolic link"
    with pytest.raises(ValueError, match=rf"{re.escape(name)}'? {what}"):
        publish(folder, "anna/x", dry_run=True)


def test_a_snapshot_of_the_hub(copy_run, tmp_path):
    folder = copy_run()
    expected = publish(folder, "anna/x", dry_run=True).files.keys()
    repository = tmp_path / "models--anna--x"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    snapshot = folder.rename(repository / "snapshots" / "0123")
    for name in ("config.json", "model.safetensors", "modeling_nlq.py"):
        (snapshot / name).rename(repository / "blobs" / name.encode().hex())
        (snapshot / name).symlink_to(f"../../blobs/{name.encode().hex()}")
    assert publish(snapshot, "anna/x", dry_run=True).files.keys() == expected


def test_what_was_checked_is_sent(copy_run, monkeypatch):
    folder, sent = copy_run(), {}
    expected = {
        name: (folder / name).read_bytes() for name in ("modeling_nlq.py", "model.safetensors", "tokenizer.json")
    }

    def swap(repo_id, contents, *_):
        for name in expected:
            (folder / "new").write_text("secret")
            (folder / "new").rename(folder / name)
        for name in expected:
            sent[name] = contents[name] if isinstance(contents[name], bytes) else contents[name].read_bytes()

    monkeypatch.setattr(publishing, "send", swap)
    publish(folder, "anna/x")
    assert sent == expected


def test_a_text_is_no_import(copy_run):
    """A file that only a docstring names stays here; as Transformers' loader would miss it, its author is told."""
    folder = copy_run()
    (folder / "settings.py").write_text("KEY = 'secret'\n")
    code = folder / "modeling_nlq.py"
    code.write_text(f'{code.read_text()}\n_TEXT = """\nfrom .settings import KEY\n"""\n')
    with pytest.raises(ValueError, match=f"^{code}: a text looks like an import of settings.py, which is not sent"):
        publish(folder, "anna/x", dry_run=True)
    code.write_text(f"{code.read_text()}\nfrom .settings import KEY\n")
    assert "settings.py" in publish(folder, "anna/x", dry_run=True).files


def test_paths_are_cut_wherever_they_stand():
    given = {"/data/private/key": [{"deep": [*PATHS, *NO_PATHS, 3, None]}]}
    assert without_folders(given) == {"key": [{"deep": [*PATHS.values(), *NO_PATHS, 3, None]}]}


@pytest.mark.parametrize("name", ["tokenizer.json", "added_tokens.json", "recipe.yaml", "modeling_nlq.py", "notes.md"])
def test_tokens_in_any_file_and_encoding(name, tmp_path):
    token = f"hf_{'x' * 34}"
    encodings = ("utf-8", "utf-16", "utf-16-le", "utf-32-be")
    written = [f"\n{before}{token}".encode(encoding) for before in ("", "key_") for encoding in encodings]
    for escape in (r"\u{:04x}", r"\u{:04X}", r"\x{:02x}"):
        hidden = "".join(escape.format(ord(letter)) for letter in token), token.replace("_", escape.format(95))
        written += [f'\n"a": "{text}"'.encode() for text in hidden]
    for content in written:
        with pytest.raises(ValueError, match=f"^{name}, line 2: holds what looks like a token"):
            check_for_traces(tmp_path, {name: content})


@pytest.mark.parametrize(
    "address", ["https://user:pass@host/x", "https://key@host", "s3://key:word@bucket", "x://a:b%40c@[::1]"]
)
def test_passwords_in_addresses(address, tmp_path):
    with pytest.raises(ValueError, match=r"^recipe\.yaml, line 1: holds an address with a password") as error:
        check_for_traces(tmp_path, {"recipe.yaml": f"dataset: {address}".encode()})
    assert address not in str(error.value)


def test_what_reveals_nothing(tmp_path):
    """The end of an address, the beginning of another name, and whatever is a token of a vocabulary."""
    text = (
        f"https://example.org{tmp_path} {tmp_path}-2 `cd /path/to/models` hf_hub_download hf_transfer {'0a1b' * 10} "
    )
    text += "ssh://git@github.com/a https://medium.com/@me https://a.b:80/?x=c@d https://{user}:{word}@host"
    check_for_traces(tmp_path, {"README.md": text.encode(), "tokenizer.json": str(tmp_path).encode()})
    with pytest.raises(ValueError, match=r"^README.md, line 2: names '.*/x', a path of this machine"):
        check_for_traces(tmp_path, {"README.md": f"{text}\n(file://{tmp_path}/x).".encode()})
