"""The working directory may be a stranger's: nothing in it runs or is read, but what the user names."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib import rc_context, rcParams
from support.lm_eval_command import write_task

import nlq
from modeling_nlq.configuration import descriptions, find
from modeling_nlq.training.comparison import report
from modeling_nlq.training.comparison.local import environment_of_one_run
from modeling_nlq.training.loading import is_saved_model
from modeling_nlq.training.run import tasks
from modeling_nlq.training.run.train import plot_losses
from modeling_nlq.training.screening import sections


@pytest.fixture
def planted(tmp_path, monkeypatch):
    (tmp_path / "here" / "rouge").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for file in ("colorsys.py", "pip.py", "selectors.py", "rouge/rouge.py", "rouge.py"):
        Path(file).write_text(f"open({str(tmp_path / 'planted')!r}, 'w').close()\n")
    return tmp_path / "planted"


@pytest.mark.parametrize("before", [None, "", "1"])
@pytest.mark.parametrize("arguments", [["-c", "import colorsys"], ["-m", "colorsys"]])
def test_processes(arguments, before, planted, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)

    def run(words=None):
        subprocess.run([sys.executable, *arguments], check=True)
        return 3

    monkeypatch.setattr(nlq, "_run", run)
    assert nlq.main([]) == 3
    with environment_of_one_run():
        run()
    assert not planted.exists() and os.environ.get("PYTHONSAFEPATH") == before


@pytest.mark.parametrize("kind, name", {"comparisons": "demo", "recipes": "heal", "models": "tiny-linear"}.items())
def test_shipped_names(kind, name, planted):
    first = descriptions("recipes")
    Path(name).write_text("# Hostile.\n")
    assert find(kind, name).parent.name == kind and descriptions("recipes") == first
    assert find(kind, f"./{name}") == Path(name)
    os.replace(name, "mine.yaml")
    assert find(kind, "mine.yaml") == Path("mine.yaml")
    Path(name).mkdir()
    assert is_saved_model(name) == (kind != "models") and is_saved_model(f"./{name}")


@pytest.mark.parametrize("name", ["arc_easy", "longproc_html_to_tsv_0.5k", "mmlu"])
def test_task_names(name, planted, small_index):
    Path(name).write_text(f"task: {name}\n")
    with pytest.raises(ValueError, match="there is no task"):
        tasks.check_tasks(name)
    tasks.check_tasks(f"./{name}")
    os.replace(name, "mine.yml")
    tasks.check_tasks(["mine.yml"])


@pytest.mark.parametrize("metric", [None, "rouge"])
def test_what_lm_eval_calls(metric, run, planted, tmp_path):
    """`git` reads files that `.git` names and runs commands, `pip` is imported, and a metric is a folder."""
    (tmp_path / "private").write_text("the private key")
    for folder in (Path(".git"), tmp_path / ".git"):
        folder.mkdir()
        (folder / "HEAD").write_text(f"ref: {tmp_path / 'private'}\n")
    task = Path(write_task(tmp_path))
    if metric is not None:
        task.write_text(task.read_text().replace("metric: acc", f"metric: {metric}", 1))
    status = nlq.main(["evaluate", str(run[0]), "--tasks", str(task), "--limit", "2", "--output", "out.json"])
    assert not planted.exists() and (metric is not None or status == 0)
    if status == 0:
        assert "private" not in Path("out.json").read_text()


def test_settings_of_matplotlib(tmp_path, monkeypatch):
    """A `matplotlibrc` may run LaTeX, which reads files."""

    def draw(*_):
        raise LookupError(rcParams["text.usetex"])

    monkeypatch.setattr(report, "FIGURES", {"a": ("", "", draw)})
    monkeypatch.setattr(sections, "draw_effects", draw)
    monkeypatch.setattr("modeling_nlq.training.run.train.Figure", lambda **_: draw())
    outcome = SimpleNamespace(trend=None, interactions=None, largest=None, effects=True)
    plot = partial(plot_losses, [], tmp_path / "loss.png", "", "token")
    for write in (
        plot,
        partial(report.write_report, outcome, tmp_path),
        partial(sections.write_report, outcome, tmp_path),
    ):
        with rc_context({"text.usetex": True}), pytest.raises(LookupError, match="False"):
            write()
