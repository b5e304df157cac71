"""The benchmarks: what they count and conclude, and that they run. Numbers of a GPU are made up, or the CPU's instead."""

import argparse
import dataclasses
import functools
import math
import re
import sys
from pathlib import Path

import attention
import attention_cuda
import conversion
import generation
import measure
import numpy as np
import parts
import pretrained
import pytest
import selection
import torch
import training_step
import trend
import tune_triton
from attention_cuda import BASELINE, CLAIMS, DIRECTIONS, MATMUL, Case, Claim, Problem, Result, Tables, WrongResult
from support.flex_stand_in import dense_flex_attention
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_nlq import flex_nlq
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS
from modeling_nlq.kernels.triton.activations import IS_INTERPRETED
from modeling_nlq.kernels.triton.attention import TILES, Tiles
from modeling_nlq.part_table_nlq import ATTENTION_PARTS
from modeling_nlq.training.parameters import measure as measure_model


NAMES = ["sigmoid", "squared", "tanh"]


def make_tables(seconds, lengths=(1024, 4096), head_dims=(64, 128)):
    """Tables in which every candidate takes so many seconds in each of three rounds, and the baseline 1."""
    tables = Tables({(head_dim, length): (2, 4) for head_dim in head_dims for length in lengths}, {}, [], 10**12)
    for head_dim, length in tables.shapes:
        for direction in DIRECTIONS:
            results = {MATMUL: Result([0.5] * 3, None)}
            results |= {candidate: Result([1.0] * 3, None) for candidate in (BASELINE, ("sdpa_cudnn", "softmax"))}
            for candidate in [(backend, name) for backend in ("nlq_triton", "flex_attention") for name in NAMES]:
                if candidate != ("flex_attention", "tanh") and (value := seconds(candidate, length, direction)):
                    results[candidate] = Result([value] * 3, None)
            tables.results[Case(head_dim, length, direction)] = results
    return tables


class TestFigures:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_flops_are_half_of_what_pytorch_counts_without_a_mask(self, direction):
        batch, heads, length, head_dim = 2, 3, 64, 16
        tables = Tables({(head_dim, length): (batch, heads)}, {}, [], 0)
        shape = (batch, heads, length, head_dim)
        expected = sdpa_flop_count(shape, shape, shape)
        if direction != "forward":
            expected += sdpa_backward_flop_count(shape, shape, shape, shape)
        assert tables.flops(Case(head_dim, length, direction), BASELINE) == expected / 2

    def test_rates_and_speeds(self):
        tables = make_tables(lambda *_: 0.25)
        case = Case(64, 1024, "forward")
        assert tables.rate(case, MATMUL) == 2.0  # 1e12 in half a second
        assert tables.rate(case, BASELINE) == pytest.approx(4 * 2 * 4 * 1024**2 * 64 / 2 / 1e12)
        assert tables.speed(case, ("nlq_triton", "tanh"), BASELINE) == [4.0, 4.0, 4.0]
        assert tables.speed(case, ("nlq_triton", "tanh"), ("flex_attention", "tanh")) is None

    def test_quartiles_are_of_the_rounds_ratios(self):
        assert measure.quartiles([2.0, 8.0, 6.0], [1.0, 2.0, 2.0]) == [2.5, 3.0, 3.5]
        assert measure.quartiles([6.0], [2.0]) == [3.0, 3.0, 3.0]

    def test_matmul_rate(self):
        assert 1e6 < measure.matmul_rate("cpu", torch.float32, size=64) < 1e15

    def test_tables_of_a_gpu(self, monkeypatch):
        """At the size of a GPU's figures, with memory."""
        monkeypatch.setitem(ATTENTION_BACKENDS, "nlq_triton", ATTENTION_BACKENDS["nlq_tiled"])
        tables = make_tables(lambda candidate, *_: 2e-3 if candidate[1] == "tanh" else 1e-3, lengths=(4096, 8192))
        for results in tables.results.values():
            for candidate, (times, _) in results.items():
                results[candidate] = Result([1.5e-3] * 3 if candidate in (MATMUL, BASELINE) else times, 5 * 2**30)
        settings = argparse.Namespace(activations=NAMES, flex=True, eager=True, rounds=3, batch=None, heads=None)
        text = attention_cuda.render(tables, settings, "bfloat16", "a GPU", "a command", "nlq_triton")
        rows = rows_of(text)
        # 4 x 2 x 4 x 4096^2 x 64 / 2 operations in 1 ms, where the product makes 1e12 in 1.5 ms
        assert rows["sigmoid, nlq_triton"][0] == ["17.2 (3%) 1.50", "68.7 (10%) 1.50"]
        assert rows["sigmoid, nlq_triton"][2:4] == [["1.00 / 1.00"] * 2, ["5,120"] * 2]
        assert rows["matrix product"] == [["667", "667"]] * 4
        assert "tanh, eager" not in rows and text.count("speed beside FlexAttention") == 2
        assert "batch x length 8192 to 16384 tokens" in text and "\n\n\n" not in text

    def test_late_errors_are_seen(self):
        """Causal averages of random values: the last ones are so small that all of them may be wrong unseen."""
        problem = Problem((1, 2, 1024, 16), torch.bfloat16, "cpu")
        candidate = ("nlq_tiled", "identity")
        expected = problem.expected(candidate)
        attention_cuda.check(problem, candidate, expected, torch.bfloat16)
        wrong = [tensor.clone() for tensor in expected]
        wrong[0][:, -128:] *= 1.1
        assert (wrong[0] - expected[0]).abs().max() < 0.02 * expected[0].abs().max()
        assert attention_cuda.error_of(wrong[0], expected[0], axis=1) == pytest.approx(0.1, rel=1e-3)
        with pytest.raises(WrongResult, match="output is off by"):
            attention_cuda.check(problem, candidate, wrong, torch.bfloat16)
        wrong = [tensor.clone() for tensor in expected]
        wrong[2][0, 0, 0, 0] = torch.nan
        with pytest.raises(WrongResult, match="gradient of key is off by nan"):
            attention_cuda.check(problem, candidate, wrong, torch.bfloat16)


