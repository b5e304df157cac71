"""The controlled comparison: its file, its runs and what they are worth, on models so small that a run takes a second."""

import functools
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from scipy import stats
from transformers import AutoModelForCausalLM, TrainingArguments

from modeling_nlq.configuration import find, names
from modeling_nlq.training.cli import main
from modeling_nlq.training.comparison.local import compare
from modeling_nlq.training.comparison.plan import load_comparison
from modeling_nlq.training.parameters import measure
from modeling_nlq.training.run.recipe import read_yaml
from modeling_nlq.training.run.trainer import load_config, prepare_data


REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def make_file(recipe_file, tmp_path_factory):
    """A function from the fields of a comparison to its file; the recipe is that of the other training tests, a bit longer."""

    def make(**fields) -> str:
        path = tmp_path_factory.mktemp("comparison") / "comparison.yaml"
        content = {
            "recipe": str(recipe_file),
            "baseline": "base",
            "models": {"base": None, "twin": None},
            "learning_rates": [1e-2],
            "seeds": [0, 1],
            "training": {"max_steps": 12, "save_steps": 3, "eval_steps": 6, "report_to": "none"},
            **fields,
        }
        path.write_text(yaml.safe_dump({name: value for name, value in content.items() if value is not None}, sort_keys=False))
        return str(path)

    return make


@pytest.fixture(scope="module")
def finished(make_file, recipe_file, tmp_path_factory) -> tuple[Path, dict, str]:
    """A comparison with what must be found in it: folder, results, file."""
    models = {
        "base": None,
        "twin": None,
        # Scores and logits ten times too large at the start: worse for a long time, whatever the seed
        "planted": {"switches": {"initializer_range": 0.2}},
        "absurd": {"learning_rates": [1e3, 1e30]},  # one ends far off, one in NaN
        "one rate absurd": {"learning_rates": [1e-2, 1e3]},
    }
    training = {"max_steps": 12, "save_steps": 3, "eval_steps": 6, "report_to": "none"}
    recipe = {**read_yaml(Path(recipe_file)), "stability_steps": 1}
    file = make_file(recipe=recipe, models=models, learning_rates=[5e-3, 1e-2], seeds=[0, 1, 2, 3], training=training)
    folder = tmp_path_factory.mktemp("compared") / "results"
    return folder, compare(load_comparison(file), folder), file


def run_files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.suffix != ".lock"}


def without_times(results: dict) -> dict:
    """Results as far as the clock and the memory have no part in them."""
    results = json.loads(json.dumps(results))
    for model in results["models"].values():
        for run in [*model["sweep"], *model["runs"]]:
            for name in ("train_seconds", "tokens_per_second", "peak_memory"):
                run.pop(name)
    return results


class TestFindsWhatIsThere:
    def test_planted_difference(self, finished):
        effect = finished[1]["statistics"]["effects"]["planted"]
        assert effect["verdict"] == "worse" and effect["holm_p"] < 0.05 and effect["loss_improvement"] < 0

    def test_two_copies_of_one_model_are_within_noise(self, finished):
        models = finished[1]["models"]
        assert finished[1]["statistics"]["effects"]["twin"]["verdict"] == "within noise"
        assert [run["test_loss"] for run in models["twin"]["runs"]] == [run["test_loss"] for run in models["base"]["runs"]]

    def test_diverged_model_is_recorded_and_the_rest_completes(self, finished):
        results = finished[1]
        absurd = results["models"]["absurd"]
        assert results["statistics"]["effects"]["absurd"]["verdict"] == "diverged"
        assert absurd["learning_rate"] is None and absurd["runs"] == [] and all(run["diverged"] for run in absurd["sweep"])
        far, without_number = absurd["sweep"]
        assert (
            far["diverged_at"] is None and far["steps"] == 12 and without_number["diverged_at"] == without_number["steps"] == 2
        )
        assert without_number["history"]["stability"]["0"]["entropy"][1] == [2, None]
        assert all(len(model["runs"]) == 4 for name, model in results["models"].items() if name != "absurd")

    def test_one_diverged_rate_is_not_chosen(self, finished):
        model = finished[1]["models"]["one rate absurd"]
        assert model["learning_rate"] == 1e-2 and model["is_at_edge"]
        assert [run["diverged"] for run in model["sweep"]] == [False, True]

    @pytest.mark.slow
    def test_half_the_width_against_all(self, tmp_path):
        """At the size of the shipped comparisons: minutes. Half the layers make no difference that soon."""
        half = {"switches": {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}}
        models = {"half": half, "all": None, "half again": half, "absurd": {"learning_rates": [1e30]}}
        fields = {"recipe": "study", "baseline": "half", "models": models, "learning_rates": [2e-3], "seeds": [0, 1, 2, 3]}
        path = tmp_path / "planted.yaml"
        path.write_text(yaml.safe_dump(fields, sort_keys=False))
        results = compare(load_comparison(str(path), ["--max_steps", "250"]), tmp_path / "results")
        verdicts = {name: effect["verdict"] for name, effect in results["statistics"]["effects"].items()}
        assert verdicts == {"all": "better", "half again": "within noise", "absurd": "diverged"}


