"""`nlq_triton` against the formulas: run by Triton's interpreter where there is no GPU, compiled where there is one.

`TRITON_INTERPRET=0 python tests/modeling/test_triton.py CASES`, where the cases are JSON, compiles kernels for GPUs that need
not be there, and prints what they take. `python tests/modeling/test_triton.py small` runs a few small cases under a sanitizer.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    NON_NEGATIVE,
    SCALING,
    Layout,
    all_layouts,
    causal,
    check,
    check_rounding,
    chunk,
    combinations,
    dense,
    drawn_layouts,
    error,
    examples,
    expected_of,
    layer,
    layer_for,
    mask_of,
    packed,
    padded,
    random_booleans,
    random_factors,
    reference,
    results,
)
from support.attention_cases import run as run_function
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache

from modeling_nlq import activations_nlq, backends_nlq, modeling_nlq, triton_nlq
from modeling_nlq.activations_nlq import LIBRARY_ACTIVATIONS, get_attention_activation, register_attention_activation
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.backends_nlq import use_fused_kernels
from modeling_nlq.masking_nlq import Visibility, make_visibility, read_mask
from modeling_nlq.triton_activations_nlq import IS_INTERPRETED, triton_sigmoid, triton_softplus
from modeling_nlq.triton_gradients_nlq import key_value_gradient_kernel, query_gradient_kernel
from modeling_nlq.triton_kernels_nlq import forward_kernel, split_kernel
from modeling_nlq.triton_nlq import LAST_TILES, TILES, Tiles
from modeling_nlq.triton_nlq import DTYPES, refusal, triton_attention_forward


triton = pytest.importorskip("triton")
tl = triton.language

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
TOLERANCE = 1e-5
# The interpreter alone takes float64, in which the polynomials of the activations are good to 1e-8
TOLERANCE_64 = 1e-7
interpreter_only = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1, no GPU")


def slow(test):
    """Minutes under the interpreter. On a GPU it would be an hour of compilation, and the other tests run the kernels too."""
    return pytest.mark.slow(pytest.mark.skipif(DEVICE.type == "cuda", reason="for Triton's interpreter")(test))


# The interpreter is numpy, which warns where an exponential is to become infinite
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"),
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]

# One of each normaliser; the first has a bias, the second a mean gradient
THREE = [("sigmoid", "none"), ("softplus", "sum"), ("gelu", "length")]


@pytest.fixture(autouse=True, scope="module")
def patched_once():
    """The interpreter (Triton 3.9) patches its language at each call of each function, half of its time: once is enough."""
    if not IS_INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch_language, done = interpreter._patch_lang, set()

    def once(function):
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        names = frozenset(map(id, modules))
        if names not in done:
            patch_language(function)
            done.add(names)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield


def set_tiles(patch, tile, step, least=16):
    """Small tiles for the interpreter. Compiled kernels run in their own, for tensor cores take no smaller ones."""
    if IS_INTERPRETED:
        for kernel in TILES:
            patch.setitem(TILES, kernel, {size: {256: Tiles(tile, step, 1, 1)} for size in (2, 4)})
        patch.setattr(triton_nlq, "MIN_TILE", least)


@pytest.fixture
def small_tiles(monkeypatch):
    set_tiles(monkeypatch, 8, 4)


@pytest.fixture
def splits(monkeypatch):
    """The keys of all but the longest calls are split; how many calls were."""
    set_tiles(monkeypatch, 4, 4)
    monkeypatch.setattr(triton_nlq, "MIN_SPLIT_KEYS", 1)
    if IS_INTERPRETED:
        monkeypatch.setattr(triton_nlq, "SPLIT_STEP", 4)
    calls, function = [], triton_nlq._attend_in_parts

    def counted(problem, **results):
        calls.append(problem)
        function(problem, **results)

    monkeypatch.setattr(triton_nlq, "_attend_in_parts", counted)
    return calls


@contextlib.contextmanager
def poisoned_memory():
    """With deterministic algorithms PyTorch fills new memory with NaN, and with the largest number in that of integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def placed(mask):
    """A mask on the device of the kernels."""
    if isinstance(mask, Visibility):
        return Visibility(*(field.to(DEVICE) if isinstance(field, torch.Tensor) else field for field in mask))
    return None if mask is None else mask.to(DEVICE)


def run(layout, module, states, **options):
    """The output and gradients of `nlq_triton`, on the CPU again; new memory is poisoned."""
    states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
    with poisoned_memory():
        output, weights = triton_attention_forward(module, *states, placed(layout.mask()), scaling=SCALING, **options)
        tensors = results(output, states)
    assert weights is None
    assert all(gradient.dtype == tensor.dtype for gradient, tensor in zip(tensors[1:], states))
    return [tensor.cpu() for tensor in tensors]


@pytest.mark.usefixtures("small_tiles")
class TestAgreement:
    """Outputs and all gradients are those of the formulas."""

    # Padding, grouped queries, keys of a cache before them and empty places after them
    EVERYTHING = padded("0011111110000", "1101111110000", query_length=5, offset=torch.tensor(5), key_value_heads=1)

    @staticmethod
    def check_float32(activation, normalization, layout, **options):
        module, states = layer_for(layout, activation, normalization), layout.states(**options)
        actual = run(layout, module, states)
        assert all(tensor.dtype == torch.float32 for tensor in actual)
        check(actual, expected_of(layout, activation, normalization, states), TOLERANCE)

    @staticmethod
    def check_half(dtype, activation, normalization, layout):
        module, states = layer_for(layout, activation, normalization), layout.states(dtype)
        eager = run_function(eager_attention_forward, layout, module, states)
        check_rounding(run(layout, module, states), eager, expected_of(layout, activation, normalization, states))

    @all_layouts
    @combinations(THREE[:2])
    def test_layouts(self, activation, normalization, layout):
        self.check_float32(activation, normalization, layout)

    @combinations(ALL_COMBINATIONS)
    def test_combinations(self, activation, normalization):
        self.check_float32(activation, normalization, self.EVERYTHING)

    @pytest.mark.parametrize("name", LIBRARY_ACTIVATIONS)
    def test_functions_of_transformers(self, name):
        layout = LAYOUTS["one_key_value_head"]
        module, states = layer_for(layout, name), layout.states()
        check(run(layout, module, states), run_function(eager_attention_forward, layout, module, states), TOLERANCE)

    @pytest.mark.parametrize("head_dim", [1, 5, 16, 17, 32])
    def test_head_dim(self, head_dim):
        """Narrower than the tile that holds it, or as wide."""
        self.check_float32("softplus", "sum", LAYOUTS["odd_length"], head_dim=head_dim)

    @pytest.mark.parametrize(
        "dtype, activation, normalization, name",
        [
            (torch.bfloat16, "softplus", "sum", "left_padding"),
            (torch.bfloat16, "squared", "sum", "packed_grouped_queries"),
            (torch.bfloat16, "relu", "sum", "chunk_in_static_cache"),
            (torch.bfloat16, "sigmoid", "none", "odd_length"),
            (torch.bfloat16, "tanh", "length", "mask_of_one_row"),
            (torch.float16, "relu_squared", "sum", "packed_grouped_queries"),
            (torch.float16, "sigmoid", "sum", "left_padding"),
            (torch.float16, "gelu", "length", "one_query"),
        ],
        ids=lambda value: str(value).removeprefix("torch."),
    )
    def test_half_precision(self, dtype, activation, normalization, name):
        self.check_half(dtype, activation, normalization, LAYOUTS[name])

    @slow
    @all_layouts
    @combinations(ALL_COMBINATIONS)
    def test_product(self, activation, normalization, layout):
        self.check_float32(activation, normalization, layout)

    @slow
    @all_layouts
    @pytest.mark.parametrize(
        "dtype, activation, normalization",
        [
            *(pytest.param(torch.bfloat16, *pair, id="-".join(("bfloat16", *pair))) for pair in ALL_COMBINATIONS),
            *(pytest.param(torch.float16, name, "sum", id=f"float16-{name}-sum") for name in NON_NEGATIVE),
        ],
    )
    def test_half_precision_product(self, dtype, activation, normalization, layout):
        self.check_half(dtype, activation, normalization, layout)


LONG_LAYOUTS = {
    "causal": chunk(301, 301, 0, batch=1, heads=1, key_value_heads=1),
    "padding": padded("0" * 130 + "1" * 183, "1" * 200 + "0" * 113, heads=1, key_value_heads=1),
    "packed": packed("a" * 100 + "b" * 170 + "c" * 31, heads=1, key_value_heads=1),
    "chunk_in_static_cache": chunk(70, 600, torch.tensor(500), batch=1, heads=1, key_value_heads=1),
    "one_query_long_cache": chunk(1, 600, 599, batch=1, heads=4, key_value_heads=1),
    "dense_mask": dense(random_booleans(2, 1, 200, 150), heads=1, key_value_heads=1),
}


class TestUsualTiles:
    """The same with tiles as large as they are in use."""

    @pytest.mark.parametrize("layout", LONG_LAYOUTS.values(), ids=LONG_LAYOUTS)
    def test_float32(self, layout):
        TestAgreement.check_float32("softplus", "sum", layout, head_dim=8)

    def test_bfloat16(self):
        TestAgreement.check_half(torch.bfloat16, "softplus", "sum", LONG_LAYOUTS["packed"])

    @pytest.mark.parametrize("head_dim", [40, 64, 130, 256])
    def test_wide_heads(self, head_dim):
        TestAgreement.check_float32("sigmoid", "none", chunk(37, 45, 8, batch=1, heads=1, key_value_heads=1), head_dim=head_dim)

    @slow
    @pytest.mark.parametrize("layout", LONG_LAYOUTS.values(), ids=LONG_LAYOUTS)
    @pytest.mark.parametrize("head_dim", [8, 130])
    @combinations(THREE)
    def test_product(self, activation, normalization, head_dim, layout):
        TestAgreement.check_float32(activation, normalization, layout, head_dim=head_dim)


