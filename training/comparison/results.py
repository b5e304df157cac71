"""The results of a comparison: the measurements of its runs, and their analysis, as one mapping for JSON."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from modeling_nlq.training.comparison.plan import Comparison, Run
from modeling_nlq.training.comparison.statistics import analyse, rate_gap
from modeling_nlq.training.files import METRICS_FILE, STATE_FILE, read_json
from modeling_nlq.training.run.stability import loss_spikes, read_stability
from modeling_nlq.training.traces import without_folders


def run_folder(folder: Path, run: Run) -> Path:
    """The folder of a run in that of its comparison."""
    return folder / "runs" / run.name


class FinishedRuns:
    """The metrics of the finished runs in the folder of a comparison. Those of a run are read once.

    Attributes:
        folder: the folder of the comparison, or an address (see `storage`).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics: dict[Run, dict[str, Any]] = {}

    def metrics(self, run: Run) -> dict[str, Any] | None:
        """The metrics of a run; `None` if it is not finished."""
        if run not in self._metrics:
            file = run_folder(self.folder, run) / METRICS_FILE
            if not file.is_file():
                return None
            self._metrics[run] = read_json(file)
        return self._metrics[run]

    def add(self, run: Run, metrics: dict[str, Any]) -> None:
        """Takes the metrics of a run that was finished just now, which a shared folder may show later."""
        self._metrics[run] = metrics

    def best_learning_rate(self, comparison: Comparison, model: str) -> float | None:
        """The rate with the lowest validation loss in the finished sweep; `None` if all its runs diverged."""
        runs = comparison.sweep(model)
        if not runs:
            return comparison.variants[model].learning_rates[0]
        measured = [(self.metrics(run), run.learning_rate) for run in runs]
        losses = [(metrics["eval_loss"], rate) for metrics, rate in measured if not metrics["diverged"]]
        return min(losses)[1] if losses else None

    def unfinished(self, comparison: Comparison, model: str) -> tuple[list[Run], int]:
        """The runs of a model that can begin now, and the number of its runs that are not finished."""
        sweep = [run for run in comparison.sweep(model) if self.metrics(run) is None]
        if sweep:
            return sweep, len(sweep) + len(comparison.seeds)
        rate = self.best_learning_rate(comparison, model)
        reported = [] if rate is None else comparison.reported(model, rate)
        reported = [run for run in reported if self.metrics(run) is None]
        return reported, len(reported)


def check_same_models(comparison: Comparison, finished: FinishedRuns) -> None:
    """Raises `ValueError` if a finished run had a model of another size than the comparison has now."""
    for name, variant in comparison.variants.items():
        sweep = comparison.sweep(name)
        is_swept = all(finished.metrics(run) is not None for run in sweep)
        rate = finished.best_learning_rate(comparison, name) if is_swept else None
        for run in [*sweep, *([] if rate is None else comparison.reported(name, rate))]:
            metrics = finished.metrics(run)
            if metrics is not None and metrics["parameters"] != variant.size.total:
                sizes = f"run {run.name} has {metrics['parameters']:,} parameters, the model {variant.size.total:,} now"
                raise ValueError(
                    f"model {name!r} has changed since {finished.folder} was begun: {sizes}; put the old one back, or choose "
                    "another --output_dir"
                )


