"""The results of a comparison: the measurements of its runs, and their analysis, as one mapping for JSON."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import METRICS_FILE, STATE_FILE, read_json
from ..run.stability import loss_spikes, read_stability
from ..scrub import without_folders
from .inference import FIRST_INTERIM, analyse, analyse_early, noise_from_text
from .plan import Comparison, Run


def run_folder(folder: Path, run: Run) -> Path:
    """The folder of a run in that of its comparison."""
    return folder / "runs" / run.name


class RunStore:
    """The finished runs in the folder of a comparison. The metrics of a run are read once, and a step of a search is made once.

    Attributes:
        folder: the folder of the comparison, or an address (see `storage`).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics: dict[Run, dict[str, Any]] = {}
        self._losses: dict[tuple, dict[float, float]] = {}  # of each search, as far as it is

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

    def seeds_of(self, comparison: Comparison, model: str) -> list[int]:
        """The seeds that a model is trained with, as far as is known: all, or those up to the look at which it leaves.

        With `stop: early`, every model is looked at when the runs of its first `FIRST_INTERIM` seeds are finished. A model
        about which there is no verdict gets the next seed, as does the baseline as long as there is such a model. The
        finished runs alone decide, so a comparison that goes on decides the same.
        """
        return comparison.seeds if comparison.stop is None else comparison.seeds[: self._seed_counts(comparison)[model]]

    def _seed_counts(self, comparison: Comparison) -> dict[str, int]:
        """How many of the seeds each model is trained with, by `seeds_of`."""
        counts = dict.fromkeys(comparison.variants, FIRST_INTERIM)
        for count in range(FIRST_INTERIM, len(comparison.seeds)):
            at_look = [model for model, own in counts.items() if own == count]
            losses = {model: self._test_losses(comparison, model, comparison.seeds[:own]) for model, own in counts.items()}
            if comparison.baseline not in at_look or None in losses.values():
                break
            unsettled = [model for model in at_look if self._is_at_edge(comparison, model, comparison.seeds[:count])]
            looked = analyse(losses, comparison.baseline, unsettled=unsettled, most=len(comparison.seeds))
            if open_models := [model for model in at_look if model in looked.open_models()]:
                counts |= dict.fromkeys([comparison.baseline, *open_models], count + 1)
        return counts

    def _test_losses(self, comparison: Comparison, model: str, seeds: list[int]) -> dict[int, float | None] | None:
        """The test losses of a model's reported runs, `None` where one diverged; `None` if not all are finished."""
        losses = {}
        for run in self._reported(comparison, model, seeds):
            if (metrics := self.metrics(run)) is None:
                return None
            losses[run.seed] = None if metrics["diverged"] else metrics["test_loss"]
        return losses if len(losses) == len(seeds) else None

    def _is_at_edge(self, comparison: Comparison, model: str, seeds: list[int]) -> bool:
        """Whether the search of a seed stopped with its best rate at an edge, as `unsettled_models` has it."""
        if not comparison.has_choice(model) or not comparison.variants[model].rates.is_search:
            return False
        tunings = [self._tune(comparison, model, seed) for seed in seeds]
        return any(tuning.edge is not None and tuning.rate is not None for tuning in tunings)

    def tunings(self, comparison: Comparison, model: str) -> list["Tuning"]:
        """How far the choice of a model's learning rate is, for each seed."""
        seeds = self.seeds_of(comparison, model)
        return [self._tune(comparison, model, seed) for seed in seeds] if comparison.has_choice(model) else []

    def _tune(self, comparison: Comparison, model: str, seed: int) -> "Tuning":
        """Goes on with the search of a seed from where it was when last asked for, with the losses of the finished runs."""
        rates = comparison.variants[model].rates_of(seed)
        losses = self._losses.setdefault((model, rates, seed), {})
        while next_rates := rates.next(losses):
            runs = [Run(model, rate, seed) for rate in next_rates]
            if ready := [run for run in runs if self.metrics(run) is None]:
                return Tuning(seed, dict(losses), ready)
            for run in runs:
                found = self.metrics(run)
                losses[run.learning_rate] = math.inf if found["diverged"] else found["eval_loss"]
        return Tuning(seed, losses, [], rates.best(losses), rates.edge(losses))

    def reported(self, comparison: Comparison, model: str) -> list[Run]:
        """The runs of a model that are reported, as far as their rates are chosen; one for each seed in the end.

        A seed that diverges at each of its rates reports the run at the smallest.
        """
        return self._reported(comparison, model, self.seeds_of(comparison, model))

    def _reported(self, comparison: Comparison, model: str, seeds: list[int]) -> list[Run]:
        if not comparison.has_choice(model):
            return [Run(model, comparison.variants[model].rates.first[0], seed) for seed in seeds]
        return [
            Run(model, min(tuning.losses) if tuning.rate is None else tuning.rate, tuning.seed)
            for tuning in (self._tune(comparison, model, seed) for seed in seeds)
            if not tuning.ready
        ]

    def tried(self, comparison: Comparison, model: str) -> list[Run]:
        """The finished runs that choose a model's learning rate and are not reported."""
        reported = set(self.reported(comparison, model))
        runs = [Run(model, rate, tuning.seed) for tuning in self.tunings(comparison, model) for rate in sorted(tuning.losses)]
        return [run for run in runs if run not in reported]

    def unfinished(self, comparison: Comparison, model: str) -> list[Run]:
        """The runs of a model that can begin now: all that are left, unless a search goes on."""
        if comparison.has_choice(model):
            return [run for tuning in self.tunings(comparison, model) for run in tuning.ready]
        return [run for run in self.reported(comparison, model) if self.metrics(run) is None]

    def count(self, comparison: Comparison, model: str) -> int:
        """The number of finished runs of a model."""
        runs = [*self.tried(comparison, model), *self.reported(comparison, model)]
        runs += [
            Run(model, rate, tuning.seed)
            for tuning in self.tunings(comparison, model)
            if tuning.ready
            for rate in comparison.variants[model].rates_of(tuning.seed).next(tuning.losses)
        ]
        return sum(self.metrics(run) is not None for run in runs)


