"""The finished runs in the folder of a comparison."""

from pathlib import Path

from ..files import METRICS_FILE
from ..result import RunResult
from .comparison import Run
from .config import Axis


def scale_folder(folder: Path, axis: Axis | None, name: str) -> Path:
    """Returns the folder of a scale or condition in that of its comparison, which is the same for a single scale."""
    return folder if axis is None else folder / axis / name


class RunStore:
    """The results of the finished runs in the folder of a scale, by the names of the runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._results: dict[str, RunResult] = {}

    def folder_of(self, run: Run) -> Path:
        return self.folder / "runs" / run.name

    def __contains__(self, name: str) -> bool:
        return name in self._results or (self.folder / "runs" / name / METRICS_FILE).is_file()

    def __getitem__(self, name: str) -> RunResult:
        if name not in self._results:
            self._results[name] = RunResult.load(self.folder / "runs" / name)
        return self._results[name]

    def add(self, run: str, result: RunResult) -> None:
        """Adds the result of a run that was finished just now, which a shared folder may show later."""
        self._results[run] = result
