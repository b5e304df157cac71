"""A run in a process of its own: its log, its progress and its lock, and its folder at an address."""

import dataclasses
import multiprocessing
import shutil
from pathlib import Path

import pytest
from support.runs import PowerCut, logged_losses
from transformers import TrainerCallback

from modeling_nlq.training.files import read_json, read_yaml
from modeling_nlq.training.run.mirror import Mirror
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.run_folder import FolderIsLocked, RunFolder
from modeling_nlq.training.run.shared_files import local_data, share_data, share_model
from modeling_nlq.training.run.trainer import train_recipe
from modeling_nlq.training.run.unattended import Progress, RunFailed, RunSpec, run_in_subprocess
from modeling_nlq.training.storage import copy_files, files_below, open_folder, scratch_folder


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
    folder, data = tmp_path / "runs" / "one", tmp_path / "data"
    data, _ = share_data(load_recipe(recipe_file).recipe, data)
    return RunSpec("one", load_recipe(recipe_file).given, str(folder), str(data), pace=0.05)


@pytest.fixture
def elsewhere(order, tmp_path, monkeypatch) -> RunSpec:
    """The same at an address, which is a folder all the same: its files are sent and fetched."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    copy_files(Path(order.data), open_folder(f"local://{tmp_path}/there/data"))
    return dataclasses.replace(order, folder=f"local://{tmp_path}/there/runs/one", data=f"local://{tmp_path}/there/data")


class TestFolder:
    def test_finished_run(self, order, run, monkeypatch):
        reports = in_a_process(order)
        folder = Path(order.folder)
        assert logged_losses(folder) == logged_losses(run[0])
        assert "train_runtime" in folder.with_name("one.log").read_text()
        assert not folder.with_name("one.progress.json").exists() and not list(folder.glob("checkpoint-*"))
        assert reports[0]["state"] == "running" and [reports[-1][name] for name in ("step", "steps")] == [8, 8]

    def test_run_that_another_process_makes(self, order):
        with RunFolder(Path(order.folder)).held():
            assert isinstance(in_a_process(order), FolderIsLocked)
        assert not Path(order.folder).exists()

    def test_run_that_fails(self, order):
        faulty = {**order.content, "attn_implementation": "no_such_backend"}
        error = in_a_process(dataclasses.replace(order, content=faulty))
        progress = read_json(Path(f"{order.folder}.progress.json"))
        assert progress["state"] == "failed" and str(error) == f"failed: {progress['error']}"
        assert "Traceback" in Path(f"{order.folder}.log").read_text()

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [("data", "/nowhere/data", "/nowhere/data is not on "), ("version", "0.0", "install the same version everywhere")],
    )
    def test_machine_that_cannot_make_it(self, order, field, value, message):
        error = in_a_process(dataclasses.replace(order, **{field: value}))
        assert isinstance(error, RunFailed) and message in str(error) and "\n" not in str(error)
        assert not Path(order.folder).parent.exists()


class TestAddress:
    def test_finished_run(self, elsewhere, run, tmp_path):
        in_a_process(elsewhere)
        there = tmp_path / "there" / "runs"
        assert logged_losses(there / "one") == logged_losses(run[0])
        assert {path.name for path in there.iterdir()} == {"one", "one.log"}
        assert {path.name for path in run[0].iterdir() if path.suffix == ".py"} <= {
            path.name for path in (there / "one").iterdir()
        }
        assert not list(there.glob("one/checkpoint-*")) and not scratch_folder(elsewhere.folder).exists()

    def test_interrupted_run_goes_on_elsewhere(self, elsewhere, run, recipe_file, tmp_path):
        """A checkpoint without its state was not sent to the end."""
        there, local = open_folder(elsewhere.folder), tmp_path / "first"
        mirror = Mirror(local, there)
        with pytest.raises(KeyboardInterrupt):
            train_recipe(load_recipe(recipe_file, {"output_dir": local}), open_folder(elsewhere.data[8:]), [mirror, PowerCut()])
        assert "checkpoint-4/trainer_state.json" in files_below(there)
        shutil.copytree(local / "checkpoint-4", tmp_path / "there" / "runs" / "one" / "checkpoint-6")
        (tmp_path / "there" / "runs" / "one" / "checkpoint-6" / "trainer_state.json").unlink()
        in_a_process(elsewhere)
        folder = tmp_path / "there" / "runs" / "one"
        assert logged_losses(folder) == logged_losses(run[0])
        assert read_json(folder / "metrics.json")["token_stream"] == run[1]["token_stream"]
        assert "Going on from" in folder.with_name("one.log").read_text()
        assert not list(folder.glob("checkpoint-*"))

    def test_data_of_another_shape_have_another_place(self, elsewhere, recipe_file, tmp_path):
        copy = local_data(elsewhere.data)
        assert read_json(copy / "blocks.json") == read_json(tmp_path / "there" / "data" / "blocks.json")
        (copy / "mark").write_text("kept")
        assert (local_data(elsewhere.data) / "mark").exists()
        recipe = load_recipe(recipe_file).recipe
        places = [
            share_data(dataclasses.replace(recipe, **fields), tmp_path / "data")[0] for fields in ({}, {"block_size": 32})
        ]
        assert places[0] != places[1] and len(list((tmp_path / "data").iterdir())) == 2

    def test_model_that_is_a_file_of_this_machine(self, elsewhere, recipe_file, run, tmp_path):
        name = share_model(read_yaml(recipe_file)["model"], open_folder(f"local://{tmp_path}/there/models"))
        assert share_model("tiny-linear", open_folder(f"local://{tmp_path}/there/models")) is None
        content = {**elsewhere.content, "model": "/not/on/this/machine/model.json"}
        in_a_process(dataclasses.replace(elsewhere, content=content, model=name))
        folder = tmp_path / "there" / "runs" / "one"
        assert logged_losses(folder) == logged_losses(run[0])
        assert read_yaml(folder / "recipe.yaml")["model"] == content["model"]


class TestProgress:
    def test_storage_that_fails_does_not_end_the_run(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        with Progress(tmp_path / "file" / "x.json", 0.01, None, tmp_path / "log") as progress:
            assert isinstance(progress, TrainerCallback)
        assert "progress was not written" in capsys.readouterr().err
