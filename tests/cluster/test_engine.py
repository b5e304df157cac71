"""The engine `ray` gives the numbers of the local engine: on several nodes, and with several workers a run."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import yaml
from support.own_parts import DISTANCE
from support.ray_cases import finished_runs, process_of, running, wait_until
from support.runs import logged_losses, without_times

from modeling_nlq.training.api import compare, load_plan, train_with
from modeling_nlq.training.comparison.local import LocalEngine
from modeling_nlq.training.comparison.on_ray import RayEngine
from modeling_nlq.training.comparison.results import read_outcome
from modeling_nlq.training.comparison.run import run_comparison
from modeling_nlq.training.files import read_json, read_yaml
from modeling_nlq.training.result import RunResult
from modeling_nlq.training.run.recipe import load_recipe
from nlq import main


class TestSameNumbers:
    def test_three_nodes_and_what_is_left_of_a_local_comparison(self, made_locally, start_cluster, tmp_path, capfd):
        file, expected, _ = made_locally
        start_cluster(1, 1, 1)
        folder = tmp_path / "results"
        command = ["compare", file, "--output_dir", str(folder), "--engine", "ray", "--cpus-per-run", "1"]
        assert main(command) == 0
        assert without_times(read_outcome(folder / "results.json")) == without_times(expected)
        printed = capfd.readouterr()
        assert "360/360" in printed.err and printed.out.endswith(f"report: {folder / 'report.html'}\n")
        assert all(log.read_text().count("train_runtime") == 1 for log in folder.glob("runs/*/*.log"))
        assert not list(folder.glob("runs/*/*/checkpoint-*")) and not list(folder.glob("runs/*/*.progress.json"))
        assert list(folder.glob(".data/*/blocks.json"))

        # Each engine keeps the finished runs of the other
        before = finished_runs(folder)
        shutil.rmtree(folder / "runs" / "squared" / "rate-0.01-seed-0")
        kept = finished_runs(folder)
        assert without_times(compare(file, folder, cpus_per_run=1)) == without_times(expected)
        assert kept.items() <= finished_runs(folder).items() and len(finished_runs(folder)) == len(before)

    def test_an_idea_of_the_users_own(self, recipe_file, comparison_file, start_cluster, tmp_path):
        """A part and an activation in one file, which no node has."""
        file = Path(
            comparison_file(
                models={
                    "base": {},
                    "distance": {"switches": {"attention_parts": ["distance"]}},
                    "bell": {"switches": {"attention_activation": "bell"}},
                },
                recipe={**yaml.safe_load(recipe_file.read_text()), "parts": ["my_idea.py"]},
                seeds=[0],
            )
        )
        file.with_name("my_idea.py").write_text(
            f"{DISTANCE}\n\nfrom modeling_nlq import register_attention_activation\n"
            "register_attention_activation('bell', lambda s: torch.exp(-s * s), non_negative=True, exist_ok=True)\n"
        )
        comparison = load_plan(str(file))
        file.with_name("my_idea.py").unlink()
        start_cluster(1, 1)
        results = run_comparison(comparison, tmp_path / "ray", RayEngine(cpus_per_run=1))
        expected = run_comparison(comparison, tmp_path / "local", LocalEngine(1))
        assert without_times(results) == without_times(expected)

    def test_no_cluster_is_running(self, made_locally, tmp_path):
        file, expected, local = made_locally
        shutil.copytree(local, tmp_path / "results")
        shutil.rmtree(tmp_path / "results" / "runs" / "squared" / "rate-0.01-seed-0")
        results = compare(file, tmp_path / "results", engine="ray", cpus_per_run=1)
        assert without_times(results) == without_times(expected)


class TestWorkers:
    def test_two_workers_a_run_of_which_one_is_killed(self, two_runs, start_cluster, tmp_path):
        file, one = two_runs
        start_cluster(1, 1)
        folder = tmp_path / "two"
        killer = threading.Thread(
            target=lambda: os.kill(process_of(wait_until(lambda: running(folder))[0]), signal.SIGKILL)
        )
        killer.start()
        two = run_comparison(load_plan(file), folder, RayEngine(workers_per_run=2))
        killer.join()
        assert sum("Going on from" in log.read_text() for log in folder.glob("runs/*/*-0.log")) == 1
        for name, model in two.largest.models.items():
            for run, alone in zip(model.runs, one.largest.models[name].runs, strict=True):
                assert run.result.data.token_stream == alone.result.data.token_stream
                assert run.test_loss == pytest.approx(alone.test_loss, abs=1e-5)
                losses, expected = (dict(item.history.train_loss) for item in (run, alone))
                assert losses == pytest.approx(expected, abs=1e-5)
                assert RunResult.load(folder / run.folder).machine.processes == 2

    def test_one_training_by_two_workers(self, recipe_file, start_cluster, tmp_path):
        start_cluster(1, 1)
        alone = tmp_path / "alone"
        assert main(["train", str(recipe_file), "--output_dir", str(alone)]) == 0
        folder = tmp_path / "two"
        overrides = {
            "output_dir": folder,
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 4,
            "explore": True,
        }
        metrics = train_with("ray", load_recipe(recipe_file, overrides), workers=2)
        assert metrics.machine.processes == 2 and metrics.data.token_stream == RunResult.load(alone).data.token_stream
        history = read_json(folder / "trainer_state.json")["log_history"]
        losses = [entry["loss"] for entry in history if "loss" in entry]
        assert losses == pytest.approx(logged_losses(alone), abs=2e-4)
        assert read_yaml(folder / "recipe.yaml")["training"]["gradient_accumulation_steps"] == 1
        assert (folder / "checkpoint-8" / "trainer_state.json").is_file() and (folder / "explore.html").is_file()