class TestClaims:
    def judge(self, claim, seconds, **options):
        return attention_cuda.judge(claim, make_tables(seconds, **options), NAMES, "nlq_triton")

    def test_they_are_those_asked_for(self):
        asked = [(claim.direction, claim.activation, claim.floor, claim.other, claim.from_length) for claim in CLAIMS]
        assert asked == [
            ("forward and backward", None, 1.0, "sdpa", 4096),
            ("forward", "sigmoid", 1.17, "sdpa", 4096),
            ("forward and backward", None, 1.0, "sdpa_cudnn", 4096),
            ("forward", "sigmoid", 1.0, "sdpa_cudnn", 4096),
            ("forward", None, 1.3, "flex_attention", 4096),
            ("forward and backward", None, 1.3, "flex_attention", 4096),
        ]

    def test_met(self):
        verdicts = [self.judge(claim, lambda candidate, *_: 0.8 if candidate[0] == "nlq_triton" else 1.1) for claim in CLAIMS]
        assert [verdict.word for verdict in verdicts] == ["met"] * 6
        # Two widths, one length; tanh has no log form
        assert [verdict.count for verdict in verdicts] == [6, 2, 6, 2, 4, 4]
        assert [verdict.worst for verdict in verdicts] == pytest.approx([1.25] * 4 + [1.375] * 2)

    def test_one_slow_cell_is_enough(self):
        def seconds(candidate, length, direction):
            return 1.001 if candidate == ("nlq_triton", "tanh") and direction != "forward" else 0.5

        verdict = self.judge(CLAIMS[0], seconds)
        assert verdict.word == "not met" and verdict.worst == pytest.approx(1 / 1.001)
        assert verdict.where.startswith("tanh, head dim 64")
        assert self.judge(CLAIMS[1], seconds).word == "met"

    def test_short_texts_do_not_count(self):
        assert self.judge(CLAIMS[0], lambda candidate, length, direction: 2.0 if length < 4096 else 0.9).word == "met"
        assert self.judge(CLAIMS[0], lambda *_: 0.9, lengths=(1024,)).word == "not measured"

    @pytest.mark.parametrize("missing", ["nlq_triton", "flex_attention"])
    def test_what_is_missing_is_not_met(self, missing):
        def seconds(candidate, length, direction):
            return None if candidate == (missing, "squared") else 0.5 if candidate[0] == "nlq_triton" else 1.0

        verdict = self.judge(CLAIMS[4], seconds)
        assert verdict.word == "met where measured" and verdict.count == 2
        assert verdict.missing == ["squared, head dim 64, length 4096", "squared, head dim 128, length 4096"]
        text = attention_cuda.claims_table(make_tables(seconds), NAMES, "nlq_triton")
        assert "**met where measured**; no figure for squared, head dim 64, length 4096; squared" in text

    def test_a_floor_is_met_by_itself(self):
        claim = Claim("", "forward", "sigmoid", 1.0, "sdpa")
        assert self.judge(claim, lambda *_: 1.0).word == "met"


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments for a run of seconds on the CPU, with a dense stand-in for FlexAttention."""
    monkeypatch.setattr(flex_nlq, "compile_friendly_flex_attention", dense_flex_attention)
    monkeypatch.setattr(flex_nlq, "_check_flex_attention_on_cpu", lambda *inputs: None)
    monkeypatch.setattr(measure, "MOST_REPEATS", 2)
    return argparse.Namespace(
        device="cpu",
        dtypes=["float32"],
        lengths=[96, 130],
        activations=NAMES,
        batch=1,
        heads=2,
        head_dim=[8, 16],
        rounds=3,
        eager=True,
        flex=True,
        markdown=tmp_path / "gpu" / "attention.md",
    )


def replace_backend(monkeypatch, name, function):
    monkeypatch.setitem(ATTENTION_BACKENDS, name, dataclasses.replace(ATTENTION_BACKENDS[name], function=function))


def rows_of(markdown):
    """The cells of every table row, by the first one; all rows of a table must be of its width."""
    rows = {}
    for block in markdown.split("\n\n"):
        lines = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")]
        assert len({len(line) for line in lines}) <= 1
        for line in lines:
            rows.setdefault(line[0], []).append(line[1:])
    return rows


class TestReport:
    """The tables of a GPU, with another backend in place of `nlq_triton`."""

    def test_on_the_cpu(self, arguments, capsys):
        assert attention_cuda.report(arguments, ours="nlq_tiled", matmul_size=64) == 0
        printed, markdown = capsys.readouterr().out, arguments.markdown.read_text()
        rows = rows_of(markdown)
        assert len(rows["matrix product"]) == 4  # two widths, two directions
        for name in ("softmax, SDPA flash", *(f"{name}, eager" for name in NAMES), "sigmoid, FlexAttention"):
            cells = [cell for row in rows[name] for cell in row]
            assert len(cells) == 8 and "-" not in cells
        # And the speed beside FlexAttention, for both widths
        assert len(rows["squared, nlq_tiled"]) == 6 and len(rows["tanh, nlq_tiled"]) == 4
        assert {cell.split()[-1] for row in rows["softmax, SDPA flash"] for cell in row} == {"1.00"}
        assert markdown.count("**not measured**") == len(CLAIMS)
        # No cuDNN here, and no gradients of Transformers' own FlexAttention
        failed = [line.split(":")[0] for line in markdown.splitlines() if line.startswith("* ")]
        assert failed == ["* softmax, SDPA cuDNN", "* softmax, FlexAttention"]
        assert printed.count("x SDPA flash (quartiles)") == 8 and markdown.startswith("`python ")

    @pytest.mark.slow
    def test_long_texts_are_judged(self, arguments, capsys, monkeypatch):
        monkeypatch.setattr(attention_cuda, "CLAIMS", tuple(claim._replace(from_length=100) for claim in CLAIMS))
        attention_cuda.report(arguments, ours="nlq_tiled", matmul_size=64)
        rows = [row for name, row in rows_of(arguments.markdown.read_text()).items() if "lengths from 100" in name]
        assert [row[0][2] for row in rows] == ["6", "2", "0", "0", "4", "4"]  # cuDNN needs a GPU
        assert all("met**" in row[0][3] and "length 130" in row[0][1] for row in rows if row[0][2] != "0")

    def test_a_wrong_result_is_not_timed(self, arguments, monkeypatch, capsys):
        right = ATTENTION_BACKENDS["nlq_tiled"].function

        def wrong(module, *inputs, **options):
            output, weights = right(module, *inputs, **options)
            return output * 1.1 if module.activation.name == "squared" else output, weights

        monkeypatch.setitem(
            ATTENTION_BACKENDS, "nlq_triton", dataclasses.replace(ATTENTION_BACKENDS["nlq_tiled"], function=wrong)
        )
        assert attention_cuda.report(arguments, ours="nlq_triton", matmul_size=64) == 1
        markdown = arguments.markdown.read_text()
        assert "squared, nlq_triton" not in rows_of(markdown) and "sigmoid, nlq_triton" in rows_of(markdown)
        assert "* squared, nlq_triton: WrongResult: output is off by 0.1, where 0.005 is allowed (everywhere)" in markdown

    def test_a_wrong_reference_stops(self, arguments, monkeypatch):
        right = ATTENTION_BACKENDS["nlq_tiled"].function
        replace_backend(monkeypatch, "nlq_tiled", lambda *inputs, **options: (right(*inputs, **options)[0] * 1.1, None))
        with pytest.raises(SystemExit, match="correctness gate: nlq_tiled or SDPA: output is off by"):
            attention_cuda.report(arguments, ours="nlq_tiled", matmul_size=64)
        assert not arguments.markdown.exists()

    @pytest.mark.slow
    def test_a_wrong_log_form_is_seen(self, arguments, monkeypatch):
        right = ATTENTION_BACKENDS["flex_attention"].function
        replace_backend(monkeypatch, "flex_attention", lambda *inputs, **options: (right(*inputs, **options)[0] * 1.1, None))
        assert attention_cuda.report(arguments, ours="nlq_tiled", matmul_size=64) == 1
        assert "* sigmoid, FlexAttention: WrongResult: output is off by 0.1" in arguments.markdown.read_text()

    @pytest.mark.slow
    def test_what_does_not_fit_gets_a_dash(self, arguments, monkeypatch):
        right = ATTENTION_BACKENDS["eager"].function

        def does_not_fit(module, query, *inputs, **options):
            if query.shape[2] == 130 and torch.is_grad_enabled():
                raise torch.OutOfMemoryError
            return right(module, query, *inputs, **options)

        replace_backend(monkeypatch, "eager", does_not_fit)
        assert attention_cuda.report(arguments, ours="nlq_tiled", matmul_size=64) == 0  # no failure: it is out of memory
        markdown = arguments.markdown.read_text()
        assert [[cell == "-" for cell in row] for row in rows_of(markdown)["tanh, eager"]] == [
            [False, False],
            [False, True],
        ] * 2
        assert "* tanh, eager: out of memory (forward and backward, head dim 8, length 130; forward and" in markdown

    def test_nothing_is_compared_with_a_baseline_that_fails(self, arguments, monkeypatch):
        def fail(*inputs, **options):
            raise RuntimeError("no kernel")

        monkeypatch.setattr(Problem, "inference", fail)
        monkeypatch.setattr(attention_cuda, "gate", lambda *inputs: {})
        with pytest.raises(SystemExit, match="SDPA flash failed, which all others are compared with: RuntimeError: no kernel"):
            attention_cuda.report(arguments, ours="nlq_tiled", matmul_size=64)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_on_a_gpu(self, tmp_path):
        arguments = argparse.Namespace(
            device="cuda",
            dtypes=["bfloat16"],
            lengths=[256],
            activations=["sigmoid", "squared"],
            batch=None,
            heads=None,
            head_dim=[64],
            rounds=3,
            eager=True,
            flex=True,
            markdown=tmp_path / "attention.md",
        )
        ours = attention_cuda.OURS if attention_cuda.OURS in ATTENTION_BACKENDS else "nlq_tiled"
        assert attention_cuda.report(arguments, ours=ours, matmul_size=1024) == 0
        rows = rows_of(arguments.markdown.read_text())
        for name in ("softmax, SDPA flash", "softmax, FlexAttention", "squared, FlexAttention", f"sigmoid, {ours}"):
            assert len(rows[name]) >= 3  # both directions, and memory


class _Event:
    """`torch.cuda.Event` on a clock that only moves by hand."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = _Event.now

    def elapsed_time(self, end):
        return end.time - self.time


