"""An engine without training: it writes results with losses from a function."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from support.inline_engine import InlineEngine, finished_future

from modeling_nlq.training.comparison.comparison import Run, Scale
from modeling_nlq.training.result import Attention, Data, Evaluation, Losses, Machine, RunResult
from modeling_nlq.training.run.recipe import Recipe


class Interrupted(Exception):
    """Raised after a number of runs."""


class PlantedEngine(InlineEngine):
    """Makes runs with the losses of `loss(comparison, run)`, in nats per token; `None` for a run that diverges.

    Attributes:
        made: the names of the runs, in order, each with its comparison's name.
    """

    def __init__(self, loss: Callable[[Scale, Run], float | None], most_runs: int | None = None):
        super().__init__()
        self.loss, self.most_runs, self.made = loss, most_runs, []

    def prepare_data(self, scale, folder):
        self.scale = scale
        return folder / "tokenizer", "planted"

    def submit(self, name: str, recipe: Recipe, data: Path):
        if len(self.made) == self.most_runs:
            raise Interrupted
        training = recipe.training
        trial = re.search(r"/trial-(\d+)-", name)
        run = Run(name.partition("/")[0], training["learning_rate"], training["seed"], trial and int(trial[1]))
        self.made.append(f"{self.scale.name}: {run.name}")
        return finished_future(self._make(run, Path(recipe.output_dir)))

    def _make(self, run: Run, folder: Path) -> RunResult:
        loss, variant = self.loss(self.scale, run), self.scale.variants[run.model]
        parts = None if loss is None or self.scale.task is not None else [loss + 0.01 * part for part in range(-2, 3)]
        tokens = dict.fromkeys(("train_tokens", "validation_tokens", "test_tokens"), 1000)
        result = RunResult(
            losses=Losses(loss is None, None, loss, Evaluation(loss), Evaluation(loss, loss_parts=parts)),
            data=Data(variant.steps, variant.tokens, f"seed {run.seed}", **tokens, fingerprint="planted"),
            size=variant.size,
            machine=Machine(1.0, float(variant.tokens), 2**20, device="cpu", versions={"nlq": "0"}),
            attention=Attention("eager"),
        )
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": []}))
        result.save(folder)
        return result


def gated_is_better(scale: Scale, run: Run) -> float:
    """A loss of which seeds are a small part, and the model `gated` has less."""
    noise = math.sin(1 + run.seed) + 0.1 * math.cos(run.seed * len(run.model))
    return 3.0 - 0.1 * (run.model == "gated") + 0.01 * noise
