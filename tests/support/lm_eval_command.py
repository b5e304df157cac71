"""lm_eval's own command, called in this process."""

import json
import sys
from pathlib import Path

import pytest

from modeling_nlq.configuration import find


def lm_eval_results(monkeypatch: pytest.MonkeyPatch, folder: Path, tasks: list[str], output: Path, *options: str) -> dict:
    """The results of lm_eval's command for a saved model and shipped tasks, by task.

    Args:
        monkeypatch: of the test.
        folder: of the model.
        tasks: names of shipped tasks.
        output: a JSON file, whose name gets the time of day.
        options: of the command.
    """
    command = ["lm_eval", "run", "--model", "hf", "--device", "cpu", "--tasks", ",".join(tasks), *options]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--output_path", str(output)]
    command += ["--include_path", str(find("tasks", tasks[0]).parent)]
    monkeypatch.setattr(sys, "argv", command)
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    return json.loads(next(output.parent.glob(f"{output.stem}_*.json")).read_text())["results"]
