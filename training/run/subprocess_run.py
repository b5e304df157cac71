"""Makes a run in a subprocess, as all engines do, which writes log and progress beside the run folder."""

import contextlib
import dataclasses
import io
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import TrainerCallback

from ..disk import delete, open_file, write_text
from ..files import LOG, PROGRESS
from ..result import RunResult
from ..text import one_line
from .recipe import Recipe
from .run_folder import FolderIsLocked, RunFolder, RunProgress
from .train import train_recipe


class RunFailed(Exception):
    """A run failed; the message says why in one line."""


def describe_failure(error: BaseException) -> str:
    return str(error) if isinstance(error, RunFailed) else f"failed: {one_line(error)}"


def beside(folder: Path, suffix: str, rank: int = 0) -> Path:
    """Returns the path of a run's log (suffix `LOG`) or progress (`PROGRESS`), beside its folder."""
    return folder.with_name(f"{folder.name}.rank-{rank}{suffix}" if rank else f"{folder.name}{suffix}")


class ProgressWriter(TrainerCallback):
    """Writes the progress of a run to a file, and reports it, every `pace` seconds during a `with` block.

    Deletes the file if the block ends without an error.
    """

    def __init__(self, file: Path, pace: float, report: Callable[[RunProgress], None] | None = None):
        self.content = RunProgress(socket.gethostname(), os.getpid())
        self._file, self._pace, self._report = file, pace, report
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> "ProgressWriter":
        self._thread.start()
        return self

    def __exit__(self, kind, error, _) -> None:
        self._is_over.set()
        self._thread.join()
        if error is not None:
            self.content.state, self.content.error = "failed", f"{kind.__name__}: {one_line(error)}"
        self._write()
        if error is None:
            with contextlib.suppress(OSError):  # what a finished run leaves there is not read
                delete(self._file)

    def _go_on(self) -> None:
        self._write()
        while not self._is_over.wait(self._pace):
            self._write()

    def _write(self) -> None:
        self.content.updated = time.time()
        with contextlib.suppress(Exception):  # the run itself may still end well
            write_text(self._file, json.dumps(dataclasses.asdict(self.content)) + "\n")
            if self._report is not None:
                self._report(dataclasses.replace(self.content))

    def on_train_begin(self, args, state, control, **kwargs):
        self.content.step, self.content.steps = state.global_step, state.max_steps

    def on_step_end(self, args, state, control, **kwargs):
        self.content.step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.content.loss = (logs or {}).get("loss", self.content.loss)


def run_in_subprocess(
    recipe: Recipe,
    data: Path,
    threads: int = 1,
    report: Callable[[RunProgress], None] | None = None,
    pace: float = 1.0,
    patience: float = 0.0,
) -> RunResult:
    """Makes a run as `nlq train` does. Standard output and error of this process go to its log from now on.

    Several processes that PyTorch's environment variables (`RANK`, ...) name train together. Log and progress are
    beside the run folder. Raises `FolderIsLocked`, and `RunFailed`, when the log has the traceback.

    Args:
        data: the folder of the tokenizer, and perhaps of `save_blocks`.
        report: called with the progress of the run, in a thread of its own, every `pace` seconds.
        patience: seconds to wait for another process that makes this run.
    """
    rank = int(os.environ.get("RANK", 0))
    folder, callbacks = Path(recipe.output_dir), []
    try:
        with contextlib.ExitStack() as stack:
            if rank == 0:
                stack.enter_context(RunFolder(folder).held(patience))
            _redirect_output(beside(folder, LOG, rank))
            if rank == 0:
                callbacks = [stack.enter_context(ProgressWriter(beside(folder, PROGRESS), pace, report))]
            try:
                torch.set_num_threads(threads)
                recipe.load_parts()  # of this process
                return train_recipe(recipe.replace(training={"disable_tqdm": True}), data, callbacks)
            except BaseException:
                traceback.print_exc()  # into the log
                sys.stderr.flush()
                raise
    except FolderIsLocked:
        raise
    except Exception as error:
        raise RunFailed(f"failed: {type(error).__name__}: {one_line(error)}") from None


def _redirect_output(log: Path) -> None:
    # Open as long as the process lives
    stream = io.TextIOWrapper(open_file(log, "a"), encoding="utf-8", line_buffering=True)
    for number, standard in ((1, sys.stdout), (2, sys.stderr)):
        standard.flush()
        os.dup2(stream.fileno(), number)
    sys.stdout = stream  # line by line, which a file is not by itself