def gather(comparison: Comparison, finished: FinishedRuns) -> dict[str, Any]:
    """Gathers the content of `results.json` from the finished runs of a comparison.

    * `models`: by name, the sizes, the switches and the training arguments that differ, the chosen `learning_rate` (`None` if
      every rate diverged), whether it `is_at_edge` of the rates tried, its `rate_gap` (see that function), and the runs of the
      sweep and the reported ones.
    * a run: its losses on training, validation and test split in nats per token, whether it `diverged`, tokens per second,
      seconds of training steps, peak memory in bytes, `token_stream` (a hash of the tokens it saw, in order), and its
      `history`: `(step, value)` of each loss and gradient norm, the steps of `loss_spikes`, and `stability` by layer.
    * `tokens_per_run`: the most tokens that a finished run saw; the plan's number if every run was stopped early. The plan
      counts the last batch of an epoch as full, which it may not be.
    * `token_streams`: by seed, that hash; `same_tokens`: whether all models of every seed saw the same tokens in the same
      order; `None` if every run was stopped early.
    * `statistics`: the result of `analyse` for the test losses.
    """
    models = {}
    for name, variant in comparison.variants.items():
        rate = finished.best_learning_rate(comparison, name)
        rates = variant.learning_rates
        sweep = [_read_run(finished, run) for run in comparison.sweep(name)]
        runs = [] if rate is None else [_read_run(finished, run) for run in comparison.reported(name, rate)]
        models[name] = {
            "given": without_folders(variant.given),
            "parameters": variant.size.total,
            "trained_parameters": variant.size.trained,
            "non_embedding_parameters": variant.size.non_embedding,
            "flops_per_token": variant.size.flops_per_token,
            "intermediate_size": variant.intermediate_size,
            "learning_rates": rates,
            "learning_rate": rate,
            "is_at_edge": len(rates) > 1 and rate in (rates[0], rates[-1]),
            "rate_gap": rate_gap(_validation_losses(sweep), _validation_losses(runs)),
            "sweep": sweep,
            "runs": runs,
        }
    # A run that was stopped early saw only the first tokens
    whole = [run for model in models.values() for run in [*model["sweep"], *model["runs"]] if run["diverged_at"] is None]
    streams: dict[int, set[str]] = {}
    for run in whole:
        streams.setdefault(run["seed"], set()).add(run["token_stream"])
    # A model that diverged at every rate counts as diverged on every seed
    losses = {
        name: {run["seed"]: run["test_loss"] for run in model["runs"]} or dict.fromkeys(comparison.seeds)
        for name, model in models.items()
    }
    runs = [run for name in models for run in _all_runs(comparison, finished, name)]
    fingerprints = {finished.metrics(run)["dataset_fingerprint"] for run in runs}
    sample = finished.metrics(runs[0])
    return {
        "name": comparison.name,
        "baseline": comparison.baseline,
        "seeds": comparison.seeds,
        "sweep_seed": comparison.sweep_seed,
        "command": comparison.command,
        "tokens_per_run": max((run["tokens_seen"] for run in whole), default=comparison.tokens_per_run),
        "dataset_fingerprint": sample["dataset_fingerprint"],
        **{f"{split}_tokens": sample[f"{split}_tokens"] for split in ("train", "validation", "test")},
        "device": sample["device"],
        "versions": sample["versions"],
        "comparison": without_folders(comparison.given),
        "token_streams": {seed: sorted(found)[0] for seed, found in sorted(streams.items())},
        "same_tokens": len(fingerprints) == 1 and all(len(found) == 1 for found in streams.values()) if streams else None,
        "models": models,
        "statistics": dataclasses.asdict(analyse(losses, comparison.baseline)),
    }


def _all_runs(comparison: Comparison, finished: FinishedRuns, model: str) -> list[Run]:
    rate = finished.best_learning_rate(comparison, model)
    return [*comparison.sweep(model), *([] if rate is None else comparison.reported(model, rate))]


def _read_run(finished: FinishedRuns, run: Run) -> dict[str, Any]:
    metrics = finished.metrics(run)
    history = read_json(run_folder(finished.folder, run) / STATE_FILE)["log_history"]
    curves = {
        name: [(entry["step"], entry[key]) for entry in history if key in entry]
        for name, key in (("train_loss", "loss"), ("validation_loss", "eval_loss"), ("gradient_norm", "grad_norm"))
    }
    return {
        "folder": f"runs/{run.name}",
        "seed": run.seed,
        "learning_rate": run.learning_rate,
        "diverged": metrics["diverged"],
        "diverged_at": metrics["diverged_at"],
        # The loss of a model that diverged is not reported
        "test_loss": None if metrics["diverged"] else metrics["test_loss"],
        "validation_loss": metrics.get("eval_loss"),
        "train_loss": metrics["train_loss"],
        "bits_per_byte": metrics.get("test_bits_per_byte"),
        "token_accuracy": metrics.get("test_token_accuracy"),
        **{name: metrics[name] for name in ("steps", "tokens_seen", "token_stream", "train_seconds", "tokens_per_second")},
        "peak_memory": metrics["peak_memory"],
        "attn_implementation": metrics["attn_implementation"],
        "history": {
            **{name: _without_nan(curve) for name, curve in curves.items()},
            "loss_spikes": loss_spikes(curves["train_loss"]),
            "stability": {
                layer: {quantity: _without_nan(curve) for quantity, curve in found.items()}
                for layer, found in read_stability(history).items()
            },
        },
    }


def _validation_losses(runs: list[dict[str, Any]]) -> list[float | None]:
    return [None if run["diverged"] else run["validation_loss"] for run in runs]


def _without_nan(curve: list[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """Replaces NaN and infinity, which JSON does not have."""
    return [(step, value if math.isfinite(value) else None) for step, value in curve]
