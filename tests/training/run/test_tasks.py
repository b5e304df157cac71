"""Downstream tasks: lm_eval's own numbers, and one line for each error."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from support.lm_eval_command import lm_eval_results, write_task

from nlq import main


def test_numbers_are_those_of_lm_eval(run, tmp_path, capsys, monkeypatch, small_index):
    options = ["--limit", "10", "--batch_size", "4", "--num_fewshot", "1"]
    task, output = write_task(tmp_path), tmp_path / "ours.json"
    assert main(["evaluate", str(run[0]), "--tasks", task, *options, "--output", str(output)]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[1], *row[-2:]) for row in table[1:]] == [("acc", "0.2500", "10"), ("brier_score", "-", "10")]
    theirs = lm_eval_results(monkeypatch, run[0], task, tmp_path / "theirs.json", *options)
    ours = json.loads(output.read_text())["results"]
    assert ours.keys() == theirs.keys() == {"my_task"}
    numbers = {name: value for name, value in theirs["my_task"].items() if isinstance(value, float)}
    assert len(numbers) == 3
    assert {name: ours["my_task"][name] for name in numbers} == pytest.approx(numbers, abs=1e-5)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--tasks", "nlq_brackets"], ["there is no task 'nlq_brackets'; `lm-eval ls tasks` lists all"]),
        (["--tasks", "own.yaml"], ["'own.yaml' cannot be loaded", "Hub"]),
        (["--tasks", "own.yaml,other.yaml"], ["there is no task 'other.yaml'"]),
        (["--tasks", "own.yaml", "--dataset", "x.txt"], ["--dataset", "--tasks"]),
        (["--limit", "3"], ["--limit needs --tasks"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_input_gets_one_line(arguments, parts, run, tmp_path, monkeypatch, capsys, small_index):
    monkeypatch.chdir(tmp_path)
    task = {"task": "own", "dataset_path": "owner/nothing-there", "test_split": "test", "doc_to_text": "text"}
    Path("own.yaml").write_text(yaml.safe_dump(task))
    assert main(["evaluate", str(run[0]), *arguments]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("nlq: error: ") and all(part in line for part in parts), line


def test_without_lm_eval(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(run[0]), "--tasks", "arc_easy"]) == 1
    assert "pip install modeling-nlq[eval]" in capsys.readouterr().err
