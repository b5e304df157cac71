"""A run in a process of its own: its log, its progress and its lock."""

import dataclasses
import multiprocessing
from pathlib import Path

import pytest
from support.runs import logged_losses

from modeling_nlq.training.files import read_json
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.run_folder import FolderIsLocked, RunFolder
from modeling_nlq.training.run.unattended import RunFailed, RunSpec, run_in_subprocess


def make(order: RunSpec, sender) -> None:
    reports = []
    try:
        run_in_subprocess(order, reports.append)
        sender.send(reports)
    except (RunFailed, FolderIsLocked) as error:
        sender.send(error)


def in_a_process(order: RunSpec):
    """Makes a run, and returns what it reported, or its error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["modeling_nlq.training.run.unattended"])  # imports once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=make, args=(order, sender))
    process.start()
    sender.close()
    message = receiver.recv()
    process.join()
    return message


@pytest.fixture
def order(recipe_file, tmp_path) -> RunSpec:
    recipe = load_recipe(recipe_file, {"output_dir": tmp_path / "runs" / "one"})
    return RunSpec("one", recipe, str(tmp_path / "data"), pace=0.05)


def test_finished_run(order, run):
    """The model is read from another path than the one in its record."""
    moved = dataclasses.replace(order, recipe=order.recipe.replace(model="/not/on/this/machine/model.json"))
    reports = in_a_process(dataclasses.replace(moved, model=order.recipe.model))
    folder = Path(order.recipe.output_dir)
    assert logged_losses(folder) == logged_losses(run[0])
    assert "/not/on/this/machine" in (folder / "recipe.yaml").read_text()
    assert "train_runtime" in folder.with_name("one.log").read_text()
    assert not folder.with_name("one.progress.json").exists() and not list(folder.glob("checkpoint-*"))
    assert reports[0].state == "running" and (reports[-1].step, reports[-1].steps) == (8, 8)


@pytest.mark.slow
def test_run_that_another_process_makes(order):
    with RunFolder(Path(order.recipe.output_dir)).held():
        assert isinstance(in_a_process(order), FolderIsLocked)
    assert not Path(order.recipe.output_dir).exists()


def test_run_that_fails(order):
    Path(order.data).mkdir()
    Path(order.data, "tokenizer.json").write_text("no tokenizer")
    error = in_a_process(order)
    progress = read_json(Path(f"{order.recipe.output_dir}.progress.json"))
    assert (
        progress["state"] == "failed" and isinstance(error, RunFailed) and str(error) == f"failed: {progress['error']}"
    )
    assert "Traceback" in Path(f"{order.recipe.output_dir}.log").read_text()
