"""Shared parts of the tests of `nlq_triton`: its device here, how exact it is, and cases for its kernels.

Triton's interpreter runs the kernels where there is no GPU. Where there is one, they are compiled.
"""

import importlib.util

import pytest
import torch
from support.attention_cases import (
    SCALING,
    check,
    check_rounding,
    chunk,
    dense,
    expected_of,
    layer_for,
    packed,
    padded,
    random_booleans,
    results,
)
from support.attention_cases import run as run_function
from support.elementwise_backends import TRITON, ignore_overflow, poisoned_memory

from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.activations import IS_INTERPRETED


DEVICE, TOLERANCE, TOLERANCE_64 = TRITON.device, TRITON.tolerance, TRITON.least_tolerance
# The marks of every module that runs the kernels
MARKS = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton"),
    pytest.mark.usefixtures("patched_once"),
    ignore_overflow,
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]
interpreter_only = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1, no GPU")


def slow(test):
    """Minutes under the interpreter. On a GPU it would be an hour of compilation, and the other tests run the kernels too."""
    return pytest.mark.slow(pytest.mark.skipif(DEVICE.type == "cuda", reason="for Triton's interpreter")(test))


LONG_LAYOUTS = {
    "causal": chunk(301, 301, 0, batch=1, heads=1, key_value_heads=1),
    "padding": padded("0" * 130 + "1" * 183, "1" * 200 + "0" * 113, heads=1, key_value_heads=1),
    "packed": packed("a" * 100 + "b" * 170 + "c" * 31, heads=1, key_value_heads=1),
    "chunk_in_static_cache": chunk(70, 600, torch.tensor(500), batch=1, heads=1, key_value_heads=1),
    "one_query_long_cache": chunk(1, 600, 599, batch=1, heads=4, key_value_heads=1),
    "dense_mask": dense(random_booleans(2, 1, 200, 150), heads=1, key_value_heads=1),
}


def check_float32(activation, normalization, layout, **options):
    """Outputs and gradients in float32 are those of the formulas."""
    module, states = layer_for(layout, activation, normalization), layout.states(**options)
    actual = TRITON.run(layout, module, states)
    assert all(tensor.dtype == torch.float32 for tensor in actual)
    check(actual, expected_of(layout, activation, normalization, states), TOLERANCE)


def check_half(dtype, activation, normalization, layout):
    """Outputs and gradients in half precision are as close to the formulas as those of eager."""
    module, states = layer_for(layout, activation, normalization), layout.states(dtype)
    eager = run_function(eager_attention_forward, layout, module, states)
    check_rounding(TRITON.run(layout, module, states), eager, expected_of(layout, activation, normalization, states))


def apply(states, count, query_index=None, key_is_valid=None, first_key=None, visible=None, options=("softplus", "sum")):
    """Output and gradients of the operator itself, which takes masks that no model asks for."""
    states = TRITON.place(states)
    masks = [None if mask is None else mask.to(DEVICE) for mask in (query_index, key_is_valid, first_key, visible)]
    with poisoned_memory(DEVICE):
        output, *_ = triton_attention.operators.function.apply(*states, count.to(DEVICE), *masks, None, *options, SCALING, 0.0)
        return [tensor.cpu() for tensor in results(output, states)]