class TestRuns:
    def test_rate_is_the_best_of_the_sweep_on_the_validation_split(self, finished):
        folder, results, _ = finished
        for name in ("base", "twin", "planted"):
            model = results["models"][name]
            losses = {}
            for run in model["sweep"]:
                assert run["seed"] == results["sweep_seed"] and run["seed"] not in results["seeds"]
                losses[json.loads((folder / run["folder"] / "metrics.json").read_text())["eval_loss"]] = run["learning_rate"]
            assert model["learning_rate"] == losses[min(losses)]
            assert {run["learning_rate"] for run in model["runs"]} == {model["learning_rate"]}

    def test_reported_loss_is_that_of_the_test_split(self, finished):
        folder, results, file = finished
        comparison = load_comparison(file)
        run = results["models"]["base"]["runs"][1]
        resolved = comparison.resolve(comparison.reported("base", run["learning_rate"])[1], folder / run["folder"])
        _, blocks, _ = prepare_data(resolved.recipe, folder / "tokenizer")
        texts = {split: set(map(bytes, part.dataset["input_ids"][:])) for split, part in blocks.items()}
        assert set(texts) == {"train", "validation", "test"} and not texts["test"] & (texts["train"] | texts["validation"])
        model = AutoModelForCausalLM.from_pretrained(folder / run["folder"]).double().eval()
        rows = torch.from_numpy(blocks["test"].dataset["input_ids"][:].astype(np.int64))
        with torch.no_grad():
            log_probabilities = model(rows).logits[:, :-1].log_softmax(dim=-1)
        expected = -log_probabilities.gather(-1, rows[:, 1:, None]).mean().item()
        assert run["test_loss"] == pytest.approx(expected, rel=1e-5) and run["test_loss"] != run["validation_loss"]

    def test_all_models_of_a_seed_see_the_same_tokens(self, finished):
        results = finished[1]
        assert results["same_tokens"] and len(set(results["token_streams"].values())) == len(results["seeds"]) + 1
        for model in results["models"].values():
            for run in [*model["sweep"], *model["runs"]]:
                if run["diverged_at"] is None:
                    assert run["token_stream"] == results["token_streams"][str(run["seed"])]

    def test_other_tokens_would_be_noticed(self, finished, tmp_path):
        folder, _, file = finished
        copy = tmp_path / "results"
        shutil.copytree(folder, copy)
        metrics_file = next((copy / "runs" / "twin").glob("rate-*-seed-2/metrics.json"))
        metrics_file.write_text(json.dumps({**json.loads(metrics_file.read_text()), "token_stream": "0" * 64}))
        assert not compare(load_comparison(file), copy)["same_tokens"]

    def test_tokens_are_those_that_the_runs_saw(self, finished, tmp_path):
        """The plan counts every batch as full; a run that was stopped saw fewer than the comparison's."""
        folder, results, file = finished
        comparison, copy = load_comparison(file), tmp_path / "results"
        shutil.copytree(folder, copy)
        files = sorted(copy.glob("runs/*/*/metrics.json"), key=lambda path: path.parent.name.startswith("rate-"))

        def change(file, **values):
            file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

        for index, metrics_file in enumerate(files):
            change(metrics_file, tokens_seen=5000 + index)
        change(files[-1], diverged=True, diverged_at=3)  # a reported run, which chooses no rate
        assert compare(comparison, copy)["tokens_per_run"] == 5000 + len(files) - 2
        for metrics_file in files:
            change(metrics_file, diverged=True, diverged_at=3)
        assert compare(comparison, copy)["tokens_per_run"] == comparison.tokens_per_run == results["tokens_per_run"] == 6144

    def test_gap_of_the_best_rates_is_in_deviations_of_a_run(self, finished):
        folder, results, _ = finished

        def losses(runs):
            return [json.loads((folder / run["folder"] / "metrics.json").read_text())["eval_loss"] for run in runs]

        model = results["models"]["planted"]
        first, second = losses(model["sweep"])
        assert model["rate_gap"] == pytest.approx(abs(first - second) / np.std(losses(model["runs"]), ddof=1))
        # One rate diverged, or both did
        assert results["models"]["one rate absurd"]["rate_gap"] is results["models"]["absurd"]["rate_gap"] is None

    def test_finished_runs_are_not_repeated(self, finished):
        folder, results, file = finished
        before = run_files(folder)
        assert compare(load_comparison(file), folder) == results
        assert run_files(folder) == before

    def test_runs_differ_in_nothing_but_what_was_asked(self, finished):
        folder, results, _ = finished
        base, planted = (
            read_yaml(folder / results["models"][name]["runs"][0]["folder"] / "recipe.yaml") for name in ("base", "planted")
        )
        assert planted["switches"].pop("initializer_range") == 0.2
        for recipe in (base, planted):
            recipe["training"].pop("learning_rate")
        assert base == planted and base["record_stability"]

    def test_stability_is_recorded(self, finished):
        history = finished[1]["models"]["base"]["runs"][0]["history"]
        assert [step for step, _ in history["stability"]["0"]["entropy"]] == list(range(1, 13))
        assert history["gradient_norm"] and len(history["validation_loss"]) == 2


