"""Outputs and gradients of `nlq_triton` are those of the formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import (
    ALL_COMBINATIONS,
    HALF_PRECISION,
    LAYOUTS,
    PRODUCT,
    THREE,
    Layout,
    check,
    chunk,
    combinations,
    drawn_layouts,
    expected_of,
    has_sum,
    layer_for,
    mask_of,
    padded,
)
from support.attention_cases import run as run_function
from support.elementwise_backends import TRITON, float64_only, set_triton_tiles
from support.grids import parametrize_grid, slow_except
from support.properties import examples
from support.triton_cases import (
    LONG_LAYOUTS,
    MARKS,
    TOLERANCE,
    TOLERANCE_64,
    apply,
    check_float32,
    check_half,
    slow,
)

from modeling_nlq.activations_nlq import LIBRARY_ACTIVATIONS
from modeling_nlq.attention_nlq import eager_attention_forward


pytestmark = MARKS

# A mask is read in the same way whatever the precision of the states
SOME_LAYOUTS = {
    name: LAYOUTS[name] for name in ("left_padding", "packed_grouped_queries", "chunk_in_static_cache", "one_query")
}


@pytest.mark.usefixtures("small_tiles")
class TestAgreement:
    """Outputs and all gradients are those of the formulas."""

    # Padding, grouped queries, keys of a cache before them and empty places after them
    EVERYTHING = padded("0011111110000", "1101111110000", query_length=5, offset=torch.tensor(5), key_value_heads=1)

    @parametrize_grid({"activation, normalization": THREE[:2], "layout": LAYOUTS}, strength=1)
    def test_layouts(self, activation, normalization, layout):
        check_float32(activation, normalization, layout)

    @parametrize_grid({name: PRODUCT[name] for name in ("activation", "normalization")}, allowed=has_sum, strength=1)
    def test_combinations(self, activation, normalization):
        check_float32(activation, normalization, self.EVERYTHING)

    @pytest.mark.parametrize("name", slow_except(tuple(LIBRARY_ACTIVATIONS), ("gelu_10", "laplace", "mish")))
    def test_functions_of_transformers(self, name):
        layout = LAYOUTS["one_key_value_head"]
        module, states = layer_for(layout, name), layout.states()
        check(TRITON.run(layout, module, states), run_function(eager_attention_forward, layout, module, states), TOLERANCE)

    @pytest.mark.parametrize("head_dim", slow_except((1, 5, 16, 17, 32), (1, 17)))
    def test_head_dim(self, head_dim):
        """Narrower than the tile that holds it, or as wide."""
        check_float32("softplus", "sum", LAYOUTS["odd_length"], head_dim=head_dim)

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
        check_half(dtype, activation, normalization, LAYOUTS[name])

    @slow
    @parametrize_grid(PRODUCT, allowed=has_sum, strength=1)
    def test_product(self, activation, normalization, layout):
        check_float32(activation, normalization, layout)

    @slow
    @parametrize_grid({"dtype, activation, normalization": HALF_PRECISION, "layout": SOME_LAYOUTS}, strength=1)
    def test_half_precision_product(self, dtype, activation, normalization, layout):
        check_half(dtype, activation, normalization, layout)


class TestUsualTiles:
    """The same with tiles as large as they are in use."""

    @pytest.mark.parametrize("name", slow_except(tuple(LONG_LAYOUTS), ("padding", "chunk_in_static_cache")))
    def test_float32(self, name):
        check_float32("softplus", "sum", LONG_LAYOUTS[name], head_dim=8)

    def test_bfloat16(self):
        check_half(torch.bfloat16, "softplus", "sum", LONG_LAYOUTS["packed"])

    @pytest.mark.parametrize("head_dim", slow_except((40, 64, 130, 256), (130,)))
    def test_wide_heads(self, head_dim):
        check_float32("sigmoid", "none", chunk(37, 45, 8, batch=1, heads=1, key_value_heads=1), head_dim=head_dim)

    @slow
    @pytest.mark.parametrize("layout", LONG_LAYOUTS.values(), ids=LONG_LAYOUTS)
    @pytest.mark.parametrize("head_dim", [8, 130])
    @combinations(THREE)
    def test_product(self, activation, normalization, head_dim, layout):
        check_float32(activation, normalization, layout, head_dim=head_dim)


def check_any_layout(layout, combination, tile, step, least, head_dim):
    states = layout.states(torch.float64, head_dim)
    with pytest.MonkeyPatch.context() as patch:
        set_triton_tiles(patch, tile, step, least)
        actual = TRITON.run(layout, layer_for(layout, *combination), states)
    check(actual, expected_of(layout, *combination, states), TOLERANCE_64)


any_tiles = [st.sampled_from(sizes) for sizes in ([4, 8, 16], [4, 8], [2, 16])]


@pytest.mark.slow
@float64_only
@examples(15)
@given(drawn_layouts(most=2, longest=9), st.sampled_from(ALL_COMBINATIONS), *any_tiles, st.integers(1, 9))
def test_any_layout(layout, combination, tile, step, least, head_dim):
    """In float64, where nothing but a wrong tile, mask or head is left to differ."""
    check_any_layout(layout, combination, tile, step, least, head_dim)


@slow
@float64_only
@examples(60)
@given(drawn_layouts(), st.sampled_from(ALL_COMBINATIONS), *any_tiles, st.integers(1, 9))
def test_many_layouts(layout, combination, tile, step, least, head_dim):
    check_any_layout(layout, combination, tile, step, least, head_dim)


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
        actual = apply(states, (12 - start)[:, None], first_key=start)
        check(actual, expected_of(layout, "softplus", "sum", states), TOLERANCE)

    def test_padded_documents(self):
        """Three flags at once, which no model asks for but a kernel compiles."""
        start, valid = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5]]), mask_of("011110111")
        layout = Layout(lambda b, h, i, j: start[0, i] <= j <= i and bool(valid[0, j]), None, 9, 9, batch=1)
        states, count = layout.states(), layout.visible[:, :1].sum(dim=-1)
        actual = apply(states, count, torch.arange(9), valid.bool(), start)
        check(actual, expected_of(layout, "softplus", "sum", states), TOLERANCE)
