"""`nlq compare --status`: what is finished, running and waiting, read from the folder of a comparison alone."""

import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ..files import COMPARISON_FILE, METRICS_FILE, PROGRESS, read_json, read_yaml
from ..run.run_folder import RunProgress
from ..text import align
from ..values import from_json
from .comparison import RunStore, ScaleProgress, outline, scale_folder
from .config import read_made_from


# A run reports every few seconds while it is alive
_SILENCE = 60.0
# A screening makes two comparisons in these folders
SCREENING, CONFIRMATION = "screening", "confirmation"


def describe_status(folder: Path) -> list[str]:
    """Returns a line for each model, and one for each run that is not finished."""
    if not (folder / COMPARISON_FILE).is_file():
        raise ValueError(f"{folder} holds no comparison yet")
    config = read_made_from(read_yaml(folder / COMPARISON_FILE), COMPARISON_FILE)
    if config.factors is not None:
        parts = [part for part in (SCREENING, CONFIRMATION) if (folder / part / COMPARISON_FILE).is_file()]
        lines = [line for part in parts for line in (part, *(f"  {line}" for line in describe_status(folder / part)))]
        return lines or [f"{SCREENING}: not begun"]
    plan = outline(config, COMPARISON_FILE)
    lines = {name: ["waits for the scale before it"] for name in plan.scales}
    stores = {name: RunStore(scale_folder(folder, config.axis, name)) for name in lines}
    for name, progress in plan.progress(stores).items():
        lines[name] = _describe(progress, stores[name].folder)
    return list(plan.by_scale(lines))


def _describe(progress: ScaleProgress, folder: Path) -> list[str]:
    rows = [["model", "runs finished", "seeds", "rates chosen"]]
    for model, tunings in progress.tunings.items():
        finished = sum(len(tuning.losses) for tuning in tunings)
        planned = finished + sum(len(tuning.ready) for tuning in tunings)
        rates = " ".join(
            f"{rate:g}" for rate in sorted({tuning.chosen.learning_rate for tuning in tunings if tuning.chosen})
        )
        seeds = f"{sum(tuning.is_finished for tuning in tunings)} of {len(tunings)}"
        rows.append([model, f"{finished} of {planned}", seeds, rates or "none"])
    begun = []
    for path in sorted(folder.glob(f"runs/*/*{PROGRESS}")):
        name = f"{path.parent.name}/{path.name.removesuffix(PROGRESS)}"
        with suppress(FileNotFoundError):  # the run was finished just now
            if not (folder / "runs" / name / METRICS_FILE).is_file():
                begun.append(_describe_run(name, from_json(RunProgress, read_json(path), f"{path}: ")))
    finished, left = progress.finished, len(progress.ready)
    counts = f"{finished} of {finished + left} runs finished, {len(begun)} begun, {left - len(begun)} waiting"
    return [*align(rows), counts, *begun]


def _describe_run(name: str, progress: RunProgress) -> str:
    silence = max(0.0, time.time() - progress.updated)
    is_ended = progress.host == socket.gethostname() and not psutil.pid_exists(progress.pid)
    is_lost = progress.state == "running" and (is_ended or silence > _SILENCE)
    parts = [
        "interrupted" if is_lost else progress.state,
        f"step {progress.step} of {progress.steps or '?'}",
        *([] if progress.loss is None else [f"loss {progress.loss:.4f}"]),
        f"{progress.host}, process {progress.pid}, {silence:.0f} s ago",
        *([progress.error] if progress.error else []),
    ]
    return f"{name}: {', '.join(parts)}"