class TestReport:
    def test_command_ends_with_table_verdicts_and_report(self, finished, capsys):
        folder, results, file = finished
        assert main(["compare", file, "--output_dir", str(folder)]) == 0
        out = capsys.readouterr().out
        for name, effect in results["statistics"]["effects"].items():
            assert re.search(rf"^{re.escape(name)} .*{effect['verdict']}$", out, flags=re.MULTILINE)
        assert out.endswith(f"report: {folder / 'report.html'}\n")
        page, table = (folder / "report.html").read_text(), (folder / "results.md").read_text()
        figures = {path.name for path in (folder / "figures").iterdir()}
        assert figures == {"curves.png", "parameters.png", "flops.png", "stability.png"}
        for model in results["models"].values():
            for run in [*model["sweep"], *model["runs"]]:
                if run["test_loss"] is not None:
                    assert f"{run['test_loss']:.4f}" in page and f"{run['test_loss']:.4f}" in table
        assert str(Path(file).parent) not in page + table + json.dumps(results)

    def test_folder_knows_how_to_go_on(self, finished):
        folder, results, _ = finished
        again = load_comparison(str(folder / "comparison.yaml"))
        assert without_times(compare(again, folder))["models"] == without_times(results)["models"]


class TestStatistics:
    """What is reported equals a computation that starts at the losses in `results.json`."""

    @pytest.fixture(scope="class")
    def results(self, finished):
        return json.loads((finished[0] / "results.json").read_text())

    def losses(self, results, name):
        return [run["test_loss"] for run in results["models"][name]["runs"]]

    def test_noise_floor(self, results):
        base = self.losses(results, "base")
        mean = sum(base) / 4
        deviation = math.sqrt(sum((loss - mean) ** 2 for loss in base) / 3)
        assert results["statistics"]["noise_floor"] == pytest.approx(deviation)
        assert results["statistics"]["noise_floor_percent"] == pytest.approx(100 * deviation / mean)

    def test_intervals_and_corrected_p_values(self, results):
        # Twin and "one rate absurd" may equal the baseline to the last bit: their differences have no variance to pool
        base = self.losses(results, "base")
        p_values = {}
        for name in ("twin", "planted", "one rate absurd"):
            effect = results["statistics"]["effects"][name]
            differences = [loss - other for loss, other in zip(self.losses(results, name), base)]
            assert effect["mean_difference"] == pytest.approx(sum(differences) / 4, abs=1e-12)
            p_values[name] = 1.0
            if any(differences):
                deviation, freedom = effect["difference_deviation"], 3
                if effect["is_pooled"]:
                    pool = results["statistics"]["pool"]
                    deviation, freedom = max(deviation, pool["deviation"]), pool["degrees_of_freedom"]
                else:
                    assert deviation == pytest.approx(np.std(differences, ddof=1))
                mean, error = np.mean(differences), deviation / 2
                p_values[name] = 2 * stats.t.sf(abs(mean / error), freedom)
                low, high = mean + np.array([-1, 1]) * stats.t.ppf(0.975, freedom) * error
                percent = 100 * np.array([-high, -low]) / np.mean(base)
                assert effect["loss_improvement_interval"] == pytest.approx(percent, abs=1e-9)
                perplexity = 100 * (1 - np.exp([high, low]))
                assert effect["perplexity_improvement_interval"] == pytest.approx(perplexity, abs=1e-9)
            assert effect["p"] == pytest.approx(p_values[name])
        corrected = 0.0
        for rank, name in enumerate(sorted(p_values, key=p_values.get)):
            corrected = max(corrected, min(1.0, (3 - rank) * p_values[name]))
            assert results["statistics"]["effects"][name]["holm_p"] == pytest.approx(corrected)


