"""Reads and interrupts training runs."""

import json
from pathlib import Path

import pytest
from transformers import TrainerCallback

from modeling_nlq.training.comparison.results import Outcome
from modeling_nlq.training.files import write_yaml
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.train import train_recipe
from modeling_nlq.training.values import from_json, to_json


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
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


class PowerCut(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def interrupt(recipe_file: Path, **overrides) -> None:
    """Begins a run that ends in its fifth step, after a checkpoint at the fourth."""
    with pytest.raises(KeyboardInterrupt):
        train_recipe(load_recipe(recipe_file, overrides), callbacks=[PowerCut()])


def without_times(results: Outcome) -> Outcome:
    """Results as far as the clock and the memory have no part in them."""
    content = json.loads(to_json(results))
    for model in (model for scale in content["scales"].values() for model in scale["models"].values()):
        for run in [*model["tried"], *model["runs"]]:
            run["result"]["machine"] = {}
            for evaluation in ("validation", "test"):
                for name in ("runtime", "samples_per_second", "steps_per_second"):
                    run["result"]["losses"][evaluation].pop(name)
    return from_json(Outcome, content)


def change_json(file: Path, **values) -> None:
    """Changes fields of a JSON file, named with their groups, such as `data__steps`; `...` removes one."""
    content = json.loads(file.read_text())
    for name, value in values.items():
        *groups, last = name.split("__")
        found = content
        for group in groups:
            found = found[group]
        found[last] = value
        if value is ...:
            del found[last]
    file.write_text(json.dumps(content))


def write_comparison(folder: Path, **fields) -> str:
    """Writes `comparison.yaml` with one rate and two seeds, unless the fields say otherwise; `None` leaves a field
    out.
    """
    content = {"baseline": "base", "learning_rates": [1e-2], "seeds": [0, 1], **fields}
    given = {name: value for name, value in content.items() if value is not None}
    write_yaml(folder / "comparison.yaml", given)
    return str(folder / "comparison.yaml")
