"""`nlq publish` against the Hub on loopback: what arrives there, what loads elsewhere, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from support.hub_server import Blob
from support.publishing_cases import (
    MODELS,
    RUN_FILES,
    Done,
    change_json,
    change_weights,
    check_refused,
    input_tokens,
    load_elsewhere,
)
from transformers import AutoTokenizer

from modeling_nlq import NLQForCausalLM
from modeling_nlq.parts_user_nlq import AUTO_MAP
from modeling_nlq.training.explorer.page import write_page
from nlq import main


ROUND_TRIP = """
repo = wanted[0][0]
assert transformers.AutoConfig.from_pretrained(repo, trust_remote_code=True).model_type == "nlq"
tokenizer = transformers.AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
results["tokens"] = tokenizer("import json")["input_ids"]
generate = transformers.pipeline("text-generation", repo, trust_remote_code=True)
results["text"] = generate("import json", max_new_tokens=5, do_sample=False)[0]["generated_text"]
"""


class TestRoundTrip:
    @pytest.mark.slow
    def test_another_machine_computes_the_same_from_every_revision(self, elsewhere, published, tmp_path):
        expected = published.expected
        assert not torch.equal(*(expected[revision]["AutoModel"] for revision in (published.first, published.second)))
        wanted = [("anna/model", revision, MODELS) for revision in (published.first, published.second, "main")]
        results = load_elsewhere(elsewhere, tmp_path, wanted, ROUND_TRIP)
        for _, revision, names in wanted:
            for name in names:
                result = results["anna/model", revision, name]
                assert torch.equal(result, expected[published.second if revision == "main" else revision][name]), name

        model = NLQForCausalLM.from_pretrained(published.folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(published.folder)
        generated = model.generate(input_tokens(), max_new_tokens=5, do_sample=False)
        assert torch.equal(results["anna/model", "main", "generated"], generated)
        inputs = tokenizer("import json", return_tensors="pt")
        assert results["tokens"] == inputs["input_ids"][0].tolist()
        assert results["text"] == tokenizer.decode(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0])

    def test_a_page_becomes_a_space_only_if_asked(self, server, nlq, copy_run):
        folder = copy_run("finished")
        assert nlq("explore", folder, "--text", "import json", "--output", folder / "explore.html").status == 0
        assert "explore.html" not in nlq.publish(folder, "anna/without-page", "--dry-run").sizes
        before = len(server.requests)
        planned = nlq.publish(folder, "anna/page", "--space", "--dry-run")
        assert planned.sizes.keys() == {"README.md", "index.html"} and len(server.requests) == before
        done = nlq.publish(folder / "explore.html", "anna/page", "--space")
        files = server.files("spaces/anna/page")
        assert files["index.html"] == (folder / "explore.html").read_bytes()
        card = ModelCard(files["README.md"].decode(), ignore_metadata_errors=False).data.to_dict()
        assert (card["title"], card["sdk"], card["app_file"]) == ("Attention of finished", "static", "index.html")
        assert "spaces/anna/page" in done.out
        nlq.publish(folder, "anna/page", "--space")
        assert len(server.commits("spaces/anna/page")) == 2, "nothing new is no commit"

    def test_no_space(self, nlq, refuses, run, tmp_path):
        (tmp_path / "other.html").write_text("Something")
        refuses(tmp_path, "anna/page", "--space", words=("there is no page", "nlq explore"))
        refuses(tmp_path / "other.html", "anna/page", "--space", words=("is not a page of `nlq explore`",))
        page = write_page("Attention", ["A note."], ["a"], [])
        changes = {"<h1>": "<h1><img src=x onerror=evil()>", "</body>": "<script>evil()</script></body>"}
        changes |= {"</script>\n</body>": "evil()</script>\n</body>", "A note.": "<a href='javascript:evil()'>a</a>"}
        changes |= {"default-src 'none'": "default-src *", "<title>": '<meta http-equiv="refresh"><title>'}
        for before, after in changes.items():
            assert before in page
            (tmp_path / "other.html").write_text(page.replace(before, after))
            refuses(tmp_path / "other.html", "anna/page", "--space", words=("is not a page of `nlq explore`",))
        (tmp_path / "other.html").write_text(page)
        assert nlq.publish(tmp_path / "other.html", "anna/page", "--space", "--dry-run").sizes
        refuses(
            run[0], "anna/page", "--space", "--license", "mit", words=("--license and --space exclude each other",)
        )

    def test_listing_tells_names_and_sizes(self, server, nlq, copy_run):
        folder = copy_run()
        planned, done = nlq.publish(folder, "anna/listed", "--dry-run"), nlq.publish(folder, "anna/listed")
        there = {name: len(data) for name, data in server.files("anna/listed").items() if name != ".gitattributes"}
        assert planned.sizes == done.sizes == there
        assert server.commits("anna/listed")[0] in done.out.splitlines()[-1], "where it can be seen"
        assert f"{sum(there.values()):,} bytes in {len(there)} files" in done.out
        assert "nothing was sent" in planned.out and "nothing was sent" not in done.out
        assert nlq.publish(folder, "anna/listed").out == done.out and len(server.commits("anna/listed")) == 2

    def test_a_repository_that_is_public_does_not_pass_for_private(self, server, nlq, copy_run):
        folder = copy_run()
        nlq.publish(folder, "anna/open")
        nlq.publish(folder, "anna/hidden", "--private")
        assert server._repos["anna/hidden"].private and not server._repos["anna/open"].private
        change_weights(folder)
        before = server.commits("anna/open")
        check_refused(nlq("publish", folder, "anna/open", "--private"), "public")
        assert server.commits("anna/open") == before
        nlq.publish(folder, "anna/open", "--revision", "longer/training")
        assert server.commits("anna/open") == before == server.commits("anna/open", "longer/training")[1:]

    def test_somebody_else_commits_meanwhile(self, server, nlq, copy_run, monkeypatch):
        folder = copy_run()
        nlq.publish(folder, "anna/shared")
        change_weights(folder)
        answer = server.answer

        def commit_first(request):
            if request.path.endswith("/anna/shared/preupload/main"):
                theirs = {
                    **server._repos["anna/shared"].revision("main").files,
                    "loss.png": Blob(b"theirs", is_lfs=True),
                }
                server._repos["anna/shared"].commit("main", theirs)
            return answer(request)

        monkeypatch.setattr(server, "answer", commit_first)
        check_refused(nlq("publish", folder, "anna/shared"), "somebody else")
        assert server.files("anna/shared")["loss.png"] == b"theirs"
        monkeypatch.undo()
        nlq.publish(folder, "anna/shared")
        assert server.files("anna/shared")["loss.png"] == (folder / "loss.png").read_bytes()


def test_training_does_not_publish(recipe_file, tmp_path, capsys):
    arguments = ["train", str(recipe_file), "--output_dir", str(tmp_path / "run"), "--push_to_hub", "true"]
    status = main(arguments)
    out, err = capsys.readouterr()
    check_refused(Done(status, out, err), "push_to_hub", "nlq publish")
    assert not (tmp_path / "run").exists()


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def change_config(**fields: object):
    return lambda folder: change_json(folder / "config.json", **fields)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def lose_a_shard(folder: Path) -> None:
    NLQForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="70KB")
    (folder / "model.safetensors").unlink()
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


def stop_before_the_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "metrics.json", "model.safetensors", "README.md"):
        (folder / name).unlink()


# What is done to a folder, and words of the error
DAMAGES = {
    "no weights": (remove("model.safetensors"), ("model.safetensors",)),
    "unfinished": (stop_before_the_end, ("config.json", "did not finish")),
    "cut": (cut, ("model.safetensors", "truncated")),
    "shard": (lose_a_shard, ("model-00002-of-",)),
    "too few": (change_config(num_hidden_layers=3), ("missing", "model.layers.2.mlp.fc1.weight")),
    "other type": (change_config(model_type="mine"), ("'mine'",)),
    "no attention code": (remove("attention_nlq.py"), ("attention_nlq.py", "save_pretrained")),
}

# The client reads HF_HUB_OFFLINE when it is imported
OFFLINE = """
from huggingface_hub import constants
from nlq import main

