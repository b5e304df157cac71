"""`nlq publish --adapter`: what a run with `trainable: new` trained arrives on the Hub alone, and PEFT puts it on the
base.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_weights
from safetensors.torch import load_file
from support.client_cases import numbered_texts, small_model
from support.hub_server import HubServer
from support.publishing_cases import TOKEN, Worker, card_of, outputs
from transformers import GPT2Config

from modeling_nlq.training import convert, train


# Follows the card: the commands, then the Python, with what it computes at the end
FOLLOW = """
import re
import shlex
import torch
from huggingface_hub import ModelCard
from nlq import main

repo, out = arguments
text = ModelCard.load(repo).text
for block in re.findall(r"```sh\\n(.*?)```", text, flags=re.DOTALL):
    for line in block.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
(block,) = re.findall(r"```python\\n(.*?)```", text, flags=re.DOTALL)
names = {}
exec(block, names)
with torch.no_grad():
    torch.save(names["model"].eval()(torch.arange(12).reshape(2, 6) % 50).logits, out)
"""


@pytest.fixture(scope="module")
def server():
    with HubServer({TOKEN: "anna"}) as server:
        yield server
    assert server.unknown == []


@pytest.fixture(scope="module")
def nlq(server, tmp_path_factory):
    """A process whose working directory is `home`, where the card's commands write."""
    home = tmp_path_factory.mktemp("nlq") / "home"
    worker = Worker(home, server.client_environment(home, TOKEN))
    worker.home = home
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def source(nlq):
    return small_model(nlq.home / "gpt2", GPT2Config)


@pytest.fixture(scope="module")
def tune(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    fields = {
        "dataset": str(numbered_texts(root / "text.jsonl")),
        "validation_fraction": 0.2,
        "block_size": 32,
        "trainable": "new",
    }
    training = {"max_steps": 6, "learning_rate": 1e-2, "save_strategy": "no", "report_to": "none"}
    (root / "recipe.yaml").write_text(json.dumps({"model": "tiny-linear", **fields, "training": training}))

    def make(model, **overrides) -> Path:
        folder = root / f"run-{len(list(root.glob('run-*')))}"
        train(root / "recipe.yaml", model=str(model), tokenizer=str(model), output_dir=folder, **overrides)
        return folder

    return make


@pytest.fixture(scope="module")
def tuned(source, tune, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    convert(source, folder / "gated", switches={"attention_gate": "headwise", "head_projection": True})
    convert(folder / "gated", folder / "upcycled", upcycle=True)
    return folder / "upcycled", tune(folder / "upcycled")


def test_follow_the_card(tuned, server, nlq, tmp_path):
    """A base that somebody else converts anew, and the adapter from the Hub, compute what the trained model does."""
    base, run = tuned
    done = nlq.publish(run, "anna/f", "--adapter")
    files, card = server.files("anna/f"), card_of(server, "anna/f")
    assert (
        files.keys()
        == {
            *(
                ".gitattributes",
                "README.md",
                "adapter_config.json",
                "adapter_model.safetensors",
                "conversion.json",
                "loss.png",
            ),
            *("chat_template.jinja", "metrics.json", "recipe.yaml", "tokenizer.json", "tokenizer_config.json"),
        }
        == done.sizes.keys() | {".gitattributes"}
    )
    trained, start = load_file(run / "model.safetensors"), load_file(base / "model.safetensors")
    new = {name for name, value in trained.items() if not torch.equal(value, start[name])}
    saved = {
        name.removeprefix("base_model.model."): value
        for name, value in load_weights(files["adapter_model.safetensors"]).items()
    }
    assert saved.keys() == new and all(torch.equal(saved[name], trained[name]) for name in new)
    assert {name.split("self_attn.")[1].split(".")[0] for name in new} == {"q_bottleneck", "gate_proj", "head_proj"}
    settings = json.loads(files["adapter_config.json"])
    assert settings["base_model_name_or_path"] is None and str(run.parent) not in str(settings) + card.content
    assert card.data.library_name == "peft" and "custom_code" not in card.data.tags
    assert f"{sum(value.numel() for value in saved.values()):,} of them were trained" in card.text

    nlq.python(FOLLOW, "anna/f", tmp_path / "logits.pt")
    again = load_file(nlq.home / "base" / "model.safetensors")
    assert any(not torch.equal(again[name], start[name]) for name in new), "new weights are drawn anew"
    assert torch.equal(torch.load(tmp_path / "logits.pt"), outputs(run))
    assert not torch.equal(outputs(run), outputs(base))


def test_base_on_the_hub(tuned, tune, server, nlq, tmp_path):
    """Where the base itself is published, the adapter names it, and PEFT alone loads both."""
    nlq.publish(tuned[0], "anna/base")
    recipe = tuned[1] / "recipe.yaml"
    options = ("--model", "anna/base", "--tokenizer", "anna/base", "--output_dir", tmp_path / "run")
    done = nlq("train", recipe, *options)
    assert done.status == 0, done.err
    assert (tmp_path / "run" / "conversion.json").read_bytes() == server.files("anna/base")["conversion.json"]
    nlq.publish(tmp_path / "run", "anna/f-of-base", "--adapter")
    assert json.loads(server.files("anna/f-of-base")["adapter_config.json"])["base_model_name_or_path"] == "anna/base"
    card = card_of(server, "anna/f-of-base")
    assert card.data.base_model == "anna/base" and "nlq convert" not in card.text
    nlq.python(FOLLOW, "anna/f-of-base", tmp_path / "logits.pt")
    assert torch.equal(torch.load(tmp_path / "logits.pt"), outputs(tmp_path / "run"))
