"""Attention in C++, `nlq_cpp`: widths and strides, its own exponential, threads, and what happens without it.

`test_tiled.py` and `test_extremes.py` run their tests of all activations, normalisers and masks with it too.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    LONG_LAYOUTS,
    SCALING,
    check,
    check_rounding,
    chunk,
    dense,
    drawn_layouts,
    expected_of,
    layer,
    layer_for,
    packed,
    padded,
    random_factors,
    results,
    run,
)
from support.elementwise_backends import allow_cpp, cpp_or_tiled, set_tiled_tiles
from support.grids import parametrize_grid
from support.properties import examples
from support.remote_code import tiny_config
from torch.utils.flop_counter import FlopCounterMode

from modeling_nlq import NLQForCausalLM
from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.kernels.cpu import cpu_ops
from modeling_nlq.kernels.cpu.cpu_ops import ACTIVATIONS, attention_forward
from modeling_nlq.masking_nlq import read_mask


COMBINATIONS = [pair for pair in ALL_COMBINATIONS if pair[0] in ACTIVATIONS]
SOME_LAYOUTS = {
    name: LAYOUTS[name]
    for name in ("odd_length", "padded_window_after_cache", "packed_grouped_queries", "mask_per_head", "one_key_value_head")
}


class TestAgreement:
    """Outputs and all gradients are those of the formulas."""

    @parametrize_grid(
        {"head_dim": (1, 8, 40, 64, 80, 128), "layout": SOME_LAYOUTS, "dtype": ("float32", "bfloat16")}, strength=1
    )
    def test_head_dims(self, cpp_passes, head_dim, layout, dtype):
        module, states = layer_for(layout, "softplus"), layout.states(getattr(torch, dtype), head_dim)
        actual, expected = run(cpp_or_tiled, layout, module, states), expected_of(layout, "softplus", "sum", states)
        if dtype == "float32":
            check(actual, expected, 1e-5)
        else:
            check_rounding(actual, run(eager_attention_forward, layout, module, states), expected)
        # bfloat16 is multiplied in pairs
        assert cpp_passes == ([] if (dtype, head_dim) == ("bfloat16", 1) else ["attention", "attention_backward"])

    @pytest.mark.parametrize("layout", [LONG_LAYOUTS[name] for name in ("padding", "packed", "many_heads")])
    def test_long_sequences_in_bfloat16(self, cpp_passes, layout):
        module, states = layer_for(layout, "relu", "sum"), layout.states(torch.bfloat16, head_dim=16)
        actual, eager = (run(function, layout, module, states) for function in (cpp_or_tiled, eager_attention_forward))
        check_rounding(actual, eager, expected_of(layout, "relu", "sum", states))
        assert cpp_passes

    @examples(60)
    @given(drawn_layouts(), st.sampled_from(COMBINATIONS), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
    def test_any_layout(self, layout, combination, query_pairs, key_pairs, head_dim):
        states = layout.states(torch.float32, head_dim)
        with pytest.MonkeyPatch.context() as patch:
            if not allow_cpp(patch):
                pytest.skip("needs a C++ compiler")
            patch.setattr(cpu_ops, "FORWARD_TILES", (2 * query_pairs, 2 * key_pairs))
            patch.setattr(cpu_ops, "BACKWARD_TILES", (2 * key_pairs, 2 * query_pairs))
            actual = run(cpp_or_tiled, layout, layer_for(layout, *combination), states)
        check(actual, expected_of(layout, *combination, states), 3e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_strides(self, cpp_passes, dtype):
        """Rows in pieces, heads and lengths in any order, and gradients that are one number."""
        layout = LAYOUTS["grouped_queries"]
        module, states = layer_for(layout, "sigmoid"), layout.states(dtype, head_dim=6)

        def strided(tensor, order):
            return tensor.detach().permute(order).contiguous().permute([order.index(axis) for axis in range(4)])

        def run_with(order, expand):
            inputs = [strided(tensor, order).requires_grad_() for tensor in states]
            output, _ = cpp_or_tiled(module, *inputs, None, scaling=SCALING)
            gradient = torch.ones(()).to(output).expand_as(output) if expand else strided(random_factors(output), order)
            return [output, *torch.autograd.grad(output, inputs, gradient)]

        for expand in (False, True):
            expected = run_with([0, 1, 2, 3], expand)
            for order in ([0, 2, 1, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
                assert all(torch.equal(one, other) for one, other in zip(run_with(order, expand), expected, strict=True))


class TestSoftmax:
    """The same for softmax, which `nlq` hands to these kernels where they are."""

    @pytest.fixture
    def small(self, cpp_passes, monkeypatch):
        """Rows that are spread over several tiles, so that a larger score may come later."""
        set_tiled_tiles(monkeypatch, 4, 3, 4)

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    def test_formulas(self, cpp_passes, layout, dtype):
        module, states = layer_for(layout, "softmax"), layout.states(dtype, head_dim=8)
        states[0].data.mul_(4)  # so that the largest score of a row matters
        actual, expected = run(attention_forward, layout, module, states), expected_of(layout, "softmax", "sum", states)
        if dtype == torch.float32:
            check(actual, expected, 1e-5)
        else:
            check_rounding(actual, run(eager_attention_forward, layout, module, states), expected)
        assert cpp_passes == ["attention", "attention_backward"]

    @pytest.mark.parametrize("layout", LONG_LAYOUTS.values(), ids=LONG_LAYOUTS)
    def test_usual_tiles(self, cpp_passes, layout):
        module, states = layer_for(layout, "softmax"), layout.states(torch.float32, head_dim=16)
        check(run(attention_forward, layout, module, states), expected_of(layout, "softmax", "sum", states), 1e-5)

    def test_extreme_scores(self, cpp_passes):
        """Scores that float32 barely holds give weights of 0 and 1; what is not a number stays so."""
        query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
        one = attention_forward(layer("softmax"), query * 1e37, key, value, None, scaling=1.0)[0]
        torch.testing.assert_close(
            one, eager_attention_forward(layer("softmax"), query * 1e37, key, value, None, scaling=1.0)[0]
        )
        # A query that sees one key gets its value, however the score is rounded
        one = attention_forward(layer("softmax"), query * 1e10, key, value, None, scaling=0.3)[0]
        assert torch.equal(one[:, 0], value[:, :, 0])
        query[0, 0, 3] = torch.nan
        one = attention_forward(layer("softmax"), query, key, value, None, scaling=1.0)[0]
        assert one[0, 3, 0].isnan().all() and one.isnan().sum() == 4

    def test_refused(self, monkeypatch):
        states = [torch.randn(1, 1, 3, 4) for _ in range(3)]
        for call in (lambda: [tensor.double() for tensor in states], lambda: monkeypatch.setenv("NLQ_CPP", "0") or states):
            with pytest.raises(ValueError, match=r"'nlq_cpp' .* computes float32 and bfloat16"):
                attention_forward(layer("softmax"), *call(), None, scaling=1.0)

    @pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
    def test_model(self, cpp_passes, precision):
        """`nlq` trains softmax by these kernels, and decodes by PyTorch's."""
        torch.manual_seed(0)
        model = NLQForCausalLM._from_config(tiny_config(), attn_implementation="nlq")
        model.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
        tokens = torch.randint(tiny_config().vocab_size, (2, 12))
        losses = {}
        for name in ("nlq", "sdpa"):
            model.set_attn_implementation(name)
            with torch.autocast("cpu", enabled=precision == "autocast"):
                losses[name] = model(tokens, labels=tokens).loss
            losses[name].backward()
        torch.testing.assert_close(losses["nlq"], losses["sdpa"], rtol=1e-5 if precision == "float32" else 1e-2, atol=0)
        assert cpp_passes == ["attention"] * 2 + ["attention_backward"] * 2
        cpp_passes.clear()
        model.set_attn_implementation("nlq")
        model.eval().generate(tokens, max_new_tokens=3, do_sample=False)
        assert cpp_passes == ["attention"] * 2

    @pytest.mark.parametrize("name", ["softmax", "softplus"])
    def test_states_of_another_type(self, cpp_passes, name):
        """The automatic choice sees the embeddings only; asked for by name, the backend refuses."""
        module, states = layer(name), [torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3)]
        module.config._attn_implementation = "nlq"
        expected = eager_attention_forward(module, *states, None, scaling=1.0)[0]
        torch.testing.assert_close(attention_forward(module, *states, None, scaling=1.0)[0], expected)
        assert not cpp_passes

    def test_dropout_takes_sdpa(self, cpp_passes):
        model = NLQForCausalLM._from_config(tiny_config(attention_dropout=0.1), attn_implementation="nlq").train()
        tokens = torch.randint(tiny_config().vocab_size, (1, 6))
        model(tokens, labels=tokens).loss.backward()
        assert not cpp_passes


