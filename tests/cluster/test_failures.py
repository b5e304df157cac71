"""What is lost with a node, a process, the memory or the driver is made again from the last checkpoint, with equal numbers."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import yaml
from support.ray_cases import finished_runs, process_of, running, wait_until
from support.runs import without_times

from modeling_nlq.training.comparison.on_ray import RayEngine
from modeling_nlq.training.comparison.reading import load_comparison
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.comparison.status import describe_status
from nlq import main


def start_driver(file: str, folder: Path, errors: Path) -> subprocess.Popen:
    """Starts `nlq compare --engine ray`."""
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
        # The lost run goes on before the others or after them
        second = wait_until(lambda: finished_runs(folder) and [run for run in running(folder) if run != first])[0]
        cluster.remove_node(node, allow_graceful=False)
        kept = finished_runs(folder)
        cluster.add_node(num_cpus=1)
        assert driver.wait(timeout=200) == 0, errors.read_text()

        assert without_times(json.loads((folder / "results.json").read_text())) == without_times(expected)
        assert kept and kept.items() <= finished_runs(folder).items()
        # A process of the second may have lived on, and finished it
        for run, said in ((first, "Going on from"), (second, "Going on from|is finished")):
            assert re.search(said, run.with_name(f"{run.name}.log").read_text())
        assert "0 of 3 runs finished, 1 running, 2 waiting" in status
        assert re.search(rf"{first.name} +running +(\d+ of 120)? +", status)

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
        results = run_comparison(load_comparison(file), folder, RayEngine(cpus_per_run=1))
        assert without_times(results) == without_times(expected)
        assert kept.items() <= finished_runs(folder).items()

    def test_too_little_memory(self, comparison_file, start_cluster, monkeypatch, tmp_path, capsys):
        """The run is begun again as often as asked for. All others are finished."""
        memory = psutil.virtual_memory()
        monkeypatch.setenv("RAY_memory_usage_threshold", str((memory.used + 2.5 * 2**30) / memory.total))
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "50")
        start_cluster(1)
        file = comparison_file(models={"base": None, "vast": {"switches": {"intermediate_size": 5_000_000}}}, seeds=[0])
        folder = tmp_path / "results"
        options = ["--engine", "ray", "--cpus-per-run", "1", "--max-retries", "1"]
        assert main(["compare", file, "--output_dir", str(folder), *options]) == 1
        log = folder / "runs" / "vast" / "rate-0.01-seed-0.log"
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.fullmatch(f"nlq: error: run vast/rate-0.01-seed-0 was lost: .*memory.*; see {log}", last)
        assert [path.parts[-3] for path in finished_runs(folder)] == ["base"]


class TestFault:
    def test_run_that_fails_by_its_own_fault(self, recipe_file, comparison_file, start_cluster, tmp_path, capsys):
        """It is not begun again, and does not stop the others."""
        start_cluster(1)
        recipe = {**yaml.safe_load(recipe_file.read_text()), "parts": ["faulty.py"]}
        models = {"base": None, "faulty": {"switches": {"attention_activation": "faulty"}}}
        file, folder = Path(comparison_file(recipe=recipe, models=models, seeds=[0])), tmp_path / "results"
        file.with_name("faulty.py").write_text(
            "import os\n"
            "from modeling_nlq import register_attention_activation\n"
            "def faulty(scores):  # on a node, which sees no GPU\n"
            "    if scores.dim() == 4 and os.environ.get('CUDA_VISIBLE_DEVICES') == '':\n"
            "        raise ValueError('no GPU')\n"
            "    return scores.relu()\n"
            "register_attention_activation('faulty', faulty, non_negative=True, exist_ok=True)\n"
        )
        assert main(["compare", str(file), "--output_dir", str(folder), "--engine", "ray", "--cpus-per-run", "1"]) == 1
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.fullmatch(r"nlq: error: run faulty/rate-0.01-seed-0 failed: \w+: .*; see .*/rate-0.01-seed-0.log", last)
        log = (folder / "runs" / "faulty" / "rate-0.01-seed-0.log").read_text()
        assert log.count("Traceback (most recent call last)") >= 1
        assert [path.parts[-3] for path in finished_runs(folder)] == ["base"]
        status = "\n".join(describe_status(folder))
        assert "1 of 2 runs finished, 0 running, 0 waiting, 1 failed or interrupted" in status

    def test_request_that_cannot_be_met(self, comparison_file, start_cluster, s3, tmp_path, capsys):
        start_cluster(2)
        for options, message in (
            (["--cpus-per-run", "9"], "1 workers of a run take 9 CPUs each, and the nodes have 2 CPUs and 0 GPUs"),
            (["--output_dir", "s3://nobody/study"], "s3://nobody/study cannot be "),
            (["--output_dir", "s5://bucket/study"], "s5://bucket/study cannot be opened: "),
        ):
            command = ["compare", comparison_file(), "--engine", "ray", "--output_dir", str(tmp_path / "results"), *options]
            assert main(command) == 1
            lines = capsys.readouterr().err.strip().splitlines()
            assert len(lines) == 1 and message in lines[0], lines
            assert not (tmp_path / "results").exists()

    def test_without_permission(self, comparison_file, s3, monkeypatch, tmp_path, capsys):
        import s3fs

        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        s3fs.S3FileSystem.clear_instance_cache()
        assert main(["compare", comparison_file(), "--engine", "ray", "--output_dir", "s3://bucket/forbidden"]) == 1
        s3fs.S3FileSystem.clear_instance_cache()
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and "s3://bucket/forbidden cannot be " in lines[0]
