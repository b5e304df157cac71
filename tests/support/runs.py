"""Reads and interrupts training runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from support.paths import REPOSITORY
from transformers import TrainerCallback

from modeling_nlq.training.files import write_yaml
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.trainer import train_recipe


def logged_losses(folder: Path) -> list[float]:
    """The training losses that a run logged."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


class PowerCut(TrainerCallback):
    """Ends a run in its fifth step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def interrupt(recipe_file: Path, **overrides) -> None:
    """Begins a run that ends in its fifth step, after a checkpoint at the fourth."""
    with pytest.raises(KeyboardInterrupt):
        train_recipe(load_recipe(recipe_file, overrides), callbacks=[PowerCut()])


def press_control_c(arguments: Sequence[str], when: Callable[[psutil.Process], bool]) -> tuple[int, str]:
    """Runs `nlq`, interrupts it at a moment as a terminal does, with all its processes, and returns its status and errors."""
    command = [sys.executable, "-m", "nlq", *arguments]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    # A shell starts a command in the background with interrupts ignored, and tests may run there
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **streams)
    finally:
        signal.signal(signal.SIGINT, before)
    while not when(psutil.Process(process.pid)):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=100)
    assert not psutil.wait_procs(family, timeout=2)[1], "a process was left behind"
    return process.returncode, process.stderr.read()


def has_loaded(library: str, process: psutil.Process) -> bool:
    """Tells whether a process has loaded a library, such as `libtorch`."""
    return any(library in file.path for file in process.memory_maps())


def without_times(results: dict) -> dict:
    """Results as far as the clock and the memory have no part in them."""
    results = json.loads(json.dumps(results))
    for model in results["models"].values():
        for run in [*model["tried"], *model["runs"]]:
            for name in ("train_seconds", "tokens_per_second", "peak_memory"):
                run.pop(name)
    return results


def write_comparison(folder: Path, **fields) -> str:
    """Writes `comparison.yaml` with one rate and two seeds, unless the fields say otherwise; `None` leaves a field out."""
    content = {"baseline": "base", "learning_rates": [1e-2], "seeds": [0, 1], **fields}
    given = {name: value for name, value in content.items() if value is not None}
    write_yaml(folder / "comparison.yaml", given)
    return str(folder / "comparison.yaml")
