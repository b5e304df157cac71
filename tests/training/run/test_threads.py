"""The number of threads is measured once, where it may be wrong, and kept by what is resumed."""

import types

import pytest
import torch
from transformers.trainer_callback import TrainerState

from modeling_nlq.training.run import threads
from modeling_nlq.training.run.trainer import RunRecord


@pytest.fixture
def machine(monkeypatch):
    """A machine of eight cores, on which a product takes these seconds by its number of threads."""
    seconds = {8: 8.0, 4: 5.0, 2: 1.2, 1: 1.0}
    for name in threads._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(threads, "_seconds_of_product", seconds.__getitem__)
    warnings = []
    monkeypatch.setattr(threads, "logger", types.SimpleNamespace(warning=warnings.append))
    return types.SimpleNamespace(seconds=seconds, warnings=warnings)


def test_the_fastest_number_on_a_busy_machine(machine):
    assert threads.choose_threads() == 1
    (warning,) = machine.warnings
    assert warning.startswith("threads: 1 instead of PyTorch's 8, 8.0 times as fast now")
    machine.seconds[2] = 0.5
    assert threads.choose_threads() == 2


@pytest.mark.parametrize("change", ["idle", "variable", "accelerator", "one"])
def test_where_pytorch_decides(machine, monkeypatch, change):
    expected = 8
    if change == "idle":
        machine.seconds.update({8: 1.4, 4: 1.0})  # a smaller gain is chance
    elif change == "variable":
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
    elif change == "accelerator":
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        expected = 1
    if change != "idle":
        monkeypatch.setattr(threads, "_seconds_of_product", lambda _: pytest.fail("measured"))
    assert threads.choose_threads() == expected and not machine.warnings


def test_a_folder_keeps_its_number(machine, tmp_path):
    assert threads.threads_of(tmp_path) == 1
    machine.seconds[8] = 0.1  # idle now
    machine.warnings.clear()
    assert threads.threads_of(tmp_path) == threads.threads_of(tmp_path, 1) == 1 and not machine.warnings
    assert threads.threads_of(tmp_path, 4) == 4
    assert machine.warnings == [f"threads: 4, and {tmp_path} was begun with 1: results may differ in the last digits"]
    assert threads.threads_of(tmp_path) == 1
    (tmp_path / "threads.txt").write_text("many\n")
    with pytest.raises(ValueError, match="must hold a number of threads, and holds 'many'"):
        threads.threads_of(tmp_path)


def test_a_number_that_is_given_is_not_measured(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "_seconds_of_product", lambda _: pytest.fail("measured"))
    assert threads.threads_of(tmp_path, 3) == 3 and (tmp_path / "threads.txt").read_text() == "3\n"


def test_a_measurement_leaves_the_number_as_it_was(monkeypatch):
    monkeypatch.setattr(threads, "_SECONDS", 0.01)
    before, set_to = torch.get_num_threads(), []
    set_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda number: set_to.append(number) or set_threads(number))
    assert 0 < threads._seconds_of_product(before + 1) < 10
    assert set_to == [before + 1, before] and torch.get_num_threads() == before


def test_a_checkpoint_restores_its_number(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    kept = RunRecord(8, "a").state()
    state = TrainerState(stateful_callbacks={"RunRecord": kept})
    RunRecord(8, "a").restore(state)
    assert not set_to
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    RunRecord(8, "a").restore(state)
    assert set_to == [3]
    del kept["attributes"]["threads"]  # an older checkpoint
    RunRecord(8, "a").restore(state)
    assert set_to == [3]