constants.HF_HUB_OFFLINE = True
try:
    raise SystemExit(main(arguments))
finally:
    constants.HF_HUB_OFFLINE = False
"""


class TestBadInput:
    @pytest.mark.parametrize("repo_id", ["name", "a/b/c", "anna/my model"])
    def test_name_of_the_repository(self, repo_id, run, refuses):
        refuses(run[0], repo_id, words=(repr(repo_id), "form" if repo_id == "name" else ""))

    @pytest.mark.thin(3)
    @pytest.mark.parametrize("name", DAMAGES)
    def test_damaged_folders_are_refused(self, name, copy_run, refuses):
        folder, (damage, words) = copy_run(), DAMAGES[name]
        damage(folder)
        refuses(folder, "anna/bad", words=words)
        refuses(folder, "anna/bad", "--dry-run", words=words)

    @pytest.mark.parametrize("auto_map", [None, {**AUTO_MAP, "AutoModel": "a/b--c.D"}])
    def test_code_is_named_whatever_the_folder_says(self, auto_map, server, nlq, copy_run):
        """Without it, nobody without this package can load the model."""
        folder = copy_run()
        change_json(folder / "config.json", auto_map=auto_map)
        nlq.publish(folder, "anna/auto-map")
        published = json.loads(server.files("anna/auto-map")["config.json"])["auto_map"]
        assert published == {name: path for name, path in AUTO_MAP.items() if name != "AutoModelForMaskedLM"}

    def test_folders_that_are_none(self, run, tmp_path, refuses):
        refuses(tmp_path / "nowhere", "anna/bad", words=("nowhere",))
        refuses(run[0], "anna/bad", "--comparison", tmp_path, words=(str(tmp_path / "results.json"),))
        refuses(run[0], "anna/bad", "--card", tmp_path / "none.md", words=("none.md",))

    def test_card_that_the_hub_refuses(self, server, nlq, copy_run, tmp_path):
        folder = copy_run()
        nlq.publish(folder, "anna/bad-card")
        before = server.commits("anna/bad-card")
        (tmp_path / "bad.md").write_text("---\nlicense: 3\n---\n# A card\n")
        check_refused(nlq("publish", folder, "anna/bad-card", "--card", tmp_path / "bad.md"), "license")
        assert server.commits("anna/bad-card") == before

    def test_without_login_or_network(self, server, nlq, run):
        before = len(server.requests)
        for variables, code, word in (({"HF_TOKEN": ""}, None, "login"), ({}, OFFLINE, "HF_HUB_OFFLINE")):
            nlq.begin(("publish", run[0], "anna/nobody", "--dry-run"), code, variables)
            planned = nlq.end()
            assert planned.status == 0 and planned.sizes.keys() == RUN_FILES - {".gitattributes"}
            nlq.begin(("publish", run[0], "anna/nobody"), code, variables)
            check_refused(nlq.end(), "anna/nobody was not published", word)
        assert server.requests[before:] == []
