"""`nlq_triton` on a GPU: large shapes, and what only a GPU has."""

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest
import torch
from support.attention_cases import (
    ALL_COMBINATIONS,
    THREE,
    combinations,
    error,
    layer,
    random_factors,
    reference,
    results,
)
from support.elementwise_backends import poisoned_memory
from support.paths import TESTS
from support.triton_cases import DEVICE, MARKS, TOLERANCE

from modeling_nlq import backends_nlq
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.kernels.triton.attention import DTYPES, triton_attention_forward
from modeling_nlq.masking_nlq import make_visibility


pytestmark = MARKS


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")
class TestOnGPU:
    """Large shapes, and what only a GPU has."""

    @staticmethod
    def draw(query_length, key_length, heads, key_value_heads, head_dim, dtype):
        """Numbers differ from run to run; the seed is printed."""
        print("seed", seed := torch.seed())
        generator = torch.Generator(DEVICE).manual_seed(seed)
        sizes = ((heads, query_length), (key_value_heads, key_length), (key_value_heads, key_length))
        states = [torch.randn(2, length, count, head_dim, generator=generator, device=DEVICE) for count, length in sizes]
        return [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in states]

    @staticmethod
    def exact(states, visible, activation, normalization, scaling, chunk_size=512):
        """The output and gradients in float64, some queries at a time."""
        query, *others = (tensor.detach().double().requires_grad_() for tensor in states)
        outputs, gradients, sums = [], [], [torch.zeros_like(tensor) for tensor in others]
        shape = (query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        factors = random_factors(query.new_empty(shape))
        for start in range(0, query.shape[2], chunk_size):
            place = slice(start, start + chunk_size)
            output = reference(query[:, :, place], *others, visible[:, :, place], activation, normalization, scaling)
            gradient, *rest = torch.autograd.grad(output, [query, *others], factors[:, place])
            gradients.append(gradient[:, :, place])
            outputs.append(output.detach())
            sums = [total + part for total, part in zip(sums, rest)]
        return [torch.cat(outputs, dim=1), torch.cat(gradients, dim=2), *sums]

    MASKS = ("causal", "padding", "packed", "static_cache")

    def mask(self, name, length):
        """A mask, and how many keys there are."""
        if name == "padding":
            mask = torch.ones(2, length, device=DEVICE)
            mask[0, : length // 3] = 0
            mask[1, length // 2 : length // 2 + 7] = 0
            return make_visibility(length, length, 0, DEVICE, mask), length
        if name == "packed":
            segments = (torch.rand(2, length, device=DEVICE) < 5 / length).cumsum(dim=-1)
            return make_visibility(length, length, 0, DEVICE, segments=segments), length
        if name == "static_cache":
            return make_visibility(length, 2 * length, torch.tensor(length // 2, device=DEVICE), DEVICE), 2 * length
        return make_visibility(length, length, 0, DEVICE), length

    def check(self, states, mask, activation, normalization):
        """The error against float64 is at most twice that of eager in the same precision, or some roundings."""
        scaling = states[0].shape[-1] ** -0.5
        module = layer(activation, normalization, heads=states[0].shape[1], key_value_heads=states[1].shape[1])
        found = []
        for function in (triton_attention_forward, eager_attention_forward):
            with poisoned_memory(DEVICE):
                output, _ = function(module, *states, mask, scaling=scaling)
                found.append(results(output, states))
        expected = self.exact(states, mask.dense(), activation, normalization, scaling)
        least = max(4 * torch.finfo(states[0].dtype).eps, TOLERANCE)
        for name, actual, eager, exact in zip(("output", "query", "key", "value"), *found, expected, strict=True):
            budget = max(2 * error(eager, exact), least)
            assert error(actual, exact) <= budget, f"{name}: {error(actual, exact):.2e}, not {budget:.2e}"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 256])
    @combinations(THREE)
    def test_head_dims(self, activation, normalization, head_dim, dtype):
        mask, key_length = self.mask("causal", 1000)
        self.check(self.draw(1000, key_length, 4, 2, head_dim, dtype), mask, activation, normalization)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("length", [4097, 1000])
    @pytest.mark.parametrize("name", MASKS)
    def test_masks(self, name, length, dtype):
        mask, key_length = self.mask(name, length)
        self.check(self.draw(length, key_length, 3, 1, 64, dtype), mask, "softplus", "sum")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("key_length", [513, 4097, 50_001])
    @pytest.mark.parametrize("query_length, heads, key_value_heads", [(1, 8, 8), (1, 8, 1), (3, 8, 2), (64, 2, 2)])
    def test_split_keys(self, query_length, heads, key_value_heads, key_length, dtype):
        mask = make_visibility(query_length, key_length, key_length - query_length, DEVICE)
        self.check(self.draw(query_length, key_length, heads, key_value_heads, 64, dtype), mask, "squared", "sum")

    @combinations(ALL_COMBINATIONS)
    def test_combinations(self, activation, normalization):
        mask, key_length = self.mask("causal", 1000)
        self.check(self.draw(1000, key_length, 2, 2, 64, torch.bfloat16), mask, activation, normalization)

    @pytest.mark.parametrize("name", MASKS)
    def test_same_each_time(self, name):
        mask, key_length = self.mask(name, 1000)
        states = self.draw(1000, key_length, 8, 2, 64, torch.bfloat16)
        module, runs = layer("softplus", heads=8, key_value_heads=2), []
        for _ in range(5):
            output, _ = triton_attention_forward(module, *states, mask, scaling=0.125)
            runs.append(results(output, states))
        for run in runs[1:]:
            assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))

    @torch.no_grad()
    @pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
    @pytest.mark.parametrize("key_length", [300, 2048], ids=["", "split"])
    def test_cuda_graph(self, key_length, padding):
        """A recorded step of decoding goes on as its static cache fills."""
        query, key, value = (tensor.detach() for tensor in self.draw(1, key_length, 8, 2, 64, torch.bfloat16))
        offset = torch.tensor(100, device=DEVICE)
        given = torch.ones(2, key_length, device=DEVICE)
        given[0, :30] = 0
        module = layer("softplus", heads=8, key_value_heads=2)

        def step(function):
            mask = make_visibility(1, key_length, offset, DEVICE, given if padding else None)
            return function(module, query, key, value, mask, scaling=0.125)[0]

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step(triton_attention_forward)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step(triton_attention_forward)
        for place in (100, 101, 250):
            offset.fill_(place)
            query.normal_()
            graph.replay()
            assert error(output, step(eager_attention_forward)) <= 4 * torch.finfo(torch.bfloat16).eps

    @pytest.mark.parametrize("mode", [None, "reduce-overhead"])
    def test_compiled_model(self, make_model, mode):
        sizes = {"hidden_size": 128, "num_attention_heads": 2, "query_projection": "linear", "num_key_value_heads": 1}
        model = make_model(implementation="nlq_triton", attention_activation="squared", **sizes).to(DEVICE)
        input_ids = torch.randint(13, (2, 31), device=DEVICE)
        found = []
        for call in (model, torch.compile(model, fullgraph=True, mode=mode)):
            for _ in range(3):
                model.zero_grad()
                loss = call(input_ids, labels=input_ids, use_cache=False).loss
                loss.backward()
            found.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)

    def test_automatic_choice(self, make_model, monkeypatch):
        """The automatic choice on a real GPU is `nlq_triton`."""
        called, row = [], backends_nlq.ATTENTION_BACKENDS["nlq_triton"]

        def counted(*inputs, **options):
            called.append(inputs[1].device.type)
            return row.function(*inputs, **options)

        monkeypatch.setitem(backends_nlq.ATTENTION_BACKENDS, "nlq_triton", dataclasses.replace(row, function=counted))
        make_model(implementation="nlq", attention_activation="relu").to(DEVICE)(torch.randint(13, (1, 3), device=DEVICE))
        assert called == ["cuda", "cuda"]

    @pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
    @pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck"])
    def test_sanitizer(self, tool):
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "support.triton_sanitizer",
        ]
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