def check_any_layout(layout, combination, tile, step, least, head_dim):
    states = layout.states(torch.float64, head_dim)
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, tile, step, least)
        actual = run(layout, layer_for(layout, *combination), states)
    check(actual, expected_of(layout, *combination, states), TOLERANCE_64)


any_tiles = [st.sampled_from(sizes) for sizes in ([4, 8, 16], [4, 8], [2, 16])]


@interpreter_only
@examples(15)
@given(drawn_layouts(most=2, longest=9), st.sampled_from(ALL_COMBINATIONS), *any_tiles, st.integers(1, 9))
def test_any_layout(layout, combination, tile, step, least, head_dim):
    """In float64, where nothing but a wrong tile, mask or head is left to differ."""
    check_any_layout(layout, combination, tile, step, least, head_dim)


@slow
@interpreter_only
@examples(250)
@given(drawn_layouts(), st.sampled_from(ALL_COMBINATIONS), *any_tiles, st.integers(1, 9))
def test_many_layouts(layout, combination, tile, step, least, head_dim):
    check_any_layout(layout, combination, tile, step, least, head_dim)


def apply(states, count, query_index=None, key_is_valid=None, document_start=None, visible=None, options=("softplus", "sum")):
    """The operator itself, which takes what no model asks for."""
    states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
    masks = [None if mask is None else mask.to(DEVICE) for mask in (query_index, key_is_valid, document_start, visible)]
    with poisoned_memory():
        output, *_ = triton_nlq.operators.function.apply(*states, count.to(DEVICE), *masks, None, *options, SCALING, 0.0)
        return [tensor.cpu() for tensor in results(output, states)]


@pytest.mark.usefixtures("small_tiles")
class TestFullAttention:
    """Without `query_index` every query sees every key."""

    @pytest.mark.parametrize(
        "query_length, key_length, activation, normalization",
        [(7, 13, "softplus", "sum"), (13, 7, "sigmoid", "none"), (9, 16, "relu", "length")],
    )
    def test_unmasked(self, query_length, key_length, activation, normalization):
        layout = Layout(lambda b, h, i, j: True, None, query_length, key_length, heads=2, key_value_heads=1)
        states = layout.states()
        count = torch.full((1, 1, query_length), key_length)
        actual = apply(states, count, options=(activation, normalization))
        check(actual, expected_of(layout, activation, normalization, states), TOLERANCE)

    def test_padding(self):
        valid = mask_of("0011011100", "1111111111").bool()
        layout = Layout(lambda b, h, i, j: valid[b, j], None, 9, 10)
        states, count = layout.states(), valid.sum(dim=-1)[:, None, None].expand(-1, -1, 9)
        actual = apply(states, count, key_is_valid=valid, options=("sigmoid", "none"))
        check(actual, expected_of(layout, "sigmoid", "none", states), TOLERANCE)

    def test_documents(self):
        """A query sees all keys from the first of its document on, also those after it."""
        start = torch.tensor([[0, 0, 0, 3, 3, 5, 9, 9, 9], [0, 1, 1, 1, 1, 1, 8, 8, 10]])
        layout = Layout(lambda b, h, i, j: j >= start[b, i], None, 9, 12)
        states = layout.states()
        actual = apply(states, (12 - start)[:, None], document_start=start)
        check(actual, expected_of(layout, "softplus", "sum", states), TOLERANCE)

    def test_padded_documents(self):
        """Three flags at once, which no model asks for but a kernel compiles."""
        start, valid = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5]]), mask_of("011110111")
        layout = Layout(lambda b, h, i, j: start[0, i] <= j <= i and bool(valid[0, j]), None, 9, 9, batch=1)
        states, count = layout.states(), layout.visible[:, :1].sum(dim=-1)
        actual = apply(states, count, torch.arange(9), valid.bool(), start)
        check(actual, expected_of(layout, "softplus", "sum", states), TOLERANCE)


SPLIT_LAYOUTS = {
    "one_query": chunk(1, 41, 40, batch=1, heads=1, key_value_heads=1),
    "grouped_queries": chunk(1, 41, 40, batch=1, heads=4, key_value_heads=1),
    "two_groups": chunk(1, 41, 40, batch=1, heads=6, key_value_heads=2),
    "several_queries": chunk(3, 40, 37, batch=1, heads=4, key_value_heads=1),
    "batch": chunk(2, 23, 21, batch=3, heads=2, key_value_heads=1),
    "static_cache": chunk(2, 64, torch.tensor(21), batch=1, heads=2, key_value_heads=1),
    "padding": padded("0" * 9 + "1" * 31, "1" * 17 + "0" + "1" * 22, query_length=3, offset=37, heads=2, key_value_heads=1),
    "padded_static_cache": padded(
        "0" * 5 + "1" * 28 + "0" * 20, query_length=2, offset=torch.tensor(31), heads=4, key_value_heads=1
    ),
    "nothing_visible": padded("0" * 33, "0" * 32 + "1", query_length=2, offset=31, heads=2, key_value_heads=1),
    "packed": packed("aaaaabbbbbbbbcc", "abbbbbbbbbbbbbb", heads=2, key_value_heads=1),
    "mask_per_head": dense(random_booleans(2, 3, 2, 37), heads=3, key_value_heads=1),
}


class TestSplitKeys:
    """Decoding: few queries, whose keys are split among programs."""

    @pytest.mark.parametrize("layout", SPLIT_LAYOUTS.values(), ids=SPLIT_LAYOUTS)
    def test_float32(self, splits, layout):
        TestAgreement.check_float32("softplus", "sum", layout)
        assert len(splits) == 1

    @combinations([pair for pair in THREE if pair[1] != "sum"])
    def test_combinations(self, splits, activation, normalization):
        TestAgreement.check_float32(activation, normalization, SPLIT_LAYOUTS["padding"])
        assert len(splits) == 1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
    def test_half_precision(self, splits, dtype):
        TestAgreement.check_half(dtype, "squared", "sum", SPLIT_LAYOUTS["padding"])
        assert len(splits) == 1

    def test_full_attention(self, splits):
        layout = Layout(lambda b, h, i, j: True, None, 2, 37, batch=1, heads=2, key_value_heads=1)
        states = layout.states()
        actual = apply(states, torch.full((1, 1, 2), 37))
        check(actual, expected_of(layout, "softplus", "sum", states), TOLERANCE)
        assert len(splits) == 1

    @interpreter_only
    def test_there_are_several_parts(self, splits, monkeypatch):
        """A part is a multiple of SPLIT_STEP, and there are as many as the device has room for, or keys."""
        found, function = [], triton_nlq._KernelCall.run_tiled

        def run_tiled(problem, kernel, programs, **arguments):
            if kernel is split_kernel:
                found.append((arguments["keys_per_split"], arguments["splits"], programs(1)))
            function(problem, kernel, programs, **arguments)

        monkeypatch.setattr(triton_nlq._KernelCall, "run_tiled", run_tiled)
        for name in ("one_query", "two_groups", "batch", "padding"):
            layout = SPLIT_LAYOUTS[name]
            states = [tensor.detach() for tensor in layout.states()]
            triton_attention_forward(layer_for(layout, "relu"), *states, layout.mask(), scaling=SCALING)
        assert found == [(12, 4, 4), (24, 2, 4), (12, 2, 6), (20, 2, 4)]

    @pytest.mark.parametrize(
        "layout, options, is_split",
        [
            pytest.param(chunk(1, 512, 511, batch=1), {}, True, id="long"),
            pytest.param(chunk(1, 511, 510, batch=1), {}, False, id="short"),
            pytest.param(chunk(64, 512, 448, batch=1), {}, True, id="64_queries"),
            pytest.param(chunk(65, 512, 447, batch=1), {}, False, id="65_queries"),
            pytest.param(chunk(17, 512, 495, batch=1, heads=8), {}, False, id="68_queries_of_a_group"),
            pytest.param(chunk(1, 512, 511, batch=1), {"dropout": 0.1}, False, id="dropout"),
        ],
    )
    def test_when_keys_are_split(self, monkeypatch, layout, options, is_split):
        calls = []
        monkeypatch.setattr(triton_nlq, "_attend_in_parts", lambda problem, **results: calls.append(problem))
        module = layer_for(layout, "relu", training=True)
        states = [tensor.detach().to(DEVICE) for tensor in layout.states()]
        triton_attention_forward(module, *states, placed(layout.mask()), scaling=SCALING, **options)
        assert len(calls) == is_split

    def test_batch_of_nothing(self):
        states = [torch.empty(0, 2, length, 4, device=DEVICE) for length in (1, 600, 600)]
        output, _ = triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        assert output.shape == (0, 1, 2, 4)


