"""Makes runs side by side: asks which of them can begin, hands them to an engine, and waits for their results."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Protocol

from tqdm.auto import tqdm

from ..files import LOG
from ..result import RunResult
from .recipe import Recipe
from .run_folder import FolderIsLocked, RunProgress
from .subprocess_run import beside


class Workers(Protocol):
    """Processes of this machine, or a cluster, that make runs."""

    def room(self, running: int) -> int:
        """Returns how many more runs may be submitted."""

    def submit(self, name: str, recipe: Recipe, data: Path) -> Future[RunResult]:
        """Begins or queues a run, which reads tokenizer and blocks from the folder `data`.

        The future raises `FolderIsLocked`, or the error of the run.
        """

    def progress(self) -> dict[str, RunProgress]:
        """Returns the progress of the runs at work, by name."""

    def describe_error(self, error: BaseException) -> str:
        """Says in a line why a run is not finished."""

    def cancel(self, names: list[str]) -> None:
        """Ends runs that are not finished, when nothing waits for them any more."""


def make_runs(
    workers: Workers, ready: Callable[[], tuple[dict[str, Recipe], int]], data: Path, bar: tqdm, steps: int
) -> Iterator[tuple[str, RunResult]]:
    """Makes runs, as many at once as the workers have room for; yields name and result of each finished one.

    `ready` returns the recipes of the runs that can begin, by name, and the number of finished runs. It is called
    again whenever a run has ended; no run is begun twice. The bar shows the steps of all runs, each of so many steps.
    Raises `ChildProcessError`, naming the runs that failed, when all others are finished.
    """
    recipes: dict[str, Recipe] = {}
    waiting: list[str] = []
    running: dict[Future[RunResult], str] = {}
    failures: list[str] = []
    try:
        while True:
            new, done = ready()
            waiting += [name for name in new if name not in recipes]
            recipes.update(new)
            while waiting and workers.room(len(running)) > 0:
                name = waiting.pop(0)
                running[workers.submit(name, recipes[name], data)] = name
            if not running:
                bar.update(max(done * steps - bar.n, 0))  # a run that has ended reports no more steps
                break
            ended = set()
            is_locked = False
            while not ended:
                _show(bar, workers.progress(), [*running.values()], done * steps)
                ended, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in ended:
                name = running.pop(future)
                try:
                    result = future.result()
                except FolderIsLocked:  # another process makes it
                    del recipes[name]
                    is_locked = True
                except Exception as error:
                    log = beside(Path(recipes[name].output_dir).absolute(), LOG)
                    failures.append(f"run {name} {workers.describe_error(error)}; see {log}")
                    bar.write(failures[-1], file=sys.stderr)
                else:
                    yield name, result
            if is_locked:
                time.sleep(1.0)
    finally:
        workers.cancel([*running.values()])
    if failures:
        count = f"{len(failures)} runs failed: " if len(failures) > 1 else ""
        raise ChildProcessError(f"{count}{'; '.join(failures)}")


def _show(bar: tqdm, reports: dict[str, RunProgress], running: list[str], done: int) -> None:
    reports = {name: reports[name] for name in running if name in reports}
    text = f"{len(running)} runs at work" if len(running) > 1 else running[0]
    if len(reports) == 1 and (loss := next(iter(reports.values())).loss) is not None:
        text = f"loss {loss:.3f}, {text}"
    bar.set_postfix_str(text, refresh=False)
    bar.update(done + sum(report.step for report in reports.values()) - bar.n)
