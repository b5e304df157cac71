"""A run that nobody watches, in a process of its own: its log and its progress lie in files beside its folder.

The engines of `nlq compare` and `nlq train` start nothing else, on this machine or on another.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import modeling_nlq

from ..files import RECIPE_FILE, has_little_space, write_text
from ..storage import copy_file, is_address, open_folder, scratch_folder
from ..text import one_line
from .mirror import CHECKPOINT, LOG, PROGRESS, Mirror, log_file, wait_for_all
from .recipe import ResolvedRecipe, resolve_recipe
from .run_folder import FolderIsLocked, RunFolder
from .shared_files import local_data, local_model
from .trainer import train_recipe


@dataclass(frozen=True)
class RunSpec:
    """What a process needs to know to make a run, on this machine or another.

    Attributes:
        name: name of the run, for messages.
        content: recipe, as `resolve_recipe` takes it.
        folder: the run folder or its address. Log and progress lie beside it.
        data: the folder of the tokenizer, with the blocks that `save_blocks` may have saved there, or its address.
        model: the path or the address of the recipe's model, if it is a file (see `share_model`).
        dataset: the path of the recipe's dataset, if each node reads a file that all share.
        threads: number of threads of PyTorch; `None` leaves its own choice.
        pace: seconds between two reports of progress.
        patience: seconds to wait for another process that makes the same run.
        keeps_checkpoints: whether the checkpoints stay when the run is finished.
        version: the version of this package where the order was given.
    """

    name: str
    content: dict[str, Any]
    folder: str
    data: str
    model: str | None = None
    dataset: str | None = None
    threads: int | None = None
    pace: float = 1.0
    patience: float = 0.0
    keeps_checkpoints: bool = False
    version: str = modeling_nlq.__version__


class RunFailed(Exception):
    """The run failed for another reason than its loss; the message says why in one line."""


def progress_file(folder):
    """The progress of a run that is not finished, beside its folder: see `Progress`."""
    return folder.with_name(folder.name + PROGRESS)


class Progress(TrainerCallback):
    """Reports the progress of a run as long as a `with` block lasts, also between its steps.

    Its file holds `state` (`running` or `failed`), `step`, `steps` (how many there are), `loss` (of the last step that was
    logged), `host`, `pid`, `updated` (seconds since 1970) and `error`. A run that is finished leaves no such file, unless it
    was killed at that moment.

    Args:
        file: written every `pace` seconds.
        pace: the seconds between two reports.
        report: called with the same content.
        log: the log on this machine; it is copied to `log_copy` each time.
        log_copy: the address of that copy, or `None`.
    """

    def __init__(self, file, pace: float, report: Callable[[dict[str, Any]], None] | None, log: Path, log_copy=None):
        self.content = {"state": "running", "step": 0, "steps": None, "loss": None, "host": socket.gethostname()}
        self.content |= {"pid": os.getpid(), "updated": None, "error": None}
        self._file, self._pace, self._report = file, pace, report
        self._log, self._log_copy, self._copied = log, log_copy, 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, kind, error, _) -> None:
        self._is_over.set()
        self._thread.join()
        if error is not None:
            self.content.update(state="failed", error=f"{kind.__name__}: {one_line(error)}")
        self._write()
        if error is None:
            with contextlib.suppress(Exception):  # what a finished run leaves there is not read
                self._file.unlink(missing_ok=True)

    def _go_on(self) -> None:
        self._write()
        while not self._is_over.wait(self._pace):
            self._write()

    def _write(self) -> None:
        self.content["updated"] = time.time()
        try:
            if self._report is not None:
                self._report(dict(self.content))
            write_text(self._file, json.dumps(self.content) + "\n")
            if self._log_copy is not None and (size := self._log.stat().st_size) != self._copied:
                copy_file(self._log, self._log_copy)
                self._copied = size
        except Exception as error:  # the run itself may still end well
            with contextlib.suppress(OSError):
                print(f"progress was not written: {type(error).__name__}: {one_line(error)}", file=sys.stderr, flush=True)

    def on_train_begin(self, args, state, control, **kwargs):
        self.content.update(step=state.global_step, steps=state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.content["step"] = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.content["loss"] = (logs or {}).get("loss", self.content["loss"])


def run_in_subprocess(order: RunSpec, report: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Makes a run as `nlq train` does. Standard output and error of this process go to its log from now on.

    Several processes that PyTorch's environment variables (`RANK`, ...) name train together.

    Args:
        order: the run.
        report: called with the progress of the run, a mapping (see `Progress`), in a thread of its own.

    Returns:
        The metrics of the run, as `train_recipe` does.

    Raises:
        FolderIsLocked: if another process makes this run.
        RunFailed: if it failed. The log has the traceback.
    """
    is_first = int(os.environ.get("RANK", 0)) == 0
    is_first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
    folder = scratch_folder(order.folder) if is_address(order.folder) else Path(order.folder)
    try:
        _check_node(order)
        place = open_folder(order.folder)
        mirror = Mirror(folder, place) if is_address(order.folder) else None
        # At an address, each machine locks its own copy, whatever an attempt that was killed has left there
        is_owner, plan = (is_first, RECIPE_FILE) if mirror is None else (is_first_here, None)
        with RunFolder(folder, plan).held(order.patience) if is_owner else contextlib.nullcontext():
            log = log_file(folder) if is_first else folder.with_name(f"{folder.name}.rank-{os.environ['RANK']}{LOG}")
            if mirror is not None and is_first:
                mirror.fetch_log()
            _redirect_output(log)
            progress = Progress(progress_file(place), order.pace, report, log, None if mirror is None else log_file(place))
            try:
                with progress if is_first else contextlib.nullcontext(), _printed_errors():
                    return _train(order, folder, mirror, [progress] if is_first else [], is_first, is_first_here)
            finally:
                if mirror is not None and is_first_here:
                    mirror.remove_local()
    except FolderIsLocked:
        raise
    except Exception as error:
        reason = "failed, because the disk is full" if folder.parent.is_dir() and has_little_space(folder.parent) else "failed"
        raise RunFailed(f"{reason}: {type(error).__name__}: {one_line(error)}") from None


