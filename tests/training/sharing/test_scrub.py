"""What is published tells nothing of the machine: no other file, no path, no token."""

import getpass
import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import safetensors.torch
import yaml
from matplotlib.figure import Figure
from support.publishing_cases import CODE, RUN_FILES, TOKEN, change_json, write_card

import modeling_nlq
from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.explorer.page import write_page
from modeling_nlq.training.run import trainer as trainer_module
from modeling_nlq.training.scrub import check_for_traces
from nlq import main


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
    "password": "a password in an address",
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
        "password": [f"{kind}://anna:" + letters(12) + "@example.org/a.jsonl" for kind in ("https", "s3", "postgresql+x")],
        "key": [key.format("", ""), key.format("RSA ", ""), key.format("OPENSSH ", ""), key.format("PGP ", " BLOCK")],
    }


# File, field, and what the field holds
JSON_PLACES = {
    "label": ("config.json", "id2label.0", lambda text: {"0": text}),
    "template": ("tokenizer_config.json", "chat_template", str),
    "config": ("config.json", "task_specific_params.all.0", lambda text: {"all": [text]}),
    "metrics": ("metrics.json", "task_specific_params.all.0", lambda text: {"all": [text]}),
}


def write_secret(folder: Path, place: str, text: str, word: str) -> str:
    """Puts a text into a folder, or a word of it where there is room for that only; returns how the place is named."""
    if place == "recipe":
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        recipe["training"]["optim_args"] = text
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return "recipe.yaml, field training.optim_args"
    if place in JSON_PLACES:
        name, field, value = JSON_PLACES[place]
        change_json(folder / name, **{field.partition(".")[0]: value(text)})
        return f"{name}, field {field}"
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
        Figure().savefig(folder / "loss.png", metadata={"note": text})
        return "loss.png, line"
    if place == "sentencepiece":
        (folder / "tokenizer.model").write_bytes(b"\x0a\x0e" + str(Path.home() / "x").encode() + b"\x00" + text.encode())
        return "tokenizer.model, line"
    assert place == "file name"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / f"{word}.jinja").write_text("")
    return "additional_chat_templates/***.jinja"


SECRET_PLACES = ["recipe", "config", "metrics", "template", "code", "weights", "picture", "vocabulary"]
SECRET_PLACES += ["sentencepiece", "file name"]
DECOYS = (
    ".env .git/config .metrics.json.123.unfinished .token adapter_model.bin all_results.json "
    "checkpoint-2/model.safetensors comparison/results.md events.out.tfevents.1.machine extra_nlq.py "
    "figures/curves.png huggingface/token model.safetensors.bak nested/config.json nested/tokenizer.json notes.py "
    "optimizer.pt other.png pytorch_model.bin results.json rng_state.pth runs/now/events.out.tfevents.2.machine "
    "scheduler.pt secrets.txt token trainer_state.json training_args.bin vocab.bin xmodel.safetensors"
)


PLACES = {"_name_or_path": "/home/somebody/model", "name_or_path": "/home/somebody/model"}


