"""A task of lm_eval with data of its own, and lm_eval's own command, called in this process."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.paths import REPOSITORY


def write_task(folder: Path) -> str:
    """Writes the task `my_task` of docs/evaluation.md with 20 items of four choices, and returns its YAML file."""
    items = [
        {
            "text": f"import {index} {index + 1}",
            "choices": [f" {index + step}" for step in range(2, 6)],
            "answer": index % 4,
        }
        for index in range(20)
    ]
    (folder / "my-items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    page = (REPOSITORY / "docs" / "evaluation.md").read_text()
    task = re.search(r"```yaml\n(# my-task.yaml\n.*?)```", page, flags=re.DOTALL)[1]
    (folder / "my-task.yaml").write_text(task.replace("my-items.jsonl", str(folder / "my-items.jsonl")))
    return str(folder / "my-task.yaml")


def lm_eval_results(monkeypatch: pytest.MonkeyPatch, folder: Path, task: str, output: Path, *options: str) -> dict:
    """The results of lm_eval's command for a saved model and a task's YAML file; `output` is JSON, its name gets the
    time of day.
    """
    command = ["lm_eval", "run", "--model", "hf", "--device", "cpu", "--tasks", task, *options]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--output_path", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    return json.loads(next(output.parent.glob(f"{output.stem}_*.json")).read_text())["results"]