class TestOnCuda:
    """The few lines that call CUDA, with stand-ins for its functions."""

    def test_clock(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
        clock, order = measure.Clock("cpu"), []
        clock.is_cuda, clock._flushed = True, argparse.Namespace(zero_=lambda: (order.append("flush"), advance(7.0)))
        durations = iter([3.0, 1.0, 2.0, *[4.0] * 3, *[0.1] * 3])

        def advance(milliseconds):
            _Event.now += milliseconds

        def function():
            order.append("call")
            advance(next(durations))

        assert clock.turn(function, 3) == pytest.approx(0.002)  # the median, without the flushes
        assert order == ["flush", "call"] * 3 + ["synchronize"]
        assert clock.repeats(function) == 5  # of 4 ms in a turn of 20 ms
        assert clock.repeats(function) == measure.MOST_REPEATS

    def test_peak_memory(self, monkeypatch):
        events = []
        for name, value in (
            ("synchronize", None),
            ("reset_peak_memory_stats", None),
            ("memory_allocated", 1000),
            ("max_memory_allocated", 1700),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: (events.append(name), value)[1])
        assert attention_cuda.peak_memory(lambda: events.append("call"), "cuda") == 700
        before, after = ["synchronize", "reset_peak_memory_stats", "memory_allocated"], ["synchronize", "max_memory_allocated"]
        assert events == ["call", *before, "call", *after]

    def test_description(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        text = measure.describe_gpu()
        assert text.startswith("a GPU, driver ") and f"torch {torch.__version__}, triton " in text and "commit " in text

    def test_compilation_is_reset(self):
        before = torch._dynamo.config.recompile_limit
        with measure.compiled_without_fallback():
            assert torch._dynamo.config.fail_on_recompile_limit_hit and torch._dynamo.config.recompile_limit > 100
        assert torch._dynamo.config.recompile_limit == before


def test_reasons_of_failures(capsys):
    assert measure.attempt("it", lambda: None) is None

    def fail():
        raise ValueError("too wide\nand more")

    assert measure.attempt("it", fail) == "ValueError: too wide"
    assert "Traceback" in capsys.readouterr().err


class TestCommandLines:
    def test_attention_on_the_cpu(self, monkeypatch, capsys):
        words = ["--lengths", "64", "--rounds", "3", "--activations", "sigmoid", "relu", "--heads", "1", "--head_dim", "8"]
        monkeypatch.setattr(sys, "argv", ["attention.py", *words, "--no-eager", "--dtypes", "float32"])
        attention.main()
        printed = capsys.readouterr().out
        assert "batch 1, 1 heads of 8, causal, forward and backward" in printed
        assert "time of nlq_tiled as a multiple of softmax's on SDPA" in printed and "  relu     " in printed

    def test_defaults(self, monkeypatch):
        arguments = attention.parse_arguments([])
        assert (arguments.dtypes, arguments.batch, arguments.heads) == (["float32", "bfloat16"], 1, 4)
        assert (arguments.head_dim, arguments.lengths) == (64, [512, 1024, 2048, 4096, 8192])
        assert training_step.parse_arguments([]).compile is False and training_step.parse_arguments(["--compile"]).compile
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setitem(ATTENTION_BACKENDS, attention_cuda.OURS, ATTENTION_BACKENDS["nlq_tiled"])
        arguments = attention.parse_arguments(["--device", "cuda"])
        assert (arguments.dtypes, arguments.batch, arguments.heads) == (["bfloat16"], None, None)
        assert (arguments.head_dim, arguments.lengths) == ([64, 128], [1024, 2048, 4096, 8192, 16384])
        names = [name for name, activation in ATTENTION_ACTIVATIONS.items() if activation.is_elementwise]
        candidates = attention_cuda.make_candidates(arguments, attention_cuda.OURS)
        assert [name for backend, name in candidates if backend == attention_cuda.OURS] == names
        assert [name for backend, name in candidates if backend == "flex_attention"] == [
            "softmax",
            *(name for name in names if ATTENTION_ACTIVATIONS[name].non_negative),
        ]
        arguments = training_step.parse_arguments(["--device", "cuda"])
        assert (arguments.dtype, arguments.preset, arguments.compile) == ("bfloat16", "gpt3-small", True)
        assert not training_step.parse_arguments(["--device", "cuda", "--no-compile"]).compile

    @pytest.mark.parametrize("words", [["--device", "cuda"], ["--markdown", "x.md"], ["--head_dim", "64", "128"]])
    def test_attention_refuses(self, words, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            attention.parse_arguments(words)
        assert words[0] in capsys.readouterr().err

    def test_training_step(self, monkeypatch, capsys):
        shape = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 96,
            "context": 64,
            "batch": 2,
        }
        monkeypatch.setitem(training_step.SHAPES, "small", shape)
        peak = 0.001
        words = ["--rounds", "3", "--trainer_steps", "0", "--dtype", "bfloat16"]
        assert training_step.main([*words, "--peak", str(peak)]) == 0
        lines = {line.split("  ")[0]: line.split("  ")[1:] for line in capsys.readouterr().out.splitlines()}
        flops = 6 * (2 * 12 * 32**2 + 96 * 32) + 2 * 12 * 64 * 32
        assert measure_model(training_step.nlq_config(shape, query_projection="linear")).flops_per_token == flops
        for name in ("gpt2 (sdpa)", "nlq linear/softmax", "nlq linear/tanh"):
            speed, utilization = [cell for cell in lines[name] if cell][:2]
            share = float(speed.replace(",", "")) * flops / (peak * 1e12)
            assert float(utilization.rstrip("%")) / 100 == pytest.approx(share, abs=6e-4)

        assert training_step.main([*words[:-1], "float32"]) == 0
        assert "MFU" not in capsys.readouterr().out

    def test_training_step_goes_on_after_a_failure_on_a_gpu(self, monkeypatch):
        def fail(tokens):
            raise RuntimeError("no kernel")

        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(training_step, "seconds", lambda function, device: function() or 1.0)
        tokens, calls = torch.zeros(1), []
        rows, failures = training_step.time_steps({"good": calls.append, "bad": fail}, tokens, 3, "cuda")
        assert rows == {"good": [1.0] * 3} and failures == {"bad": "RuntimeError: no kernel"} and len(calls) == 5
        with pytest.raises(RuntimeError, match="no kernel"):
            training_step.time_steps({"bad": fail}, tokens, 3, "cpu")


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "key_value"])
def test_tuning(kernel, capsys):
    """Tuning orders the choices that work by their time, and leaves the table as it was."""
    before = {key: dict(lines) for key, lines in TILES.items()}
    one_pass = tune_triton.Pass(kernel, head_dim=256, length=16, tokens=16, activation="relu", device="cpu")
    choices = [Tiles(16, 16, 4, 1), Tiles(3, 16, 4, 1), Tiles(8, 16, 4, 1)]
    times = tune_triton.tune(one_pass, measure.Clock("cpu"), choices)
    assert sorted(tiles for _, tiles in times) == [choices[2], choices[0]]
    assert times[0][0] <= times[1][0]
    assert str(choices[1]) in capsys.readouterr().out  # tiles are powers of 2
    assert before == TILES