@dataclass(frozen=True)
class Tuning:
    """The choice of a learning rate by a seed.

    Attributes:
        seed: that chooses.
        losses: validation loss of each rate tried, in nats per token; infinity if the run diverged.
        ready: runs that the choice waits for.
        rate: the rate chosen; `None` before, or if every rate diverged.
        edge: whether it is the `smallest` or the `largest` rate tried.
    """

    seed: int
    losses: dict[float, float]
    ready: list[Run]
    rate: float | None = None
    edge: str | None = None


def next_runs(comparison: Comparison, finished: RunStore) -> tuple[list[Run], int]:
    """The runs that can begin now, in their order, and the number of finished runs."""
    ready = [run for model in comparison.variants for run in finished.unfinished(comparison, model)]
    return comparison.in_order(ready), sum(finished.count(comparison, model) for model in comparison.variants)


def chosen_rates(comparison: Comparison, finished: RunStore) -> dict[str, dict[int, float]]:
    """The rates that seeds chose, by model and seed; none of a seed that diverged at each."""
    return {
        model: {tuning.seed: tuning.rate for tuning in finished.tunings(comparison, model) if tuning.rate is not None}
        for model in comparison.variants
    }


def gather(comparison: Comparison, finished: RunStore) -> dict[str, Any]:
    """Gathers the content of `results.json` from the finished runs of a comparison.

    * `models`: by name, the sizes, the switches and the training arguments that differ, the `learning_rates` tried, the
      `search` for them (`None` for a list), the `runs` that are reported, those that were `tried` only to choose a rate, the
      `kernels` that computed them, and the `edges` (by seed, whether its rate is the smallest or the largest tried).
    * a run: its losses on training, validation and test split in nats per token, whether it `diverged`, tokens per second,
      seconds of training steps, peak memory in bytes, `token_stream` (a hash of the tokens it saw, in order), and its
      `history`: `(step, value)` of each loss and gradient norm, the steps of `loss_spikes`, and `stability` by layer.
    * `tokens_per_run`: the most tokens that a finished run saw; the plan's number if every run was stopped early. The plan
      counts the last batch of an epoch as full, which it may not be.
    * `token_streams`: by seed, that hash; `same_tokens`: whether all models of every seed saw the same tokens in the same
      order; `None` if every run was stopped early.
    * `statistics`: the result of `analyse` for the test losses.
    * `looks`: with `stop: early`, what was known at each look (see `analyse_early`), else `None`; `statistics` is then that of
      each model's last look.
    * `noise_from_text`: see there; that of the baseline's reported runs, without those that diverged. `None` if one of them has
      no losses of parts of the text.
    """
    models = {}
    for name, variant in comparison.variants.items():
        tunings = finished.tunings(comparison, name)
        to_choose, reported = finished.tried(comparison, name), finished.reported(comparison, name)
        tried, runs = ([_read_run(finished, run) for run in part] for part in (to_choose, reported))
        models[name] = {
            "given": without_folders(variant.given),
            "parameters": variant.size.total,
            "trained_parameters": variant.size.trained,
            "non_embedding_parameters": variant.size.non_embedding,
            "flops_per_token": variant.size.flops_per_token,
            "intermediate_size": variant.intermediate_size,
            "learning_rates": sorted({rate for tuning in tunings for rate in tuning.losses} or variant.rates.first),
            "search": variant.rates.search,
            "edges": {tuning.seed: tuning.edge for tuning in tunings if tuning.edge is not None and tuning.rate is not None},
            "kernels": sorted({finished.metrics(run).get("kernels", "not recorded") for run in (*to_choose, *reported)}),
            "tried": tried,
            "runs": runs,
        }
    # A run that was stopped early saw only the first tokens
    whole = [run for model in models.values() for run in [*model["tried"], *model["runs"]] if run["diverged_at"] is None]
    streams: dict[int, set[str]] = {}
    for run in whole:
        streams.setdefault(run["seed"], set()).add(run["token_stream"])
    runs = [run for name in models for run in (*finished.tried(comparison, name), *finished.reported(comparison, name))]
    fingerprints = {finished.metrics(run)["dataset_fingerprint"] for run in runs}
    sample = finished.metrics(runs[0])
    losses, history = losses_by_seed(models), None
    if comparison.stop is None:
        analysis = analyse(losses, comparison.baseline, unsettled=unsettled_models(models))
    else:
        edges = {name: model["edges"] for name, model in models.items() if model["search"]}
        analysis, history = analyse_early(losses, comparison.baseline, comparison.seeds, edges)
    return {
        "name": comparison.name,
        "baseline": comparison.baseline,
        "seeds": comparison.seeds,
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
        "statistics": dataclasses.asdict(analysis),
        "looks": history,
        "noise_from_text": _noise_from_text(models[comparison.baseline]["runs"]),
    }


def _noise_from_text(runs: list[dict[str, Any]]) -> float | None:
    parts = [run["test_loss_parts"] for run in runs if not run["diverged"]]
    return None if None in parts else noise_from_text(parts)


def unsettled_models(models: dict[str, Any]) -> list[str]:
    """Those of `models` in `results.json` whose search of rates stopped with the best at an edge for any seed."""
    return [name for name, model in models.items() if model["search"] and model["edges"]]


def losses_by_seed(models: dict[str, Any]) -> dict[str, dict[int, float | None]]:
    """The test losses of the reported runs of `models` in `results.json`, by model and seed, in nats per token.

    It is `None` where a run diverged.
    """
    return {name: {run["seed"]: run["test_loss"] for run in model["runs"]} for name, model in models.items()}


def _read_run(finished: RunStore, run: Run) -> dict[str, Any]:
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
        "test_loss_parts": None if metrics["diverged"] else metrics.get("test_loss_parts"),
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


def _without_nan(curve: list[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """Replaces NaN and infinity, which JSON does not have."""
    return [(step, value if math.isfinite(value) else None) for step, value in curve]
