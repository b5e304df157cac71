"""Attention in C++, `nlq_cpp`: widths and strides, its own exponential, threads, and what happens without it.

`test_attention_functions.py`, `test_extremes.py` and `test_tiled.py` run their tests of activations, normalisers and
masks with it too.
"""

import functools

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    LONG_LAYOUTS,
    SCALING,
    attend,
    check,
    check_rounding,
    expected_of,
    layer,
    layer_for,
    random_factors,
    run,
    set_tiles,
)
from support.grids import parametrize_grid
from support.remote_code import tiny_config

from modeling_nlq import NLQForCausalLM
from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.kernels.cpu import cpu_ops
from modeling_nlq.kernels.cpu.cpu_ops import ACTIVATIONS
from modeling_nlq.masking_nlq import read_mask


pytestmark = pytest.mark.thin(2)


SOME_LAYOUTS = ("odd_length", "padded_window_after_cache", "packed_grouped_queries", "mask_per_head")
BOTH = ["attention", "attention_backward"]
attend_in_cpp = functools.partial(attend, "nlq_cpp")
two_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def agrees(layout, pair, states):
    module = layer_for(layout, *pair)
    actual, expected = run("nlq_cpp", layout, module, states), expected_of(layout, *pair, states)
    if states[0].dtype == torch.float32:
        check(actual, expected, 1e-5)
    else:
        check_rounding(actual, run("eager", layout, module, states), expected)