@pytest.mark.usefixtures("small_tiles")
class TestGradients:
    @staticmethod
    def states_away_from_kinks():
        """Two heads that share keys; 5 queries and 6 keys; no score near 0."""
        for seed in range(1000):
            generator = torch.Generator().manual_seed(seed)
            shapes = ((1, 2, 5, 2), (1, 1, 6, 2), (1, 1, 6, 2))
            states = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
            if (states[0] @ states[1].transpose(2, 3)).abs().min() > 0.02:
                return states
        raise AssertionError("no such states")

    @interpreter_only
    @pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["", "dropout"])
    @combinations([("sigmoid", "none"), ("squared", "sum"), ("softplus", "sum"), ("relu", "sum"), ("silu", "length")])
    def test_finite_differences(self, activation, normalization, dropout):
        module = layer(activation, normalization, heads=2, training=True)
        visibility = make_visibility(5, 6, 0, CPU, mask_of("110111"))

        def function(*states):
            torch.manual_seed(5)  # the same weights are dropped each time
            return triton_attention_forward(module, *states, visibility, scaling=SCALING, dropout=dropout)[0]

        assert torch.autograd.gradcheck(function, self.states_away_from_kinks(), fast_mode=True)

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=["query", "key", "value", "query_and_value"])
    def test_of_some_inputs(self, wanted):
        layout = LAYOUTS["grouped_queries"]
        module = layer_for(layout, "sigmoid")
        all_gradients = run(layout, module, layout.states())[1:]
        states = [tensor.detach().to(DEVICE) for tensor in layout.states()]
        inputs = [states[index].requires_grad_() for index in wanted]
        output, _ = triton_attention_forward(module, *states, placed(layout.mask()), scaling=SCALING)
        for actual, index in zip(results(output, inputs)[1:], wanted, strict=True):
            assert torch.equal(actual.cpu(), all_gradients[index])

    def test_of_an_expanded_gradient(self):
        """`output.sum()` hands back a gradient of stride 0."""
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        on_device = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
        output, _ = triton_attention_forward(layer_for(layout, "softplus"), *on_device, None, scaling=SCALING)
        expected = reference(*states, layout.visible, "softplus", "sum", SCALING)
        for actual, other in zip(torch.autograd.grad(output.sum(), on_device), torch.autograd.grad(expected.sum(), states)):
            assert error(actual.cpu(), other) <= TOLERANCE

    @pytest.mark.parametrize("dims", [(1, 2), (0, 1), (2, 3)])
    def test_of_a_transposed_gradient(self, dims):
        layout = LAYOUTS["grouped_queries"]
        states = layout.states()
        on_device = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
        output, _ = triton_attention_forward(layer_for(layout, "softplus"), *on_device, None, scaling=SCALING)
        gradient = random_factors(output).transpose(*dims).contiguous().transpose(*dims)
        assert not gradient.is_contiguous()
        actual = [output.detach(), *torch.autograd.grad(output, on_device, gradient)]
        check([tensor.cpu() for tensor in actual], expected_of(layout, "softplus", "sum", states), TOLERANCE)

    def test_same_each_time(self):
        for name in ("packed_grouped_queries", "odd_length"):
            layout = LAYOUTS[name]
            module, states = layer_for(layout, "softplus"), layout.states(torch.bfloat16)
            first, second = (run(layout, module, states) for _ in range(2))
            assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))

    def test_no_second_derivatives_in_silence(self):
        states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in LAYOUTS["causal"].states()]
        output, _ = triton_attention_forward(layer("sigmoid"), *states, None, scaling=SCALING)
        gradient = torch.autograd.grad(output.square().sum(), states[0], create_graph=True)[0]
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.square().sum().backward()

    def test_no_forward_mode_in_silence(self):
        states = [tensor.detach().to(DEVICE) for tensor in LAYOUTS["causal"].states()]

        def function(query):
            return triton_attention_forward(layer("sigmoid"), query, *states[1:], None, scaling=SCALING)[0]

        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(function, (states[0],), (torch.ones_like(states[0]),))


@pytest.mark.usefixtures("small_tiles")
class TestStrides:
    """Tensors laid out in any way, among memory that is not theirs."""

    LAYOUT = Layout(causal, query_length=9, key_length=9, heads=2, key_value_heads=1)

    WAYS = {
        "contiguous": lambda states: states.contiguous(),
        "length_first": lambda states: states.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "last_dimension": lambda states: states.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "every_other": lambda states: nn.functional.pad(states[..., None], (0, 1), value=math.nan).flatten(-2)[..., ::2],
        # Sliced out of a larger one, whose other numbers are NaN
        "sliced": lambda states: nn.functional.pad(states, (3, 2, 4, 5, 1, 1, 1, 0), value=math.nan)[1:, 1:-1, 4:-5, 3:-2],
        "step": lambda states: torch.stack([states, torch.full_like(states, math.nan)], dim=3).flatten(2, 3)[:, :, ::2],
    }

    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_laid_out(self, way):
        states = self.LAYOUT.states()
        moved = [way(tensor.detach()) for tensor in states]
        assert all(torch.equal(one, other) for one, other in zip(moved, states))
        actual = run(self.LAYOUT, layer_for(self.LAYOUT, "softplus"), moved)
        check(actual, expected_of(self.LAYOUT, "softplus", "sum", states), TOLERANCE)

    def test_expanded(self):
        """One query for both heads, one key and value for both batches and all places: strides of 0."""
        layout = self.LAYOUT
        query, key, value = (tensor.detach() for tensor in layout.states())
        key, value = (tensor[:1, :, :1].expand(2, -1, 9, -1) for tensor in (key, value))
        query = query[:, :1].expand(-1, 2, -1, -1)
        states = [tensor.requires_grad_() for tensor in (query, key, value)]
        check(run(layout, layer_for(layout, "softplus"), states), expected_of(layout, "softplus", "sum", states), TOLERANCE)

    @pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
    def test_one_laid_out_in_another_way(self, which):
        states = self.LAYOUT.states()
        moved = [tensor.contiguous() for tensor in states]
        moved[which] = self.WAYS["sliced"](states[which].detach())
        actual = run(self.LAYOUT, layer_for(self.LAYOUT, "softplus"), moved)
        check(actual, expected_of(self.LAYOUT, "softplus", "sum", states), TOLERANCE)

    def test_inputs_stay_as_they_are(self):
        layout = LAYOUTS["mask_of_one_row"]
        states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in layout.states()]
        mask = placed(layout.mask())
        before = [tensor.detach().clone() for tensor in (*states, mask)]
        output, _ = triton_attention_forward(layer_for(layout, "sigmoid"), *states, mask, scaling=SCALING)
        results(output, states)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip((*states, mask), before))

    @pytest.mark.parametrize("way", ["contiguous", "transposed", "sliced"])
    def test_masks_laid_out(self, way):
        visible = random_booleans(2, 2, 9, 9)
        mask = {
            "contiguous": visible,
            "transposed": visible.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
            "sliced": nn.functional.pad(visible, (2, 3, 1, 1, 1, 0), value=True)[:, 1:, 1:-1, 2:-3],
        }[way]
        layout = dense(visible, mask, key_value_heads=1)
        states = layout.states()
        actual = run(layout, layer_for(layout, "softplus"), states)
        check(actual, expected_of(layout, "softplus", "sum", states), TOLERANCE)

    @pytest.mark.parametrize("split", [False, True], ids=["", "split"])
    @pytest.mark.parametrize("name", ["odd_length", "padded_chunk_in_static_cache"])
    def test_nothing_is_stored_elsewhere(self, monkeypatch, name, split):
        """What is written lies inside a larger buffer, whose other numbers stay."""
        if split:
            monkeypatch.setattr(triton_nlq, "MIN_SPLIT_KEYS", 1)
        buffers = []

        def guarded(tensor):
            buffer = torch.full((tensor.numel() + 512,), 7.0, dtype=tensor.dtype, device=tensor.device)
            buffers.append(buffer)
            return buffer[256:-256].view(tensor.shape)

        new_results, new_gradient = triton_nlq._new_results, triton_nlq._new_gradient
        monkeypatch.setattr(triton_nlq, "_new_results", lambda *inputs: tuple(map(guarded, new_results(*inputs))))
        monkeypatch.setattr(
            triton_nlq, "_new_gradient", lambda states: guarded(new_gradient(states).transpose(1, 2)).transpose(1, 2)
        )
        layout = LAYOUTS[name]
        states = layout.states(torch.bfloat16)
        run(layout, layer_for(layout, "softplus"), states)
        assert len(buffers) == 6
        for buffer in buffers:
            assert (buffer[:256] == 7).all() and (buffer[-256:] == 7).all()


def finite_results(activation, normalization, states, visible):
    states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
    with poisoned_memory():
        output, _ = triton_attention_forward(layer(activation, normalization), *states, visible.to(DEVICE), scaling=1.0)
        tensors = [tensor.cpu() for tensor in results(output, states)]
    assert all(tensor.isfinite().all() for tensor in tensors)
    return tensors


