"""`trainable: new`: only what a conversion added is trained, and the rest stays as it was."""

import json
from functools import partial

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support.runs import logged_losses, write_comparison
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, TrainerCallback

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training import train
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.conversion.converting import convert
from modeling_nlq.training.loading import load_config
from modeling_nlq.training.run.lora import choose_trained
from modeling_nlq.training.run.recipe import load_recipe, read_recipe
from modeling_nlq.training.run.train import train_recipe
from modeling_nlq.training.size import measure
from nlq import main


pytestmark = pytest.mark.thin(2)


NEW = ("q_bottleneck", "gate_proj")


@pytest.fixture(scope="module")
def gpt2(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainable") / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(run[0]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def upcycled(gpt2):
    convert(gpt2, gpt2.with_name("upcycled"), upcycle=True, switches={"attention_gate": "headwise"})
    return gpt2.with_name("upcycled")


def test_the_training_loss_of_a_stock_model(gpt2, recipe_file, tmp_path):
    """Its class names no loss, and Trainer alone would count the first token of a block, which is not predicted."""
    config = GPT2Config.from_pretrained(gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(gpt2).save_pretrained(tmp_path / "gpt2")
    convert(tmp_path / "gpt2", tmp_path / "nlq")
    losses = []
    for name in ("gpt2", "nlq"):
        given = {"model": tmp_path / name, "tokenizer": tmp_path / name, "output_dir": tmp_path / f"{name}-run"}
        train(recipe_file, **given, max_steps=2, logging_steps=1, save_strategy="no")
        losses.append(logged_losses(given["output_dir"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.fixture(scope="module")
def tune(upcycled, recipe_file):
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe = {**recipe, "model": str(upcycled), "tokenizer": str(upcycled), "trainable": "new"}
    recipe["training"]["report_to"] = "none"
    path = upcycled.with_name("tune.yaml")
    path.write_text(yaml.safe_dump(recipe))
    return path


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        self.found = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.optimized = {name for name, parameter in model.named_parameters() if id(parameter) in known}


@pytest.fixture(scope="module")
def tuned(tune, upcycled):
    gradients = Gradients()
    recipe = load_recipe(tune, {"output_dir": upcycled.with_name("tuned")})
    return upcycled.with_name("tuned"), train_recipe(recipe, callbacks=[gradients]), gradients


def is_new(name):
    return any(part in name for part in NEW)


def test_nothing_else_is_trained(tuned, upcycled):
    folder, metrics, gradients = tuned
    before, after = (load_file(path / "model.safetensors") for path in (upcycled, folder))
    new = {name for name in before if is_new(name)}
    assert len(new) == 2 * (7 + 2)  # f: the gain of its first norm, and three weights with biases; the gate: one
    assert {name for name in before if not torch.equal(before[name], after[name])} == new
    assert gradients.found == gradients.optimized == new
    kept = torch.load(folder / "checkpoint-8" / "optimizer.pt")["state"]
    assert sorted(state["exp_avg"].numel() for state in kept.values()) == sorted(before[name].numel() for name in new)
    assert metrics.size.trained == sum(before[name].numel() for name in new) < metrics.size.total
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    first, last = (entry["eval_loss"] for entry in history if "eval_loss" in entry)
    assert last < first


def test_the_run_records_what_was_trained(tuned, upcycled, recipe_file, capsys):
    folder, metrics, _ = tuned
    assert (folder / "conversion.json").read_text() == (upcycled / "conversion.json").read_text()
    assert main(["train", str(folder.with_name("tune.yaml")), "--output_dir", str(folder)]) == 0  # it is finished
    share = f"{metrics.size.trained:,} of {metrics.size.total:,} parameters were trained"
    assert share in capsys.readouterr().out
    card = ModelCard.load(folder / "README.md").text
    assert f"{metrics.size.trained:,} of them were trained" in card and "trainable: new" in card
    assert "Before training, its outputs on random tokens were" in card


def test_two_conversions_are_as_one(gpt2, upcycled, tuned, tmp_path):
    """But what was trained is new no more, nor is what only grew."""
    first = convert(gpt2, tmp_path / "gated", switches={"attention_gate": "headwise"})
    second = convert(tmp_path / "gated", tmp_path / "both", upcycle=True)
    once = json.loads((upcycled / "conversion.json").read_text())
    assert second.added == once["added"] and all(map(is_new, second.added)) and len(second.added) == 18
    assert set(first.added) == {name for name in once["added"] if "gate_proj" in name} and first.before is None
    assert second.before == json.loads((tmp_path / "gated" / "conversion.json").read_text())
    done = convert(tuned[0], tmp_path / "more", switches={"head_projection": True, "max_position_embeddings": 80})
    assert done.added == [f"model.layers.{layer}.self_attn.head_proj.weight" for layer in range(2)]
    assert done.enlarged == ["model.embed_positions.weight"] and done.before is None


def test_what_is_refused(recipe_file, run, tune, tmp_path, monkeypatch):
    """With or without PEFT; tests/clients/test_lora.py trains."""

    def check(recipe, message, **changes):
        with pytest.raises(ValueError, match=message):
            train(recipe, output_dir=tmp_path / "run", **changes)
        assert not (tmp_path / "run" / "tokenizer.json").exists()

    check(
        recipe_file, r"trainable='new' trains what `nlq convert` .*model.json' has no conversion.json", trainable="new"
    )
    check(tune, "has no conversion.json", model=str(run[0]), tokenizer=str(run[0]))
    check(tune, "'old'", trainable="old")
    monkeypatch.setattr("modeling_nlq.training.run.lora.find_spec", lambda name: None)
    check(tune, "trainable='new' both say", lora={"r": 8})
    check(tune, "pip install peft", trainable="all", lora={"r": 8})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check(recipe_file, "has none; name a saved model.*without FSDP", lora={"r": 8})


def test_adapters_that_are_refused(run, gpt2, tune, tuned, tmp_path, capsys):
    """Before PEFT is needed; tests/clients/test_adapter.py publishes. PEFT saves modules, and a sink is none."""
    switches = {"attention_sink": "zero", "query_projection": "linear", "attention_gate": None}
    NLQForCausalLM(load_config(str(tuned[0]), switches)).save_pretrained(tmp_path / "zero")
    AutoTokenizer.from_pretrained(gpt2).save_pretrained(tmp_path / "zero")
    convert(tmp_path / "zero", tmp_path / "learned", upcycle=True, switches={"attention_sink": "learned"})
    train(tune, output_dir=tmp_path / "run", model=str(tmp_path / "learned"), max_steps=1, save_strategy="no")
    names = ", ".join(f"model.layers.{layer}.self_attn.sink_bias" for layer in range(2))
    messages = {run[0]: "what a finished run with `trainable: new` trained", tmp_path / "run": f"of others: {names}"}
    capsys.readouterr()
    for folder, message in messages.items():
        assert main(["publish", str(folder), "anna/f", "--adapter", "--dry-run"]) == 1
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and message in line


def test_plan_of_a_comparison(tune, upcycled, tmp_path):
    """Frozen matrices cost two thirds."""
    recipe = {**yaml.safe_load(tune.read_text()), "trainable": "all"}
    file = write_comparison(tmp_path, recipe=recipe, models={"base": None, "new": {"trainable": "new"}})
    header, base, new, *_ = load_plan(file).describe()
    recipe = read_recipe({"model": str(upcycled), "trainable": "new"})
    whole, size = measure(recipe.config, 64), measure(recipe.config, 64, prepare=partial(choose_trained, recipe))
    frozen = 0
    for name, value in load_file(upcycled / "model.safetensors").items():
        if value.ndim == 2 and not is_new(name) and "_pos" not in name:
            frozen += value.numel()
    assert whole.flops_per_token - size.flops_per_token == 2 * frozen
    assert header.split()[:3] == ["model", "parameters", "trained"]
    assert [f"{size.total:,}", f"{size.trained:,}"] == new.split()[1:3] and f"{size.flops_per_token:,}" in new
    assert base.split()[2:4] == [f"{size.total:,}"] * 2 and f"{size.flops_per_token:,}" not in base
    with pytest.raises(ValueError, match="model 'new': trainable='new' trains what `nlq convert` added"):
        load_plan(file, {"model": "tiny-linear", "tokenizer": str(upcycled)})
