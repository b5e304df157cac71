"""Files of runs: written whole or not at all, compared, and read with clear errors."""

import errno
import os
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

from modeling_nlq.parts_user_nlq import AUTO_MAP
from modeling_nlq.training.disk import atomic_dir, write_text
from modeling_nlq.training.files import code_files, differences, parse_yaml, read_json, read_yaml
from modeling_nlq.training.text import one_line
from nlq import main


class TestWrittenWhole:
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
        moved, replace = [], os.replace
        keep = lambda *names, **folders: moved.append(names[1]) or replace(*names, **folders)  # noqa: E731
        monkeypatch.setattr(os, "replace", keep)
        with atomic_dir(tmp_path, last="b.txt") as folder:
            for name in ("a.txt", "b.txt", "c.txt"):
                (folder / name).write_text(name)
            assert not (tmp_path / "a.txt").exists()
        assert moved == ["a.txt", "c.txt", "b.txt"]
        for text in ("one", "zwei: ü"):
            write_text(tmp_path / "a.txt", text)
            assert (tmp_path / "a.txt").read_text(encoding="utf-8") == text
        assert len(list(tmp_path.iterdir())) == 3


def test_differences_name_nested_fields():
    before = {"model": "a", "training": {"seed": 0, "report_to": "none"}, "switches": {}}
    now = {"model": "a", "training": {"seed": 1, "report_to": "tensorboard"}, "switches": {"qk_norm": "l2"}}
    assert differences(before, before) == ""
    assert differences(before, now) == (
        "switches: {} there, not set now, switches.qk_norm: not set there, 'l2' now, training.seed: 0 there, 1 now"
    )


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


def _repeat(form: str, times: int = 40) -> str:
    """A mapping `a0`, values that each hold the one before it as often as `form` says, and a field with the last."""
    lines = [f"a{index}: &a{index} {form.replace('*', f'*a{index - 1}')}" for index in range(1, times)]
    return "\n".join(["a0: &a0 {x: 1}", *lines, f"field: *a{times - 1}"])


def test_yaml_that_would_fill_the_memory():
    texts = [*map(_repeat, ("[*, *]", "{a: *, b: *}", "{y: *, <<: [*, *]}")), _repeat("[*]", 200)]
    texts += ["a: &a [" + "x, " * 300 + "]\nfield: [" + "*a, " * 300 + "]", "a: &a [1, *a]", "a: &a {b: 1, <<: *a}"]
    texts += ["a: " + "[" * 5000, "a: [" + "1, " * 60_000 + "]", "a: 1" + ":59" * 5000, "a: " + "x" * 4_000_000]
    for text in texts:
        with pytest.raises(ValueError, match="more than 4,000,000 characters, 50,000 values"):
            parse_yaml(text)
    assert parse_yaml("rates: [2e-5, 1E3, -4e+2]\nword: e5") == {"rates": [2e-5, 1e3, -400.0], "word": "e5"}
    found = parse_yaml("a: &a {x: [1, 2]}\nb: &b {<<: *a, y: *a}\nc: [*b, " + "[" * 90 + "]" * 90 + "]\nd: 190:20:30")
    assert found["c"][0] == {"x": [1, 2], "y": {"x": [1, 2]}} and found["d"] == 685_230


def test_a_deep_configuration(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"a": ' * 100_000)
    assert main(["params", str(tmp_path / "config.json")]) == 1
    assert "config.json': maximum recursion depth" in capsys.readouterr().err


def test_full_disk_is_named():
    wrapped, of_torch = RuntimeError("of datasets"), RuntimeError("[enforce fail] . unexpected pos 576 vs 534")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device", "a")
    for error in (wrapped.__cause__, wrapped, of_torch, Exception("I/O error: No space left on device (os error 28)")):
        assert one_line(error).startswith("the disk is full: ")
    assert one_line(OSError(errno.EACCES, "Permission denied")) == "[Errno 13] Permission denied"


def test_code_is_what_the_loader_of_transformers_takes(run):
    expected = set()
    for module in AUTO_MAP.values():
        entry = run[0] / f"{module.partition('.')[0]}.py"
        expected |= {entry, *map(Path, get_relative_import_files(entry))}
    assert code_files(run[0]) == expected
