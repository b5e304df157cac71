"""Checks that lost nodes, processes, memory and drivers change no number: runs resume from their last checkpoints."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from support.ray_cases import finished_runs, process_of, running, wait_until
from support.runs import without_times

from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison.on_ray import RayEngine
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.comparison.status import describe_status
from nlq import main


def start_driver(file: str, folder: Path, errors: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "nlq", "compare", file, "--output_dir", str(folder)]
    command += ["--engine", "ray", "--cpus-per-run", "1"]
    with errors.open("w") as stream:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream)


class TestLost:
    def test_killed_worker_and_lost_node(self, made_locally, start_cluster, tmp_path):
        file, expected, _ = made_locally
        cluster = start_cluster(0)
        node = cluster.add_node(num_cpus=1)
        folder, errors = tmp_path / "results", tmp_path / "errors.txt"
        driver = start_driver(file, folder, errors)
        first = wait_until(lambda: running(folder))[0]
        status = "\n".join(describe_status(folder))
        os.kill(process_of(first), signal.SIGKILL)
        # The lost run may resume before or after the others
        second = wait_until(lambda: finished_runs(folder) and [run for run in running(folder) if run != first])[0]
        cluster.remove_node(node, allow_graceful=False)
        kept = finished_runs(folder)
        cluster.add_node(num_cpus=1)
        assert driver.wait(timeout=300) == 0, errors.read_text()

        assert without_times(read_outcome(folder / "results.json")) == without_times(expected)
        assert kept and kept.items() <= finished_runs(folder).items()
        # A process of the second may have lived on, and finished it
        for run, said in ((first, "Going on from"), (second, "Going on from|is finished")):
            assert re.search(said, run.with_name(f"{run.name}.log").read_text())
        assert "0 of 3 runs finished, 1 begun, 2 waiting" in status
        assert re.search(rf"{first.name}: running, step \d+ of (120|\?)", status)

    def test_killed_driver(self, two_runs, start_cluster, tmp_path, capsys):
        file, expected = two_runs
        start_cluster(0, 1)
        folder = tmp_path / "results"
        driver = start_driver(file, folder, tmp_path / "errors.txt")
        wait_until(lambda: finished_runs(folder) and running(folder))
        worker = process_of(running(folder)[0])
        assert main(["compare", file, "--output_dir", str(folder), "--engine", "ray", "--cpus-per-run", "1"]) == 1
        assert "is in use by another process" in capsys.readouterr().err
        driver.kill()
        driver.wait()
        kept = finished_runs(folder)
        wait_until(lambda: not psutil.pid_exists(worker))
        results = run_comparison(load_plan(file), folder, RayEngine(cpus_per_run=1))
        assert without_times(results) == without_times(expected)
        assert kept.items() <= finished_runs(folder).items()

    def test_too_little_memory(self, comparison_file, start_cluster, monkeypatch, tmp_path, capsys):
        """The run is begun again as often as asked for. All others are finished."""
        memory = psutil.virtual_memory()
        monkeypatch.setenv("RAY_memory_usage_threshold", str((memory.used + 2.5 * 2**30) / memory.total))
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "50")
        start_cluster(1)
        file = comparison_file(
            models={"base": None, "vast": {"switches": {"intermediate_size": 5_000_000}}}, seeds=[0]
        )
        folder = tmp_path / "results"
        options = ["--engine", "ray", "--cpus-per-run", "1", "--max-retries", "1"]
        assert main(["compare", file, "--output_dir", str(folder), *options]) == 1
        log = folder / "runs" / "vast" / "rate-0.01-seed-0.log"
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.fullmatch(f"nlq: error: run vast/rate-0.01-seed-0 was lost: .*memory.*; see {log}", last)
        assert [path.parts[-3] for path in finished_runs(folder)] == ["base"]
