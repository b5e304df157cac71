"""`nlq compare` on local machines: makes every run of a comparison once, then the results.

Any number of processes may work on one results folder, started by `accelerate launch` or by hand, on one machine or on several
that share the folder. A run belongs to the process that holds its lock; the operating system frees the lock of a dead process.
"""

import gc
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
from datasets import disable_progress_bars
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers import TrainerCallback

from modeling_nlq.training.comparison.plan import Comparison, Run, load_comparison
from modeling_nlq.training.comparison.report import write_report
from modeling_nlq.training.comparison.results import best_learning_rate, gather, read_metrics, run_folder
from modeling_nlq.training.files import (
    COMPARISON_FILE,
    RESULTS_FILE,
    differences,
    has_little_space,
    is_taken,
    read_yaml,
    write_text,
    write_yaml,
)
from modeling_nlq.training.run.data import prepare_data
from modeling_nlq.training.run.recipe import resolve_recipe
from modeling_nlq.training.run.trainer import train_recipe


FINGERPRINT_FILE = "dataset_fingerprint.txt"
_BUSY = "busy"
# Variables of the launcher that started this process, which the process of a run must not read
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


def compare(comparison: str | Path, output_dir: str | Path | None = None, **overrides: Any) -> dict[str, Any]:
    """Trains the models of a comparison and reports which differ from the baseline. Called again, it goes on.

    Each run is a process of its own, so a script must call this under `if __name__ == "__main__":`.

    Args:
        comparison: name of a shipped comparison, or a YAML file.
        output_dir: results folder; by default `runs/compare-NAME`.
        overrides: fields of the recipe that all models share, as for `train`.

    Returns:
        The content of `results.json` in the results folder (see `gather`).

    Raises:
        ValueError: for an unknown field, name or value, or a folder that holds another comparison or something else.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    loaded = load_comparison(comparison, overrides)
    return run_and_report(loaded, Path(output_dir or loaded.default_folder))


def run_and_report(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """Makes all runs that are not finished, writes the report, and returns the results; raises as `compare` does."""
    results = run_comparison(comparison, folder)
    if is_main_process():
        write_report(results, folder)
    return results


def is_main_process() -> bool:
    """Tells whether this is the first of the processes that a launcher started on this machine, or the only one."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def run_comparison(comparison: Comparison, folder: Path) -> dict[str, Any]:
    """Makes all runs that are not finished, and returns the results without a report.

    Args:
        comparison: the runs to make.
        folder: folder of the runs.

    Raises:
        ValueError: if the folder holds another comparison or something else; nothing in it is touched.
        ChildProcessError: if a run failed for another reason than its loss; finished runs stay.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()  # a log file does not need those of the data
    _claim_folder(folder, comparison)
    with FileLock(folder / "tokenizer.lock"):
        # Once for all runs, which find the data in the cache then
        first = comparison.resolve(Run(comparison.baseline, 1.0, 0, False), folder)
        _, _, fingerprint = prepare_data(first.recipe, folder / "tokenizer")
        _check_same_dataset(folder / FINGERPRINT_FILE, fingerprint)
    _run_all(comparison, folder)
    for checkpoint in folder.glob("runs/*/*/checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)  # of a run that was killed after its last step
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
        write_yaml(file, comparison.given)


def _check_same_dataset(file: Path, fingerprint: str | None) -> None:
    """Raises `ValueError` if the dataset differs from that of earlier runs."""
    if file.is_file() and (before := file.read_text(encoding="utf-8").strip()) != str(fingerprint):
        raise ValueError(
            f"the dataset has changed since {file.parent} was begun (fingerprint {before} then, {fingerprint} now); put the "
            "old one back, or choose another --output_dir"
        )
    write_text(file, f"{fingerprint}\n")


def _unfinished(comparison: Comparison, folder: Path) -> tuple[list[Run], int]:
    """The runs that can begin now, in their order, and the number of runs that are not finished."""
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
    # All sweeps first, then seed by seed, so that early results cover all models
    order = {seed: index for index, seed in enumerate(comparison.seeds)}
    return sorted(ready, key=lambda run: -1 if run.is_sweep else order[run.seed]), count


def _run_all(comparison: Comparison, folder: Path) -> None:
    """Makes the runs that are not finished, one after another, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")  # it imports once, and every run is still a fresh process
    context.set_forkserver_preload([__name__])
    steps = context.Value("q", 0)
    total = sum(comparison.runs_of(model) for model in comparison.variants)
    steps_per_run = comparison.resolve(Run(comparison.baseline, 1.0, 0, False), folder).training_arguments.max_steps
    # A terminal shows the progress every second, a log file after every run
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
                time.sleep(1.0)  # other processes make all runs that are left


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
    """Makes one run in a process of its own, and shows its progress."""
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
            # Leaving the executor waits for the run, which may have lost the interrupt: Python ignores one in a destructor
            if future is None or wait([future], timeout=10.0).not_done:
                for process in children:
                    process.kill()
            raise
        except BrokenProcessPool as error:
            text = f"run {run.name} died, perhaps of too little memory; see {_log_file(folder, run)}"
            raise ChildProcessError(text) from error
        except Exception as error:
            reason = "failed, because the disk is full" if has_little_space(folder) else "failed"
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


# The process of a run


class _Progress(TrainerCallback):
    """Counts the steps of a run."""

    def on_step_end(self, args, state, control, **kwargs):
        _steps.value = state.global_step


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # another process goes on from the last checkpoint


def _start_run(steps, log_file: Path) -> None:
    global _steps
    _steps = steps
    gc.freeze()  # a run collects garbage, and need not look through all that was imported
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    stream = open(log_file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - stays open as long as the process lives
    os.dup2(stream.fileno(), sys.stdout.fileno())
    os.dup2(stream.fileno(), sys.stderr.fileno())


def _train_alone(content: dict[str, Any], folder: Path, lock_file: Path, tokenizer_folder: Path) -> str | None:
    try:
        with FileLock(lock_file, timeout=0):
            train_recipe(resolve_recipe(content, {"output_dir": folder, "disable_tqdm": True}), tokenizer_folder, [_Progress()])
            for checkpoint in folder.glob("checkpoint-*"):
                # A finished run needs none, and many runs would fill the disk. Another process may remove them too
                shutil.rmtree(checkpoint, ignore_errors=True)
    except Timeout:
        return _BUSY
    except Exception:
        traceback.print_exc()  # into the log
        raise
