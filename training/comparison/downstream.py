"""Downstream tasks of a comparison: every reported run is evaluated once, and each metric is judged like a loss."""

import dataclasses
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..files import TASKS_FILE, read_json, write_text
from ..run.run_folder import RunFolder
from ..run.tasks import evaluate_tasks, score_numbers
from ..storage import fetch
from ..text import bar_options
from .inference import analyse
from .plan import Comparison
from .results import RunStore, run_folder


def score_runs(comparison: Comparison, folder: Path, finished: RunStore) -> None:
    """Evaluates the reported runs that have no `tasks.json` yet, one after another, in this process.

    A run that diverged has no weights to evaluate.
    """
    if torch.cuda.is_available():  # each process that a launcher started has a device of its own
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    runs = [run for model in comparison.variants for run in finished.reported(comparison, model)]
    runs = [run for run in runs if not finished.metrics(run)["diverged"]]
    for run in tqdm(runs, unit="run", desc=f"{comparison.name}, tasks", **bar_options()):
        path = run_folder(folder, run)
        with RunFolder(path, plan=None).held(patience=-1):
            if not (path / TASKS_FILE).is_file():
                results = evaluate_tasks(fetch(path), comparison.tasks)
                content = {"scores": score_numbers(results), "higher_is_better": results["higher_is_better"]}
                write_text(path / TASKS_FILE, json.dumps(content, indent=2) + "\n")


def read_scores(comparison: Comparison, folder: Path, finished: RunStore, unsettled: Collection[str] = ()) -> dict[str, Any]:
    """Reads and judges the scores of the reported runs.

    Args:
        comparison: a comparison at one scale.
        folder: the folder of that scale.
        finished: its runs.
        unsettled: as in `analyse`.

    Returns:
        By task and metric: `items` and `chance`, whether `higher_is_better`, `scores` by model and seed (`None` where the run
        diverged), and `statistics`, the result of `analyse` (see `judged_losses`). Holm's correction is over the models, for
        each metric by itself.
    """
    found: dict[str, Any] = {}
    for model in comparison.variants:
        for run in finished.reported(comparison, model):
            path = run_folder(folder, run) / TASKS_FILE
            if not comparison.tasks or not path.is_file():
                continue
            content = read_json(path)
            for task, values in content["scores"].items():
                better = content["higher_is_better"].get(task, {})
                for metric, value in values.items():
                    is_higher_better = better.get(metric.partition(",")[0])  # a filter stands behind the comma
                    if is_higher_better is None:
                        continue
                    entry = found.setdefault(task, {}).setdefault(
                        metric,
                        {
                            "items": values["items"],
                            "chance": values["chance"],
                            "higher_is_better": is_higher_better,
                            "scores": {name: dict.fromkeys(comparison.seeds) for name in comparison.variants},
                        },
                    )
                    entry["scores"][model][run.seed] = value
    for metrics in found.values():
        for entry in metrics.values():
            analysis = analyse(judged_losses(entry), comparison.baseline, unsettled=unsettled, resolution=_resolution(entry))
            entry["statistics"] = dataclasses.asdict(analysis)
    return found


def _resolution(entry: dict[str, Any]) -> float:
    """One over the number of items, if all scores are shares of counted items, else 0."""
    known = [value for of_model in entry["scores"].values() for value in of_model.values() if value is not None]
    counts = [value * (entry["items"] or 0.5) for value in known]
    return 1 / entry["items"] if all(abs(count - round(count)) < 1e-6 for count in counts) and entry["items"] else 0.0


def judged_losses(entry: dict[str, Any]) -> dict[str, dict[Any, float | None]]:
    """The scores of a metric as numbers of which lower ones are better, by model and seed.

    Of an accuracy or a probability that is its distance from 1, the rate of errors; of other metrics of which higher values are
    better, the negative.
    """
    scores = entry["scores"]
    if not entry["higher_is_better"]:
        return scores
    known = [value for of_model in scores.values() for value in of_model.values() if value is not None]
    ceiling = 1.0 if all(0 <= value <= 1 for value in known) else 0.0
    return {
        model: {seed: None if value is None else ceiling - value for seed, value in of_model.items()}
        for model, of_model in scores.items()
    }
