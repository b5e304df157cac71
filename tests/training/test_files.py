"""Files of runs: written whole or not at all, compared, and read with clear errors."""

from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

from modeling_nlq.configuration_nlq import AUTO_MAP
from modeling_nlq.training.files import (
    atomic_dir,
    code_files,
    differences,
    is_nonempty,
    model_files,
    read_json,
    read_yaml,
    write_text,
    write_yaml,
)


class TestWrittenWhole:
    def test_files_move_when_the_block_ends(self, tmp_path):
        target = tmp_path / "new" / "folder"
        with atomic_dir(target) as folder:
            (folder / "a.txt").write_text("a")
            (folder / "below").mkdir()
            (folder / "below" / "b.txt").write_text("b")
            assert not target.exists()
        assert {path.relative_to(target).as_posix() for path in target.rglob("*")} == {"a.txt", "below", "below/b.txt"}
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]

    @pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
    def test_an_error_leaves_what_was_there(self, error, tmp_path):
        (tmp_path / "a.txt").write_text("before")
        for target in (tmp_path, tmp_path / "new"):
            with pytest.raises(error), atomic_dir(target) as folder:
                (folder / "a.txt").write_text("half")
                raise error
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
        assert (tmp_path / "a.txt").read_text() == "before"

    def test_the_last_file_shows_that_all_are_there(self, tmp_path, monkeypatch):
        moved, replace = [], Path.replace
        monkeypatch.setattr(Path, "replace", lambda self, target: moved.append(self.name) or replace(self, target))
        with atomic_dir(tmp_path, last="b.txt") as folder:
            for name in ("a.txt", "b.txt", "c.txt"):
                (folder / name).write_text(name)
        assert moved == ["a.txt", "c.txt", "b.txt"]
        for text in ("one", "zwei: ü"):
            write_text(tmp_path / "a.txt", text)
            assert (tmp_path / "a.txt").read_text(encoding="utf-8") == text
        assert len(list(tmp_path.iterdir())) == 3


def test_folder_of_an_interrupted_write_is_not_taken(tmp_path):
    assert not is_nonempty(tmp_path / "nothing")
    (tmp_path / ".run.123.unfinished").mkdir()
    assert not is_nonempty(tmp_path)
    (tmp_path / "thesis.tex").write_text("all I have")
    assert is_nonempty(tmp_path) and is_nonempty(tmp_path / "thesis.tex")


def test_differences_name_nested_fields():
    before = {"model": "a", "training": {"seed": 0, "report_to": "none"}, "switches": {}}
    now = {"model": "a", "training": {"seed": 1, "report_to": "tensorboard"}, "switches": {"qk_norm": "l2"}}
    assert differences(before, before) == ""
    assert differences(before, now) == (
        "switches: {} there, None now, switches.qk_norm: None there, 'l2' now, training.seed: 0 there, 1 now"
    )


def test_numbers_without_a_point_are_numbers(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("rates: [2e-5, 1E3, -4e+2]\nword: e5\n")
    assert read_yaml(path) == {"rates": [2e-5, 1e3, -400.0], "word": "e5"}
    write_yaml(path, {"b": 1, "a": 2.5e-7})
    assert path.read_text().startswith("b: 1\n") and read_yaml(path) == {"b": 1, "a": 2.5e-7}


@pytest.mark.parametrize(
    "reader, text, message",
    [
        (read_yaml, "[1]", "must hold fields and values, not list"),
        (read_yaml, "a: 1\na: 2", "a is given twice"),
        (read_yaml, "a: [", "file: cannot be read"),
        (read_json, "{", "file is damaged"),
        (read_json, "null", "file is damaged: it must hold fields and values, not NoneType"),
    ],
)
def test_file_that_cannot_be_used(reader, text, message, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=message):
        reader(tmp_path / "file")


def test_code_is_what_the_loader_of_transformers_takes(run):
    entries = (run[0] / f"{module.partition('.')[0]}.py" for module in AUTO_MAP.values())
    assert code_files(run[0]) == {Path(path) for entry in entries for path in (entry, *get_relative_import_files(entry))}


def test_files_of_a_saved_model(run):
    names = {path.name for path in model_files(run[0])}
    assert {"model.safetensors", "config.json", "modeling_nlq.py", "tokenizer.json", "metrics.json", "loss.png"} <= names
    assert not names & {"README.md", "training_args.bin", "trainer_state.json"}
