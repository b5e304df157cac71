"""What the tests of the engine `ray` share."""

import time
from collections.abc import Callable
from pathlib import Path

from modeling_nlq.training.files import read_json


def wait_until(condition: Callable[[], object], seconds: float = 120.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def finished_runs(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/metrics.json")}


def running(folder: Path) -> list[Path]:
    """The runs that have a complete checkpoint and are not finished."""
    states = folder.glob("runs/*/*/checkpoint-*/trainer_state.json")
    return [state.parents[1] for state in states if not (state.parents[1] / "metrics.json").is_file()]


def process_of(run: Path) -> int:
    return read_json(run.with_name(f"{run.name}.progress.json"))["pid"]
