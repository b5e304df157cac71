"""Decoding with `nlq_triton`: few queries, whose keys are split among programs."""

import pytest
import torch
from support.attention_cases import (
    SCALING,
    THREE,
    Layout,
    check,
    chunk,
    combinations,
    dense,
    expected_of,
    layer,
    layer_for,
    packed,
    padded,
    random_booleans,
)
from support.elementwise_backends import TRITON
from support.grids import slow_except
from support.triton_cases import DEVICE, MARKS, TOLERANCE, apply, check_float32, check_half, interpreter_only

from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.attention import triton_attention_forward
from modeling_nlq.kernels.triton.forward import split_kernel


pytestmark = MARKS
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

    @pytest.mark.parametrize(
        "name",
        slow_except(
            tuple(SPLIT_LAYOUTS),
            ("two_groups", "static_cache", "nothing_visible", "mask_per_head"),
        ),
    )
    def test_float32(self, splits, name):
        check_float32("softplus", "sum", SPLIT_LAYOUTS[name])
        assert len(splits) == 1

    @combinations([pair for pair in THREE if pair[1] != "sum"])
    def test_combinations(self, splits, activation, normalization):
        check_float32(activation, normalization, SPLIT_LAYOUTS["padding"])
        assert len(splits) == 1

    @pytest.mark.parametrize("dtype", slow_except((torch.bfloat16, torch.float16), (torch.bfloat16,)))
    def test_half_precision(self, splits, dtype):
        check_half(dtype, "squared", "sum", SPLIT_LAYOUTS["padding"])
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
        found, function = [], triton_attention._KernelCall.run_tiled

        def run_tiled(problem, kernel, programs, **arguments):
            if kernel is split_kernel:
                found.append((arguments["keys_per_split"], arguments["splits"], programs(1)))
            function(problem, kernel, programs, **arguments)

        monkeypatch.setattr(triton_attention._KernelCall, "run_tiled", run_tiled)
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
        monkeypatch.setattr(triton_attention, "_attend_in_parts", lambda problem, **results: calls.append(problem))
        module = layer_for(layout, "relu", training=True)
        states = [tensor.detach().to(DEVICE) for tensor in layout.states()]
        triton_attention_forward(module, *states, TRITON.mask(layout.mask()), scaling=SCALING, **options)
        assert len(calls) == is_split

    def test_batch_of_nothing(self):
        states = [torch.empty(0, 2, length, 4, device=DEVICE) for length in (1, 600, 600)]
        output, _ = triton_attention_forward(layer("relu"), *states, None, scaling=SCALING)
        assert output.shape == (0, 1, 2, 4)
