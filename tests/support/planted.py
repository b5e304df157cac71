"""An engine that trains nothing: it writes the metrics of runs whose losses a function gives."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from modeling_nlq.training.comparison.plan import Run, Scale
from modeling_nlq.training.comparison.results import RunStore, next_runs, run_folder


class Interrupted(Exception):
    """Raised after a number of runs."""


class PlantedEngine:
    """Makes runs with the losses of `loss(comparison, run)`, in nats per token; `None` for a run that diverges.

    Attributes:
        made: the names of the runs, in order, each with its comparison's name.
    """

    def __init__(self, loss: Callable[[Scale, Run], float | None], most_runs: int | None = None):
        self.loss, self.most_runs, self.made = loss, most_runs, []

    def connected(self, comparisons, folder):
        return nullcontext()

    def alone_in(self, folder):
        return nullcontext()

    def prepare_data(self, comparison, folder):
        return folder / "tokenizer", "planted"

    def make_runs(self, comparison: Scale, folder: Path, data: Path, finished: RunStore) -> None:
        while True:
            ready, _ = next_runs(comparison, finished)
            if not ready:
                return
            for run in ready:
                if len(self.made) == self.most_runs:
                    raise Interrupted
                self._make(comparison, run, run_folder(folder, run))
                self.made.append(f"{comparison.name}: {run.name}")

    def _make(self, comparison: Scale, run: Run, folder: Path) -> None:
        loss, variant = self.loss(comparison, run), comparison.variants[run.model]
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