@pytest.mark.usefixtures("small_tiles")
class TestNoNaN:
    """Nothing becomes infinite or NaN, whatever the scores and however little is visible."""

    CASES = [
        *((torch.float32, *pair) for pair in ALL_COMBINATIONS),
        *((torch.float32, name, "length") for name in LIBRARY_ACTIVATIONS),
        *((torch.bfloat16, name, "sum") for name in NON_NEGATIVE),
        *((torch.float16, name, "sum") for name in NON_NEGATIVE),
        (torch.bfloat16, "sigmoid", "none"),
        (torch.bfloat16, "mish", "none"),
    ]
    all_cases = pytest.mark.parametrize(
        "dtype, activation, normalization", CASES, ids=["-".join((str(dtype)[6:], *pair)) for dtype, *pair in CASES]
    )

    @all_cases
    def test_scores_of_ten_thousand(self, dtype, activation, normalization):
        """Rows of large scores of either sign, and of both; whole tiles of what is visible, and tiles cut by the mask."""
        signs = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]])
        key = (100 * signs[:, None, :, None] * torch.tensor([1.0, 0.0, 0.0])).to(dtype).requires_grad_()
        query = key[1:].detach().expand(2, -1, -1, -1).flip(2).clone().requires_grad_()
        states = [query, key, torch.randn(2, 1, 6, 3).to(dtype).requires_grad_()]
        visible = torch.ones(2, 1, 6, 6).tril().bool()
        output, *_ = finite_results(activation, normalization, states, visible)
        if activation in dict(ALL_COMBINATIONS):
            with torch.no_grad():
                expected = reference(*states, visible, activation, normalization, 1.0)
            assert error(output, expected) <= 4 * torch.finfo(dtype).eps
        causal = make_visibility(6, 6, 0, DEVICE)
        on_device = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
        again, _ = triton_attention_forward(layer(activation, normalization), *on_device, causal, scaling=1.0)
        assert all(tensor.isfinite().all() for tensor in results(again, on_device))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @combinations(THREE)
    def test_nothing_visible(self, activation, normalization, dtype):
        """Rows that see nothing, first, in the middle, and all of a batch; whole tiles of them too."""
        visible = torch.ones(2, 1, 9, 9).tril().bool()
        visible[0, 0, 0], visible[0, 0, 4:8], visible[1] = False, False, False
        nothing = ~visible.any(dim=-1)[:, 0]
        states = [torch.randn(2, 1, 9, 3).to(dtype).requires_grad_() for _ in range(3)]
        output, *gradients = finite_results(activation, normalization, states, visible)
        assert (output[nothing] == 0).all()
        assert (output[~nothing] != 0).any()
        assert (gradients[0].transpose(1, 2)[nothing] == 0).all()
        assert all((gradient[1] == 0).all() for gradient in gradients[1:3])

    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_no_weight_is_positive(self, normalization, activation):
        """A row whose `phi` are all 0 gets 0 under every normaliser."""
        key, value = -torch.rand(1, 1, 6, 3) - 0.1, torch.randn(1, 1, 6, 3)
        visible = torch.ones(1, 1, 6, 6).tril().bool()
        for tensor in finite_results(activation, normalization, [torch.rand(1, 1, 6, 3), key, value], visible):
            assert (tensor == 0).all()

    @pytest.mark.parametrize("split", [False, True], ids=["", "split"])
    @pytest.mark.parametrize(
        "activation, score", [("relu", 1e-37), ("relu_squared", 1e-18), ("squared", -1e-18), ("softplus", -85.0)]
    )
    def test_almost_no_weight(self, monkeypatch, activation, score, split):
        """A sum too small to divide by counts as 0, long before it rounds to 0."""
        if split:
            monkeypatch.setattr(triton_nlq, "MIN_SPLIT_KEYS", 1)
        assert get_attention_activation(activation).function(torch.tensor(score)) > 0
        states = [torch.full((1, 1, 6, 1), float(score)), torch.ones(1, 1, 6, 1), torch.randn(1, 1, 6, 1)]
        visible = torch.ones(1, 1, 6, 6).tril().bool()
        output, *_ = finite_results(activation, "sum", states, visible)
        assert (output == 0).all()

    def test_equal_scores(self):
        """All scores 0, where several functions have a zero or a kink."""
        states = [torch.zeros(1, 1, 6, 3), torch.randn(1, 1, 6, 3), torch.randn(1, 1, 6, 3)]
        visible = torch.ones(1, 1, 6, 6).tril().bool()
        for name, normalization in ALL_COMBINATIONS:
            output, *_ = finite_results(name, normalization, states, visible)
            if name not in ("sigmoid", "softplus"):
                assert (output == 0).all()

    @pytest.mark.parametrize("query_length, key_length", [(1, 1000), (1000, 1)], ids=["one_query", "one_key"])
    @combinations([("softplus", "none"), ("relu", "length")])
    def test_sums_over_many_tiles(self, monkeypatch, activation, normalization, query_length, key_length):
        """They are taken in float32: in bfloat16, terms of one sign would soon be too small to change the sum."""
        set_tiles(monkeypatch, 16, 16)
        monkeypatch.setattr(triton_nlq, "MIN_SPLIT_KEYS", 10**9)
        states = [
            torch.rand(1, 1, length, 4).to(torch.bfloat16).requires_grad_() for length in (query_length, key_length, key_length)
        ]
        on_device = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
        visible = torch.ones(1, 1, query_length, key_length).bool()
        output, _ = triton_attention_forward(layer(activation, normalization), *on_device, visible.to(DEVICE), SCALING)
        expected = reference(*states, visible, activation, normalization, SCALING)
        gradients = torch.autograd.grad(output.sum(), on_device), torch.autograd.grad(expected.sum(), states)
        for one, other in zip((output, *gradients[0]), (expected, *gradients[1]), strict=True):
            assert error(one.cpu(), other) <= 2 * 2**-7  # the interpreter does not round to the nearest


@pytest.mark.usefixtures("small_tiles")
class TestDropout:
    @staticmethod
    def run(states, normalization="sum", dropout=0.25, seed=0, training=True):
        torch.manual_seed(seed)
        heads, key_value_heads = states[0].shape[1], states[1].shape[1]
        module = layer("softplus", normalization, heads=heads, key_value_heads=key_value_heads, training=training)
        states = [tensor.to(DEVICE) for tensor in states]
        return triton_attention_forward(module, *states, None, scaling=SCALING, dropout=dropout)[0].cpu()

    def dropped_weights(self, states, **options):
        """With one-hot values the outputs are the weights; `(batch, heads, query, key)`."""
        batch, heads, length, _ = states[1].shape
        one_hot = torch.eye(length, dtype=states[0].dtype).expand(batch, heads, -1, -1)
        query, key = (nn.functional.pad(tensor.detach(), (0, length - tensor.shape[-1])) for tensor in states[:2])
        return self.run([query, key, one_hot], **options).transpose(1, 2)

    def test_seed(self):
        states = LAYOUTS["grouped_queries"].states()
        first, second, other = (self.run(states, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first, second)
        assert not torch.allclose(first, other)
        module = layer("softplus", heads=4, key_value_heads=2, training=True)
        states = [tensor.to(DEVICE) for tensor in states]
        again, _ = triton_attention_forward(module, *states, None, scaling=SCALING, dropout=0.25)
        assert not torch.allclose(again.cpu(), other)  # each call draws anew

    def test_evaluation_drops_nothing(self):
        states = LAYOUTS["grouped_queries"].states()
        assert torch.equal(self.run(states, training=False), self.run(states, dropout=0.0))

    def test_which_weights_are_dropped(self, monkeypatch):
        """A quarter, everywhere; the others are divided by 3/4; no two tiles or heads alike."""
        set_tiles(monkeypatch, 16, 16)
        states = chunk(40, 40, 0, heads=4, key_value_heads=4).states(head_dim=4)
        kept = self.dropped_weights(states) / self.dropped_weights(states, dropout=0.0)
        lower = torch.ones(40, 40).tril().bool()
        kept = kept[..., lower]
        is_kept = kept != 0
        torch.testing.assert_close(kept[is_kept], torch.full_like(kept[is_kept], 1 / 0.75))
        count = is_kept.numel()
        assert abs(is_kept.float().mean() - 0.75) < 4 * math.sqrt(0.75 * 0.25 / count)
        patterns = torch.zeros(8, 40, 40).masked_scatter(lower.expand(8, -1, -1), is_kept.float())
        assert len(patterns.unique(dim=0)) == 8
        tiles = patterns.unfold(1, 4, 4).unfold(2, 4, 4)[:, *torch.tril_indices(10, 10, -1)].transpose(0, 1)
        assert len(tiles.unique(dim=0)) == len(tiles) == 45

    @pytest.mark.parametrize("normalization", ["sum", "none"])
    def test_mean_over_many(self, normalization):
        """One text many times over in a batch: each time other weights are dropped, and on average none."""
        layout = chunk(7, 7, 0, batch=1, heads=1, key_value_heads=1)
        states = [tensor.detach().expand(80, -1, -1, -1) for tensor in layout.states()]
        expected = self.run([tensor[:1] for tensor in states], normalization, dropout=0.0)
        samples = self.run(states, normalization)
        deviation = samples.std(dim=0) / math.sqrt(len(samples))
        assert ((samples.mean(dim=0) - expected).abs() <= 5 * deviation + 1e-6).all()
        assert (deviation > 0).all()

    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_backward_drops_the_same(self, normalization):
        layout = chunk(11, 11, 0, batch=1, heads=4, key_value_heads=2)
        states = layout.states(torch.float64 if IS_INTERPRETED else torch.float32)
        dropped = self.dropped_weights(states, normalization=normalization)
        full = self.dropped_weights(states, normalization=normalization, dropout=0.0)
        kept = torch.where(full == 0, 0.0, dropped / full)
        assert 0 < (kept[layout.visible] == 0).sum() < layout.visible.sum()
        actual = results(self.run(states, normalization), states)
        tolerance = TOLERANCE_64 if IS_INTERPRETED else TOLERANCE
        check(actual, expected_of(layout, "softplus", normalization, states, kept=kept), tolerance)

    @interpreter_only
    def test_whatever_the_tiles(self, monkeypatch):
        states = chunk(11, 11, 0, batch=1, heads=2, key_value_heads=1).states(torch.float64)
        found = []
        for tile, step in ((8, 4), (4, 16), (16, 2)):
            set_tiles(monkeypatch, tile, step)
            found.append(results(self.run(states), states))
        check(found[1], found[0], 1e-12)
        check(found[2], found[0], 1e-12)


class TestRefusals:
    """What the kernels do not take is an error that says so."""

    RELU = get_attention_activation("relu")

    @pytest.fixture(autouse=True)
    def large_gpu(self, monkeypatch):
        monkeypatch.setattr(triton_nlq, "_capability", lambda index: (9, 0))

    @pytest.mark.parametrize("head_dim", [1, 40, 256])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("device", ["cuda", "cuda:3"])
    def test_takes(self, device, dtype, head_dim):
        assert refusal(self.RELU, torch.device(device), dtype, head_dim) is None

    def test_takes_under_the_interpreter(self, monkeypatch):
        monkeypatch.setattr(triton_nlq, "IS_INTERPRETED", True)
        for dtype in (*DTYPES, torch.float64):
            assert refusal(self.RELU, CPU, dtype, 64) is None

    @pytest.mark.parametrize(
        "device, dtype, head_dim, activation, reason",
        [
            ("cpu", torch.float32, 64, "relu", "needs a CUDA device, not device='cpu'"),
            ("meta", torch.float32, 64, "relu", "needs a CUDA device, not device='meta'"),
            ("xpu:1", torch.float32, 64, "relu", "needs a CUDA device, not device='xpu:1'"),
            ("cuda", torch.float32, 64, "softmax", "needs a Triton body of attention_activation='softmax'"),
            ("cuda", torch.bfloat16, 257, "relu", "takes head_dim up to 256, not 257"),
            (
                "cuda",
                torch.float64,
                64,
                "relu",
                "takes torch.float16, torch.bfloat16, torch.float32, not torch.float64",
            ),
            ("cuda", torch.int64, 64, "relu", "takes torch.float16, torch.bfloat16, torch.float32, not torch.int64"),
        ],
        ids=["cpu", "meta", "xpu", "softmax", "head_dim", "float64", "int64"],
    )
    def test_reasons(self, monkeypatch, device, dtype, head_dim, activation, reason):
        monkeypatch.setattr(triton_nlq, "IS_INTERPRETED", False)
        assert refusal(get_attention_activation(activation), torch.device(device), dtype, head_dim) == reason

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr(triton_nlq, "triton", None)
        assert refusal(self.RELU, torch.device("cuda"), torch.float32, 64) == "needs the package triton: pip install triton"

    def test_old_gpus(self, monkeypatch):
        monkeypatch.setattr(triton_nlq, "_capability", {None: (8, 0), 1: (7, 5)}.get)
        assert refusal(self.RELU, torch.device("cuda"), torch.float16, 64) is None
        assert refusal(self.RELU, torch.device("cuda:1"), torch.float16, 64) == (
            "needs a GPU of compute capability 8.0 or more, not 7.5"
        )
        monkeypatch.setattr(torch.version, "hip", "6.0")
        assert refusal(self.RELU, torch.device("cuda:1"), torch.float16, 64) is None

    @pytest.mark.parametrize(
        "shape, dtype, reason",
        [
            ((1, 2, 3, 300), torch.float32, "takes head_dim up to 256, not 300"),
            ((1, 2, 3, 4), torch.int32, "takes torch.float16, torch.bfloat16, torch.float32, not torch.int32"),
        ],
        ids=["head_dim", "dtype"],
    )
    def test_message(self, shape, dtype, reason):
        states = [torch.ones(shape, dtype=dtype, device=DEVICE) for _ in range(3)]
        with pytest.raises(ValueError) as error:
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        assert str(error.value) == (f"attn_implementation='nlq_triton' (layer 0) {reason}; use one of nlq, nlq_tiled, eager")

    def test_message_on_another_device(self):
        states = [torch.empty(1, 2, 3, 4, device="meta") for _ in range(3)]
        with pytest.raises(ValueError, match=r"\(layer 0\) needs a CUDA device, not device='meta'; use one of nlq, nlq_tiled"):
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)

    @pytest.mark.parametrize(
        "shapes",
        [
            ((2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 4, 8)),
            ((2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 16)),
            ((2, 4, 3, 8), (2, 4, 3, 16), (2, 4, 3, 16)),
            ((2, 4, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)),
            ((2, 4, 3, 8), (2, 3, 3, 8), (2, 3, 3, 8)),
            ((2, 2, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)),
            ((2, 4, 3, 8), (2, 0, 3, 8), (2, 0, 3, 8)),
            ((4, 3, 8), (4, 3, 8), (4, 3, 8)),
            ((2, 4, 3, 8), (4, 3, 8), (4, 3, 8)),
            ((1, 2, 4, 3, 8), (1, 2, 4, 3, 8), (1, 2, 4, 3, 8)),
        ],
        ids=lambda shapes: " ".join(map(str, shapes)),
    )
    def test_shapes(self, shapes):
        states = [torch.randn(shape, device=DEVICE) for shape in shapes]
        with pytest.raises(ValueError) as error:
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        query, key, value = shapes
        assert str(error.value) == (
            f"nlq_triton: query={query}, key={key}, value={value} must be (batch, heads, query, head_dim) and twice "
            "(batch, key_value_heads, key, head_dim), with heads a multiple of key_value_heads"
        )

    def test_precisions(self):
        states = [torch.randn(1, 2, 3, 4, device=DEVICE, dtype=dtype) for dtype in DTYPES[::-1]]
        with pytest.raises(ValueError) as error:
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        assert str(error.value) == (
            "nlq_triton: the dtypes of query, key and value, torch.float32, torch.bfloat16, torch.float16, must be the same"
        )

    def test_devices(self):
        states = [torch.randn(1, 2, 3, 4, device=device) for device in (DEVICE, "meta", "meta")]
        with pytest.raises(
            ValueError, match=r"nlq_triton: the devices of query, key and value, .*, meta, meta, must be the same"
        ):
            triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)

    @pytest.mark.parametrize("shape", [(2, 1, 1, 300), (3, 1, 300, 300), (2, 3, 300, 300), (2, 1, 300, 257)])
    def test_masks_of_another_shape(self, shape):
        states = [torch.randn(2, 2, 300, 4, device=DEVICE) for _ in range(3)]
        with pytest.raises(ValueError, match=r"must be \(batch, 1 or heads, query, key\)=\(2, 1 or 2, 300, 300\)"):
            triton_attention_forward(layer("sigmoid"), *states, torch.ones(shape, device=DEVICE).bool(), scaling=SCALING)