class TestNothingLeaks:
    @pytest.fixture(scope="class")
    def files(self, server, nlq, run, tmp_path_factory) -> dict[str, bytes]:
        """What arrives of a run folder that has much in it that must not."""
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

    def test_exactly_these_files(self, files, published, server):
        assert files.keys() == RUN_FILES
        assert server.files("anna/model", published.first).keys() == RUN_FILES

    def test_files_are_those_of_the_run(self, files, run):
        for name in (*CODE, "model.safetensors", "loss.png", "tokenizer.json"):
            assert files[name] == (run[0] / name).read_bytes(), name
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert json.loads(files[name]) == json.loads((run[0] / name).read_text()), name
        (trained_on,) = run[1]["trained_on"]
        trained_on = {**trained_on, "dataset": Path(trained_on["dataset"]).name}
        assert json.loads(files["metrics.json"]) == {**run[1], "resumed_from": "checkpoint-4", "trained_on": [trained_on]}

    def test_no_trace_of_the_machine(self, files, server, run, recipe_file, corpus, published):
        folders = {run[0], recipe_file.parent, corpus.parent, Path.home(), Path.cwd(), Path(modeling_nlq.__file__).parents[1]}
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

    @pytest.mark.parametrize("name", ["card.md", "chat_template.jinja", "modeling_nlq.py", "tokenizer.json"])
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
        path, arguments = folder / name, ()
        before = path.read_text() if path.exists() else ""
        if name == "card.md":
            arguments = ("--card", write_card(tmp_path, f"Trained on {text}."))
        elif name.endswith(".json"):
            path.write_text(before or "{}")
            change_json(path, added=text)
        else:
            path.write_text(f"{before}\n# {text}\n")
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
        settings = ("config.json", "generation_config.json", "tokenizer_config.json", "metrics.json", "special_tokens_map.json")
        (folder / "special_tokens_map.json").write_text("{}")
        for name in settings:
            change_json(folder / name, origin=given | same)
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "training": given | same | {"run_name": "ours"}}))
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

    @pytest.mark.parametrize("place", ["label", "template", "weights", "picture"])
    def test_path_where_it_cannot_be_cut(self, place, copy_run, tmp_path, refuses):
        folder, path = copy_run(), str(tmp_path / "corpus.txt")
        where = write_secret(folder, place, f"from {path}", path)
        refuses(folder, "anna/paths", words=(where, path, "a path of this machine"))

    @pytest.mark.parametrize("place", [*SECRET_PLACES, "card", "report"])
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

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
    def test_other_encodings(self, encoding, tmp_path):
        for text, words in ((fake_tokens()["github"][0], "a token of GitHub"), (str(tmp_path), "a path of this machine")):
            with pytest.raises(ValueError, match=words):
                check_for_traces(tmp_path, {"chat_template.jinja": f"first\n{text}".encode(encoding)})

    @pytest.mark.parametrize("place", ["text", "title"])
    def test_page_of_a_space(self, place, tmp_path, refuses, nlq):
        """A page has its text token by token, and packed numbers, which are no text."""
        page, secrets = tmp_path / "page.html", {"token": fake_tokens()["github"][0], "a path": str(tmp_path / "x")}
        for word, secret in secrets.items():
            title, tokens = ("t", re.findall(r".{1,3}", f"a {secret} b")) if place == "text" else (f"of {secret}", ["a"])
            page.write_text(write_page(title, ["note"], tokens, []))
            refuses(page, "anna/page", "--space", "--dry-run", words=(word, "index.html" if place == "text" else "README.md"))
        page.write_text(write_page("t", ["note"], ["/", "h", "ome", "/", "nobody/x"], []))
        assert nlq("publish", page, "anna/page", "--space", "--dry-run").status == 0

    def test_what_is_no_token(self, tmp_path):
        digits = "0123456789abcdef"
        texts = [
            f"dataset_fingerprint: {digits}",
            f"token_stream: {digits * 4}",
            f"commit {digits * 2}{digits[:8]}, wandb run {digits}",
            "run_id: 01234567-89ab-cdef-0123-456789abcdef",
            f"disk-{digits * 2} task-specific-parameters-of-a-model sk-learn hf_hub_download hf_transfer ghp_ AKIA sk-proj-",
            "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
            "https://example.org:80/@anna https://anna@example.org https://{user}:{password}@example.org s3://bucket/a:b@c",
            "secret_access_key=YOUR_KEY wandb_api_key=... pad_token: <|endoftext|>",
        ]
        check_for_traces(tmp_path, {"card.md": "\n".join(texts).encode(), "notes.json": json.dumps(texts).encode()})

    def test_what_training_draws_and_writes(self, recipe_file, tmp_path, monkeypatch):
        """The title of the plot too is seen by all."""
        titles = []
        monkeypatch.setattr(trainer_module, "plot_losses", lambda history, path, title: titles.append(title))
        options = ("--max_steps", "1", "--dataset_config", "on file:///data/private/x.txt")
        assert main(["train", str(recipe_file), "--output_dir", str(tmp_path / "run"), *options]) == 0
        assert titles == ["model.json"]
        card = (tmp_path / "run" / "README.md").read_text()
        assert "dataset_config: on x.txt\n" in card and str(recipe_file.parent) not in card

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
