"""The engine of one machine: the runs of a comparison, one after another.

Several processes may work on one folder, such as those that `accelerate launch` starts, one for each GPU. A run
belongs to the process that holds its lock.
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from tqdm.auto import tqdm

from ..disk import make_folder
from ..files import LOG
from ..run.data import prepare_data
from ..run.run_folder import FolderIsLocked, RunFolder, RunProgress
from ..run.unattended import RunFailed, RunSpec, beside, run_in_subprocess
from ..storage import is_address, origin
from ..text import bar_options
from .plan import Run, Scale
from .results import RunStore, next_runs, run_folder


_TOKENIZER = "tokenizer"
# Variables of the launcher that started this process, which the process of a run must not read
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "ACCELERATE_",
    "TORCHELASTIC_",
)


@dataclass(frozen=True)
class LocalEngine:
    """Makes runs in processes of this machine.

    Attributes:
        cpus_per_run: number of threads of a run; by default as many as PyTorch takes in this process.
    """

    cpus_per_run: int | None = None

    def __post_init__(self):
        if self.cpus_per_run is not None and self.cpus_per_run < 1:
            raise ValueError(f"cpus_per_run={self.cpus_per_run} must be at least 1")

    def connected(self, scales: Sequence[Scale], folder: Path) -> AbstractContextManager[None]:
        """Raises `ValueError` for an address: the locks of runs need a file system."""
        if is_address(origin(folder)):
            raise ValueError(f"{origin(folder)} is no folder: results at an address need --engine ray")
        return nullcontext()

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Others may work in the folder, too: each run has a lock."""
        return nullcontext()

    def prepare_data(self, scale: Scale, folder: Path) -> tuple[Path, str | None]:
        """Trains or loads the tokenizer; the data go into the cache of `datasets`, where all runs find them."""
        make_folder(folder)
        with FileLock(folder / f"{_TOKENIZER}.lock"):
            first = scale.recipe_of(Run(scale.baseline, 1.0, 0), folder)
            _, _, fingerprint = prepare_data(first, folder / _TOKENIZER)
        return folder / _TOKENIZER, fingerprint

    def make_runs(self, scale: Scale, folder: Path, data: Path, finished: RunStore) -> None:
        """Makes the runs that are not finished, seed by seed."""
        context = multiprocessing.get_context("forkserver")  # it imports once, and every run is still a fresh process
        context.set_forkserver_preload([__name__])
        steps = scale.steps_per_run
        with environment_of_one_run(), tqdm(desc=scale.name, unit="step", **bar_options()) as progress:
            while True:
                ready, done = next_runs(scale, finished)
                before, progress.n, progress.total = progress.n, done * steps, (done + len(ready)) * steps
                progress.set_postfix_str("", refresh=progress.n != before)  # a log file has no line for each second
                if not ready:
                    return
                following = [*(f"; next {run.name}" for run in ready[1:]), ""]
                makes = (
                    self._make_run(context, scale, run, folder, data, progress, then)
                    for run, then in zip(ready, following)
                )
                if not any(makes):
                    time.sleep(1.0)  # other processes make all runs that are left

    def _make_run(self, context, scale: Scale, run: Run, folder: Path, data: Path, progress: tqdm, then: str) -> bool:
        """Makes a run in a new process and shows its loss in `progress`; returns false if another process makes it."""
        path = run_folder(folder, run)
        if RunFolder(path).is_held():
            return False
        spec = RunSpec(
            name=run.name,
            recipe=scale.recipe_of(run, path),
            data=str(data),
            threads=self.cpus_per_run or torch.get_num_threads(),
        )
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train_and_report, args=(spec, sender))
        process.start()
        sender.close()
        started_from = progress.n
        progress.set_postfix_str(f"{run.name}{then}")
        try:
            while isinstance(message := receiver.recv(), RunProgress):
                loss = "" if message.loss is None else f"loss {message.loss:.3f}, "  # first, for a line may be cut
                progress.set_postfix_str(f"{loss}{run.name}{then}", refresh=False)
                progress.update(started_from + message.step - progress.n)
        except EOFError:
            raise ChildProcessError(
                f"run {run.name} died, perhaps of too little memory; see {beside(path, LOG)}"
            ) from None
        except BaseException:
            process.terminate()  # interrupted: the run goes on from its last checkpoint
            raise
        finally:
            process.join()
        if isinstance(message, RunFailed):
            raise ChildProcessError(f"run {run.name} {message}; see {beside(path, LOG)}") from message
        return message is None


@contextmanager
def environment_of_one_run() -> Iterator[None]:
    """Sets the environment that the processes of runs inherit: one device, and no variables of a launcher."""
    before = dict(os.environ)
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(os.environ.get("LOCAL_RANK", 0)) % len(devices)]
    for name in before:
        if name.startswith(_LAUNCHER_VARIABLES):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _train_and_report(spec: RunSpec, sender) -> None:
    """What the process of a run does: sends its progress, and at last `None` or the error."""

    def report(progress: RunProgress) -> None:
        try:
            sender.send(progress)
        except OSError:  # the comparison was killed; another process goes on from the last checkpoint
            os._exit(1)

    # Ctrl-C reaches all processes of a terminal; the comparison ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a run collects garbage, and need not look through all that was imported
    tqdm.set_lock(threading.RLock())  # the default has a semaphore, which a run that is ended would leave behind
    try:
        run_in_subprocess(spec, report)
        sender.send(None)
    except (FolderIsLocked, RunFailed) as error:
        sender.send(error)
