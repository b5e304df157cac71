"""Outputs and gradients are finite for scores of up to 10,000, and however little is visible."""

import sys

import pytest
import torch
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    NON_NEGATIVE,
    PHI,
    attend,
    check,
    error,
    expected_of,
    layer,
    poisoned_memory,
    reference,
    results,
    run,
)
from support.model_cases import ROW_KINDS
from support.reference import OF_A_ROW, PROJECTED

from modeling_nlq import NLQForCausalLM
from modeling_nlq.activations_nlq import LIBRARY_ACTIVATIONS
from modeling_nlq.attention_nlq import attention_weights


ELEMENTWISE = ("eager", "nlq_tiled", "nlq_cpp")
CASES = [
    *((dtype, *pair) for pair in ALL_COMBINATIONS for dtype in (torch.float32, torch.bfloat16)),
    *((torch.float16, name, "sum") for name in NON_NEGATIVE),
    *((torch.float32, name, "length") for name in LIBRARY_ACTIVATIONS if name not in PHI),
    *((torch.bfloat16, name, "none") for name in LIBRARY_ACTIVATIONS if name not in PHI),
    *((dtype, "softmax", "sum") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((dtype, name, None) for name in ROW_KINDS for dtype in (torch.float32, torch.bfloat16)),
]
all_cases = pytest.mark.parametrize(
    "dtype, activation, normalization", CASES, ids=["-".join(map(str, case)) for case in CASES]
)
pytestmark = [pytest.mark.usefixtures("small_tiles", "cpp_allowed"), pytest.mark.thin(2)]


def finite_results(activation, normalization, states, visible, sinks=(None,)):
    is_softmax = activation == "softmax"
    backends = ("eager", "sdpa") if is_softmax else ("eager", "nlq_rows") if activation in OF_A_ROW else ELEMENTWISE
    for sink in sinks if is_softmax else (None,):
        logit = None if sink is None else torch.full(states[0].shape[1:2], sink, requires_grad=True)
        module = layer(activation, normalization, sink=logit, attention_sink=None if sink is None else "learned")
        for backend in backends:
            output = attend(backend, module, *states, mask=visible, scaling=1.0)
            tensors = results(output, states if sink is None else [*states, logit])
            assert all(tensor.isfinite().all() for tensor in tensors), backend
            yield tensors


@all_cases
def test_scores_of_ten_thousand(dtype, activation, normalization):
    signs = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]])
    key = (100 * signs[:, None, :, None] * torch.tensor([1.0, 0.0, 0.0])).to(dtype).requires_grad_()
    query = key[1:].detach().expand(2, -1, -1, -1).flip(2).clone().requires_grad_()
    scores = (query @ key.transpose(2, 3)).float()
    assert (scores.abs() - 1e4).abs().max() <= 1e4 * torch.finfo(dtype).eps
    assert scores.min() < 0 < scores.max()
    states = [query, key, torch.randn(2, 1, 6, 3).to(dtype).requires_grad_()]
    visible = torch.ones(2, 1, 6, 6).tril().bool()
    for output, *_ in finite_results(activation, normalization, states, visible, sinks=(None, 0.0, 9e3)):
        if activation in PHI:
            with torch.no_grad():
                expected = reference(*states, visible, activation, normalization, 1.0)
            assert error(output, expected) <= 4 * torch.finfo(dtype).eps


@all_cases
def test_scores_of_0_stay_finite(dtype, activation, normalization):
    """Several functions have a zero or a kink there."""
    query = torch.zeros(1, 1, 6, 3, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, 1, 6, 3).to(dtype).requires_grad_() for _ in range(2))
    visible = torch.ones(1, 1, 6, 6).tril().bool()
    for output, *_ in finite_results(activation, normalization, [query, key, value], visible, sinks=(None, 0.0)):
        if activation in ("relu", "relu_squared", "squared", "tanh", "identity", "gelu", "silu"):
            assert (output == 0).all()


@all_cases
def test_queries_that_see_nothing_give_0(dtype, activation, normalization):
    """Rows that see nothing, first, in the middle, and all of a batch; whole tiles of them too."""
    visible = torch.ones(2, 1, 9, 9).tril().bool()
    visible[0, 0, 0], visible[0, 0, 4:8], visible[1] = False, False, False
    nothing = ~visible.any(dim=-1)[:, 0]
    states = [torch.randn(2, 1, 9, 3).to(dtype).requires_grad_() for _ in range(3)]
    for output, *gradients in finite_results(activation, normalization, states, visible, sinks=(None, 0.0, 3.0)):
        assert (output[nothing] == 0).all()
        assert (output[~nothing] != 0).any()
        assert (gradients[0].transpose(1, 2)[nothing] == 0).all()
        assert all((gradient[1] == 0).all() for gradient in gradients[1:3])


@pytest.mark.parametrize("backend", ELEMENTWISE)
def test_almost_no_weight_gives_0(backend):
    """A sum of weights that is 0, or too small to divide by."""
    scores = {"relu": (1e-40, -1.0), "relu_squared": (1e-21,), "squared": (-1e-21,), "softplus": (-95.0,)}
    for activation, score in ((name, score) for name, row in scores.items() for score in row):
        query = torch.full((1, 1, 6, 1), score, requires_grad=True)
        states = [query, torch.ones(1, 1, 6, 1, requires_grad=True), torch.randn(1, 1, 6, 1, requires_grad=True)]
        output = attend(backend, layer(activation, "sum"), *states, scaling=1.0)
        assert (output == 0).all()
        assert all(tensor.isfinite().all() for tensor in results(output, states))


@pytest.mark.parametrize("backend", ["nlq_tiled", "nlq_cpp"])
def test_nothing_is_left_uninitialised(backend):
    layout = LAYOUTS["nothing_visible"]
    states = layout.states()
    with poisoned_memory():
        actual = run(backend, layout, layer("softplus"), states)
    check(actual, expected_of(layout, "softplus", "sum", states), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("activation", PROJECTED)
def test_only_differences_of_scores_count(activation, dtype):
    """For projections onto the simplex; a hidden key gets nothing, however low the others are."""
    for shift in (-3e4, 0.0, 3e4):
        scores = torch.tensor([[[[0.0, -0.5, -1e5, -3e4, 0.25, 9.0]]]]) + shift
        visible = torch.tensor([True, True, True, True, False, False]).expand(1, 1, 1, 6)
        weights = attention_weights(
            scores.to(dtype), visible, visible.sum(-1)[:, 0], layer(activation).activation, "sum"
        )
        expected = PROJECTED[activation](scores.to(dtype)[0, 0, 0, :4].double())
        torch.testing.assert_close(weights[0, 0, 0, :4].double(), expected, rtol=1e-5, atol=1e-5)
        assert (weights[..., 2:] == 0).all()


def test_without_entmax_a_model_loads_and_says_what_it_needs(make_model, monkeypatch, tmp_path, tokens):
    monkeypatch.setitem(sys.modules, "entmax", None)
    make_model(attention_activation="entmax15").save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="attention_activation='entmax15' needs the package entmax: pip install"):
        NLQForCausalLM.from_pretrained(tmp_path)(tokens)
    assert make_model()(tokens).logits.isfinite().all()
