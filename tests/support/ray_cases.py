"""What the tests of the engine `ray` share."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 120.0):
    """Waits until a condition holds, and returns what it returned."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found


def finished_runs(folder: Path) -> dict[Path, int]:
    """The finished runs below a folder, with the times of their metrics."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/metrics.json")}
