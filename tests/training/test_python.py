"""The functions of `modeling_nlq.training`: the examples of docs/python.md run as they stand, one after the other."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.lm_eval_command import write_task

from modeling_nlq import training
from modeling_nlq.training.values import to_json


DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_examples_of_the_page_run(corpus, tmp_path, monkeypatch, capsys):
    text = DOCUMENT.read_text()
    shutil.copy(corpus, tmp_path / "corpus.jsonl")
    write_task(tmp_path)
    (tmp_path / "gates.yaml").write_text(re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {"__name__": "__main__"}
    for example in examples:
        exec(compile(example, DOCUMENT.name, "exec"), names)
    assert {name for name in names if name in training.__all__} == set(training.__all__)
    assert json.loads(Path("runs/short/config.json").read_text())["attention_activation"] == "sigmoid"
    assert Path("runs/gates/results.json").read_text() == to_json(names["results"])
    assert Path("runs/gates/report.html").is_file()
    assert names["done"].difference < 1e-5 and names["planned"].url is None
    assert "model.safetensors" in capsys.readouterr().out
    assert names["metrics"]["eval_loss"] > 0


def test_functions_are_found_by_name():
    for name in training.__all__:
        function = getattr(training, name)
        assert function.__name__ == name != function.__module__.rpartition(".")[2]
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        training.trian  # noqa: B018
