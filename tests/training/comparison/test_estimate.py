"""`nlq compare --dry-run`: the time on this machine, by steps of the models, and the smallest difference."""

import itertools
import json
import os
import tempfile
from types import SimpleNamespace

import pytest
import torch
from support.paths import REPOSITORY
from transformers import Trainer

from modeling_nlq.training.comparison import estimate
from modeling_nlq.training.comparison.estimate import describe_estimate, machine_warning, read_noise_floors
from modeling_nlq.training.comparison.inference import smallest_difference
from modeling_nlq.training.comparison.reading import load_comparison
from modeling_nlq.training.files import read_yaml
from modeling_nlq.training.run import recipe
from modeling_nlq.training.text import duration
from nlq import main


RESULTS = REPOSITORY / "docs" / "results"
TRAINING = {"max_steps": 100, "save_strategy": "no", "eval_strategy": "no", "report_to": "none", "use_cpu": True}


@pytest.fixture
def step(monkeypatch):
    """Every step takes 11 seconds, and the command has taken 50."""
    monkeypatch.setattr(estimate, "time", SimpleNamespace(process_time=lambda: 50.0))
    monkeypatch.setattr(
        estimate, "seconds_of_step", lambda variant, threads: 22.0 if variant.intermediate_size == 1024 else 11.0
    )


