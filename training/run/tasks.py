"""Downstream tasks: saved models evaluated by lm_eval."""

import hashlib
import itertools
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch

from ..disk import read_bytes, resolve_user_path, write_text
from ..loading import load_model
from ..size import ModelKind
from ..text import check_number, first_line, root_cause


def evaluate_tasks(
    model: str | Path,
    tasks: str | Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int = 8,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Evaluates a saved model on tasks of lm_eval.

    Args:
        tasks: names of lm_eval's tasks or groups, or paths of YAML files; also one text with commas.
        num_fewshot: solved examples before each item; by default as the task says, else none.
        limit: evaluate the first items only: this many, or below 1 this share.

    Returns the results of lm_eval, with the score of guessing in `chance`; `None` for a task without choices.
    """
    _require_lm_eval()
    import evaluate
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    check_number("num_fewshot", num_fewshot, 0)
    check_number("batch_size", batch_size, 1)
    loaded, tokenizer = load_model(str(model), trust_remote_code, [ModelKind.DECODER], "lm_eval")
    loaded = loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    wrapped = HFLM(pretrained=loaded, tokenizer=tokenizer, batch_size=batch_size)
    options = {"num_fewshot": num_fewshot, "limit": limit, "log_samples": False}
    with (
        # They call git and pip in the working directory, which run what its files say
        patch.multiple("lm_eval.evaluator", get_git_commit_hash=lambda: None, add_env_info=lambda results: None),
        patch("evaluate.load", partial(_load_metric, evaluate.load)),
    ):
        manager, specs, single = _load_tasks(tasks, str(model))
        results = simple_evaluate(wrapped, tasks=specs, task_manager=manager, **options)
    results["chance"] = dict.fromkeys(single)
    for name, task in single.items():
        if task.OUTPUT_TYPE == "multiple_choice":
            items = itertools.islice(task.eval_docs, results["n-samples"][name]["effective"])
            results["chance"][name] = fmean([1 / len(task.doc_to_choice(item)) for item in items])
    return results


def score_numbers(results: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Returns the numbers in the results of `evaluate_tasks` by task or group, ready for JSON.

    These are each metric as `METRIC` or `METRIC,FILTER`, its `METRIC_stderr`, the number of `items`, and `chance`.
    """
    scores = {}
    for task, values in results["results"].items():
        scores[task] = {}
        for name, value in values.items():
            if name != "sample_len" and isinstance(value, int | float) and math.isfinite(value):  # JSON lacks NaN
                scores[task][name.removesuffix(",none")] = float(value)
        scores[task]["items"] = results["n-samples"].get(task, {}).get("effective", values.get("sample_len"))
        scores[task]["chance"] = results["chance"].get(task)
    return scores


def is_guessable(metric: str) -> bool:
    """Tells whether guessing scores the chance level in a metric, as in accuracies."""
    return metric.startswith("acc")


def tabulate_tasks(results: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of a table of results, with a header."""
    rows = [["task", "metric", "value", "standard error", "chance", "items"]]
    for task, scores in score_numbers(results).items():
        for name, value in scores.items():
            metric, comma, kept = name.partition(",")
            if name in ("items", "chance") or metric.endswith("_stderr"):
                continue
            error = scores.get(f"{metric}_stderr{comma}{kept}")
            chance = scores["chance"] if is_guessable(metric) else None
            cells = ["-" if number is None else f"{number:.4f}" for number in (value, error, chance)]
            rows.append([task, name, *cells, "-" if scores["items"] is None else f"{scores['items']:,}"])
    return rows


def write_task_results(results: dict[str, Any], path: str | Path) -> None:
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_text(resolve_user_path(path), text + "\n")


def check_tasks(tasks: str | Sequence[str]) -> None:
    """Raises as `evaluate_tasks` for unknown names, without loading data."""
    _require_lm_eval()
    _find_tasks(tasks, "")


def _require_lm_eval() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise ImportError(f"tasks need lm_eval: pip install modeling-nlq[eval] ({first_line(error)})") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of a model that is loaded already


def _load_tasks(tasks: str | Sequence[str], model: str) -> tuple[Any, list, dict[str, Any]]:
    """Returns lm_eval's `TaskManager`, the specs for `simple_evaluate`, and single tasks by name."""
    tasks, manager = _find_tasks(tasks, model)
    specs, single = [], {}
    for name in dict.fromkeys(tasks):
        try:
            found = manager.load([name])
        except Exception as error:  # of datasets, or of the code of the task
            raise ValueError(f"task {name!r} cannot be loaded: {first_line(root_cause(error))}") from error
        single.update(found["tasks"])
        specs += [found["groups"][name]] if name in found["groups"] else found["tasks"].values()
    return manager, specs, single


def _find_tasks(tasks: str | Sequence[str], model: str) -> tuple[list[str], Any]:
    from lm_eval.tasks import TaskManager

    tasks = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks)]
    has_names = not all(map(_is_task_file, tasks))  # to read lm_eval's list of names takes seconds
    manager = TaskManager(include_defaults=has_names, metadata={"pretrained": model})
    for name in tasks:
        if name not in manager.all_tasks and not _is_task_file(name):
            raise ValueError(f"there is no task {name!r}; `lm-eval ls tasks` lists all, or name a YAML file")
    return tasks, manager


def task_files(tasks: Sequence[str]) -> dict[str, str]:
    """Returns the hashes of the tasks that are files, by name."""
    files = [resolve_user_path(name) for name in tasks if _is_task_file(name)]
    return {file.name: hashlib.sha256(read_bytes(file)).hexdigest()[:16] for file in files}


def _is_task_file(name: str) -> bool:
    """Tells whether a task is a file. One with the name of a task of lm_eval needs its folder."""
    return Path(name).is_file() and (os.path.dirname(name) != "" or name.endswith((".yaml", ".yml")))


def _load_metric(load: Callable[..., Any], path: str, *arguments: Any, **options: Any) -> Any:
    """Calls `evaluate.load`, but ignores a folder in the working directory with a metric's name."""
    is_name = not (path.startswith(("/", ".")) or path.endswith(".py"))
    with tempfile.TemporaryDirectory() as empty, chdir(empty if is_name and os.path.exists(path) else "."):
        return load(path, *arguments, **options)
