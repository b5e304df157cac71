"""A run that nobody watches, in a process of its own: its log and its progress lie in files beside its folder.

The engines of `nlq compare` and `nlq train` start nothing else, on this machine or on another.
"""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainerCallback

from ..disk import delete, open_file, write_text
from ..files import CHECKPOINT, LOG, PROGRESS
from ..text import one_line
from .recipe import Recipe
from .result import RunResult
from .run_folder import FolderIsLocked, RunFolder, RunProgress
from .trainer import train_recipe


@dataclass(frozen=True)
class RunSpec:
    """What a process needs to know to make a run.

    Attributes:
        name: name of the run, for messages.
        recipe: its `output_dir` is the run folder. Log and progress lie beside it.
        data: the folder of the tokenizer, with the blocks that `save_blocks` may have saved there.
        model: the path of the recipe's model on this machine, if it is a file that lies elsewhere than its record
            says.
        threads: number of threads of PyTorch.
        pace: seconds between two reports of progress.
        keeps_checkpoints: whether the checkpoints stay when the run is finished.
    """

    name: str
    recipe: Recipe
    data: str
    model: str | None = None
    threads: int = 1
    pace: float = 1.0
    keeps_checkpoints: bool = False


class RunFailed(Exception):
    """The run failed for another reason than its loss; the message says why in one line."""


def beside(folder: Path, suffix: str, rank: int = 0) -> Path:
    """The log (suffix `LOG`) or the progress (`PROGRESS`, see `ProgressWriter`) of a run, beside its folder."""
    return folder.with_name(f"{folder.name}.rank-{rank}{suffix}" if rank else f"{folder.name}{suffix}")


class ProgressWriter(TrainerCallback):
    """Writes the progress of a run to a file during a `with` block, and deletes the file if the block ends without an
    error.

    Args:
        file: written every `pace` seconds, also between two steps.
        report: called with the same content, after the file was written.
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
    order: RunSpec,
    report: Callable[[RunProgress], None] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunResult:
    """Makes a run as `nlq train` does. Standard output and error of this process go to its log from now on.

    Several processes that PyTorch's environment variables (`RANK`, ...) name train together.

    Args:
        report: called with the progress of the run, in a thread of its own.
        callbacks: more callbacks for `Trainer`.

    Returns:
        The result of the run, as `train_recipe` does.

    Raises:
        FolderIsLocked: if another process makes this run.
        RunFailed: if it failed. The log has the traceback.
    """
    rank, folder = int(os.environ.get("RANK", 0)), Path(order.recipe.output_dir)
    try:
        with contextlib.ExitStack() as stack:
            if rank == 0:
                stack.enter_context(RunFolder(folder).held())
            _redirect_output(beside(folder, LOG, rank))
            if rank == 0:
                progress = stack.enter_context(ProgressWriter(beside(folder, PROGRESS), order.pace, report))
                callbacks = [progress, *callbacks]
            try:
                result = _train(order, callbacks)
            except BaseException:
                traceback.print_exc()  # into the log
                sys.stderr.flush()
                raise
            if rank == 0 and not order.keeps_checkpoints:
                for checkpoint in folder.glob(f"{CHECKPOINT}*"):
                    # A finished run needs none, and many runs would fill the disk. Another process may remove them too
                    delete(checkpoint)
            return result
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


def _train(order: RunSpec, callbacks: Sequence[TrainerCallback]) -> RunResult:
    torch.set_num_threads(order.threads)
    order.recipe.load_parts()  # of this process
    recipe = order.recipe.replace(training={"disable_tqdm": True})
    local = recipe if order.model is None else recipe.replace(model=order.model)
    return train_recipe(local, Path(order.data), callbacks, recorded=recipe)