class TestSelection:
    def test_only_the_paired_test_holds_where_noises_differ(self):
        random = np.random.default_rng(0)
        found = selection.compare_tests(random, 5, 5, noise="baseline 4 x", repetitions=1500)
        # Of 2 and 20 %, with a standard error below 1 %
        assert found["paired"] < 0.05 < 0.15 < found["blocks"]
        found = selection.compare_tests(random, 5, 2, difference=2.0, repetitions=1500)
        assert found["paired"] < found["pooled"] < found["blocks"]
        same = selection.compare_tests(random, 5, 1, repetitions=1500)
        assert same["paired"] == same["pooled"] == same["blocks"] < 0.08

    def test_the_documented_errors_of_skewed_noise(self):
        """Also those of the warning: the table of docs/statistics.md, within four standard errors."""
        text = (Path(__file__).parents[1] / "docs" / "statistics.md").read_text().split("## Skewed noise")[1].split("\n#")[0]
        rows = [re.findall(r"[\d.]+", line) for line in text.splitlines() if re.match(r"\| \d", line)]
        random, repetitions = np.random.default_rng(0), 1500
        for seeds, models, *shares in rows:
            found = [
                selection.compare_tests(random, int(seeds), int(models), 0.0, noise, "skewed", repetitions=repetitions)
                for noise in ("equal", "one model 4 x", "all models 4 x", "baseline 4 x")
            ]
            calm = selection.compare_tests(random, int(seeds), int(models), repetitions=repetitions)
            simulated = [*(of["paired"] for of in found), calm["warned"], found[2]["warned"], found[2]["unwarned"]]
            for share, documented in zip(simulated, (float(share) / 100 for share in shares), strict=True):
                assert abs(share - documented) < 4 * math.sqrt(documented * (1 - documented) / repetitions), (seeds, models)
        assert len(rows) == 7

    @pytest.mark.parametrize("correlation", [1.0, 0.5])
    def test_only_a_choice_in_each_seed_is_in_the_test(self, correlation):
        random = np.random.default_rng(0)
        rates = np.array([1.5, 0.0, 1.5])
        found = selection.compare_choices(random, 5, 5, rates, correlation=correlation, repetitions=1500)
        assert found["each seed"]["wrong"] < 0.08 < 0.16 < found["sweep 1"]["wrong"]
        runs = {"sweep 1": 3 + 5, "sweep 2": 6 + 5, "sweep 4": 12 + 5, "two best": 3 + 10, "mean": 15, "each seed": 15}
        assert {name: values["runs"] for name, values in found.items()} == runs

    def test_a_clear_best_rate_leaves_nothing_to_choose(self):
        found = selection.compare_choices(np.random.default_rng(0), 3, 1, np.array([0.0, 99.0, 99.0]), repetitions=200)
        assert len({values["wrong"] for values in found.values()}) == 1
        # All but a hundredth of the noise is shared: 0.5 deviations are 5 of what is left
        rates = np.array([0.5, 0.0, 0.5])
        shared = selection.compare_choices(np.random.default_rng(0), 5, 1, rates, shared=0.99, repetitions=1500)
        assert shared["sweep 1"]["wrong"] < 0.08

    def test_search_ends_between_worse_rates(self):
        losses = np.random.default_rng(0).standard_normal((50, 2, 13, 3)) + np.square(np.arange(-6, 7.0))[:, None]
        tried = selection.search(losses)
        best = np.where(tried, losses, np.inf).argmin(axis=2, keepdims=True)
        assert ((best > 0) & (best < 12)).all()
        for neighbour in (best - 1, best + 1):
            assert np.take_along_axis(tried, neighbour, axis=2).all()
        # Rates beside each other, as a search tries no others
        assert (np.diff(tried.astype(int), axis=2, prepend=0) == 1).sum(axis=2).max() == 1

    def test_only_seeds_that_begin_at_their_own_rates_choose_independently(self):
        away = np.abs(np.arange(-12, 13.0))
        found = selection.compare_starts(np.random.default_rng(0), 5, 5, 0.5 * away, 4, repetitions=1500)
        # Of 5 and 8 %, with a standard error below 1 %
        assert found["own"]["wrong"] < 0.065 < found["median"]["wrong"]
        assert found["own"]["runs"] < 1.05 * found["median"]["runs"]

    def test_seeds_that_are_added_until_there_is_a_verdict(self):
        wrong = [selection.wrong_after_looks(np.random.default_rng(0), looks, 2, 1500) for looks in ([5], [3, 5], [3, 5, 10])]
        # Of 5, 9 and 12 %, with standard errors below 1 %
        assert wrong[0] < 0.065 < wrong[1] < wrong[2]

    def test_wrong_statistics_give_no_table(self, monkeypatch):
        selection.gate()
        for name, message in (("paired", "verdicts differ"), ("warned_of_noise", "warnings differ")):
            with monkeypatch.context() as patch, pytest.raises(SystemExit, match=f"correctness gate: {message}"):
                patch.setattr(selection, name, lambda losses: selection.paired_t(losses).max(axis=1, keepdims=True) > 2)
                selection.gate()


