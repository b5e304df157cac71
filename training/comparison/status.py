"""`nlq compare --status`: what is finished, running and waiting, read from the folder of a comparison alone."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import COMPARISON_FILE, METRICS_FILE, PROGRESS, read_json, read_yaml
from ..text import align
from .ladder import in_turn
from .plan import Comparison
from .reading import load_outline
from .results import RunStore
from .screening import CONFIRMATION, SCREENING


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
    if read_yaml(folder / COMPARISON_FILE).get("factors") is not None:
        parts = [part for part in (SCREENING, CONFIRMATION) if (folder / part / COMPARISON_FILE).is_file()]
        found = [line for part in parts for line in (part, *(f"  {line}" for line in describe_status(folder / part)))]
        return found or [f"{SCREENING}: not begun"]
    lines, is_begun = [], True
    for name, scale, finished in in_turn(load_outline(read_yaml(folder / COMPARISON_FILE)), folder):
        found = _describe(scale, finished, is_begun)
        lines += [f"scale {name}", *(f"  {line}" for line in found)] if name else found
        is_begun = is_begun and not any(finished.unfinished(scale, model) for model in scale.variants)
    return lines


def _describe(comparison: Comparison, finished: RunStore, is_begun: bool) -> list[str]:
    """Says how far a comparison at one scale is.

    Args:
        comparison: its outline.
        finished: its finished runs.
        is_begun: whether the scale before it is finished.
    """
    folder = finished.folder
    done = {_name(path.parent) for path in folder.glob(f"runs/*/*/{METRICS_FILE}")}
    begun = {}
    for path in folder.glob(f"runs/*/*{PROGRESS}"):
        with suppress(FileNotFoundError):  # the run was finished just now
            begun[_name(path).removesuffix(PROGRESS)] = read_json(path)
    begun = {name: content for name, content in begun.items() if name not in done}

    rows = [["model", "runs finished", "seeds", "rates chosen"]]
    count, total = 0, 0
    for model in comparison.variants:
        ended, left = finished.count(comparison, model), len(finished.unfinished(comparison, model))
        reported, tunings = finished.reported(comparison, model), finished.tunings(comparison, model)
        seeds = sum(run.name in done for run in reported)
        rates = {tuning.rate for tuning in tunings} - {None} if tunings else {run.learning_rate for run in reported}
        nothing = "none yet" if any(tuning.ready for tuning in tunings) else "every rate diverged"
        chosen = " ".join(f"{rate:g}" for rate in sorted(rates)) or nothing
        rows.append([model, f"{ended} of {ended + left}", f"{seeds} of {len(finished.seeds_of(comparison, model))}", chosen])
        count += ended
        total += ended + left
    if not is_begun and not count:
        return ["waits for the scale before it"]
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