class TestInterruption:
    @pytest.fixture(scope="class")
    def uninterrupted(self, make_file, tmp_path_factory):
        file = make_file(models={"base": None, "squared": {"switches": {"attention_activation": "squared"}}})
        folder = tmp_path_factory.mktemp("uninterrupted") / "results"
        return file, compare(load_comparison(file), folder), folder

    def start(self, file: str, folder: Path, **options) -> subprocess.Popen:
        command = [sys.executable, "-m", "modeling_nlq.training", "compare", file, "--output_dir", str(folder)]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)

    def wait_for(self, condition, process, seconds=400):
        end = time.monotonic() + seconds
        while not condition():
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)

    def test_killed_and_run_again(self, uninterrupted, tmp_path):
        file, expected, _ = uninterrupted
        folder = tmp_path / "results"
        process = self.start(file, folder)
        moment = random.Random(os.getpid())
        try:
            # A run is finished and another has begun; then any moment will do
            self.wait_for(lambda: len(list(folder.glob("runs/*/*/recipe.yaml"))) > 1, process)
            time.sleep(moment.uniform(0.0, 1.5))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        finished = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/metrics.json")}
        # Not through a new process: the run that was being made is still locked for a step
        results = compare(load_comparison(file), folder)
        assert without_times(results) == without_times(expected)
        assert (
            len(finished) < 4
            and finished.items() <= {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/metrics.json")}.items()
        )

    def test_run_does_not_outlive_a_killed_comparison(self, make_file, tmp_path):
        training = {"max_steps": 2, "save_steps": 2, "eval_strategy": "no", "report_to": "none"}
        process = self.start(make_file(training=training), tmp_path / "results")
        # After its last step a run evaluates, saves, and waits to be asked for more
        self.wait_for(lambda: list(tmp_path.glob("results/runs/base/*/checkpoint-2")), process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert len(children) > 1 and not psutil.wait_procs(children, timeout=100)[1]

    def test_interrupted_by_hand(self, make_file, tmp_path):
        training = {"max_steps": 10_000, "save_steps": 20, "eval_steps": 10_000, "report_to": "none"}
        # A shell starts what it puts in the background with interrupts ignored, and tests may run there
        heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        process = self.start(make_file(training=training), tmp_path / "results", preexec_fn=heed)
        self.wait_for(lambda: list(tmp_path.glob("results/runs/base/*/checkpoint-*")), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
        assert "nlq: interrupted" in process.stderr.read().decode().splitlines()

    def test_processes_share_the_runs(self, uninterrupted, tmp_path):
        file, expected, _ = uninterrupted
        folder = tmp_path / "results"
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(find("accelerate", "cpu-two-processes")),
        ]
        command += ["-m", "modeling_nlq.training", "compare", file, "--output_dir", str(folder)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert without_times(json.loads((folder / "results.json").read_text())) == without_times(expected)
        for log in folder.glob("runs/*/*.log"):
            assert log.read_text().count("train_runtime") == 1, log

    def test_file_that_cannot_be_written(self, uninterrupted, finished, tmp_path):
        """A disk that is full looks like this limit on the size of files: finished runs are kept, and go on later."""
        file, expected, complete = uninterrupted
        folder = tmp_path / "results"
        shutil.copytree(complete, folder)
        lost = next(folder.glob("runs/squared/*seed-1"))
        shutil.rmtree(lost)
        kept = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/metrics.json")}

        def limit():
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

        process = self.start(file, folder, preexec_fn=limit)
        error = process.stderr.read().decode()
        assert process.wait() == 1
        message = error.strip().splitlines()[-1]
        assert message.startswith("nlq: error: run squared/rate-0.01-seed-1 failed: ") and "Traceback" not in message
        assert kept.items() <= {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/metrics.json")}.items()
        assert without_times(compare(load_comparison(file), folder)) == without_times(expected)


class TestPlan:
    def test_dry_run(self, make_file, capsys, tmp_path):
        file = make_file(
            models={"base": None, "wide": {"switches": {"intermediate_size": 256}}},
            learning_rates=[1e-3, 1e-2],
            seeds=[0, 1, 2],
        )
        assert main(["compare", file, "--dry-run", "--output_dir", str(tmp_path / "none")]) == 0
        lines = capsys.readouterr().out.splitlines()
        comparison = load_comparison(file)
        for line, (name, variant) in zip(lines[1:], comparison.variants.items()):
            size = measure(load_config(variant.content["model"], variant.content["switches"]), 64)
            assert name in line and f"{size.total:,}" in line and f"{size.flops_per_token:,}" in line
        assert f"10 runs of {12 * 8 * 64:,} tokens" in lines[3] and not (tmp_path / "none").exists()

    def test_advice_on_gpus_is_for_runs(self, make_file, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: False)
        logger = logging.getLogger("transformers.training_args")
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        training = {"max_steps": 12, "torch_compile": True, "bf16": False, "report_to": "none"}
        comparison = load_comparison(make_file(training=training))
        comparison.resolve(comparison.reported("base", 1e-2)[0], tmp_path)
        assert not caplog.messages
        TrainingArguments(str(tmp_path), torch_compile=True, report_to="none")
        assert {message.split(" mostly")[0] for message in caplog.messages} == {"The speedups for torchdynamo"}

    def test_power_warning(self, make_file):
        models = dict.fromkeys(("base", "a", "b", "c", "d", "e"))
        plan = "\n".join(load_comparison(make_file(models=models, seeds=[0, 1, 2])).describe())
        assert "9.9" in plan and "warning" in plan
        assert "warning" not in "\n".join(load_comparison(make_file(models=models, seeds=[0, 1, 2, 3, 4])).describe())

    @pytest.mark.parametrize("match", ["parameters", "flops"])
    def test_match(self, make_file, match):
        models = {
            "base": {"switches": {"query_projection": "linear"}},
            "identity": {"switches": {"query_projection": "identity"}},
        }
        models["as it is"] = {**models["identity"], "match": None}
        variants = load_comparison(make_file(models=models, match=match)).variants
        unit = 2 * 2 * 32 * (6 if match == "flops" else 1)  # one more in the MLP: 2 layers, 2 matrices, 32 wide
        field = "flops_per_token" if match == "flops" else "non_embedding"
        base, identity, as_it_is = (getattr(variants[name].size, field) for name in models)
        assert abs(identity - base) <= unit / 2 < base - as_it_is
        assert variants["base"].intermediate_size == variants["as it is"].intermediate_size == 128

    def test_command_line_overrides_the_file(self, make_file):
        assert load_comparison(make_file(), ["--max_steps", "5"]).tokens_per_run == 5 * 8 * 64

    @pytest.mark.parametrize("name", names("comparisons"))
    def test_shipped_comparisons(self, name):
        comparison = load_comparison(name)
        assert (comparison.power_warning() is None) == (name != "gpu")  # which shows curves and speed, and judges nothing
        for model in comparison.variants:
            for run in [*comparison.sweep(model), *comparison.reported(model, comparison.variants[model].learning_rates[0])]:
                comparison.resolve(run, Path("runs"))
        assert list(comparison.describe())


class TestBadInput:
    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"baseline": None}, "the field 'baseline' is missing"),
            ({"baseline": ["base"]}, r"baseline=\['base'\] must be one of"),
            ({"baseline": "bas"}, "baseline='bas' must be one of the models base, twin"),
            ({"models": {"base": None}}, "holds only the baseline 'base'"),
            ({"models": None}, "must be one of the models"),
            ({"models": {"base": None, "x": "tiny-liner"}}, "did you mean 'tiny-linear'"),
            ({"models": {"base": None, "x": {"switches": {"query_projektion": "linear"}}}}, "no field 'query_projektion'"),
            ({"models": {"base": None, "x": {"switch": {}}}}, "unknown field 'switch'; did you mean 'switches'"),
            ({"models": {"base": None, "x": {"training": {"seed": 3}}}}, "model 'x': seed: set seeds"),
            ({"models": {"base": None, "x": {"training": {"max_steps": 6}}}}, "model 'x' would see 3,072 tokens"),
            ({"models": {"base": None, "../x": None}}, "model '../x': a name must be made of"),
            ({"seeds": None}, "seeds=None must be a list"),
            ({"seeds": []}, r"seeds=\[\] must be a list"),
            ({"models": {"base": None, "Base": None}}, "the same name but for capitals"),
            ({"models": {"base": None, 1: None}}, "model 1: a name must be a text; put it in quotes"),
            ({"models": {"base": None, "x.": None}}, "model 'x.': a name must be made of"),
            ({"models": {"base": None, "x": {"switches": {"query_projection": "linaer"}}}}, "model 'x': .*'linaer'"),
            ({"models": {"base": None, "x": {"training": {"max_step": 1}}}}, "model 'x': training: unknown field 'max_step'"),
            ({"training": {"max_steps": 12, "learning_rate": 1.0}}, "training: learning_rate: set seeds and learning_rates"),
            ({"training": {"max_steps": 12, "save_steps": 3, "logging_steps": 2}}, "save_steps=3 must be a multiple of"),
            ({"training": {"max_steps": 12, "per_device_train_batch_size": 0}}, "must be at least 1"),
            ({"seeds": [2**32]}, "seeds="),
            ({"seeds": [True]}, "seeds="),
            ({"learning_rates": [math.inf]}, "must be a list of numbers above 0"),
            ({"seeds": [0, 0]}, "holds a seed twice"),
            ({"seeds": [1000]}, "sweep_seed=1000 is one of the seeds"),
            ({"learning_rates": None}, "learning_rates is missing"),
            ({"learning_rates": [1e-2, 0.01]}, "holds a rate twice"),
            ({"learning_rates": [-1.0]}, "must be a list of numbers above 0"),
            ({"match": "memory"}, "match='memory' must be one of parameters, flops"),
            ({"model": "tiny-linear"}, "unknown field 'model'; did you mean 'models'"),
            ({"training": {"max_steps": -1}}, "needs max_steps"),
            (
                {
                    "match": "parameters",
                    "models": {"base": {"switches": {"intermediate_size": 1}}, "x": {"switches": {"head_projection": True}}},
                },
                "model 'x': no MLP width brings the model down to",
            ),
        ],
    )
    def test_one_line(self, make_file, fields, message, capsys, tmp_path):
        with pytest.raises(ValueError, match=message):
            load_comparison(make_file(**fields))
        assert main(["compare", make_file(**fields), "--output_dir", str(tmp_path / "out")]) == 1
        assert len(capsys.readouterr().err.strip().splitlines()) == 1 and not (tmp_path / "out").exists()

    def test_recipe_that_no_comparison_can_use(self, make_file, run, recipe_file):
        with pytest.raises(ValueError, match="test_fraction=0 leaves no test split"):
            load_comparison(make_file(), ["--test_fraction", "0"])
        with pytest.raises(ValueError, match="command line: seed: set seeds and learning_rates"):
            load_comparison(make_file(), ["--seed", "3"])
        recipe = {name: value for name, value in read_yaml(Path(recipe_file)).items() if name != "tokenizer"}
        with pytest.raises(ValueError, match=r"model 'saved' has the tokenizer .*, the baseline 'bpe:8192'"):
            models = {"base": {"switches": {"vocab_size": 8192}}, "saved": str(run[0])}
            load_comparison(make_file(recipe=recipe, models=models))
        with pytest.raises(ValueError, match=r"record_stability needs an NLQ model, and .* is of type 'gpt2'"):
            path = Path(recipe_file).parent / "gpt2.json"
            path.write_text(
                json.dumps({"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 32, "n_layer": 2})
            )
            load_comparison(make_file(models={"base": None, "gpt2": str(path)}))

    def test_name_given_twice(self, make_file, capsys):
        file = Path(make_file())
        file.write_text(file.read_text().replace("twin:", "base:"))
        assert main(["compare", str(file)]) == 1
        assert "base is given twice" in capsys.readouterr().err

    def test_unknown_comparison(self, capsys):
        assert main(["compare", "querys"]) == 1
        assert "did you mean 'queries'" in capsys.readouterr().err

    def test_dataset_that_changed(self, finished, tmp_path, capsys):
        folder = tmp_path / "results"
        shutil.copytree(finished[0], folder)
        fingerprint = (folder / "dataset_fingerprint.txt").read_text().strip()
        assert fingerprint == finished[1]["dataset_fingerprint"]
        (folder / "dataset_fingerprint.txt").write_text("another\n")  # as if the text had been another one then
        before = run_files(folder)
        assert main(["compare", finished[2], "--output_dir", str(folder)]) == 1
        assert f"the dataset has changed since {folder} was begun (fingerprint another then, {fingerprint} now)" in (
            capsys.readouterr().err
        )
        assert run_files(folder) == before

    def test_folder_of_another_comparison(self, finished, make_file, capsys):
        folder, _, file = finished
        before = run_files(folder)
        assert main(["compare", file, "--output_dir", str(folder), "--weight_decay", "0.3"]) == 1
        assert "holds another comparison (recipe.training.weight_decay: None there, 0.3 now)" in capsys.readouterr().err
        assert main(["compare", make_file(), "--output_dir", str(folder)]) == 1
        assert "seeds: [0, 1, 2, 3] there, [0, 1] now" in capsys.readouterr().err
        another = read_yaml(Path(file))
        another["models"]["third"] = None
        Path(file).with_name("another.yaml").write_text(yaml.safe_dump({**another, "name": "comparison"}))
        assert main(["compare", str(Path(file).with_name("another.yaml")), "--output_dir", str(folder)]) == 1
        assert "models.third: None there, {} now" in capsys.readouterr().err
        assert run_files(folder) == before

    def test_foreign_folder(self, make_file, tmp_path, capsys):
        (tmp_path / "thesis.tex").write_text("all I have")
        assert main(["compare", make_file(), "--output_dir", str(tmp_path)]) == 1
        assert "holds no comparison" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