def _check_node(order: RunSpec) -> None:
    """Raises `ValueError` if this machine has another version of this package, or does not see the folders of the order."""
    if not is_address(order.data) and not Path(order.data).is_dir():
        raise ValueError(
            f"{order.data} is not on {socket.gethostname()}: --output_dir must be a folder that all nodes share, or an address "
            "such as s3://bucket/results"
        )
    if order.version != modeling_nlq.__version__:
        raise ValueError(
            f"{socket.gethostname()} has version {modeling_nlq.__version__} of modeling-nlq, and the runs were started with "
            f"{order.version}: install the same version everywhere"
        )


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    stream = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - stays open as long as the process lives
    for number, standard in ((1, sys.stdout), (2, sys.stderr)):
        standard.flush()
        os.dup2(stream.fileno(), number)
    sys.stdout = stream  # line by line, which a file is not by itself


@contextlib.contextmanager
def _printed_errors() -> Iterator[None]:
    try:
        yield
    except BaseException:
        traceback.print_exc()  # into the log
        sys.stderr.flush()
        raise


def _train(
    order: RunSpec, folder: Path, mirror: Mirror | None, callbacks: list, is_first: bool, is_first_here: bool
) -> dict[str, Any]:
    if mirror is not None:
        if is_first_here:
            mirror.fetch()
        wait_for_all()
        callbacks = [*callbacks, mirror]
    data = local_data(order.data)
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    resolved = resolve_recipe(order.content, {"output_dir": str(folder), "disable_tqdm": True})
    places = {"model": order.model and str(local_model(order.model)), "dataset": order.dataset}
    resolved = _with_places(resolved, **{name: place for name, place in places.items() if place})
    metrics = train_recipe(resolved, data, callbacks)
    if not is_first:
        return metrics
    if not order.keeps_checkpoints:
        for checkpoint in folder.glob(f"{CHECKPOINT}*"):
            # A finished run needs none, and many runs would fill the disk. Another process may remove them too
            shutil.rmtree(checkpoint, ignore_errors=True)
    if mirror is not None:
        mirror.send_results()
    return metrics


def _with_places(resolved: ResolvedRecipe, **places: str) -> ResolvedRecipe:
    """A recipe that reads its model or its dataset from another place; what it writes down stays."""
    return dataclasses.replace(resolved, recipe=dataclasses.replace(resolved.recipe, **places))
