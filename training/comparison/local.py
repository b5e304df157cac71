"""`nlq compare`: every run of a comparison, each once, then the results.

Any number of processes may work on one results folder, started by `accelerate launch` or by hand, on one machine or on several
that share the folder: a run belongs to the process that holds its lock, which the operating system takes from a dead one.
"""

import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import disable_progress_bars
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers import TrainerCallback

from modeling_nlq.training.comparison.plan import Comparison, Run
from modeling_nlq.training.comparison.results import RESULTS_FILE, best_learning_rate, gather, read_metrics, run_folder
from modeling_nlq.training.run.recipe import read_yaml, resolve_recipe
from modeling_nlq.training.run.trainer import differences, is_taken, prepare_data, train, write_text


COMPARISON_FILE = "comparison.yaml"
FINGERPRINT_FILE = "dataset_fingerprint.txt"
_BUSY = "busy"
_LITTLE_SPACE = 2**26  # bytes on a disk that explain a failure
# What launchers tell their processes, and a run of its own must not read
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_",
    "TORCHELASTIC_",
)


def compare(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """Makes all runs that are not finished, and returns the results.

    Args:
        comparison: what to run.
        folder: where the runs lie, or will.

    Raises:
        ValueError: if the folder holds another comparison or something else; nothing in it is touched.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()  # those of the data, which a log file does not need
    _claim_folder(folder, comparison)
    with FileLock(folder / "tokenizer.lock"):
        # Once for all runs, which then find the data in the cache
        first = comparison.resolve(Run(comparison.baseline, 1.0, 0, False), folder)
        _, _, fingerprint = prepare_data(first.recipe, folder / "tokenizer")
        _check_same_dataset(folder / FINGERPRINT_FILE, fingerprint)
    _run_all(comparison, folder)
    for checkpoint in folder.glob("runs/*/*/checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)  # of a run that was killed after its end
    text = json.dumps(gather(comparison, folder), allow_nan=False)
    write_text(folder / RESULTS_FILE, text + "\n")
    return json.loads(text)


def _claim_folder(folder: Path, comparison: Comparison) -> None:
    file = folder / COMPARISON_FILE
    if file.is_file():
        if changes := differences(read_yaml(file), comparison.given):
            raise ValueError(f"{folder} holds another comparison ({changes}); choose another --output_dir")
    elif is_taken(folder):
        raise ValueError(f"{folder} exists and holds no comparison; choose another --output_dir")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, yaml.safe_dump(comparison.given, sort_keys=False))


def _check_same_dataset(file: Path, fingerprint: str | None) -> None:
    """Raises `ValueError` if runs of a comparison were, or would be, made with another dataset."""
    if file.is_file() and (before := file.read_text(encoding="utf-8").strip()) != str(fingerprint):
        raise ValueError(
            f"the dataset has changed since {file.parent} was begun (fingerprint {before} then, {fingerprint} now); put the "
            "old one back, or choose another --output_dir"
        )
    write_text(file, f"{fingerprint}\n")


def _unfinished(comparison: Comparison, folder: Path) -> tuple[list[Run], int]:
    """The runs that can begin now, in their order, and how many runs are not finished."""
    ready, count = [], 0
    for model in comparison.variants:
        sweep = [run for run in comparison.sweep(model) if read_metrics(folder, run) is None]
        if sweep:
            ready += sweep
            count += len(sweep) + len(comparison.seeds)
        elif (rate := best_learning_rate(comparison, folder, model)) is not None:
            reported = [run for run in comparison.reported(model, rate) if read_metrics(folder, run) is None]
            ready += reported
            count += len(reported)
    # All sweeps first, then seed by seed: what is there early is of all models
    order = {seed: index for index, seed in enumerate(comparison.seeds)}
    return sorted(ready, key=lambda run: -1 if run.is_sweep else order[run.seed]), count


def _run_all(comparison: Comparison, folder: Path) -> None:
    """Makes the runs that are not finished, one after another, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")  # imports once, and every run is still a fresh process
    context.set_forkserver_preload([__name__])
    steps = context.Value("q", 0)
    total = sum(comparison.runs_of(model) for model in comparison.variants)
    steps_per_run = comparison.resolve(Run(comparison.baseline, 1.0, 0, False), folder).training_arguments.max_steps
    # A terminal sees every second where things are, a log file every run
    pace = {"mininterval": 1.0, "dynamic_ncols": True} if sys.stderr.isatty() else {"mininterval": math.inf, "ncols": 110}
    _, count = _unfinished(comparison, folder)
    with (
        _environment_of_one_run(),
        tqdm(total=total * steps_per_run, initial=(total - count) * steps_per_run, unit="step", **pace) as progress,
    ):
        with _interrupts_blocked():  # Ctrl-C in a terminal reaches every process; this one passes it on
            forkserver.ensure_running()
        while True:
            ready, count = _unfinished(comparison, folder)
            progress.n = (total - count) * steps_per_run
            if not count:
                progress.set_postfix_str("")
                return
            for run in ready:
                if not _is_locked(folder, run) and _run_one(comparison, run, folder, context, steps, progress) != _BUSY:
                    break
            else:
                time.sleep(1.0)  # others are at work on all that is left


def _lock_file(folder: Path, run: Run) -> Path:
    path = run_folder(folder, run)
    return path.with_name(f"{path.name}.lock")


def _is_locked(folder: Path, run: Run) -> bool:
    path = _lock_file(folder, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def _run_one(comparison: Comparison, run: Run, folder: Path, context, steps, progress: tqdm) -> str | None:
    """One run in a process of its own, with the progress shown while it lasts."""
    started_from = progress.n
    steps.value = 0
    progress.set_postfix_str(run.name)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, context, initializer=_start_run, initargs=(steps, _log_file(folder, run))) as executor:
        path = run_folder(folder, run)
        content = comparison.resolve(run, path).given
        future = None
        try:
            future = executor.submit(_train_alone, content, path, _lock_file(folder, run), folder / "tokenizer")
            while not _is_done(future):
                progress.update(started_from + steps.value - progress.n)
            return future.result()
        except KeyboardInterrupt:
            children = set(multiprocessing.active_children()) - others
            for process in children:
                os.kill(process.pid, signal.SIGINT)
            # Leaving the executor waits for the run, which may have lost the interrupt: Python drops one in a destructor
            if future is None or wait([future], timeout=10.0).not_done:
                for process in children:
                    process.kill()
            raise
        except BrokenProcessPool as error:
            reason = "died, of too little memory perhaps"
            raise ChildProcessError(f"run {run.name} {reason}; see {_log_file(folder, run)}") from error
        except Exception as error:
            is_full = shutil.disk_usage(folder).free < _LITTLE_SPACE
            reason = "failed, for the disk is full" if is_full else "failed"
            text = f"run {run.name} {reason}: {type(error).__name__}: {error}; see {_log_file(folder, run)}"
            raise ChildProcessError(text) from error


def _is_done(future: Future) -> bool:
    try:
        future.exception(timeout=1.0)
    except TimeoutError:
        return False
    return True


def _log_file(folder: Path, run: Run) -> Path:
    path = run_folder(folder, run)
    return path.with_name(f"{path.name}.log")


@contextmanager
def _interrupts_blocked():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def _environment_of_one_run():
    """What the processes of runs inherit: one device, and nothing of the launcher that started this process."""
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


# What follows runs in the process of a run


class _Progress(TrainerCallback):
    """Tells how far a run is."""

    def on_step_end(self, args, state, control, **kwargs):
        _steps.value = state.global_step


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # the next process that works on this comparison goes on from the last checkpoint


def _start_run(steps, log_file: Path) -> None:
    global _steps
    _steps = steps
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    stream = open(log_file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - stays open as long as the process lives
    os.dup2(stream.fileno(), sys.stdout.fileno())
    os.dup2(stream.fileno(), sys.stderr.fileno())


def _train_alone(content: dict[str, Any], folder: Path, lock_file: Path, tokenizer_folder: Path) -> str | None:
    try:
        with FileLock(lock_file, timeout=0):
            train(
                resolve_recipe(content, ["--output_dir", str(folder), "--disable_tqdm", "true"]),
                tokenizer_folder,
                [_Progress()],
            )
            for checkpoint in folder.glob("checkpoint-*"):
                # A finished run needs none, and many runs would fill the disk. Another process may be removing them too
                shutil.rmtree(checkpoint, ignore_errors=True)
    except Timeout:
        return _BUSY
    except Exception:
        traceback.print_exc()  # into the log
        raise
