"""The finished runs in the folder of a comparison."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..files import METRICS_FILE
from ..result import RunResult
from .comparison import Run
from .config import SINGLE


def scale_folder(folder: Path, name: str) -> Path:
    """Returns the folder of a scale in that of its comparison, which is the same for a single scale."""
    return folder if name == SINGLE else folder / "scales" / name


def run_folder(folder: Path, run: Run) -> Path:
    return folder / "runs" / run.name


class RunStore(Mapping[str, RunResult]):
    """The results of the finished runs in the folder of a scale, by the names of the runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._results: dict[str, RunResult] = {}

    def __getitem__(self, name: str) -> RunResult:
        if name not in self._results:
            folder = self.folder / "runs" / name
            if not (folder / METRICS_FILE).is_file():
                raise KeyError(name)
            self._results[name] = RunResult.load(folder)
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        files = self.folder.glob(f"runs/*/*/{METRICS_FILE}")
        return iter({*self._results, *(f"{file.parent.parent.name}/{file.parent.name}" for file in files)})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, run: str, result: RunResult) -> None:
        """Adds the result of a run that was finished just now, which a shared folder may show later."""
        self._results[run] = result
