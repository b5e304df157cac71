"""Data parallel and FSDP2 runs train as one process does, and go on with another number of processes."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.paths import REPOSITORY
from support.runs import logged_losses

from modeling_nlq.configuration import find
from modeling_nlq.training.result import RunResult
from modeling_nlq.training.run.checkpoints import fault_of, last_complete_checkpoint


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def fsdp_environment(state_dict_type: str) -> dict[str, str]:
    """What `accelerate launch` makes of the shipped file, with another way to store weights."""
    from accelerate.commands.config.config_args import load_config_from_file

    settings = load_config_from_file(str(find("accelerate", "fsdp2"))).fsdp_config
    settings = {**settings, "fsdp_state_dict_type": state_dict_type}
    names = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
    variables = {names.get(name, name.upper()): str(value) for name, value in settings.items()}
    return {"ACCELERATE_USE_FSDP": "true", **variables}


def launch(recipe_file: Path, folder: Path, processes: int, state_dict_type: str | None, *options: str):
    program = "support.fsdp_on_cpu" if state_dict_type is not None else "nlq"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", program, "train", str(recipe_file), "--output_dir", str(folder), "--report_to", "none"]
    command += ["--per_device_train_batch_size", str(8 // processes), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(REPOSITORY / "tests")
    if state_dict_type is not None:
        environment |= fsdp_environment(state_dict_type)
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=folder.parent)


def cut(finished: Path, folder: Path, step: int = 4) -> None:
    shutil.copytree(finished, folder)
    for file in (folder / "metrics.json", folder / "model.safetensors"):
        file.unlink()
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(checkpoint)


def check_same_run(folder: Path, run: tuple[Path, dict], processes: int) -> None:
    metrics = RunResult.load(folder)
    assert metrics.machine.processes == processes
    for name in ("steps", "tokens_seen", "token_stream"):
        assert getattr(metrics.data, name) == getattr(run[1].data, name)
    assert logged_losses(folder) == pytest.approx(logged_losses(run[0]), abs=2e-4)
    assert metrics.losses.validation.loss == pytest.approx(run[1].losses.validation.loss, abs=2e-4)
    weights, expected = (load_file(path / "model.safetensors") for path in (folder, run[0]))
    for name, weight in expected.items():
        assert weights[name] == pytest.approx(weight, abs=2e-3), name


@pytest.fixture(scope="module")
def finished(recipe_file, tmp_path_factory):
    @functools.cache
    def make(processes: int, state_dict_type: str | None) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "run"
        done = launch(recipe_file, folder, processes, state_dict_type)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return make


# The number of processes before and after, how weights are stored, and the step of the cut; 8 is the last
CASES = [(2, 1, None, 4), (2, 1, SHARDED, 4), (2, 2, SHARDED, 8), (2, 1, FULL, 8), (1, 2, FULL, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_goes_on_with_another_number_of_processes(run, finished, recipe_file, tmp_path, case):
    before, after, state_dict_type, step = case
    folder = tmp_path / "run"
    cut(finished(before, state_dict_type), folder, step)
    done = launch(recipe_file, folder, after, state_dict_type)
    assert done.returncode == 0 and "Going on from" in done.stderr, done.stderr[-3000:]
    check_same_run(folder, run, after)
    training = yaml.safe_load((folder / "recipe.yaml").read_text())["training"]
    assert training["per_device_train_batch_size"] == 8 // after


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs PyTorch 2.9")
def test_muon_in_two_processes_trains_as_in_one(recipe_file, tmp_path):
    """Each process keeps the whole state, so one alone goes on with it."""
    options = ("--optimizer", "muon", "--learning_rate", "1e-3")
    for name, processes in {"one": 1, "two": 2}.items():
        done = launch(recipe_file, tmp_path / name, processes, None, *options)
        assert done.returncode == 0, done.stderr[-3000:]
    one = (tmp_path / "one", RunResult.load(tmp_path / "one"))
    check_same_run(tmp_path / "two", one, 2)
    cut(tmp_path / "two", tmp_path / "cut")
    done = launch(recipe_file, tmp_path / "cut", 1, None, *options)
    assert done.returncode == 0 and "Going on from" in done.stderr, done.stderr[-3000:]
    check_same_run(tmp_path / "cut", one, 1)


@pytest.mark.slow
@pytest.mark.parametrize("state_dict_type", [SHARDED, FULL])
def test_checkpoint_that_is_damaged_or_of_fsdp(finished, recipe_file, tmp_path, state_dict_type):
    folder = tmp_path / "run"
    cut(finished(2, state_dict_type), folder, step=6)
    broken = folder / "checkpoint-6"
    assert fault_of(broken) is None
    if state_dict_type == SHARDED:
        (broken / "optimizer_0" / ".metadata").unlink()
    else:
        (broken / "optimizer.bin").write_bytes(b"half")
    assert last_complete_checkpoint(folder) == folder / "checkpoint-4"
    done = launch(recipe_file, folder, 1, None)
    assert done.returncode != 0 and "was made with FSDP; choose what it was" in done.stderr