def values_and_slopes(activation, scores, dtype=torch.float32):
    """`phi` and `phi'` by attention of one query and one key of width 2 for each score."""
    query = torch.stack([scores, torch.zeros_like(scores)], dim=-1)[None, None].to(dtype).requires_grad_()
    key, value = (torch.tensor([[[[1.0, 0.0]]]], dtype=dtype) for _ in range(2))
    visible = torch.ones(1, 1, len(scores), 1, dtype=torch.bool)
    output, _ = cpp_or_tiled(layer(activation, "none"), query, key, value, visible, scaling=1.0)
    (slopes,) = torch.autograd.grad(output[..., 0].sum(), query)
    return output[0, :, 0, 0].detach(), slopes[0, 0, :, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
class TestFunctions:
    def test_exact(self, cpp_passes, activation):
        """The relative error of weights is that of a few roundings, also near 0 and where they nearly vanish."""
        magnitudes = torch.cat([torch.logspace(-30, 1.9, 2000), torch.linspace(0.01, 87, 4000)])
        scores = torch.cat([magnitudes, -magnitudes, torch.zeros(1)])
        exact = scores.double().requires_grad_()
        expected = get_attention_activation(activation).function(exact)
        (expected_slopes,) = torch.autograd.grad(expected.sum(), exact)
        values, slopes = values_and_slopes(activation, scores)
        is_normal = expected.abs() > 1e-37
        torch.testing.assert_close(values[is_normal].double(), expected[is_normal].detach(), rtol=5e-7, atol=0)
        torch.testing.assert_close(slopes.double()[scores != 0], expected_slopes[scores != 0], rtol=5e-7, atol=2e-7)
        assert len(cpp_passes) == 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_not_finite(self, cpp_passes, monkeypatch, activation, dtype):
        """Scores that are huge, infinite or not a number give what PyTorch's operators give."""
        scores = torch.tensor([1e20, -1e20, 3e38, -3e38, 200.0, -200.0, torch.inf, -torch.inf, torch.nan])
        actual = values_and_slopes(activation, scores, dtype)
        monkeypatch.setenv("NLQ_CPP", "0")
        expected = values_and_slopes(activation, scores, dtype)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-2, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_threads_change_nothing(cpp_passes, dtype):
    layout = LONG_LAYOUTS["many_heads"]
    module, states, found, threads = layer_for(layout, "softplus"), layout.states(dtype, 8), [], torch.get_num_threads()
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(run(cpp_or_tiled, layout, module, states))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for actual in found[1:] for one, other in zip(actual, found[0], strict=True))


