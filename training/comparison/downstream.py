"""Downstream tasks of a comparison: every reported run is evaluated once, and each metric is judged like a loss."""

import json
import os
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from ..disk import write_text
from ..files import TASKS_FILE, differences, read_json
from ..run.run_folder import RunFolder
from ..run.tasks import evaluate_tasks, score_numbers, task_files
from ..text import bar_options
from .comparison import RunStore, ScaleProgress
from .inference import analyse
from .results import TaskOutcome


def score_runs(progress: ScaleProgress, finished: RunStore) -> dict[str, dict[str, TaskOutcome]]:
    """Evaluates the reported runs that have weights and no `tasks.json` yet; returns outcomes by task and metric.

    Raises `ValueError` if a task's file has changed since a run was evaluated.
    """
    scale, outcomes = progress.scale, {}
    if not scale.config.tasks:
        return outcomes
    files = task_files(scale.config.tasks)
    if torch.cuda.is_available():  # each process that a launcher started has a device of its own
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    runs = [run for model in scale.variants for run in progress.reported(model)]
    runs = [run for run in runs if not finished[run.name].losses.diverged]
    for run in tqdm(runs, unit="run", desc=f"{scale.name}, tasks", **bar_options()):
        path = finished.folder_of(run)
        with RunFolder(path, plan=None).held(patience=-1):
            if not (path / TASKS_FILE).is_file():
                results = evaluate_tasks(path, scale.config.tasks)
                content = {"scores": score_numbers(results), "higher_is_better": results["higher_is_better"]}
                content["files"] = files
                write_text(path / TASKS_FILE, json.dumps(content, indent=2) + "\n")
        content = read_json(path / TASKS_FILE)
        if changes := differences(content.get("files", files), files):  # older versions wrote none
            hint = f"restore what it was, or delete {TASKS_FILE} in the folders of all runs"
            raise ValueError(f"tasks: a file has changed since {path} was evaluated ({changes}); {hint}")
        for task, values in content["scores"].items():
            directions = content["higher_is_better"].get(task, {})
            for metric, value in values.items():
                is_higher_better = directions.get(metric.partition(",")[0])  # a filter stands behind the comma
                if is_higher_better is not None:
                    scores = {name: dict.fromkeys(scale.seeds) for name in scale.variants}
                    new = TaskOutcome(values["items"], values["chance"], is_higher_better, scores)
                    outcomes.setdefault(task, {}).setdefault(metric, new).scores[run.model][run.seed] = value

    for metrics in outcomes.values():
        for metric, entry in metrics.items():
            losses, boundaries = judged_losses(entry), progress.at_boundary
            statistics = analyse(losses, scale.baseline, at_boundary=boundaries, resolution=resolution(entry))
            metrics[metric] = replace(entry, statistics=statistics)
    return outcomes


def resolution(entry: TaskOutcome) -> float:
    """One over the number of items, if all scores are shares of counted items, else 0."""
    counts = [value * (entry.items or 0.5) for value in _known(entry)]
    return 1 / entry.items if all(abs(count - round(count)) < 1e-6 for count in counts) and entry.items else 0.0


def judged_losses(entry: TaskOutcome) -> dict[str, dict[int, float | None]]:
    """Returns the scores so that lower is better: distances of accuracies and probabilities from 1, others negated."""
    if not entry.higher_is_better:
        return entry.scores
    ceiling = 1.0 if all(0 <= value <= 1 for value in _known(entry)) else 0.0
    return {
        model: {seed: None if value is None else ceiling - value for seed, value in scores.items()}
        for model, scores in entry.scores.items()
    }


def _known(entry: TaskOutcome) -> list[float]:
    return [value for scores in entry.scores.values() for value in scores.values() if value is not None]
