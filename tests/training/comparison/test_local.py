"""Runs of a comparison are made once, resume after an interruption, and are shared between processes."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.paths import REPOSITORY
from support.runs import without_times

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.local import LocalEngine
from modeling_nlq.training.comparison.run import check_same_models, run_comparison
from modeling_nlq.training.files import LOCK_FILE, METRICS_FILE, read_yaml
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.run.subprocess_run import RunFailed
from modeling_nlq.training.values import to_json
from nlq import main


@pytest.mark.parametrize(
    "options, jobs",
    [({}, 1), ({"cpus_per_run": 1}, 4), ({"cpus_per_run": 8}, 1), ({"jobs": 3}, 3)],
)
def test_runs_at_a_time(monkeypatch, options, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert LocalEngine(**options).jobs == jobs


def test_runs_on_a_gpu_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    engines = [LocalEngine(), LocalEngine(jobs=2), LocalEngine(jobs=8), LocalEngine(1, jobs=2)]
    assert [(engine.jobs, engine._threads) for engine in engines] == [(1, 4), (2, 2), (8, 1), (2, 1)]


def test_a_run_is_cancelled_while_its_process_starts(recipe_file, tmp_path):
    engine, ended = LocalEngine(1), []

    class Process:
        def __init__(self, target, args):
            self.is_started = False

        def start(self):
            engine.cancel(["run"])
            self.is_started = True

        def terminate(self):
            assert self.is_started, "a process that has not started cannot be ended"
            ended.append(self)

        def join(self):
            pass

    engine._context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Process)
    recipe = load_recipe(recipe_file, {"output_dir": str(tmp_path / "run")})
    with pytest.raises(RunFailed, match="was ended"):
        engine._make_run("run", recipe, tmp_path)
    assert len(ended) == 1 and not engine._processes


def test_runs_side_by_side(finished, tmp_path):
    """Two runs at a time give the same results to the bit, and a run that dies stops no other."""
    folder, expected, file = finished
    results = tmp_path / "results"
    shutil.copytree(folder, results)
    runs = [results / "runs" / "twin" / f"rate-0.01-seed-{seed}" for seed in range(3)]
    for run in runs:
        shutil.rmtree(run)
    runs[0].write_text("no folder")
    engine = LocalEngine(1, jobs=2)
    with pytest.raises(ChildProcessError, match=r"^run twin/rate-0\.01-seed-0 failed: "):
        run_comparison(load_plan(file), results, engine)
    assert [(run / METRICS_FILE).is_file() for run in runs] == [False, True, True]
    runs[0].unlink()
    assert without_times(run_comparison(load_plan(file), results, engine)) == without_times(expected)


def files_of(folder: Path, pattern: str = "runs/**/*") -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob(pattern) if path.name != LOCK_FILE}


def metrics_of(folder: Path) -> dict[Path, int]:
    return files_of(folder, "runs/*/*/metrics.json")


def refused(capsys, *command: str) -> str:
    capsys.readouterr()
    assert main([*command]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("nlq: error: ") and "Traceback" not in error
    return error


class TestCommand:
    def test_command_ends_with_table_verdicts_and_report(self, finished, capsys):
        folder, results, file = finished
        before = files_of(folder)
        assert main(["compare", file, "--output_dir", str(folder)]) == 0
        assert files_of(folder) == before
        out = capsys.readouterr().out
        for name, effect in results.largest.statistics.effects.items():
            assert re.search(rf"^{re.escape(name)} .*{effect.verdict}$", out, flags=re.MULTILINE)
        assert out.endswith(f"report: {folder / 'report.html'}\n")
        page, table = (folder / "report.html").read_text(), (folder / "results.md").read_text()
        figures = {path.name for path in (folder / "figures").iterdir()}
        assert figures == {"curves.png", "parameters.png", "stability.png"}
        for model in results.largest.models.values():
            for run in [*model.tried, *model.runs]:
                if run.test_loss is not None:
                    assert f"{run.test_loss:.4f}" in page and f"{run.test_loss:.4f}" in table
        assert str(Path(file).parent) not in page + table + to_json(results)

        assert main(["compare", file, "--output_dir", str(folder), "--explore", "true"]) == 0
        # The best of the models that finished all runs stands beside the baseline
        losses = {name: [run.test_loss for run in model.runs] for name, model in results.largest.models.items()}
        best = min((name for name, found in losses.items() if None not in found), key=lambda name: sum(losses[name]))
        explored, page = (folder / "explore.html").read_text(), (folder / "report.html").read_text()
        assert f"<title>Attention of {' and '.join(dict.fromkeys(('base', best)))}</title>" in explored
        assert '<a href="explore.html">' in page and "explore.html" not in table


@pytest.fixture(scope="module")
def two_models(make_file, tmp_path_factory) -> tuple[str, dict, Path]:
    file = make_file(models={"base": None, "squared": {"switches": {"attention_activation": "squared"}}})
    folder = tmp_path_factory.mktemp("uninterrupted") / "results"
    return file, run_comparison(load_plan(file), folder), folder


class TestInterruption:
    @pytest.mark.slow
    def test_killed_and_run_again(self, two_models, tmp_path):
        file, expected, _ = two_models
        folder = tmp_path / "results"
        command = [sys.executable, "-m", "nlq", "compare", file, "--output_dir", str(folder)]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(list(folder.glob("runs/*/*/recipe.yaml"))) < 2:  # a run is finished and another has begun
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(os.getpid() % 10 / 10)  # any moment will do
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        finished = metrics_of(folder)
        # Not in a new process: the run that was being made is still locked for a step
        assert without_times(run_comparison(load_plan(file), folder)) == without_times(expected)
        assert len(finished) < 4 and finished.items() <= metrics_of(folder).items()
        assert len(children) > 1 and not psutil.wait_procs(children, timeout=100)[1], "a run outlived its comparison"


class TestFolder:
    def test_what_a_comparison_was_begun_with_has_changed(self, finished, tmp_path, capsys):
        """The text, and the model: its file has the same name, and another activation inside."""
        folder = tmp_path / "results"
        shutil.copytree(finished[0], folder)
        fingerprint, models = folder / "dataset_fingerprint.txt", folder / "models.json"
        text = fingerprint.read_text()
        assert text.strip() == finished[1].largest.sample.data.fingerprint
        before = files_of(folder)
        changed = models.read_text().replace('"hidden_act": "gelu"', '"hidden_act": "silu"')
        begun = f"has changed since {folder} was begun"
        for file, content, message in (
            (fingerprint, "another\n", f"the dataset {begun} (fingerprint another then, "),
            (models, changed, f"model 'base' {begun} (hidden_act: 'silu' there, 'gelu' now)"),
        ):
            file.write_text(content)
            assert message in refused(capsys, "compare", finished[2], "--output_dir", str(folder))
            fingerprint.write_text(text)
        assert files_of(folder) == before

    def test_folder_of_another_comparison(self, finished, make_file, tmp_path, capsys):
        folder, _, file = finished
        before = files_of(folder)
        changed = "holds another comparison (recipe.training.weight_decay: not set there, 0.3 now)"
        for arguments, message in (
            ((file, "--weight_decay", "0.3"), changed),
            ((make_file(),), "seeds: [0, 1, 2] there, [0, 1] now"),
        ):
            assert message in refused(capsys, "compare", *arguments, "--output_dir", str(folder))
        assert files_of(folder) == before
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "thesis.tex").write_text("all I have")
        assert "holds no comparison" in refused(capsys, "compare", file, "--output_dir", str(tmp_path / "thesis"))
        assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]

    def test_saved_weights_that_changed(self, make_file, run, recipe_file, tmp_path):
        shutil.copytree(run[0], tmp_path / "model")
        saved = dict.fromkeys(("model", "tokenizer"), str(tmp_path / "model"))
        recipe = {**read_yaml(Path(recipe_file)), **saved}
        files = {"now": make_file(recipe=recipe), "then": make_file()}
        scales = {name: load_plan(file).largest for name, file in files.items()}
        check_same_models(tmp_path / "models.json", scales)
        check_same_models(tmp_path / "models.json", scales)
        weights = tmp_path / "model" / "model.safetensors"
        save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights)
        with pytest.raises(ValueError, match=r"model 'base' of 'now' has changed since .* \(other weights\)"):
            check_same_models(tmp_path / "models.json", scales)
        (tmp_path / "models.json").write_text('{"now": {"base": []}}')
        with pytest.raises(ValueError, match="'base' is not a model of this comparison"):
            check_same_models(tmp_path / "models.json", scales)