class TestThroughput:
    def test_of_a_large_batch(self, make_file, monkeypatch):
        """A large batch is cut, steps of a batch are not accumulated, and the threads are those of the runs."""
        before, batches, original = torch.get_num_threads(), [], Trainer.training_step

        def step(self, model, inputs, *args, **kwargs):
            batches.append((tuple(inputs["input_ids"].shape), torch.get_num_threads()))
            return original(self, model, inputs, *args, **kwargs)

        monkeypatch.setattr(Trainer, "training_step", step)
        clock = itertools.count(step=2.0)
        monkeypatch.setattr(estimate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        training = {**TRAINING, "per_device_train_batch_size": 256, "gradient_accumulation_steps": 3}
        variant = load_comparison(make_file(training=training)).largest.variants["base"]
        assert estimate.seconds_of_step(variant, before + 1) == 6 * 2.0
        assert batches == [((128, 64), before + 1)] * 3 and torch.get_num_threads() == before

    def test_leaves_nothing(self, make_file, tmp_path, monkeypatch, capfd):
        training = {"max_steps": 5, "save_steps": 1, "eval_steps": 1, "logging_first_step": True, "log_level": "info"}
        training |= {
            "eval_strategy": "steps",
            "load_best_model_at_end": True,
            "report_to": "tensorboard",
            "torch_compile": True,
        }
        variant, environment = load_comparison(make_file(training=training)).largest.variants["base"], dict(os.environ)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        capfd.readouterr()
        assert 0 < estimate.seconds_of_step(variant) < 60
        assert capfd.readouterr() == ("", "") and not list(tmp_path.iterdir()) and dict(os.environ) == environment


class TestOutput:
    def test_times(self, make_file, corpus, step):
        """Start-up and evaluation count."""
        models = {"base": None, "wide": {"switches": {"intermediate_size": 1024}, "learning_rates": [1e-2]}}
        comparison = load_comparison(make_file(training=TRAINING, models=models, learning_rates=[1e-3, 1e-2], seeds=[0, 1]))
        lines = list(describe_estimate(comparison))
        # 2.25 bytes a token; validation and test, each once
        evaluation = 11 / (8 * 64) * (0.1 + 0.02) * corpus.stat().st_size / 2.249 / 3
        run = 3 + 11 * 100 + evaluation
        everything = duration(2 * 50 + 4 * run + 2 * (3 + 22 * 100 + 2 * evaluation))
        assert lines[0] == (
            f"time on this machine: about {duration(run)} a run of base, {everything} in all, one run at a time"
        )
        assert "with start-up and evaluation by the size of the text" in lines[1]

    def test_text_that_is_evaluated(self, make_file, recipe_file, corpus, tmp_path):
        """By the size of files, also of a folder with splits, and of so many documents as are held out at most."""
        path = tmp_path / "folder" / "train.jsonl"
        path.parent.mkdir()
        path.write_bytes(corpus.read_bytes())
        folder = str(path.parent)

        def size(**fields) -> float:
            recipe = {**read_yaml(recipe_file), "test_fraction": 0.02, **fields}
            variant = load_comparison(make_file(recipe=recipe, training=TRAINING)).largest.variants["base"]
            return estimate._evaluated_tokens(variant) * 2.249

        whole = corpus.stat().st_size
        assert size() == size(dataset=folder) == pytest.approx(0.12 * whole, rel=1e-3)
        documents = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        mean = sum(map(len, documents)) / len(documents)
        assert size(dataset=folder, max_validation_documents=1) == pytest.approx(2 * mean, rel=0.5)
        assert size(max_validation_documents=1000) == size()
        path.with_name("validation.jsonl").write_text(json.dumps({"text": "x" * 5000}) + "\n")
        assert size(dataset=folder) == pytest.approx(5014 + 0.02 * whole, rel=1e-2)

    def test_ladder(self, make_file, recipe_file, step, capsys, tmp_path):
        """Models that are alike are measured once; nothing is downloaded for a plan."""
        scales = {
            "small": {"switches": {"hidden_size": 16}, "seeds": [0]},
            "large": {"switches": {"hidden_size": 64}},
        }
        recipe = {**read_yaml(recipe_file), "dataset": "owner/name"}
        rates = {"start": 1e-2, "factor": 2}
        file = make_file(recipe=recipe, training=TRAINING, scales=scales, learning_rates=rates, seeds=[0, 1, 2])
        options = ["--dry-run", "--output_dir", str(tmp_path / "none"), "--noise-floor", "0.5"]
        assert main(["compare", file, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        times = [line for line in lines if line.startswith("time")]
        assert times[0].startswith("time on this machine, scale small: about 18 min a run of base, 1 h 50 min in all, more if")
        assert times[2].startswith("time on this machine, all scales: about ") and times[2].endswith(", one run at a time")
        assert "but without evaluation, for the text is not here" in times[3]
        found = 0.5 * smallest_difference(3, 1, 1.0)
        found = f"{found:.2g} % of the loss, if the noise floor is 0.5 %"
        assert lines[-2:] == [
            "smallest difference found with probability 80 %, scale small: none, for a test needs two seeds or more",
            f"smallest difference found with probability 80 %, scale large: {found}",
        ]
        assert not (tmp_path / "none").exists()

    def test_step_that_fails(self, make_file, monkeypatch, capsys):
        def fail(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

        monkeypatch.setattr(Trainer, "training_step", fail)
        assert main(["compare", make_file(seeds=[0, 1, 2]), "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-3:] == [
            "warning: time on this machine unknown: OutOfMemoryError: CUDA out of memory.",
            f"smallest difference found with probability 80 %: {smallest_difference(3, 1, 1.0):.2g} times the noise floor",
            "--noise-floor PERCENT gives the smallest difference in percent of the loss",
        ]


class TestNoiseFloor:
    def test_of_earlier_results(self, make_file):
        scales = {name: {"switches": {"hidden_size": width}} for name, width in (("25k", 16), ("large", 64))}
        ladder, plain = load_comparison(make_file(scales=scales)), load_comparison(make_file())
        assert read_noise_floors("0.5", ladder) == {"25k": 0.5, "large": 0.5}
        earlier = json.loads((RESULTS / "ladder/blocks/results.json").read_text())["trend"]["noise_floor_percent"]
        found = read_noise_floors(str(RESULTS / "ladder/blocks"), ladder)
        assert found == {"25k": pytest.approx(earlier["25k"]), "large": pytest.approx(list(earlier.values())[-1])}
        single = RESULTS / "upcycling/results.json"
        floor = json.loads(single.read_text())["statistics"]["noise_floor_percent"]
        assert read_noise_floors(str(single), plain) == {"": floor}

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("0", "must be a number above 0, not 0.0"),
            ("nan", "must be a number above 0, not nan"),
            ("no/such/folder", "must be a number above 0, in percent, or the results of a comparison"),
            ("other.json", "other.json holds no results of a comparison"),
        ],
    )
    def test_bad_input(self, make_file, tmp_path, monkeypatch, capsys, given, message):
        file = make_file()
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other.json").write_text("{}")
        assert main(["compare", file, "--dry-run", "--noise-floor", given]) == 1
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("is_native", [False, True])
def test_bf16_that_the_cpu_emulates(make_file, monkeypatch, is_native):
    monkeypatch.setattr(recipe.torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    warning = machine_warning(load_comparison(make_file(training={**TRAINING, "bf16": True})))
    assert warning is None if is_native else warning.startswith("bf16=True: this CPU has no instructions for bfloat16")
    assert machine_warning(load_comparison(make_file(training=TRAINING))) is None