@triton.jit
def softsign_body(scores):
    """`s / (1 + |s|)`."""
    size = 1.0 + tl.abs(scores)
    return scores / size, 1.0 / (size * size)


@triton.jit
def wrong_slope_body(scores):
    reciprocal = 1.0 / (1.0 + tl.abs(scores))
    return scores * reciprocal, reciprocal


COUNTED = []


@triton.jit
def counted_body(scores):
    """As softplus; under the interpreter, which lets it, it tells how large each tile is."""
    COUNTED.append(tuple(int(size) for size in scores.shape))
    return triton_softplus(scores)


@pytest.mark.usefixtures("small_tiles")
class TestRegisteredActivations:
    """A user's own activation."""

    @pytest.fixture(autouse=True)
    def nothing_is_registered(self, monkeypatch):
        monkeypatch.setattr(activations_nlq, "_REGISTERED", {})

    @pytest.mark.parametrize("normalization", ["length", "none"])
    @pytest.mark.parametrize("name", ["one_key_value_head", "packed"])
    def test_with_a_body(self, name, normalization):
        register_attention_activation("mine", nn.functional.softsign, triton_body=softsign_body)
        layout = LAYOUTS[name]
        module, states = layer_for(layout, "mine", normalization), layout.states()
        check(run(layout, module, states), run_function(eager_attention_forward, layout, module, states), TOLERANCE)

    def test_model(self, make_model):
        register_attention_activation("mine", nn.functional.softsign, triton_body=softsign_body)
        input_ids = torch.randint(13, (2, 9))
        models = [make_model(implementation=name, attention_activation="mine").to(DEVICE) for name in ("nlq_triton", "eager")]
        torch.testing.assert_close(*[model(input_ids.to(DEVICE)).logits for model in models], rtol=1e-4, atol=1e-5)

    def test_without_a_body(self, monkeypatch, make_model):
        register_attention_activation("mine", nn.functional.softsign)
        with pytest.raises(ValueError) as error:
            make_model(implementation="nlq_triton", attention_activation="mine")
        assert "'nlq_triton' cannot compute attention_activation='mine' (layer 0, 1); use one of nlq, eager, nlq_tiled" in str(
            error.value
        )
        with pytest.raises(ValueError, match="needs a Triton body of attention_activation='mine'; use one of nlq, nlq_tiled"):
            triton_attention_forward(layer("mine"), *[torch.randn(1, 1, 3, 4, device=DEVICE) for _ in range(3)], None, SCALING)
        monkeypatch.setattr(triton_nlq, "_capability", lambda index: (9, 0))
        query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=(1, 2, 3, 4))
        assert use_fused_kernels("nlq_tiled", get_attention_activation("mine"), query) == "nlq_tiled"

    @pytest.mark.parametrize("body", [nn.functional.softsign, lambda scores: (scores, scores), "softsign", 3], ids=repr)
    def test_not_a_triton_function(self, body):
        with pytest.raises(ValueError) as error:
            register_attention_activation("mine", nn.functional.softsign, triton_body=body)
        assert str(error.value) == f"triton_body={body!r} of 'mine' must be a function decorated with triton.jit"

    @pytest.mark.parametrize(
        "function, body, what",
        [(torch.tanh, softsign_body, "weights"), (nn.functional.softsign, wrong_slope_body, "derivative")],
        ids=["weights", "derivative"],
    )
    def test_another_function(self, function, body, what):
        register_attention_activation("mine", function, triton_body=body)
        with pytest.raises(ValueError, match=f"^triton_body of 'mine' computes other {what} than its function$"):
            triton_attention_forward(layer("mine"), *[torch.randn(1, 1, 3, 4, device=DEVICE) for _ in range(3)], None, SCALING)

    @interpreter_only
    @pytest.mark.parametrize(
        "layout, pairs",
        [
            pytest.param(chunk(16, 16, 0, batch=1), 10, id="causal"),
            pytest.param(chunk(4, 16, 4, batch=1), 2, id="static_cache"),
            pytest.param(packed("aaaabbbbccccdddd"), 4, id="packed"),
            pytest.param(packed("aaaabbbbccccdddd", "aaaaaaaabbbbbbbb"), 4 + 6, id="packed_differently"),
            pytest.param(padded("0000000011111111", "0000111111111111"), 3 + 6, id="left_padding"),
            pytest.param(padded("1111111100000000"), 7, id="right_padding"),
            pytest.param(padded("0" * 16), 0, id="nothing_visible"),
        ],
    )
    def test_hidden_tiles_are_skipped(self, monkeypatch, layout, pairs):
        set_tiles(monkeypatch, 4, 4)
        register_attention_activation("counted", nn.functional.softplus, triton_body=counted_body)
        triton_nlq._check_body(get_attention_activation("counted"), DEVICE)  # which the first call does
        COUNTED.clear()
        module, states = layer_for(layout, "counted"), layout.states()
        output, _ = triton_attention_forward(module, *states, layout.mask(), scaling=SCALING)
        assert [(4, 4)] * pairs * layout.heads == COUNTED
        output.sum().backward()
        assert [(4, 4)] * pairs * layout.heads * 3 == COUNTED

    @interpreter_only
    def test_hidden_keys_are_skipped_in_parts(self, splits):
        """A static cache's empty places, though not those before the keys' own part."""
        register_attention_activation("counted", nn.functional.softplus, triton_body=counted_body)
        triton_nlq._check_body(get_attention_activation("counted"), DEVICE)  # which the first call does
        COUNTED.clear()
        layout = chunk(2, 64, torch.tensor(21), batch=1, heads=2, key_value_heads=1)
        states = [tensor.detach() for tensor in layout.states()]
        triton_attention_forward(layer_for(layout, "counted"), *states, layout.mask(), scaling=SCALING)
        assert len(splits) == 1
        assert [(16, 4)] * math.ceil(23 / 4) == COUNTED


