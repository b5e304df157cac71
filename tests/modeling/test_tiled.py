"""`nlq_tiled` and `eager` against the formulas; the tiles that `nlq_tiled` skips, and the memory it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import (
    ALL_COMBINATIONS,
    HALF_PRECISION,
    LAYOUTS,
    LONG_LAYOUTS,
    PRODUCT,
    SCALING,
    THREE,
    check,
    check_rounding,
    chunk,
    combinations,
    dense,
    drawn_layouts,
    error,
    expected_of,
    has_sum,
    layer,
    layer_for,
    packed,
    padded,
    reference,
    results,
    run,
)
from support.elementwise_backends import set_tiled_tiles
from support.grids import parametrize_grid
from support.live_memory import LiveMemory
from support.properties import examples

from modeling_nlq import activations_nlq, tiled_nlq
from modeling_nlq.activations_nlq import LIBRARY_ACTIVATIONS
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.ops_nlq import AttentionInputs
from modeling_nlq.tiled_nlq import tiled_attention_forward


@pytest.mark.usefixtures("small_tiles")
class TestAgreement:
    """Outputs and all gradients of `nlq_tiled` and `eager` are those of the formulas."""

    @parametrize_grid(PRODUCT, allowed=has_sum)
    def test_float32(self, tiled, activation, normalization, layout):
        module, states = layer_for(layout, activation, normalization), layout.states()
        expected = expected_of(layout, activation, normalization, states)
        actual = run(tiled, layout, module, states)
        eager = run(eager_attention_forward, layout, module, states)
        assert all(tensor.dtype == torch.float32 for tensor in actual)
        check(actual, expected, 1e-5)
        check(eager, expected, 1e-5)
        check(actual, eager, 1e-5)

    @parametrize_grid({"dtype, activation, normalization": HALF_PRECISION, "layout": LAYOUTS}, strength=1)
    def test_half_precision(self, tiled, dtype, activation, normalization, layout):
        module, states = layer_for(layout, activation, normalization), layout.states(dtype)
        actual = run(tiled, layout, module, states)
        eager = run(eager_attention_forward, layout, module, states)
        check_rounding(actual, eager, expected_of(layout, activation, normalization, states))

    @pytest.mark.parametrize("name", LIBRARY_ACTIVATIONS)
    def test_functions_of_transformers(self, name):
        layout = LAYOUTS["one_key_value_head"]
        module, states = layer_for(layout, name), layout.states()
        tiled = run(tiled_attention_forward, layout, module, states)
        check(tiled, run(eager_attention_forward, layout, module, states), 1e-5)
        with torch.no_grad():
            scores = SCALING * states[0].double() @ states[1].double().transpose(2, 3)
            count = layout.visible.sum(dim=-1, keepdim=True).clamp(min=1)
            weights = torch.where(layout.visible, module.activation.function(scores), 0.0) / count
            check([tiled[0]], [(weights @ states[2].double()).transpose(1, 2)], 1e-5)

    @pytest.mark.parametrize("query_length, key_length", [(1, 2000), (2000, 1)], ids=["one_query", "one_key"])
    def test_sums_over_many_tiles(self, tiled, query_length, key_length):
        """They are taken in float32: in bfloat16, terms of one sign would soon be too small to change the sum."""
        lengths = (query_length, key_length, key_length)
        states = [torch.rand(1, 1, length, 4).to(torch.bfloat16).requires_grad_() for length in lengths]
        visible = torch.ones(1, 1, query_length, key_length).bool()
        for activation, normalization in (("softplus", "none"), ("relu", "length")):
            output, _ = tiled(layer(activation, normalization), *states, visible, scaling=SCALING)
            expected = reference(*states, visible, activation, normalization, SCALING)
            gradients = [torch.autograd.grad(tensor.sum(), states) for tensor in (output, expected)]
            for one, other in zip((output, *gradients[0]), (expected, *gradients[1]), strict=True):
                assert error(one, other) <= 2 * 2**-7


class TestUsualTiles:
    """The same with tiles as large as they are in use."""

    @parametrize_grid({"activation, normalization": THREE, "layout": LONG_LAYOUTS}, strength=1)
    def test_float32(self, tiled, activation, normalization, layout):
        module, states = layer_for(layout, activation, normalization), layout.states(head_dim=8)
        check(
            run(tiled, layout, module, states),
            expected_of(layout, activation, normalization, states),
            1e-5,
        )


def check_any_layout(layout, combination, tile, head_dim):
    """In float64, where nothing but a wrong tile, mask or head is left to differ."""
    states = layout.states(torch.float64, head_dim)
    expected = expected_of(layout, *combination, states)
    module = layer_for(layout, *combination)
    with pytest.MonkeyPatch.context() as patch:
        set_tiled_tiles(patch, tile, tile, 0)
        check(run(tiled_attention_forward, layout, module, states), expected, 1e-9)
    check(run(eager_attention_forward, layout, module, states), expected, 1e-9)


@examples(100)
@given(drawn_layouts(), st.sampled_from(ALL_COMBINATIONS), st.integers(1, 6), st.integers(1, 5))
def test_any_layout(layout, combination, tile, head_dim):
    check_any_layout(layout, combination, tile, head_dim)


@pytest.mark.slow
@examples(250)
@given(drawn_layouts(), st.sampled_from(ALL_COMBINATIONS), st.integers(1, 6), st.integers(1, 5))
def test_many_layouts(layout, combination, tile, head_dim):
    check_any_layout(layout, combination, tile, head_dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@combinations(ALL_COMBINATIONS)
def test_tiled_attention_on_a_gpu(activation, normalization):
    module = layer(activation, normalization)
    shape, device = (2, 4, 300, 64), torch.device("cuda")
    states = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    expected = results(eager_attention_forward(module, *states, None, scaling=SCALING)[0], states)
    actual = results(tiled_attention_forward(module, *states, None, scaling=SCALING)[0], states)
    check(actual, expected, 1e-4)


class TestWork:
    """Tiles that are all hidden are not computed, and memory grows linearly with the length."""

    @pytest.mark.parametrize(
        "layout, pairs",
        [
            pytest.param(chunk(16, 16, 0, batch=1), 10, id="causal"),
            pytest.param(chunk(4, 16, 4, batch=1), 2, id="static_cache"),
            pytest.param(packed("aaaabbbbccccdddd"), 4, id="packed"),
            pytest.param(packed("aaaabbbbccccdddd", "aaaaaaaabbbbbbbb"), 6, id="packed_differently"),
            pytest.param(padded("0000000011111111", "0000111111111111"), 6, id="left_padding"),
            pytest.param(dense(torch.eye(16).bool()[None, None]), 4, id="dense_mask"),
            pytest.param(chunk(16, 16, 0, batch=1, window=4), 7, id="window"),
        ],
    )
    def test_hidden_tiles_are_skipped(self, monkeypatch, layout, pairs):
        set_tiled_tiles(monkeypatch, 4, 4, 0)
        sizes = []

        def function(scores):
            sizes.append(tuple(scores.shape[1:]))
            return scores.tanh()

        monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
        activations_nlq.register_attention_activation("counted", function)
        sizes.clear()
        module, states = layer_for(layout, "counted"), layout.states()
        output, _ = tiled_attention_forward(module, *states, layout.mask(), scaling=SCALING)
        assert sizes == [(4, 4)] * pairs
        output.sum().backward()
        assert sizes == [(4, 4)] * pairs * 2

    @parametrize_grid(
        {"activation, normalization": (*THREE, ("softmax", "sum")), "mask": ("causal", "padding", "packed", "window")},
        strength=1,
    )
    def test_memory_is_linear(self, monkeypatch, activation, normalization, mask):
        monkeypatch.setenv("NLQ_CPP", "0")  # the C++ code takes its memory elsewhere
        set_tiled_tiles(monkeypatch, 16, 16, 0)
        peaks = {length: self.measure(activation, normalization, mask, length, tiled=True) for length in (128, 256, 512)}
        eager = {length: self.measure(activation, normalization, mask, length, tiled=False) for length in (128, 256)}
        assert eager[256].largest == 4 * eager[128].largest  # it measures what it should
        for name in ("peak", "largest"):
            first, second, third = (getattr(peaks[length], name) for length in (128, 256, 512))
            assert second <= 2.05 * first
            assert third <= 2.05 * second
        assert peaks[512].largest <= 2 * 512 * 8 * 4  # (heads, length, head_dim) in float32: the inputs' size

    @staticmethod
    def measure(activation, normalization, mask, length, tiled):
        layout = {
            "causal": chunk(length, length, 0, batch=1),
            "padding": padded("0" * 5 + "1" * (length - 5)),
            "packed": packed("a" * 30 + "b" * (length - 30)),
            "window": chunk(length, length, 0, batch=1, window=20),
        }[mask]
        states = [torch.randn(1, 2, length, 8) for _ in range(3)]
        # Of softmax, `nlq_tiled` computes what has a bias
        total = torch.rand(1, 2, length, dtype=torch.float64)
        biases = [total, total] if activation == "softmax" else [None, None]
        visibility = layout.mask()
        with LiveMemory() as memory:
            if tiled:
                # The functions behind the operators: a dispatch mode cannot look inside operators
                masks = (visibility.last_key, visibility.key_is_valid, visibility.first_key, None)
                rest = (visibility.visible_count[:, None], *masks, None, activation, normalization, SCALING, 0.0)
                inputs = AttentionInputs(*states, *biases, *rest)
                results = tiled_nlq._tiled_attention(inputs)
                tiled_nlq._tiled_attention_backward(torch.ones_like(results[0]), inputs, results)
            else:
                eager_attention_forward(layer(activation, normalization), *states, visibility, scaling=SCALING)
        return memory
