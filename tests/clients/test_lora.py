"""`lora` in a recipe: PEFT's LoRA is all that is trained, and the run folder holds it alone and in the weights of the
model.
"""

import json
from functools import partial

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from support.client_cases import numbered_texts, small_model
from support.runs import interrupt, logged_losses
from transformers import AutoModelForCausalLM, LlamaConfig

from modeling_nlq.training import train
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.run.lora import choose_trained
from modeling_nlq.training.run.recipe import read_recipe
from modeling_nlq.training.size import measure
from nlq import main


RANK = 2
LORA = {"r": RANK, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("lora") / "llama", LlamaConfig)


@pytest.fixture(scope="module")
def recipe(llama):
    root = llama.parent
    training = {"max_steps": 8, "learning_rate": 1e-2, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    fields = {
        "model": str(llama),
        "tokenizer": str(llama),
        "dataset": str(numbered_texts(root / "text.jsonl")),
        "validation_fraction": 0.2,
        "test_fraction": 0.2,
        "block_size": 32,
        "lora": LORA,
        "training": {**training, "logging_steps": 1, "report_to": "none"},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(fields))
    return root / "recipe.yaml"


@pytest.fixture(scope="module")
def tuned(recipe):
    return recipe.with_name("run"), train(recipe, output_dir=recipe.with_name("run"))


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(2, 6)).logits


def test_what_is_trained_and_saved(tuned, llama):
    folder, metrics = tuned
    size = 2 * RANK * ((32 + 32) + (48 + 32))
    assert metrics.size.trained == size
    before, after = (load_file(path / "model.safetensors") for path in (llama, folder))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name or "down_proj" in name}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]

    checkpoint = folder / "checkpoint-8"
    kept = torch.load(checkpoint / "optimizer.pt")["state"].values()
    assert sum(state["exp_avg"].numel() for state in kept) == size
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    assert sum(value.numel() for value in adapter.values()) == size and not (checkpoint / "model.safetensors").exists()

    base = AutoModelForCausalLM.from_pretrained(llama)
    untrained = logits(base)
    merged = logits(AutoModelForCausalLM.from_pretrained(folder))
    beside = logits(PeftModel.from_pretrained(base, folder / "adapter"))
    torch.testing.assert_close(merged, beside, atol=1e-5, rtol=0.0)
    assert (merged - untrained).abs().max() > 1e-2
    files = {path.name for path in (folder / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}

    card = ModelCard.load(folder / "README.md").text
    assert f"A LoRA of {size:,} parameters was trained" in card
    assert f"{sum(value.numel() for value in before.values()):,} parameters" in card


def test_interrupted_run_ends_alike(recipe, tuned, tmp_path):
    interrupt(recipe, output_dir=tmp_path / "run")
    metrics = train(recipe, output_dir=tmp_path / "run")
    assert (
        logged_losses(tmp_path / "run") == logged_losses(tuned[0])
        and metrics.data.token_stream == tuned[1].data.token_stream
    )
    weights, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "run", tuned[0]))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_comparison_trains_adapters(llama, recipe, tmp_path):
    fields = {
        "recipe": {**yaml.safe_load(recipe.read_text()), "lora": None, "record_stability": False},
        "baseline": "whole",
        "models": {"whole": {}, "lora": {"lora": LORA}},
        "learning_rates": [1e-2],
        "seeds": [0, 1],
        "training": {"max_steps": 2, "save_strategy": "no", "eval_steps": 2},
    }
    (tmp_path / "comparison.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    comparison = load_plan(tmp_path / "comparison.yaml")
    recipe = read_recipe({"model": str(llama), "lora": LORA})
    size = measure(recipe.config, 32, prepare=partial(choose_trained, recipe))
    assert f"{size.total:,}" in (line := list(comparison.describe())[2]) and f"{size.trained:,}" in line
    results = run_comparison(comparison, tmp_path / "results")
    assert results.largest.same_tokens and results.largest.models["lora"].size.trained == size.trained


@pytest.mark.parametrize(
    "lora, words",
    [
        ("{rank: 8}", ["lora={'rank': 8}", "unexpected keyword"]),
        ("{r: 0}", ["lora={'r': 0}", "positive"]),
        ("{target_modules: [fc7]}", ["lora={'target_modules': ['fc7']}", "does not fit"]),
    ],
)
def test_bad_input(lora, words, recipe, tmp_path, capsys):
    assert main(["train", str(recipe), "--output_dir", str(tmp_path / "run"), "--lora", lora]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nlq: error")]
    assert all(word in line for word in words), line
    assert not (tmp_path / "run" / "tokenizer.json").exists()