class TestAgreement:
    @parametrize_grid(
        {"head_dim": (1, 8, 40, 64, 80, 128), "name": SOME_LAYOUTS, "dtype": ("float32", "bfloat16")}, strength=1
    )
    def test_head_dims_agree_with_the_formulas(self, cpp_passes, head_dim, name, dtype):
        agrees(LAYOUTS[name], ("softplus", "sum"), LAYOUTS[name].states(getattr(torch, dtype), head_dim))
        # bfloat16 is multiplied in pairs
        assert cpp_passes == ([] if (dtype, head_dim) == ("bfloat16", 1) else BOTH)

    @two_dtypes
    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    def test_softmax_whose_largest_score_comes_late(self, cpp_passes, monkeypatch, layout, dtype):
        set_tiles(monkeypatch, 4, 3, 4)
        states = layout.states(dtype, head_dim=8)
        states[0].data.mul_(4)
        agrees(layout, ("softmax", "sum"), states)
        assert cpp_passes == BOTH

    @two_dtypes
    def test_any_strides_give_the_same(self, cpp_passes, dtype):
        layout = LAYOUTS["grouped_queries"]
        module, states = layer_for(layout, "sigmoid"), layout.states(dtype, head_dim=6)

        def strided(tensor, order):
            return tensor.detach().permute(order).contiguous().permute([order.index(axis) for axis in range(4)])

        def run_with(order, expand):
            inputs = [strided(tensor, order).requires_grad_() for tensor in states]
            output = attend_in_cpp(module, *inputs)
            ones = torch.ones(()).to(output).expand_as(output)
            gradient = ones if expand else strided(random_factors(output), order)
            return [output, *torch.autograd.grad(output, inputs, gradient)]

        for expand in (False, True):
            expected = run_with([0, 1, 2, 3], expand)
            for order in ([0, 2, 1, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
                assert all(torch.equal(*pair) for pair in zip(run_with(order, expand), expected, strict=True))


class TestSoftmax:
    @pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
    def test_nlq_trains_softmax_in_cpp(self, cpp_passes, precision):
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
        torch.testing.assert_close(
            losses["nlq"], losses["sdpa"], rtol=1e-5 if precision == "float32" else 1e-2, atol=0
        )
        assert cpp_passes == ["attention"] * 2 + ["attention_backward"] * 2
        cpp_passes.clear()
        model.set_attn_implementation("nlq")
        model.eval().generate(tokens, max_new_tokens=3, do_sample=False)
        assert cpp_passes == ["attention"] * 2


def values_and_slopes(activation, scores, dtype=torch.float32):
    """`phi` and `phi'` by attention of one query and one key of width 2 for each score."""
    query = torch.stack([scores, torch.zeros_like(scores)], dim=-1)[None, None].to(dtype).requires_grad_()
    key, value = (torch.tensor([[[[1.0, 0.0]]]], dtype=dtype) for _ in range(2))
    visible = torch.ones(1, 1, len(scores), 1, dtype=torch.bool)
    output = attend_in_cpp(layer(activation, "none"), query, key, value, mask=visible, scaling=1.0)
    (slopes,) = torch.autograd.grad(output[..., 0].sum(), query)
    return output[0, :, 0, 0].detach(), slopes[0, 0, :, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
class TestFunctions:
    def test_functions_and_slopes_have_few_roundings(self, cpp_passes, activation):
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

    @two_dtypes
    def test_scores_that_are_not_finite_give_what_pytorch_gives(self, cpp_passes, monkeypatch, activation, dtype):
        scores = torch.tensor([1e20, -1e20, 3e38, -3e38, 200.0, -200.0, torch.inf, -torch.inf, torch.nan])
        actual = values_and_slopes(activation, scores, dtype)
        monkeypatch.setenv("NLQ_CPP", "0")
        expected = values_and_slopes(activation, scores, dtype)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-2, atol=1e-30)


@two_dtypes
def test_threads_change_nothing(cpp_passes, dtype):
    layout, threads, results = LONG_LAYOUTS["many_heads"], torch.get_num_threads(), []
    module, states = layer_for(layout, "softplus"), layout.states(dtype, 8)
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            results.append(run("nlq_cpp", layout, module, states))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for actual in results[1:] for pair in zip(actual, results[0], strict=True))


@pytest.mark.parametrize("activation", ["squared", "relu_squared", "softplus"])
def test_a_single_key_has_no_gradient_of_its_score(cpp_passes, activation):
    """Under `sum`, a query of a single key has weight 1 whatever its score, although `phi' / Z` can be large."""
    size = 40
    visible = torch.eye(size, dtype=torch.bool)[None, None]
    query, key, value = (torch.rand(1, 1, size, 64).to(torch.bfloat16) + 0.1 for _ in range(3))
    states = [(query * 2**-6).requires_grad_(), key.requires_grad_(), value.requires_grad_()]
    output = attend_in_cpp(layer(activation, "sum"), *states, mask=visible, scaling=1 / 64)
    gradients = torch.autograd.grad(output, states, torch.ones_like(output))
    scores = (states[0].float() * states[1].float()).sum(dim=-1) / 64
    # `phi' / Z` is at most 2 / s, and the gradient of a weight is the sum of a value
    largest = 2 / scores * value.float().sum(dim=-1) / 64
    for gradient, states_of_other in zip(gradients, (key, states[0])):
        assert (gradient.float().abs() <= 2**-14 * largest[..., None] * states_of_other.float().abs()).all()


@pytest.mark.parametrize("reason", ["no kernels", "switched off"])
def test_without_cpp_nlq_computes_by_pytorch_and_the_name_is_refused(cpp_passes, monkeypatch, reason):
    if reason == "switched off":
        monkeypatch.setenv("NLQ_CPP", "0")
    else:
        monkeypatch.setattr(cpu_ops, "_multiplies", lambda is_half: False)
    layout, module = LAYOUTS["causal"], layer("softmax")
    agrees(layout, ("relu", "length"), layout.states())
    assert not cpp_passes
    module.config._attn_implementation = "nlq_cpp"
    with pytest.raises(ValueError, match=r"'nlq_cpp' .* computes float32 and bfloat16"):
        attend_in_cpp(module, *layout.states())


def test_operators_pass_opcheck(cpp_allowed):
    if not cpp_allowed:
        pytest.skip("needs a C++ compiler")
    for layout, dtype in (
        (LAYOUTS["padded_window_after_cache"], torch.float32),
        (LAYOUTS["mask_per_head"], torch.bfloat16 if cpu_ops._multiplies(True) else torch.float32),
    ):
        query, key, value = (states.detach() for states in layout.states(dtype, 8))
        mask, count = read_mask(layout.mask(), query, key)
        is_dense = isinstance(mask, torch.Tensor)
        masks = (None, None, None, mask) if is_dense else (mask.last_key, mask.key_is_valid, mask.first_key, None)
        bias = count.float().clamp(min=1).log()
        inputs = (query, key, value, bias, None, *masks, "sigmoid", "none", SCALING, 64, 64)
        torch.library.opcheck(cpu_ops.operators.attention.default, inputs)
        results = cpu_ops.operators.attention(*inputs)
        options = ("sigmoid", "none", SCALING, 64, 64)
        inputs = (torch.randn_like(results[0]), query, key, value, *results, bias, *masks, *options)
        torch.library.opcheck(cpu_ops.operators.attention_backward.default, inputs)
