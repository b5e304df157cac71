"""`nlq compare --status`: what is finished, running and waiting, read from the folder of a comparison alone."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from modeling_nlq.training.comparison.plan import outline
from modeling_nlq.training.comparison.results import FinishedRuns
from modeling_nlq.training.files import COMPARISON_FILE, METRICS_FILE, read_json, read_yaml
from modeling_nlq.training.run.unattended import PROGRESS
from modeling_nlq.training.text import align


# A run reports every few seconds while it is alive
_SILENCE = 60.0


def describe_status(folder: Path) -> list[str]:
    """Says how far a comparison is: a line for each model, and one for each run that has begun and is not finished.

    Args:
        folder: its results folder, or an address (see `storage`). Nothing else is read.

    Raises:
        ValueError: if the folder holds no comparison.
    """
    if not (folder / COMPARISON_FILE).is_file():
        raise ValueError(f"{folder} holds no comparison yet")
    comparison = outline(read_yaml(folder / COMPARISON_FILE))
    finished = FinishedRuns(folder)
    done = {_name(path.parent) for path in folder.glob(f"runs/*/*/{METRICS_FILE}")}
    begun = {}
    for path in folder.glob(f"runs/*/*{PROGRESS}"):
        with suppress(FileNotFoundError):  # the run was finished just now
            begun[_name(path).removesuffix(PROGRESS)] = read_json(path)
    begun = {name: content for name, content in begun.items() if name not in done}

    rows = [["model", "sweep", "chosen rate", "seeds"]]
    count, total = 0, 0
    for model in comparison.variants:
        sweep = comparison.sweep(model)
        swept = sum(run.name in done for run in sweep)
        rate = finished.best_learning_rate(comparison, model) if swept == len(sweep) else None
        reported = [] if rate is None else comparison.reported(model, rate)
        seeds = sum(run.name in done for run in reported)
        chosen = "waits for the sweep" if swept < len(sweep) else "every rate diverged" if rate is None else f"{rate:g}"
        rows.append([model, f"{swept} of {len(sweep)}", chosen, f"{seeds} of {len(comparison.seeds)}"])
        count += swept + seeds
        total += len(sweep) + (0 if rate is None and swept == len(sweep) else len(comparison.seeds))
    states = [_state(content) for content in begun.values()]
    running = states.count("running")
    waiting = total - count - len(states)
    summary = f"{count} of {total} runs finished, {running} running, {waiting} waiting"
    if other := len(states) - running:
        summary += f", {other} failed or interrupted"
    lines = [*align(rows), summary]
    if begun:
        table = [["run", "state", "step", "loss", "where", "last report"]]
        for name, content in sorted(begun.items()):
            step = "" if content["steps"] is None else f"{content['step']} of {content['steps']}"
            loss = "" if content["loss"] is None else f"{content['loss']:.4f}"
            ago = f"{max(0.0, time.time() - content['updated']):.0f} s ago"
            table.append([name, _state(content), step, loss, f"{content['host']}, process {content['pid']}", ago])
        lines += ["", *align(table, right=False)]
        lines += [f"{name}: {content['error']}" for name, content in sorted(begun.items()) if content["error"]]
    return lines


def _name(path) -> str:
    """The name of a run, from a path below `runs/MODEL`."""
    return f"{path.parent.name}/{path.name}"


def _state(content: dict[str, Any]) -> str:
    if content["state"] == "running" and time.time() - content["updated"] > _SILENCE:
        return "interrupted"
    return content["state"]
