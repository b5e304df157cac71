"""`nlq compare --dry-run`: the time on this machine, by steps of the models, and the smallest difference."""

import itertools
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.api import load_plan
from modeling_nlq.training.comparison import estimate
from modeling_nlq.training.comparison.estimate import describe_estimate
from modeling_nlq.training.comparison.inference import smallest_difference
from modeling_nlq.training.run import recipe
from modeling_nlq.training.text import duration
from nlq import main


TRAINING = {"max_steps": 100, "save_strategy": "no", "eval_strategy": "no", "report_to": "none", "use_cpu": True}


@pytest.fixture
def step(monkeypatch):
    monkeypatch.setattr(
        estimate, "seconds_of_step", lambda variant, threads: 22.0 if variant.intermediate_size == 1024 else 11.0
    )


def test_a_large_batch_is_timed_by_a_part(make_file, monkeypatch, tmp_path, capfd):
    """With the threads of the runs, which are restored, and without a trace."""
    before, environment, batches, forward = torch.get_num_threads(), dict(os.environ), [], NLQForCausalLM.forward

    def watch(self, input_ids, **kwargs):
        batches.append((tuple(input_ids.shape), torch.get_num_threads()))
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(NLQForCausalLM, "forward", watch)
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(estimate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    training = {**TRAINING, "per_device_train_batch_size": 256, "gradient_accumulation_steps": 3}
    variant = load_plan(make_file(training=training)).largest.variants["base"]
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    assert estimate.seconds_of_step(variant, before + 1) == 6 * 2.0
    assert batches == [((128, 64), before + 1)] * 3 and torch.get_num_threads() == before
    assert capfd.readouterr() == ("", "") and not list(tmp_path.glob("unused")) and dict(os.environ) == environment


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs PyTorch 2.9")
def test_steps_are_timed_with_the_optimizer_of_the_run(make_file, monkeypatch):
    stepped = []
    monkeypatch.setattr(torch.optim.Muon, "step", stepped.append)
    estimate.seconds_of_step(load_plan(make_file(training=TRAINING), {"optimizer": "muon"}).largest.variants["base"])
    assert stepped


class TestOutput:
    def test_times_are_those_of_measured_steps(self, make_file, step):
        models = {"base": None, "wide": {"switches": {"intermediate_size": 1024}, "learning_rates": [1e-2]}}
        comparison = load_plan(make_file(training=TRAINING, models=models, learning_rates=[1e-3, 1e-2], seeds=[0, 1]))
        *_, of_scale, total = describe_estimate(comparison)
        run, runs = 3 + 11 * 100, 4 * (3 + 11 * 100) + 2 * (3 + 22 * 100)
        assert of_scale == f"time on this machine: about {duration(run)} a run of base, {duration(runs)} in all"
        assert total.startswith("times are for one run at a time, by the throughput")

    def test_a_ladder_is_estimated_by_scale(self, make_file, step, capsys, tmp_path):
        scales = {"small": {"switches": {"hidden_size": 16}, "seeds": [0]}, "large": {"switches": {"hidden_size": 64}}}
        rates = {"start": 1e-2, "factor": 2}
        file = make_file(training=TRAINING, scales=scales, learning_rates=rates, seeds=[0, 1, 2])
        options = ["--dry-run", "--output_dir", str(tmp_path / "none"), "--noise-floor", "0.5"]
        assert main(["compare", file, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        times, ends = 0.5 * smallest_difference(3, 1, 1.0), np.sqrt(2 / stats.chi2.ppf([0.975, 0.025], 2))
        assert lines[-7:-5] == [
            "smallest difference found with probability 80 %, scale small: none, for a test needs two seeds or more",
            f"smallest difference found with probability 80 %, scale large: {times:.2g} % of the loss, if the noise "
            f"floor is 0.5 %; {times * ends[0]:.2g} to {times * ends[1]:.2g} % by its 95 % range, if it comes from 3 "
            "runs",
        ]
        assert lines[-5].startswith("this takes the runs of a seed for independent and leaves out the choice of")
        assert re.match(
            r"time on this machine, scale small: about \d+ min a run of base, .* in all, more if a", lines[-4]
        )
        assert lines[-2].startswith("time on this machine, all scales: about ") and not (tmp_path / "none").exists()

    def test_step_that_fails(self, make_file, monkeypatch, capsys):
        def fail(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

        monkeypatch.setattr(torch.optim.AdamW, "step", fail)
        assert main(["compare", make_file(seeds=[0, 1, 2]), "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [lines[-3], lines[-1]] == [
            f"smallest difference found with probability 80 %: {smallest_difference(3, 1, 1.0):.2g} times the noise "
            "floor",
            "warning: time on this machine unknown: OutOfMemoryError: CUDA out of memory.",
        ]


@pytest.mark.parametrize(("seeds", "stop", "alpha"), [(2, None, 0.05), (5, None, 0.05), (5, "early", 0.025)])
def test_smallest_difference(make_file, step, seeds, stop, alpha):
    plan = load_plan(make_file(models=dict.fromkeys(("base", "a", "b")), seeds=list(range(seeds)), stop=stop))
    times = smallest_difference(seeds, 2, 1.0, alpha, 0.8)
    told = f"{times * 0.5:.2g} % of the loss, if the noise floor is 0.5 %; "
    assert told in next(describe_estimate(plan, noise_floor=0.5))


@pytest.mark.parametrize("is_native", [False, True])
def test_bf16_that_the_cpu_emulates(make_file, monkeypatch, is_native):
    monkeypatch.setattr(recipe.torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_native)
    warning = load_plan(make_file(training={**TRAINING, "bf16": True})).machine_warning
    assert warning is None if is_native else warning.startswith("bf16=True: this CPU has no instructions for bfloat16")
    assert load_plan(make_file(training=TRAINING)).machine_warning is None
