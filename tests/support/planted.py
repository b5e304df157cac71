"""An engine that trains nothing: it writes the metrics of runs whose losses a function gives."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from support.inline_engine import finished_future

from modeling_nlq.training.comparison.comparison import Run, Scale
from modeling_nlq.training.run.recipe import Recipe


class Interrupted(Exception):
    """Raised after a number of runs."""


class PlantedEngine:
    """Makes runs with the losses of `loss(comparison, run)`, in nats per token; `None` for a run that diverges.

    Attributes:
        made: the names of the runs, in order, each with its comparison's name.
    """

    def __init__(self, loss: Callable[[Scale, Run], float | None], most_runs: int | None = None):
        self.loss, self.most_runs, self.made = loss, most_runs, []

    def connected(self, comparisons):
        return nullcontext()

    def alone_in(self, folder):
        return nullcontext()

    def prepare_data(self, comparison, folder):
        self.scale = comparison
        return folder / "tokenizer", "planted"

    def room(self, running):
        return 1

    def progress(self):
        return {}

    def cancel(self, names):
        pass

    def submit(self, name: str, recipe: Recipe, data: Path):
        if len(self.made) == self.most_runs:
            raise Interrupted
        training = recipe.training
        run = Run(name.partition("/")[0], training["learning_rate"], training["seed"])
        self.made.append(f"{self.scale.name}: {run.name}")
        return finished_future(self._make(run, Path(recipe.output_dir)))

    def _make(self, run: Run, folder: Path) -> dict:
        loss, variant = self.loss(self.scale, run), self.scale.variants[run.model]
        folder.mkdir(parents=True)
        metrics = {
            "diverged": loss is None,
            "diverged_at": None,
            "eval_loss": loss,
            "test_loss": loss,
            "train_loss": loss,
            "test_loss_parts": None if loss is None else [loss + 0.01 * part for part in range(-2, 3)],
            "steps": variant.steps,
            "tokens_seen": variant.tokens,
            "token_stream": f"seed {run.seed}",
            "train_seconds": 1.0,
            "tokens_per_second": float(variant.tokens),
            "peak_memory": 2**20,
            "attn_implementation": "eager",
            "dataset_fingerprint": "planted",
            "device": "cpu",
            "versions": {"nlq": "0"},
            "parameters": variant.size.total,
            **{f"{split}_tokens": 1000 for split in ("train", "validation", "test")},
        }
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": []}))
        (folder / "metrics.json").write_text(json.dumps(metrics))
        return metrics
