"""`nlq compare --status` and the options of the engines."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modeling_nlq.training import train
from modeling_nlq.training.api import compare
from modeling_nlq.training.comparison.status import describe_status
from modeling_nlq.training.run import ray_jobs
from nlq import main


def write_progress(folder, name, **fields):
    content = {"state": "running", "step": 3, "steps": 8, "loss": 5.25, "host": "node-1", "pid": 7, "error": None}
    (folder / "runs" / f"{name}.progress.json").write_text(json.dumps({**content, "updated": time.time(), **fields}))


class TestStatus:
    def test_status_of_a_finished_comparison(self, finished, tmp_path, monkeypatch, capsys):
        """The folder says it all: of the comparison's file, only the name is read."""
        monkeypatch.chdir(tmp_path)
        Path("runs").mkdir()
        Path("runs/compare-mine").symlink_to(finished[0])
        Path("mine.yaml").write_text("recipe: missing.yaml\nmodels: {}\n")
        assert main(["compare", "mine.yaml", "--status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "21 of 21 runs finished, 0 begun, 0 waiting"
        assert re.search(r"^absurd +6 of 6 +3 of 3 +none$", "\n".join(lines), flags=re.MULTILINE)
        assert re.search(r"^one rate absurd +6 of 6 +3 of 3 +0\.\d+", "\n".join(lines), flags=re.MULTILINE)

    def test_at_work(self, finished, tmp_path):
        folder = tmp_path / "results"
        shutil.copytree(finished[0], folder)
        base = [f"base/rate-0.01-seed-{seed}" for seed in range(3)]
        for name in (*base, "one rate absurd/rate-1000-seed-1"):
            shutil.rmtree(folder / "runs" / name)
        write_progress(folder, base[0])
        write_progress(folder, base[1], updated=time.time() - 3600)
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        write_progress(folder, "one rate absurd/rate-1000-seed-1", host=socket.gethostname(), pid=ended.pid)
        failed = {"state": "failed", "error": "OSError: no memory", "step": 0, "steps": None, "loss": None}
        write_progress(folder, base[2], **failed)
        write_progress(folder, "twin/rate-0.01-seed-0")  # left behind by a finished run
        text = "\n".join(describe_status(folder))
        for line in (
            r"base/rate-0.01-seed-0: running, step 3 of 8, loss 5.2500, node-1, process 7, \d s ago",
            r"base/rate-0.01-seed-1: interrupted, step 3 of 8, .* 3600 s ago",
            r"one rate absurd/rate-1000-seed-1: interrupted, step 3 of 8, .* \d s ago",
            r"base/rate-0.01-seed-2: failed, step 0 of \?, .*, OSError: no memory",
            r"one rate absurd +5 of 6 +2 of 3 +0\.\d+",
        ):
            assert re.search(f"^{line}", text, flags=re.MULTILINE), line
        assert "twin/rate" not in text and "17 of 21 runs finished, 4 begun, 0 waiting" in text


class TestEngines:
    def test_a_comparison_refuses_options_in_one_line(self, make_file, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(ray_jobs, "ray", None)
        for options, message in (
            (["--gpus-per-run", "1"], "gpus_per_run: only the engine 'ray' has that; set --engine ray"),
            (["--jobs", "0"], "jobs=0 must be at least 1"),
            (["--engine", "ray", "--jobs", "1"], "jobs: the engine 'ray' makes as many runs at a time as"),
            (["--engine", "ray"], "the engine 'ray' needs Ray: pip install modeling-nlq[ray]"),
        ):
            assert main(["compare", make_file(), "--output_dir", str(tmp_path / "results"), *options]) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"nlq: error: {message}")
        assert not (tmp_path / "results").exists()

    def test_training_refuses_options_in_one_line(self, recipe_file, tmp_path, monkeypatch):
        monkeypatch.setattr(ray_jobs, "ray", None)
        folder = tmp_path / "run"
        for options, message in (
            ({"workers": 2}, "workers: only the engine 'ray' has that"),
            ({"engine": "slurm"}, "engine='slurm' must be 'local' or 'ray'"),
            ({"output_dir": "s3://bucket/run"}, "output_dir=s3://bucket/run is an address; name a folder"),
        ):
            with pytest.raises(ValueError, match=message):
                train(recipe_file, **{"output_dir": folder, **options})
        with pytest.raises(ValueError, match="output_dir=memory://results is an address; name a folder"):
            compare("demo", "memory://results")
        with pytest.raises(ValueError, match="engine='dask' must be 'local' or 'ray'"):
            compare("demo", engine="dask")
        with pytest.raises(ImportError, match="needs Ray"):
            train(recipe_file, output_dir=folder, engine="ray")
        assert not folder.exists()