class TestTrend:
    @pytest.mark.slow
    def test_verdicts_are_seldom_wrong(self):
        # Of 5 % at most, with standard errors of 2 to 3 %
        loud = trend.Noise(by_scale=(4.0, 1.0, 1.0, 1.0))
        assert trend.wrong(trend.simulate(trend.with_change(1.0, 0.0), 3, loud, 2, 60)) < 0.15
        found = trend.shares(trend.simulate(trend.with_change(2.0, 1.0), 3, trend.Noise(1.0, 0.75), 1, 80))
        assert found["shrinks"] < 0.15

    def test_wrong_statistics_give_no_table(self, monkeypatch):
        trend.gate(50)
        monkeypatch.setattr(trend, "analyse_trend", functools.partial(trend.analyse_trend, alpha=0.4))
        with pytest.raises(SystemExit, match="correctness gate: intervals of the multiplier hold in"):
            trend.gate(50)


@pytest.mark.slow
def test_pretrained(monkeypatch, capsys, tmp_path):
    """Speed and memory of a tiny Llama, whose numbers mean nothing."""
    for name in ("set_verbosity_error", "disable_progress_bar"):
        monkeypatch.setattr(pretrained.logging, name, lambda: None)  # it would hold for later tests too
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=99, **sizes, max_position_embeddings=64, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    words = {
        "source": tmp_path / "llama",
        "dtypes": "bfloat16",
        "prompt": 32,
        "new": 4,
        "context": 16,
        "rounds": 2,
        "processes": 1,
    }
    pretrained.main([str(part) for name, value in words.items() for part in (f"--{name}", value)])
    *_, load, prompt, token, step = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    assert [row[0] for row in (load, prompt, token, step)] == ["load", "prompt", "token", "training step"]
    for _, dtype, *numbers in (load, prompt, token, step):
        assert dtype == "bfloat16" and all(float(number.split()[0].replace(",", "")) > 0 for number in numbers)