@pytest.mark.parametrize("activation", ["squared", "relu_squared", "softplus"])
def test_mean_gradient_cancels(cpp_passes, activation):
    """Under `sum`, a query of a single key has weight 1 whatever its score, although `phi' / Z` can be large."""
    size = 40
    visible = torch.eye(size, dtype=torch.bool)[None, None]
    query, key, value = (torch.rand(1, 1, size, 64).to(torch.bfloat16) + 0.1 for _ in range(3))
    states = [(query * 2**-6).requires_grad_(), key.requires_grad_(), value.requires_grad_()]
    output, _ = cpp_or_tiled(layer(activation, "sum"), *states, visible, scaling=1 / 64)
    gradients = torch.autograd.grad(output, states, torch.ones_like(output))
    scores = (states[0].float() * states[1].float()).sum(dim=-1) / 64
    # `phi' / Z` is at most 2 / s, and the gradient of a weight is the sum of a value
    largest = 2 / scores * value.float().sum(dim=-1) / 64
    for gradient, states_of_other in zip(gradients, (key, states[0])):
        assert (gradient.float().abs() <= 2**-14 * largest[..., None] * states_of_other.float().abs()).all()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(chunk(16, 16, 0, batch=1), id="causal"),
        pytest.param(chunk(4, 16, 4, batch=1), id="static_cache"),
        pytest.param(packed("aaaabbbbccccdddd", "aaaaaaaabbbbbbbb"), id="packed_differently"),
        pytest.param(padded("0000000011111111", "0000111111111111"), id="left_padding"),
        pytest.param(dense(torch.eye(16).bool()[None, None]), id="dense_mask"),
        pytest.param(chunk(16, 16, 0, batch=1, window=4), id="window"),
    ],
)
def test_hidden_tiles_are_skipped(cpp_passes, monkeypatch, layout):
    """A weight of 0 times NaN would be NaN, so whatever is finite did not visit the tile."""
    monkeypatch.setattr(cpu_ops, "FORWARD_TILES", (4, 4))
    monkeypatch.setattr(cpu_ops, "BACKWARD_TILES", (4, 4))
    module, mask = layer_for(layout, "tanh"), layout.mask()
    for start in range(0, layout.key_length, 4):
        query, key, value = layout.states()
        with torch.no_grad():
            value[:, :, start : start + 4] = torch.nan
        output, gradient, *_ = results(cpp_or_tiled(module, query, key, value, mask, scaling=SCALING)[0], [query, key, value])
        seen = layout.visible[..., start : start + 4].any(dim=-1)  # (batch, heads, query)
        seen = seen.unflatten(-1, (-1, 4)).any(dim=-1).repeat_interleave(4, dim=-1)
        assert output.transpose(1, 2)[~seen].isfinite().all()
        assert gradient[~seen].isfinite().all()
        assert output.transpose(1, 2)[seen].isnan().all()


