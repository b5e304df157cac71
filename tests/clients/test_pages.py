"""The examples of the pages about other programs run as they stand."""

import re
import subprocess
import sys

import pytest
from support.client_cases import continuation
from support.paths import REPOSITORY
from support.serving import server


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), flags=re.DOTALL)


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """The model that the pages call `runs/demo` and `runs/counting`, in the working directory."""
    (tmp_path / "runs").mkdir()
    for name in ("demo", "counting"):
        (tmp_path / "runs" / name).symlink_to(trained("relu", "nonlinear"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "counting"


def test_page_of_exports_runs(folder, capsys):
    onnx, runtime, executorch = blocks("export.md")
    exec(compile(onnx, "export.md", "exec"), {})
    capsys.readouterr()
    exec(compile(runtime, "export.md", "exec"), {})
    expected = [continuation(folder, prompt, 20) for prompt in ("import os", "class Node(object):")]
    assert capsys.readouterr().out == f"{expected}\n"
    exec(compile(executorch, "export.md", "exec"), {})
    assert "torch.Size([1, 8, 300])" in capsys.readouterr().out


def test_page_of_serving_runs(folder, tmp_path, capsys):
    request, batch = blocks("serving.md")
    with server(tmp_path / "log", package=False) as client:
        address = str(client.base_url).removesuffix("/v1/")
        exec(compile(request.replace("http://localhost:8000", address), "serving.md", "exec"), {})
    assert capsys.readouterr().out.strip() == "four five six seven eight nine"
    exec(compile(batch, "serving.md", "exec"), {})
    expected = {continuation(folder, prompt, 6) for prompt in ("one two three", "nine ten", "six seven eight nine")}
    assert set(capsys.readouterr().out.splitlines()) == expected


def test_page_of_distributed_models_runs(folder, tmp_path):
    (script,) = blocks("distributed.md")
    (tmp_path / "split.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "split.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"one two three{continuation(folder, 'one two three', 4)} (64, 32) (32, 32)"