class TestTiles:
    """The line of `TILES` that a device has room for."""

    @pytest.fixture
    def launches(self, monkeypatch):
        """What is launched on a device that has room for tiles of 64 at most."""
        found = []

        def launch(problem, kernel, programs, options=None, **arguments):
            if kernel in TILES:
                found.append((kernel.__name__, programs, arguments["TILE"], arguments["STEP"], options))
                if arguments["TILE"] > 64:
                    raise triton.runtime.OutOfResources(300_000, 232_448, "shared memory")

        monkeypatch.setattr(triton_nlq._KernelCall, "run", launch)
        monkeypatch.setattr(triton_nlq, "_FITTING", {})
        return found

    @staticmethod
    def attend(dtype=torch.bfloat16, head_dim=64, length=300):
        states = [torch.zeros(1, 2, length, head_dim, dtype=dtype, device=DEVICE) for _ in range(3)]
        triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)

    def test_smaller_ones_where_memory_is_short(self, launches):
        self.attend()
        lines = [*TILES[forward_kernel][2].values(), LAST_TILES]
        expected = [("forward_kernel", 2 * math.ceil(300 / tiles.tile), tiles.tile, tiles.step) for tiles in lines]
        assert [launch[:4] for launch in launches] == expected
        options = launches[-1][4]
        assert options == {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
        del launches[:]
        self.attend()  # it remembers
        assert [launch[:4] for launch in launches] == expected[-1:]
        del launches[:]
        self.attend(head_dim=128)  # wider heads may do with fewer attempts
        assert [launch[:4] for launch in launches] == expected[1:]

    def test_none_fits(self, monkeypatch, launches):
        monkeypatch.setattr(triton_nlq, "LAST_TILES", Tiles(128, 64, 8, 3))
        with pytest.raises(triton.runtime.OutOfResources, match="shared memory"):
            self.attend()
        assert len(launches) == len(TILES[forward_kernel][2]) + 1

    @pytest.mark.parametrize(
        "dtype, head_dim, size, width",
        [
            (torch.bfloat16, 16, 2, 64),
            (torch.bfloat16, 64, 2, 64),
            (torch.bfloat16, 65, 2, 128),
            (torch.bfloat16, 256, 2, 256),
            (torch.float16, 64, 4, 64),
            (torch.float16, 256, 4, 256),
            (torch.float32, 32, 4, 64),
            (torch.float32, 200, 4, 256),
        ],
    )
    def test_line_of_a_head(self, monkeypatch, launches, dtype, head_dim, size, width):
        lines = {size: {width: Tiles(size * width // 64, 1, 1, 1) for width in (64, 128, 256)} for size in (2, 4)}
        monkeypatch.setitem(TILES, forward_kernel, lines)
        self.attend(dtype, head_dim, length=9)
        assert [launch[2] for launch in launches] == [size * width // 64]

    @interpreter_only
    def test_results_after_a_failure(self, monkeypatch):
        """With the kernels run as they are, and a first line that has no room."""
        for kernel in TILES:
            monkeypatch.setitem(TILES, kernel, {4: {128: Tiles(128, 128, 8, 9), 256: Tiles(8, 8, 4, 1)}})
        run_kernel, failures = triton_nlq._KernelCall.run, []

        def launch(problem, kernel, programs, options=None, **arguments):
            if options is not None and options["num_stages"] == 9:
                failures.append(kernel)
                raise triton.runtime.OutOfResources(300_000, 232_448, "shared memory")
            run_kernel(problem, kernel, programs, options, **arguments)

        monkeypatch.setattr(triton_nlq._KernelCall, "run", launch)
        monkeypatch.setattr(triton_nlq, "_FITTING", {})
        TestAgreement.check_float32("softplus", "sum", LAYOUTS["grouped_queries"])
        assert failures == [forward_kernel, query_gradient_kernel, key_value_gradient_kernel]


class TestAutomaticChoice:
    """`nlq` takes the kernels on CUDA where it can, which a stand-in for a query on CUDA asks for."""

    @pytest.fixture(autouse=True)
    def warnings(self, monkeypatch):
        """What was warned of, and a GPU that the kernels take."""
        found = []
        monkeypatch.setattr(triton_nlq, "_capability", lambda index: (9, 0))
        monkeypatch.setattr(backends_nlq.logger, "warning_once", found.append)
        return found

    @staticmethod
    def choose(name="nlq_tiled", activation="relu", device="cuda", dtype=torch.bfloat16, head_dim=64):
        query = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=torch.Size((2, 4, 7, head_dim)))
        return use_fused_kernels(name, get_attention_activation(activation), query)

    @pytest.mark.parametrize("activation", ["relu", "sigmoid", "gelu", "mish"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_on_cuda(self, warnings, activation, dtype):
        assert self.choose(activation=activation, dtype=dtype) == "nlq_triton"
        assert warnings == []

    def test_elsewhere(self, warnings):
        assert self.choose(device="cpu") == self.choose(device="meta") == self.choose(device="mps") == "nlq_tiled"
        assert warnings == []

    @pytest.mark.parametrize("name", ["sdpa", "eager", "nlq_sparse", "nlq_linear", "flex_attention"])
    def test_other_backends_stay(self, warnings, name):
        assert self.choose(name=name, activation="softmax") == name
        assert warnings == []

    @pytest.mark.parametrize(
        "options, reason",
        [
            ({"dtype": torch.float64}, "takes torch.float16, torch.bfloat16, torch.float32, not torch.float64"),
            ({"head_dim": 512}, "takes head_dim up to 256, not 512"),
        ],
    )
    def test_warns(self, monkeypatch, warnings, options, reason):
        monkeypatch.setattr(triton_nlq, "IS_INTERPRETED", False)
        assert self.choose(**options) == "nlq_tiled"
        assert warnings == [f"attn_implementation='nlq' uses nlq_tiled, which is slower: nlq_triton {reason}"]

    def test_warns_on_old_gpus_and_without_triton(self, monkeypatch, warnings):
        monkeypatch.setattr(triton_nlq, "_capability", lambda index: (7, 0))
        assert self.choose() == "nlq_tiled"
        monkeypatch.setattr(triton_nlq, "triton", None)
        assert self.choose() == "nlq_tiled"
        assert [text.split("nlq_triton ")[1] for text in warnings] == [
            "needs a GPU of compute capability 8.0 or more, not 7.0",
            "needs the package triton: pip install triton",
        ]

    def test_no_warning_under_the_compiler(self, monkeypatch, warnings):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert self.choose(head_dim=512) == "nlq_tiled"
        assert warnings == []

    @pytest.mark.parametrize(
        "implementation, function", [("nlq", "nlq_triton"), ("nlq_tiled", "nlq_tiled"), ("eager", "eager")]
    )
    def test_model(self, monkeypatch, make_model, implementation, function):
        """Who calls whom: the automatic choice alone asks, once per layer."""
        asked, called = [], []
        monkeypatch.setattr(modeling_nlq, "use_fused_kernels", lambda *inputs: asked.append(inputs[0]) or "nlq_triton")
        for name in ("nlq_triton", "nlq_tiled", "eager"):
            row = backends_nlq.ATTENTION_BACKENDS[name]

            def counted(*inputs, name=name, row=row, **options):
                called.append(name)
                return row.function(*inputs, **options)

            monkeypatch.setitem(backends_nlq.ATTENTION_BACKENDS, name, dataclasses.replace(row, function=counted))
        model = make_model(implementation=implementation, attention_activation="relu").to(DEVICE)
        model(torch.randint(13, (1, 3), device=DEVICE))
        assert called == [function] * 2
        assert asked == (["nlq_tiled"] * 2 if implementation == "nlq" else [])


def test_without_triton():
    """The package and its other backends work; who asks for the kernels learns what to install."""
    script = """
import sys
sys.modules["triton"] = None
import torch
from modeling_nlq import NLQConfig, NLQForCausalLM
sizes = dict(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
for name in ("nlq", "nlq_triton"):
    model = NLQForCausalLM(NLQConfig(**sizes, attention_activation="relu", attn_implementation=name))
    try:
        print(model(torch.tensor([[1, 2]])).logits.shape)
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "torch.Size([1, 2, 7])",
        "attn_implementation='nlq_triton' (layer 0) needs the package triton: pip install triton; use one of nlq, nlq_tiled, "
        "eager",
    ]


def test_on_the_cpu_without_the_interpreter():
    script = """
import torch
from modeling_nlq import NLQConfig, NLQForCausalLM
sizes = dict(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = NLQForCausalLM(NLQConfig(**sizes, attention_activation="relu", attn_implementation="nlq_triton"))
try:
    model(torch.tensor([[1, 2]]))
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    folder = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == (
        "attn_implementation='nlq_triton' (layer 0) needs a CUDA device, not device='cpu'; use one of nlq, nlq_tiled, eager"
    )


def operator_inputs(layout, states, dropout=0.0, activation="softplus", normalization="sum"):
    """What the operators take besides the query, key and value."""
    visibility, count = read_mask(placed(layout.mask()), *states[:2])
    masks = (None, None, None, visibility)
    if isinstance(visibility, Visibility):
        masks = (visibility.query_index, visibility.key_is_valid, visibility.document_start, None)
    seed = torch.tensor(5, device=DEVICE) if dropout else None
    return (count, *masks, seed, activation, normalization, SCALING, dropout)


@pytest.mark.usefixtures("small_tiles")
class TestWithPyTorch:
    """Under `torch.compile`, export, autocast, gradient checkpointing, and PyTorch's checks of operators."""

    @pytest.fixture(autouse=True)
    def dynamo(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @staticmethod
    def compile(function):
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    @staticmethod
    def states(layout, **options):
        return [tensor.detach().to(DEVICE).requires_grad_() for tensor in layout.states(**options)]

    @pytest.mark.parametrize("name", ["causal", "one_key_value_head", "packed", "mask_of_one_row"])
    def test_compile(self, name):
        layout = LAYOUTS[name]
        module, mask = layer_for(layout, "sigmoid"), placed(layout.mask())

        def function(query, key, value):
            return triton_attention_forward(module, query, key, value, mask, scaling=SCALING)[0]

        states = self.states(layout)
        compiled = self.compile(function)
        expected, actual = (results(call(*states), states) for call in (function, compiled))
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
        with torch.no_grad():
            assert torch.equal(compiled(*states), expected[0])

    def test_compile_in_bfloat16(self):
        """With a remainder, and a sum."""
        layout = LAYOUTS["causal"]
        module, states = layer_for(layout, "softplus"), self.states(layout, dtype=torch.bfloat16)

        def function(query, key, value):
            return triton_attention_forward(module, query, key, value, None, scaling=SCALING)[0]

        expected, actual = (results(call(*states), states) for call in (function, self.compile(function)))
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))

    def test_compile_with_dropout(self):
        layout = LAYOUTS["causal"]
        module = layer_for(layout, "gelu", training=True)

        def function(query, key, value):
            return triton_attention_forward(module, query, key, value, None, scaling=SCALING, dropout=0.3)[0]

        compiled, states = self.compile(function), self.states(layout)
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(results(compiled(*states), states))
        assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1], strict=True))
        assert not torch.allclose(runs[0][0], runs[2][0])

    def test_compile_for_other_lengths(self):
        """One graph for all lengths: nothing but the operator reads them."""
        module, graphs = layer("relu"), []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        def function(query, key, value):
            return triton_attention_forward(module, query, key, value, None, scaling=SCALING)[0]

        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        for length in (5, 9, 12):
            states = [torch.randn(1, 2, length, 4, device=DEVICE) for _ in range(3)]
            assert torch.equal(compiled(*states), function(*states))
        assert len(graphs) == 1

    @pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
    def test_export(self, make_model, strict):
        model = make_model(implementation="nlq_triton", attention_activation="softplus", use_cache=False).to(DEVICE)
        input_ids = torch.randint(13, (2, 7), device=DEVICE)
        program = torch.export.export(model, (input_ids,), strict=strict)
        graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
        targets = [node.target for graph in graphs for node in graph.nodes]
        assert targets.count(triton_nlq.operators.forward) == model.config.num_hidden_layers
        torch.testing.assert_close(program.module()(input_ids).logits, model(input_ids).logits)

    @torch.no_grad()
    def test_export_of_any_length(self, make_model):
        model = make_model(implementation="nlq_triton", attention_activation="softplus", use_cache=False).to(DEVICE)
        shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=30)}}
        program = torch.export.export(model, (torch.randint(13, (2, 7), device=DEVICE),), dynamic_shapes=shapes, strict=True)
        input_ids = torch.randint(13, (2, 12), device=DEVICE)
        torch.testing.assert_close(program.module()(input_ids).logits, model(input_ids).logits)

    @pytest.mark.parametrize("is_training", [False, True], ids=["inference", "training"])
    def test_no_graph_break(self, make_model, is_training):
        switches = {"attention_activation": "squared", "num_key_value_heads": 2, "query_projection": "linear"}
        model = make_model(implementation="nlq_triton", attention_dropout=0.1, **switches).to(DEVICE).train(is_training)
        input_ids = torch.randint(13, (2, 7), device=DEVICE)
        with torch.set_grad_enabled(is_training):
            explanation = torch._dynamo.explain(model)(input_ids, labels=input_ids, use_cache=False)
        assert explanation.graph_break_count == 0, explanation.break_reasons
        assert explanation.graph_count == 1

    def test_compiled_model(self, make_model):
        """Loss and gradients of a training step, bit by bit."""
        model = make_model(implementation="nlq_triton", attention_activation="softplus").to(DEVICE).train()
        input_ids = torch.randint(13, (2, 7), device=DEVICE)
        losses, gradients = [], []
        for call in (model, self.compile(model)):
            model.zero_grad()
            loss = call(input_ids, labels=input_ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
    def test_autocast(self, dtype):
        layout = LAYOUTS["left_padding"]
        module, states = layer_for(layout, "softplus"), self.states(layout)
        with torch.autocast(DEVICE.type, dtype):
            output, _ = triton_attention_forward(module, *states, placed(layout.mask()), scaling=SCALING)
        actual = results(output, states)
        assert output.dtype == dtype
        assert all(gradient.dtype == torch.float32 for gradient in actual[1:])
        rounded = [tensor.detach().to(dtype) for tensor in states]
        for one, other in zip(actual, run(layout, module, rounded), strict=True):
            assert torch.equal(one.cpu(), other.to(one.dtype))

    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
    def test_checkpointing(self, use_reentrant):
        layout = LAYOUTS["causal"]
        module, states = layer_for(layout, "relu", training=True), self.states(layout)

        def function(*states):
            return triton_attention_forward(module, *states, None, scaling=SCALING, dropout=0.3)[0]

        torch.manual_seed(1)
        expected = results(function(*states), states)
        torch.manual_seed(1)
        output = checkpoint(function, *states, use_reentrant=use_reentrant)
        torch.rand(3, device=DEVICE)  # between the two passes others draw random numbers too
        output.backward(random_factors(output))
        actual = [output.detach(), *(tensor.grad for tensor in states)]
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))

    @pytest.mark.parametrize(
        "name, dropout, dtype",
        [
            ("causal", 0.0, torch.bfloat16),
            ("one_key_value_head", 0.3, torch.float32),
            ("packed", 0.0, torch.float32),
            ("mask_of_one_row", 0.3, torch.float32),
        ],
    )
    def test_operators(self, name, dropout, dtype):
        layout = LAYOUTS[name]
        states = [tensor.detach() for tensor in self.states(layout, dtype=dtype)]
        rest = operator_inputs(layout, states, dropout)
        torch.library.opcheck(triton_nlq.operators.forward, (*states, *rest))
        results = triton_nlq.operators.forward(*states, *rest)
        torch.library.opcheck(triton_nlq.operators.backward, (torch.randn_like(results[0]), *states, *results, *rest))

    @pytest.mark.parametrize("normalization", ["sum", "length"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
    def test_shapes_without_data(self, dtype, normalization):
        """What the compiler is told of a call is what the call returns."""
        layout = LAYOUTS["chunk_after_cache"]
        module, states = layer_for(layout, "softplus", normalization), layout.states(dtype)
        found = []
        for mode in (contextlib.nullcontext(), FakeTensorMode()):
            with mode:
                inputs = [torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=DEVICE) for tensor in states]
                inputs = [tensor.requires_grad_() for tensor in inputs]
                output, _ = triton_attention_forward(module, *inputs, None, scaling=SCALING)
                tensors = [output, *torch.autograd.grad(output, inputs, torch.empty_like(output))]
                found.append([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
        assert found[0] == found[1]


@pytest.fixture(scope="module")
def model_pair(make_model):
    """A function from switches to a model on `nlq_triton` and the same on `eager`."""

    def make(**switches):
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "query_projection": "linear", "num_key_value_heads": 1}
        return [make_model(implementation=name, **{**sizes, **switches}).to(DEVICE) for name in ("nlq_triton", "eager")]

    return make


def test_precision_of_float32(monkeypatch):
    """As PyTorch is told to multiply, by its older or its newer function; read without a word where both were used."""
    monkeypatch.setattr(torch.version, "hip", None)
    given = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert triton_nlq._float32_precision() == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert triton_nlq._float32_precision() == "tf32"
        torch.set_float32_matmul_precision("highest")
        assert triton_nlq._float32_precision() == "tf32x3"
        torch.set_float32_matmul_precision("high")
        assert triton_nlq._float32_precision() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = given


@pytest.mark.usefixtures("small_tiles")
class TestModel:
    """Whole models on `nlq_triton` and on `eager`."""

    close = staticmethod(functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5))
    INPUTS = {
        "plain": {},
        "left_padding": {"attention_mask": mask_of("111111111", "000111111")},
        "right_padding": {"attention_mask": mask_of("111111111", "111110000")},
        "packed": {
            "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0, 1]]),
            "use_cache": False,
        },
        "4d_mask": {"attention_mask": random_booleans(2, 1, 9, 9) | torch.eye(9).bool(), "use_cache": False},
    }

    @pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
    @pytest.mark.parametrize("activation", ["sigmoid", "squared"])
    def test_loss_and_gradients(self, model_pair, activation, inputs):
        input_ids = torch.randint(13, (2, 9))
        is_padding = "attention_mask" in inputs and inputs["attention_mask"].ndim == 2
        labels = torch.where(inputs["attention_mask"] == 1, input_ids, -100) if is_padding else input_ids
        found = []
        for model in model_pair(attention_activation=activation, position_embedding="rope"):
            given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
            loss = model(input_ids.to(DEVICE), labels=labels.to(DEVICE), **given).loss
            found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)])
        self.close(*found)

    def test_positions_for_the_whole_batch(self, model_pair):
        """As one row of them, which eager takes for every text."""
        inputs = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=DEVICE), "use_cache": False}
        input_ids = torch.randint(13, (3, 9), device=DEVICE)
        kernels, eager = (model(input_ids, **inputs).logits for model in model_pair(attention_activation="relu"))
        self.close(kernels, eager)

    @torch.no_grad()
    @pytest.mark.parametrize("split", [False, True], ids=["", "split"])
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
    def test_cached_decoding(self, monkeypatch, model_pair, padding, cache, split):
        if split:
            monkeypatch.setattr(triton_nlq, "MIN_SPLIT_KEYS", 1)
        model, eager = model_pair(attention_activation="softplus", position_embedding="learned")
        input_ids = torch.randint(13, (2, 9), device=DEVICE)
        mask = (mask_of("111111111", "000111111") if padding else torch.ones(2, 9).long()).to(DEVICE)
        expected = eager(input_ids, attention_mask=mask, use_cache=False).logits
        options = {"config": model.config}
        past = DynamicCache(**options) if cache == "dynamic" else StaticCache(**options, max_cache_len=16)
        found, seen = [], 0
        for size in (4, 1, 3, 1):
            chunk, seen = input_ids[:, seen : seen + size], seen + size
            found.append(model(chunk, attention_mask=mask[:, :seen], past_key_values=past).logits)
        visible = mask.bool()
        self.close(torch.cat(found, dim=1)[visible], expected[visible])

    @pytest.mark.parametrize("cache", [None, "static"])
    def test_generation(self, model_pair, cache):
        prompts = {"input_ids": torch.tensor([[7, 7, 3, 1], [5, 9, 2, 6]]), "attention_mask": mask_of("0011", "1111")}
        prompts = {name: tensor.to(DEVICE) for name, tensor in prompts.items()}
        options = {
            "max_new_tokens": 5,
            "min_new_tokens": 5,
            "do_sample": False,
            "pad_token_id": 0,
            "cache_implementation": cache,
        }
        tokens = [
            model.generate(**prompts, **options, **({"disable_compile": True} if cache else {}))
            for model in model_pair(attention_activation="tanh", attention_scaling=2.0, norm_position="post")
        ]
        assert torch.equal(*tokens)

    def test_layers_of_several_kinds(self, model_pair):
        switches = {"attention_activation": "relu", "per_layer_config": {1: {"attention_activation": "gelu"}}}
        kernels, eager = model_pair(**switches, attention_normalization="none", qk_norm="l2", attention_gate="headwise")
        input_ids = torch.randint(13, (2, 9), device=DEVICE)
        self.close(kernels(input_ids).logits, eager(input_ids).logits)

    @pytest.mark.parametrize("activation", ["softmax", "entmax15", "linear_attention"])
    def test_other_activations(self, make_model, activation):
        with pytest.raises(
            ValueError, match=rf"'nlq_triton' cannot compute attention_activation='{activation}' \(layer 0, 1\)"
        ):
            make_model(implementation="nlq_triton", attention_activation=activation)

    def test_weights_are_refused(self, make_model):
        model = make_model(implementation="nlq_triton", attention_activation="relu").to(DEVICE)
        with pytest.raises(ValueError, match="the weights that output_attentions=True asks for"):
            model(torch.randint(13, (1, 3), device=DEVICE), output_attentions=True)