def test_true_is_any_byte_but_0(cpp_passes):
    query, key, value = (torch.randn(1, 1, 9, 4) for _ in range(3))
    visible = torch.rand(1, 1, 9, 9) > 0.4
    expected, _ = cpp_or_tiled(layer("relu"), query, key, value, visible, scaling=1.0)
    visible = (255 * visible.to(torch.uint8)).view(torch.bool)
    assert torch.equal(cpp_or_tiled(layer("relu"), query, key, value, visible, scaling=1.0)[0], expected)


@pytest.mark.parametrize("without", ["_multiplies", None])
def test_where_cpp_cannot_compute(cpp_passes, monkeypatch, without):
    if without is None:
        monkeypatch.setenv("NLQ_CPP", "0")
    else:
        monkeypatch.setattr(cpu_ops, without, lambda *_: False)
    layout = LAYOUTS["causal"]
    states = layout.states()
    check(run(cpp_or_tiled, layout, layer("relu"), states), expected_of(layout, "relu", "length", states), 1e-5)
    assert not cpp_passes


class TestTransforms:
    """What PyTorch does with the operators: transformations, modes, compilation, and its own checks."""

    def test_opcheck(self, cpp_allowed):
        if not cpp_allowed:
            pytest.skip("needs a C++ compiler")
        for layout, dtype in (
            (LAYOUTS["padded_window_after_cache"], torch.float32),
            (LAYOUTS["mask_per_head"], torch.bfloat16),
        ):
            query, key, value = (states.detach() for states in layout.states(dtype, 8))
            mask, count = read_mask(layout.mask(), query, key)
            is_dense = isinstance(mask, torch.Tensor)
            masks = (None, None, None, mask) if is_dense else (mask.last_key, mask.key_is_valid, mask.first_key, None)
            bias = count.float().clamp(min=1).log()
            inputs = (query, key, value, bias, None, *masks, "sigmoid", "none", SCALING, 1e9, 64, 64)
            torch.library.opcheck(cpu_ops.operators.attention.default, inputs)
            results = cpu_ops.operators.attention(*inputs)
            inputs = (
                torch.randn_like(results[0]),
                query,
                key,
                value,
                *results,
                bias,
                *masks,
                "sigmoid",
                "none",
                SCALING,
                64,
                64,
            )
            torch.library.opcheck(cpu_ops.operators.attention_backward.default, inputs)

    def test_vmap(self, cpp_allowed):
        states = [torch.randn(3, 2, 4, 9, 8) for _ in range(3)]

        def loss(query, key, value):
            return cpp_or_tiled(layer("softplus"), query, key, value, None, scaling=SCALING)[0].square().sum()

        gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*states)
        for index in range(3):
            expected = torch.func.grad(loss, argnums=(0, 1, 2))(*(tensor[index] for tensor in states))
            torch.testing.assert_close([gradient[index] for gradient in gradients], list(expected))

    def test_forward_mode_is_refused(self, cpp_allowed):
        states = tuple(torch.randn(1, 2, 5, 4) for _ in range(3))
        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(lambda *states: cpp_or_tiled(layer("softplus"), *states, None, scaling=SCALING)[0], states, states)

    def test_second_derivatives_are_refused(self, cpp_passes):
        states = [torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(3)]
        output, _ = attention_forward(layer("softmax"), *states, None, scaling=SCALING)
        (gradient,) = torch.autograd.grad(output.square().sum(), states[0], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative; set attn_implementation='eager'"):
            (gradient.square().sum() + output.sum()).backward()

    @pytest.mark.slow
    @pytest.mark.usefixtures("fresh_compiler")
    def test_compiled(self, cpp_allowed):
        layout = LAYOUTS["padded_window_after_cache"]
        states = layout.states(torch.float32, 8)
        compiled = torch.compile(cpp_or_tiled, fullgraph=True)
        check(run(compiled, layout, layer("sigmoid"), states), expected_of(layout, "sigmoid", "none", states), 1e-5)

    def test_flops_are_counted(self, cpp_allowed):
        if not cpp_allowed:
            pytest.skip("needs a C++ compiler")
        states = [torch.randn(1, 2, 64, 8).requires_grad_() for _ in range(3)]
        with FlopCounterMode(display=False) as mode:
            attention_forward(layer("softmax"), *states, None, scaling=SCALING)[0].sum().backward()
        assert mode.get_total_flops() == 3.5 * 4 * 2 * 64 * 64 * 8  # two products, and five in backward
