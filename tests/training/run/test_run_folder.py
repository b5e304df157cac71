"""One process at a time writes into a folder, and the others are told which."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from modeling_nlq.training import convert, train
from modeling_nlq.training.files import COMPARISON_FILE, read_yaml
from modeling_nlq.training.run.run_folder import FolderIsLocked, RunFolder


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


def test_folder_in_which_nothing_was_written_is_as_before(recipe_file, tmp_path):
    with pytest.raises(LookupError), RunFolder(tmp_path / "new").held():
        raise LookupError
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("all I have")
    with pytest.raises(ValueError, match="is not a run of `nlq train`"):
        train(recipe_file, output_dir=tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "thesis.tex"]