def compiled(kernel, state, head_dim, capability, normalization="sum", line=0, one_head=False, **options):
    """What a kernel takes on a GPU of this capability, which need not be there.

    Args:
        kernel: its name.
        state: the precision of query, key and value, by Triton's name.
        head_dim: any.
        capability: 80 or 90.
        normalization: of sigmoid.
        line: which of the lines of `TILES` that such heads may use; -1 is the last.
        one_head: with one head and one batch, whose numbers are constants then.
        options: the kernel's constants, in lower case.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, size = globals()[kernel], 2 if state == "bf16" else 4
    width = max(16, 1 << (head_dim - 1).bit_length())
    tiles = [*(tiles for most, tiles in TILES[function][size].items() if width <= most), LAST_TILES][line]
    flags = dict.fromkeys(("has_dropout", "causal", "packed", "padded", "masked"), False) | options
    constants = {
        **{name.upper(): value for name, value in flags.items()},
        "TILE": tiles.tile,
        "STEP": tiles.step,
        "WIDTH": width,
        "HEAD_DIM": head_dim,
        "SUM": tl.float32,
        "LIMIT": 1e-31,
        "BODY": triton_sigmoid,
        "NORMALIZATION": normalization,
        "HAS_BIAS": normalization == "none",
        "PRECISION": "tf32x3" if state == "fp32" else "ieee",
        "HAS_REMAINDER": normalization == "sum" and state != "fp32",
    }
    if one_head:
        constants |= {"heads": 1, "group": 1}
    types = {
        **dict.fromkeys(("scale", "mean_gradient", "log_count", "weighted_sums", "totals", "scaling", "dropout"), "fp32"),
        **dict.fromkeys(("query_index", "visible_count", "document_start", "document_end", "seed"), "i64"),
        **dict.fromkeys(("key_is_valid", "visible"), "u8"),
        "valid_range": "i32",
    }
    numbers = ("scaling", "dropout", "heads", "group", "query_length", "key_length", "keys_per_split", "splits")
    signature = {}
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in numbers or name.endswith("stride"):
            signature[name] = types.get(name, "i32")
        else:
            signature[name] = "*" + types.get(name, state)
    # As PyTorch lays memory out
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or (name.endswith("stride") and name.split("_")[0] in ("query", "key", "value"))
    ]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(function, signature, constants, {(index,): [["tt.divisibility", 16]] for index in aligned})
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": binary.metadata.shared, "wgmma": binary.asm["ptx"].count("wgmma.mma_async")}


KERNELS = ("forward_kernel", "query_gradient_kernel", "key_value_gradient_kernel", "split_kernel")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # of a block, on A100 and H100
LEAST_SHARED_MEMORY = 99 * 1024  # on the GPUs of these generations that have least


def compile_elsewhere(tmp_path, cases):
    """What `compiled` says of each case, in a process without the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, __file__, json.dumps(cases)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


