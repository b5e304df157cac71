"""Downstream tasks: items that are right, lm_eval's own numbers, and one line for each error."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support.lm_eval_command import lm_eval_results

from modeling_nlq.configuration import names
from modeling_nlq.training.run.documents import load_documents
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.task_items import CHOICES, TASKS, Source, held_out_documents, make_items, task_dataset
from modeling_nlq.training.run.trained_on import record_run
from nlq import main


@pytest.fixture(scope="module")
def items() -> dict[str, list[dict]]:
    assert names("tasks") == sorted(TASKS)
    return {task: make_items(task, held_out_documents()) for task in TASKS}


def test_documents_are_none_that_a_comparison_trains_on():
    documents = load_documents(load_recipe("study").recipe)
    held_out = {row["text"] for row in held_out_documents()}
    assert held_out <= {text for split in ("validation", "test") for text in documents[split]["text"]}
    assert not held_out & set(documents["train"]["text"])


@pytest.mark.thin(3)
@pytest.mark.parametrize("task", TASKS)
def test_items_are_right(task, items):
    texts = {row["path"]: row["text"] for row in held_out_documents()}
    assert len(items[task]) >= 500  # Debian packs the standard library without its own tests
    for item in items[task]:
        text, offset, choices = texts[item["path"]], item["offset"], item["choices"]
        assert text.startswith(choices[item["answer"]], offset)
        last = item["context"].splitlines()[-1]
        assert text[:offset].endswith(last) and 0 < len(item["context"]) <= 256
        assert len(set(choices)) == CHOICES
    assert len({(item["path"], item["offset"]) for item in items[task]}) == len(items[task])
    positions = Counter(item["answer"] for item in items[task])
    assert max(positions.values()) - min(positions.values()) <= 1


@pytest.mark.parametrize("task", TASKS)
def test_choices_do_not_give_the_answer_away(task, items):
    """Guessing 1 of 4; the bound is five standard errors above."""
    for length in (len, lambda choice: -len(choice)):
        right = 0.0
        for item in items[task]:
            values = [length(choice) for choice in item["choices"]]
            right += (values[item["answer"]] == max(values)) / values.count(max(values))
        assert right / len(items[task]) < 0.25 + 5 * (0.25 * 0.75 / len(items[task])) ** 0.5


def test_items_of_a_short_text():
    text = "def first(alpha, beta):\n    total = alpha[beta]\n    return first(total, [beta])\n"
    places = {task: list(maker.find_places(Source("x.py", text))) for task, maker in TASKS.items()}
    arguments = places["nlq_argument_names"]
    assert [(place.before + place.answer, place.near) for place in arguments] == [
        (" alpha", ("beta",)),
        ("beta", ("alpha",)),
        ("beta", ("alpha",)),
    ]
    assert arguments[0].context == "def first(alpha, beta):\n    total ="
    assert [place.answer + place.after for place in places["nlq_brackets"]] == ["):\n   ", "]\n   ", "])\n"]
    assert [place.answer for place in places["nlq_next_identifier"]] == ["alpha", "beta", "first", "total", "beta"]
    # A signature that is longer than a context, in the last lines of a file
    long = f"def first({', '.join(f'argument_{index}' for index in range(40))}):\n    return argument_1"
    assert not [*TASKS["nlq_argument_names"].find_places(Source("x.py", long))]


@pytest.mark.slow
def test_numbers_are_those_of_lm_eval(run, tmp_path, capsys, monkeypatch, small_index):
    options = ["--limit", "8", "--batch_size", "4"]
    assert main(["evaluate", str(run[0]), "--tasks", ",".join(TASKS), *options, "--output", str(tmp_path / "ours.json")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 3 * len(TASKS) and table[1].split()[-2:] == ["0.2500", "8"]
    theirs = lm_eval_results(monkeypatch, run[0], list(TASKS), tmp_path / "theirs.json", *options)
    ours = json.loads((tmp_path / "ours.json").read_text())
    assert ours["results"].keys() == theirs.keys() == set(TASKS)
    for task, values in theirs.items():
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        assert len(numbers) == 6
        assert {name: ours["results"][task][name] for name in numbers} == pytest.approx(numbers, abs=1e-5)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--tasks", "nlq_bracket"], ["'nlq_bracket'", "shipped are", "nlq_brackets"]),
        (["--tasks", "own.yaml"], ["'own.yaml' cannot be loaded", "Hub"]),
        (["--tasks", "nlq_brackets", "--dataset", "x.txt"], ["--dataset", "--tasks"]),
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
    assert main(["evaluate", str(run[0]), "--tasks", "nlq_brackets"]) == 1
    assert "pip install modeling-nlq[eval]" in capsys.readouterr().err


def test_a_model_that_has_seen_the_documents_is_refused(run, tmp_path):
    shutil.copy(run[0] / "config.json", tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: tiny-linear\nvalidation_fraction: 0.01\n")
    with pytest.raises(ValueError, match=r"validation_fraction=0.01 and test_fraction=0.0, so it has seen"):
        task_dataset("nlq_brackets", tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: tiny-linear\nvalidation_fraction: 0.008\ntest_fraction: 0.01\n")
    task_dataset("nlq_brackets", tmp_path)
    (tmp_path / "recipe.yaml").unlink()  # as in a conversion
    (tmp_path / "conversion.json").write_text(json.dumps({"trained_on": record_run({"validation_fraction": 0.01}, None)}))
    with pytest.raises(ValueError, match=r"validation_fraction=0.01 and test_fraction=0.0, so it has seen"):
        task_dataset("nlq_brackets", tmp_path)
