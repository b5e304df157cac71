"""Reads and interrupts training runs."""

import json
from pathlib import Path

import pytest
from transformers import TrainerCallback

from modeling_nlq.training.files import write_yaml
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.trainer import train_recipe


HALF = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
}
HALF |= {"position_embedding": "learned"}
PAIR_SWITCHES = {"encoder": HALF, "decoder": {**HALF, "cross_attention": {"attention_activation": "sigmoid"}}}


def logged_losses(folder: Path) -> list[float]:
    """The training losses that a run logged."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


class PowerCut(TrainerCallback):
    """Ends a run in its fifth step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def interrupt(recipe_file: Path, **overrides) -> None:
    """Begins a run that ends in its fifth step, after a checkpoint at the fourth."""
    with pytest.raises(KeyboardInterrupt):
        train_recipe(load_recipe(recipe_file, overrides), callbacks=[PowerCut()])


def without_times(results: dict) -> dict:
    """Results as far as the clock and the memory have no part in them."""
    results = json.loads(json.dumps(results))
    for model in results["models"].values():
        for run in [*model["tried"], *model["runs"]]:
            for name in ("train_seconds", "tokens_per_second", "peak_memory"):
                run.pop(name)
    return results


def write_comparison(folder: Path, **fields) -> str:
    """Writes `comparison.yaml` with one rate and two seeds, unless the fields say otherwise; `None` leaves a field
    out.
    """
    content = {"baseline": "base", "learning_rates": [1e-2], "seeds": [0, 1], **fields}
    given = {name: value for name, value in content.items() if value is not None}
    write_yaml(folder / "comparison.yaml", given)
    return str(folder / "comparison.yaml")
