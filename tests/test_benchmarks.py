"""The benchmarks run, and refuse to time wrong results."""

import dataclasses
import math
import re
import sys

import attention
import conversion
import error_rates
import generation
import jobs
import measure
import numpy as np
import parts
import pytest
import torch
import training_step
from support.paths import REPOSITORY

from modeling_nlq.backends_nlq import ATTENTION_BACKENDS
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS
from modeling_nlq.training.size import measure as measure_model


def test_attention_is_timed(monkeypatch, capsys):
    """Every candidate has its row, and a wrong result none."""
    monkeypatch.setattr(measure, "MOST_REPEATS", 2)
    words = "--lengths 64 96 --rounds 2 --activations sigmoid relu --heads 1 --head_dim 8 --dtypes float32 --no-memory"
    words = words.split()
    assert attention.main(words) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    labels = ["softmax, sdpa", "sigmoid, nlq_tiled", "relu, nlq_tiled", "sigmoid, eager", "relu, eager"]
    assert [row[0].removeprefix("| ") for row in rows if " ms, " in row[1]] == 2 * labels
    assert rows[1][1].split(" ms, ")[1].startswith("1.00 ")

    right = ATTENTION_BACKENDS["nlq_tiled"].function
    wrong = dataclasses.replace(
        ATTENTION_BACKENDS["nlq_tiled"], function=lambda *inputs, **options: (right(*inputs, **options)[0] * 1.1, None)
    )
    monkeypatch.setitem(ATTENTION_BACKENDS, "nlq_tiled", wrong)
    assert attention.main(words) == 1
    printed = capsys.readouterr().out
    assert "relu, nlq_tiled: ValueError: wrong result, off by 0.1" in printed and "| relu, nlq_tiled" not in printed


def test_attention_refuses_a_missing_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        attention.main(["--device", "cuda"])
    assert "PyTorch sees no CUDA device here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_attention_on_a_gpu(capsys):
    backends = ["nlq_tiled", "flex_attention"]
    assert (
        attention.main(["--device", "cuda", "--lengths", "256", "--activations", "sigmoid", "--backends", *backends])
        == 0
    )
    assert "| sigmoid, flex_attention |" in capsys.readouterr().out


def test_error_rates_are_those_of_the_page():
    """With a tenth of the repetitions, so within five standard errors; the rules keep to 6 % where noise is normal."""
    page = (REPOSITORY / "docs" / "statistics.md").read_text()
    rows = dict(re.findall(r"^\| (.*) \| (\d+\.\d)±\d+\.\d \|$", page, flags=re.MULTILINE))
    found = dict(error_rates.simulate(np.random.default_rng(1), 2000))
    assert found.keys() == rows.keys()
    for claim, outcomes in found.items():
        assert abs(100 * outcomes.mean() - float(rows[claim])) < 500 * outcomes.std() / math.sqrt(len(outcomes)), claim
    kept = [claim for claim in rows if "independent parts" in claim or "normal noise" in claim or "margin" in claim]
    assert len(kept) == 5 and max(float(rows[claim]) for claim in kept) <= 6


def test_failures_give_their_reason(capsys):
    def fail():
        raise ValueError("too wide\nand more")

    assert measure.attempt("it", lambda: None) is None
    assert measure.attempt("it", fail) == "ValueError: too wide"
    assert "Traceback" in capsys.readouterr().err


def test_training_steps_are_timed(monkeypatch, capsys):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}
    shape |= {"context": 64, "batch": 2}
    monkeypatch.setitem(training_step.SHAPES, "small", shape)
    peak = 0.001
    words = ["--rounds", "3", "--dtype", "bfloat16"]
    assert training_step.main([*words, "--peak", str(peak)]) == 0
    lines = {line.split("  ")[0]: line.split("  ")[1:] for line in capsys.readouterr().out.splitlines()}
    flops = 6 * (2 * 12 * 32**2 + 96 * 32) + 2 * 12 * 64 * 32
    assert measure_model(training_step.nlq_config(shape, query_projection="linear")).flops_per_token == flops
    for name in ("gpt2 (sdpa)", "nlq linear/softmax", "nlq linear/tanh"):
        speed, utilization = [cell for cell in lines[name] if cell][:2]
        share = float(speed.replace(",", "")) * flops / (peak * 1e12)
        assert float(utilization.rstrip("%")) / 100 == pytest.approx(share, abs=6e-4)

    assert training_step.main([*words[:-1], "float32", "--encoders"]) == 0
    assert "MFU" not in capsys.readouterr().out


@pytest.mark.slow
def test_memory_of_a_conversion_is_measured(monkeypatch, capsys, tmp_path):
    """Of weights that are larger than the limit, so that nothing that loads them all would pass."""
    monkeypatch.delitem(conversion.CONFIGURATIONS, "llama")
    assert conversion.main(["--layers", "16", "--folder", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " to " in line]
    assert len(rows) == 3
    for *_, weights, _, _, peak, limit in rows:
        assert float(limit) < float(weights) and 0.3 < float(peak) < float(limit)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_runs_side_by_side_are_timed(capsys):
    words = "--device cpu --sizes 0.4M --jobs 2 --steps 2 --batch 2 --length 32 --threads 1"
    assert jobs.main(words.split()) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[:2] == ["| 0.4M", "-"]
    in_all, training, mfu = cells[2].removesuffix(" |").replace(",", "").split()
    assert 0 < float(in_all) < float(training) and mfu == "-"


def test_generation_is_timed(monkeypatch, capsys):
    shape = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    setting = generation.Setting(2, 8, 3, "gpt2", shows_prompt=True)
    monkeypatch.setattr(generation.logging, "set_verbosity_error", lambda: None)  # it would hold for later tests too
    monkeypatch.setitem(generation.SHAPES, "small", shape)
    monkeypatch.setattr(generation, "SETTINGS", {"decode": [setting]})
    monkeypatch.setattr(sys, "argv", ["generation.py", "--settings", "decode", "--rounds", "2", "--threads", "1"])
    generation.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows] == ["model", *generation.REFERENCES, *generation.CANDIDATES]
    assert rows[1][2] == "1.00" and all(float(row[1]) > 0 for row in rows[1:])


@pytest.mark.slow
def test_parts_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(parts.logging, "set_verbosity_error", lambda: None)  # it would hold for later tests too
    monkeypatch.setattr(
        parts, "SHAPE", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 29}
    )
    assert set(parts.PARTS) - {"attention_activation"} <= set(ATTENTION_PARTS)
    assert parts.main(["--length", "80", "--new", "3", "--rounds", "2", "--threads", "1"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[1:]] == list(parts.candidates_of(list(parts.PARTS)))
    assert rows[1][2] == "1" and all(float(row[1]) > 0 for row in rows[1:])
