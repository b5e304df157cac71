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
        found = _describe(scale, finished) if is_begun else ["waits for the scale before it"]
        lines += [f"scale {name}", *(f"  {line}" for line in found)] if name else found
        is_begun = is_begun and not any(finished.unfinished(scale, model) for model in scale.variants)
    return lines


def _describe(scale: Scale, finished: RunStore) -> list[str]:
    """Says how far one scale is."""
    rows, count, total = [["model", "runs finished", "seeds", "rates chosen"]], 0, 0
    for model in scale.variants:
        ended, tunings = finished.count(scale, model), finished.tunings(scale, model)
        planned = ended + len(finished.unfinished(scale, model))
        chosen = " ".join(f"{rate:g}" for rate in sorted({tuning.rate for tuning in tunings} - {None})) or "none"
        rows.append(
            [model, f"{ended} of {planned}", f"{sum(not tuning.ready for tuning in tunings)} of {len(tunings)}", chosen]
        )
        count, total = count + ended, total + planned
    begun = []
    for path in sorted(finished.folder.glob(f"runs/*/*{PROGRESS}")):
        name = f"{path.parent.name}/{path.name.removesuffix(PROGRESS)}"
        with suppress(FileNotFoundError):  # the run was finished just now
            if not (finished.folder / "runs" / name / METRICS_FILE).is_file():
                begun.append(_describe_run(name, read_json(path)))
    return [*align(rows), f"{count} of {total} runs finished, {len(begun)} begun, {total - count - len(begun)} waiting", *begun]


def _describe_run(name: str, content: dict[str, Any]) -> str:
    """Says how far a run is that has begun and is not finished."""
    silence = max(0.0, time.time() - content["updated"])
    is_lost = content["state"] == "running" and silence > _SILENCE
    parts = [
        "interrupted" if is_lost else content["state"],
        f"step {content['step']} of {content['steps'] or '?'}",
        *([] if content["loss"] is None else [f"loss {content['loss']:.4f}"]),
        f"{content['host']}, process {content['pid']}, {silence:.0f} s ago",
        *([content["error"]] if content["error"] else []),
    ]
    return f"{name}: {', '.join(parts)}"
