"""`nlq compare --status`: what is finished, running and waiting, read from the folder of a comparison alone."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import COMPARISON_FILE, METRICS_FILE, PROGRESS, read_json, read_yaml
from ..text import align
from .plan import Scale
from .reading import load_outline
from .results import RunStore, in_turn


# A run reports every few seconds while it is alive
_SILENCE = 60.0
# A screening has no runs of its own: those of its design, and those that confirm, are comparisons in these folders
SCREENING, CONFIRMATION = "screening", "confirmation"


def describe_status(folder: Path) -> list[str]:
    """Says how far a comparison is: a line for each model, and one for each run that has begun and is not finished.

    Args:
        folder: its results folder, or an address (see `storage`). Nothing else is read.

    Raises:
        ValueError: if the folder holds no comparison.
    """
    if not (folder / COMPARISON_FILE).is_file():
        raise ValueError(f"{folder} holds no comparison yet")
    given = read_yaml(folder / COMPARISON_FILE)
    if given.get("factors") is not None:
        parts = [part for part in (SCREENING, CONFIRMATION) if (folder / part / COMPARISON_FILE).is_file()]
        found = [line for part in parts for line in (part, *(f"  {line}" for line in describe_status(folder / part)))]
        return found or [f"{SCREENING}: not begun"]
    lines, is_begun = [], True
    for name, scale, finished in in_turn(load_outline(given), folder):
        found = _describe(scale, finished, is_begun)
        lines += [f"scale {name}", *(f"  {line}" for line in found)] if name else found
        is_begun = is_begun and not any(finished.unfinished(scale, model) for model in scale.variants)
    return lines


def _describe(scale: Scale, finished: RunStore, is_begun: bool) -> list[str]:
    """Says how far one scale is; `is_begun` tells whether the scale before it is finished."""
    done = {_name(path.parent) for path in finished.folder.glob(f"runs/*/*/{METRICS_FILE}")}
    begun = {}
    for path in finished.folder.glob(f"runs/*/*{PROGRESS}"):
        with suppress(FileNotFoundError):  # the run was finished just now
            begun[_name(path).removesuffix(PROGRESS)] = read_json(path)
    begun = {name: content for name, content in sorted(begun.items()) if name not in done}

    rows, count, total = [["model", "runs finished", "seeds", "rates chosen"]], 0, 0
    for model, variant in scale.variants.items():
        ended, tunings = finished.count(scale, model), finished.tunings(scale, model)
        planned = ended + len(finished.unfinished(scale, model))
        rates = {tuning.rate for tuning in tunings} - {None} if scale.has_choice(model) else variant.rates.first
        nothing = "none yet" if any(tuning.ready for tuning in tunings) else "every rate diverged"
        chosen = " ".join(f"{rate:g}" for rate in sorted(rates)) or nothing
        rows.append(
            [model, f"{ended} of {planned}", f"{sum(not tuning.ready for tuning in tunings)} of {len(tunings)}", chosen]
        )
        count, total = count + ended, total + planned
    if not is_begun and not count:
        return ["waits for the scale before it"]
    states = [_state(content) for content in begun.values()]
    running = states.count("running")
    summary = f"{count} of {total} runs finished, {running} running, {total - count - len(states)} waiting"
    if other := len(states) - running:
        summary += f", {other} failed or interrupted"
    lines = [*align(rows), summary]
    if begun:
        table = [["run", "state", "step", "loss", "where", "last report"]]
        for name, content in begun.items():
            step = "" if content["steps"] is None else f"{content['step']} of {content['steps']}"
            loss = "" if content["loss"] is None else f"{content['loss']:.4f}"
            ago = f"{max(0.0, time.time() - content['updated']):.0f} s ago"
            table.append([name, _state(content), step, loss, f"{content['host']}, process {content['pid']}", ago])
        lines += ["", *align(table, right=False)]
        lines += [f"{name}: {content['error']}" for name, content in begun.items() if content["error"]]
    return lines


def _name(path) -> str:
    """The name of a run, from a path below `runs/MODEL`."""
    return f"{path.parent.name}/{path.name}"


def _state(content: dict[str, Any]) -> str:
    if content["state"] == "running" and time.time() - content["updated"] > _SILENCE:
        return "interrupted"
    return content["state"]