class TestCompilation:
    """The kernels compile for GPUs that need not be there, in the tiles they are shipped with, and fit into their memory."""

    def test_for_hopper(self, tmp_path):
        cases = [{"kernel": name, "state": "bf16", "head_dim": 128, "capability": 90, "causal": True} for name in KERNELS]
        for case, found in zip(cases, compile_elsewhere(tmp_path, cases), strict=True):
            assert found["shared"] <= SHARED_MEMORY[90]
            assert (found["wgmma"] > 0) == (case["kernel"] != "split_kernel")  # whose tile is too small for that

    @pytest.mark.parametrize(
        "state", [pytest.param("bf16", marks=pytest.mark.slow), pytest.param("fp16", marks=pytest.mark.slow), "fp32"]
    )
    def test_smallest_tiles(self, tmp_path, state):
        """Some line of `TILES` fits everywhere."""
        options = {"normalization": "none", "head_dim": 256, "capability": 80, "line": -1, "causal": True}
        cases = [{"kernel": name, "state": state, **options} for name in KERNELS]
        assert all(found["shared"] <= LEAST_SHARED_MEMORY for found in compile_elsewhere(tmp_path, cases))

    @slow
    @pytest.mark.parametrize("capability", SHARED_MEMORY)
    @pytest.mark.parametrize("head_dim", [4, 64, 80, 128, 256])
    @pytest.mark.parametrize("state", ["bf16", "fp16", "fp32"])
    def test_every_size(self, tmp_path, state, head_dim, capability):
        cases = [
            {"kernel": name, "state": state, "head_dim": head_dim, "capability": capability, "causal": True} for name in KERNELS
        ]
        for case, found in zip(cases, compile_elsewhere(tmp_path, cases), strict=True):
            if capability == 90:
                assert found["shared"] <= SHARED_MEMORY[90], case
                if state == "bf16" and case["kernel"] != "split_kernel":
                    assert found["wgmma"] > 0, case

    @slow
    @pytest.mark.parametrize("capability", SHARED_MEMORY)
    @pytest.mark.parametrize(
        "options",
        [
            {"causal": True, "padded": True},
            {"causal": True, "packed": True},
            {"masked": True, "normalization": "none"},
            {"causal": True, "has_dropout": True, "normalization": "length"},
            {},
            {"causal": True, "one_head": True},
        ],
        ids=lambda options: "-".join(options) or "full",
    )
    def test_every_mask(self, tmp_path, options, capability):
        cases = [{"kernel": name, "state": "bf16", "head_dim": 64, "capability": capability, **options} for name in KERNELS]
        for found in compile_elsewhere(tmp_path, cases):
            assert found["shared"] <= SHARED_MEMORY[capability]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")
class TestOnGPU:
    """Large shapes, and what only a GPU has."""

    @staticmethod
    def draw(query_length, key_length, heads, key_value_heads, head_dim, dtype):
        """Other numbers each time; the seed is printed for whoever needs them again."""
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
        """As close to float64 as twice the error of eager in the same precision, or as some roundings."""
        scaling = states[0].shape[-1] ** -0.5
        module = layer(activation, normalization, heads=states[0].shape[1], key_value_heads=states[1].shape[1])
        found = []
        for function in (triton_attention_forward, eager_attention_forward):
            with poisoned_memory():
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
        """Of the device, with nothing in its place."""
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
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "small"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


if __name__ == "__main__":
    if sys.argv[1] == "small":  # for a sanitizer
        for small in ("packed_grouped_queries", "padded_chunk_in_static_cache", "mask_per_head", "odd_length"):
            run(LAYOUTS[small], layer_for(LAYOUTS[small], "softplus"), LAYOUTS[small].states(torch.bfloat16))
        run(long := chunk(2, 700, 690, heads=4), layer_for(long, "softplus"), long.states())
    else:
        print(json.dumps([compiled(**case) for case in json.loads(sys.argv[1])]))
