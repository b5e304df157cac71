"""One process at a time writes into a folder, and the others are told which."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.paths import REPOSITORY

from modeling_nlq.training import convert, train
from modeling_nlq.training.files import COMPARISON_FILE, read_yaml
from modeling_nlq.training.run.run_folder import FolderIsLocked, RunFolder
from nlq import main


@pytest.mark.slow
def test_second_training_is_refused_until_the_first_dies(recipe_file, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["train", str(recipe_file), "--output_dir", str(folder), "--eval_strategy", "no", "--max_steps"]
    first = subprocess.Popen(
        [sys.executable, "-m", "nlq", *arguments, "100000"],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(folder.glob("checkpoint-*")):
            assert first.poll() is None
            time.sleep(0.1)
        for steps in ("100000", "1"):  # the same recipe, and another
            assert main([*arguments, steps]) == 1
            assert f"nlq: error: {folder} is in use by another process; wait" in capsys.readouterr().err
        assert RunFolder(folder).is_held()
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert not RunFolder(folder).is_held()
    assert main([*arguments, "1"]) == 1 and "holds a run of another recipe" in capsys.readouterr().err
    with RunFolder(folder).held():
        pass


def test_one_of_several_comparisons_gets_a_folder(tmp_path):
    def claim(number: int) -> str | None:
        place = RunFolder(tmp_path / "results", COMPARISON_FILE)
        try:
            with place.held(patience=10):
                place.claim({"name": f"comparison {number // 2}"})  # each comes twice
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(claim, range(8)))
    assert errors.count(None) == 2 and sum("holds another comparison" in (error or "") for error in errors) == 6
    winner = read_yaml(tmp_path / "results" / COMPARISON_FILE)["name"]
    assert errors[2 * int(winner.split()[1])] is None


def test_conversion_into_a_folder_that_another_process_holds(run, tmp_path):
    with RunFolder(tmp_path / "target", plan=None).held():
        with pytest.raises(FolderIsLocked):
            convert(run[0], tmp_path / "target", switches={"qk_norm": "l2"})
        with pytest.raises(FolderIsLocked):
            train(run[0] / "recipe.yaml", output_dir=tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("content", [[], ["thesis.tex"]])
def test_folder_in_which_nothing_was_written_is_as_before(content, tmp_path):
    folder = tmp_path / "folder"
    for name in content:
        folder.mkdir()
        (folder / name).write_text("all I have")
    with pytest.raises(ValueError), RunFolder(folder).held():
        raise ValueError
    assert [path.name for path in tmp_path.rglob("*")] == (["folder", *content] if content else [])