@pytest.mark.slow
def test_memory_of_a_conversion(monkeypatch, capsys, tmp_path):
    """Of weights that are larger than the limit, so that nothing that loads them all would pass."""
    monkeypatch.delitem(conversion.CONFIGURATIONS, "llama")
    assert conversion.main(["--layers", "16", "--folder", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " to " in line]
    assert len(rows) == 3
    for *_, weights, _, _, peak, limit in rows:
        assert float(limit) < float(weights) and 0.3 < float(peak) < float(limit)
    assert not list(tmp_path.iterdir())


def test_generation(monkeypatch, capsys):
    """Every candidate has its row, and the reference the ratio 1."""
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


def test_parts(monkeypatch, capsys):
    """Every part has its row, beside the model without it."""
    monkeypatch.setattr(parts.logging, "set_verbosity_error", lambda: None)  # it would hold for later tests too
    monkeypatch.setattr(parts, "SHAPE", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 29})
    assert set(parts.PARTS) - {"attention_activation"} <= set(ATTENTION_PARTS)
    assert parts.main(["--length", "80", "--new", "3", "--rounds", "2", "--threads", "1"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[1:]] == list(parts.candidates_of(list(parts.PARTS)))
    assert rows[1][2] == "1" and all(float(row[1]) > 0 for row in rows[1:])

    monkeypatch.setattr(parts.NLQForCausalLM, "set_attn_implementation", lambda model, name: model.lm_head.weight.data.mul_(2))
    with pytest.raises(SystemExit, match="correctness gate: softmax: the logits differ"):
        parts.main(["--length", "80", "--new", "3", "--rounds", "1", "--parts", "exclusive_attention", "--threads", "1"])
