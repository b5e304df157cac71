"""Makes the runs of a comparison on this machine, each in a process, and some side by side.

Several processes may share a folder, as under `accelerate launch`: a run belongs to the one that holds its lock.
"""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import torch
from filelock import FileLock
from tqdm.auto import tqdm
from transformers.utils import logging

from ..disk import make_folder
from ..files import THREADS_FILE
from ..result import RunResult
from ..run.data import prepare_data, warn_of_spare_ids
from ..run.recipe import Recipe
from ..run.run_folder import FolderIsLocked, RunFolder, RunProgress
from ..run.subprocess_run import RunFailed, describe_failure, run_in_subprocess
from ..run.threads import threads_of
from ..text import check_number
from .comparison import Run, Scale


logger = logging.get_logger(__name__)

_TOKENIZER = "tokenizer"
# Variables of a launcher, which the process of a run must not read
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHER_PREFIXES = ("MASTER_", "ACCELERATE_", "TORCHELASTIC_")


@dataclass
class LocalEngine:
    """Makes runs in processes of this machine, each in a new one, so that a run that dies stops no other.

    Attributes:
        cpus_per_run: number of threads of a run. Defaults to that with which the folder was begun, or as
            `choose_threads` says; on a GPU, to PyTorch's number, and at most the cores divided by `jobs`.
        jobs: number of runs at a time. Defaults to the cores divided by `cpus_per_run`, and to 1 on a GPU or without
            `cpus_per_run`. Results do not depend on it.
    """

    cpus_per_run: int | None = None
    jobs: int | None = None

    def __post_init__(self):
        check_number("cpus_per_run", self.cpus_per_run, 1)
        check_number("jobs", self.jobs, 1)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        has_gpu = torch.accelerator.is_available()
        self._threads = self.cpus_per_run or torch.get_num_threads()
        if has_gpu and self.cpus_per_run is None and self.jobs is not None:
            self._threads = max(1, min(self._threads, cores // self.jobs))  # threads change no result of a GPU
        if self.jobs is None:
            is_serial = self.cpus_per_run is None or has_gpu
            self.jobs = 1 if is_serial else max(1, cores // self._threads)
        elif self.jobs > 1 and self.jobs * self._threads > cores:
            logger.warning(f"jobs={self.jobs} with {self._threads} threads each need more than {cores} cores")
        self._processes: dict[str, multiprocessing.Process] = {}
        self._progress: dict[str, RunProgress] = {}

    @contextmanager
    def connected(self, scales: Sequence[Scale]) -> Iterator[None]:
        self._is_cancelled = False
        # The server imports once, and every run is still a fresh process
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        with ThreadPoolExecutor(self.jobs) as self._pool:
            yield

    def alone_in(self, folder: Path) -> AbstractContextManager[None]:
        """Others may work in the folder: each run has a lock."""
        return nullcontext()

    def choose_threads(self, folder: Path) -> None:
        """Takes the number of threads with which the runs in the folder were begun, or chooses it."""
        if torch.accelerator.is_available():
            return  # where it changes no result
        with FileLock(folder / f"{THREADS_FILE}.lock"):
            self._threads = threads_of(folder, self.cpus_per_run)

    def prepare_data(self, scale: Scale, folder: Path) -> tuple[Path, str | None]:
        """Trains or loads the tokenizer; runs find the data in the cache of `datasets`."""
        make_folder(folder)
        with FileLock(folder / f"{_TOKENIZER}.lock"):
            first = scale.recipe_of(Run(scale.baseline, 1.0, 0), folder)
            tokenizer, _, fingerprint = prepare_data(first, folder / _TOKENIZER)
            warn_of_spare_ids(tokenizer, first)
        return folder / _TOKENIZER, fingerprint

    def room(self, running: int) -> int:
        return self.jobs - running

    def submit(self, name: str, recipe: Recipe, data: Path) -> Future[RunResult]:
        # The server imports for seconds, in which Ctrl-C would print its traceback
        before = (
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else ()
        )
        try:
            with environment_of_one_run():  # which the processes of runs get from the server
                ensure_running()
        finally:
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._pool.submit(self._make_run, name, recipe, data)

    def progress(self) -> dict[str, RunProgress]:
        return dict(self._progress)

    describe_error = staticmethod(describe_failure)

    def cancel(self, names: list[str]) -> None:
        """Ends the processes of runs. They can resume from their last checkpoints."""
        self._is_cancelled = bool(names)
        for name in names:
            if (process := self._processes.get(name)) is not None:
                process.terminate()

    def _make_run(self, name: str, recipe: Recipe, data: Path) -> RunResult:
        folder = RunFolder(Path(recipe.output_dir))
        if folder.is_held():
            raise FolderIsLocked(name)
        receiver, sender = self._context.Pipe(duplex=False)
        arguments = (recipe, data, self._threads, sender)
        process = self._context.Process(target=_train_and_report, args=arguments)
        process.start()
        self._processes[name] = process  # only now can `cancel` end it
        sender.close()
        if self._is_cancelled:
            process.terminate()
        try:
            while isinstance(message := receiver.recv(), RunProgress):
                self._progress[name] = message
        except EOFError:
            raise RunFailed("was ended" if self._is_cancelled else "died, perhaps of too little memory") from None
        finally:
            process.join()
            del self._processes[name]
            self._progress.pop(name, None)
        if message is not None:
            raise message
        return folder.result()


@contextmanager
def environment_of_one_run() -> Iterator[None]:
    """Gives the processes of runs an environment with one device, without variables of a launcher."""
    before = dict(os.environ)
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        devices = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(os.environ.get("LOCAL_RANK", 0)) % len(devices)]
    for name in before:
        if name in _LAUNCHER_VARIABLES or name.startswith(_LAUNCHER_PREFIXES):
            del os.environ[name]
    os.environ["PYTHONSAFEPATH"] = "1"  # `python -c`, by which they start, would import from the working directory
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _train_and_report(recipe: Recipe, data: Path, threads: int, sender) -> None:
    """Makes a run in this process. Sends its progress, then `None` or the error."""

    def report(progress: RunProgress) -> None:
        try:
            sender.send(progress)
        except OSError:  # the comparison was killed; the run can resume from its last checkpoint
            os._exit(1)

    # Ctrl-C reaches all processes of a terminal; the comparison ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a run collects garbage, and need not look through all that was imported
    tqdm.set_lock(threading.RLock())  # the default has a semaphore, which a run that is ended would leave behind
    try:
        run_in_subprocess(recipe, data, threads, report)
        sender.send(None)
    except (FolderIsLocked, RunFailed) as error:
        sender.send(error)
