"""A run in a process of its own: its log, its progress and its lock."""

import multiprocessing
from pathlib import Path

import pytest
from support.runs import logged_losses

from modeling_nlq.training.files import read_json
from modeling_nlq.training.run.recipe import Recipe, load_recipe
from modeling_nlq.training.run.subprocess_run import RunFailed, run_in_subprocess


def make(recipe: Recipe, data: Path, sender) -> None:
    reports = []
    try:
        run_in_subprocess(recipe, data, report=reports.append, pace=0.05)
        sender.send(reports)
    except RunFailed as error:
        sender.send(error)


def in_a_process(recipe: Recipe, data: Path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["modeling_nlq.training.run.subprocess_run"])  # imports once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=make, args=(recipe, data, sender))
    process.start()
    sender.close()
    message = receiver.recv()
    process.join()
    return message


@pytest.fixture
def recipe(recipe_file, tmp_path) -> Recipe:
    return load_recipe(recipe_file, {"output_dir": tmp_path / "runs" / "one"})


def test_finished_run(recipe, run, tmp_path):
    reports = in_a_process(recipe, tmp_path / "data")
    folder = Path(recipe.output_dir)
    assert logged_losses(folder) == logged_losses(run[0])
    assert "train_runtime" in folder.with_name("one.log").read_text()
    assert not folder.with_name("one.progress.json").exists()
    assert reports[0].state == "running" and (reports[-1].step, reports[-1].steps) == (8, 8)


def test_run_that_fails(recipe, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.json").write_text("no tokenizer")
    error = in_a_process(recipe, tmp_path / "data")
    progress = read_json(Path(f"{recipe.output_dir}.progress.json"))
    assert (
        progress["state"] == "failed" and isinstance(error, RunFailed) and str(error) == f"failed: {progress['error']}"
    )
    assert "Traceback" in Path(f"{recipe.output_dir}.log").read_text()
