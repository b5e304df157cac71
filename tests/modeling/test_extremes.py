"""Nothing becomes infinite or NaN, whatever the scores and however little is visible."""

import pytest
import torch
from support.attention_cases import (
    ALL_COMBINATIONS,
    LAYOUTS,
    NON_NEGATIVE,
    PHI,
    almost_nothing,
    check,
    error,
    expected_of,
    layer,
    reference,
    results,
    run,
)
from support.elementwise_backends import cpp_or_tiled

from modeling_nlq.activations_nlq import LIBRARY_ACTIVATIONS
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.backends_nlq import sdpa_with_sink_forward
from modeling_nlq.tiled_nlq import tiled_attention_forward


ELEMENTWISE = {"eager": eager_attention_forward, "nlq_tiled": tiled_attention_forward, "nlq_cpp": cpp_or_tiled}
elementwise_functions = pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
EXTREME_CASES = [
    *((torch.float32, *pair) for pair in ALL_COMBINATIONS),
    *((torch.bfloat16, *pair) for pair in ALL_COMBINATIONS),
    *((torch.float16, name, "sum") for name in NON_NEGATIVE),
    *((torch.float32, name, "length") for name in LIBRARY_ACTIVATIONS if name not in PHI),
    *((torch.bfloat16, name, "none") for name in LIBRARY_ACTIVATIONS if name not in PHI),
    *((dtype, "softmax", "sum") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@pytest.mark.usefixtures("small_tiles", "cpp_allowed")
class TestNoNaN:
    """Nothing becomes infinite or NaN, whatever the scores and however little is visible."""

    all_cases = pytest.mark.parametrize(
        "dtype, activation, normalization",
        EXTREME_CASES,
        ids=["-".join((str(dtype).removeprefix("torch."), *pair)) for dtype, *pair in EXTREME_CASES],
    )

    @staticmethod
    def finite_results(activation, normalization, states, visible, sinks=(None,)):
        """The output and gradients of every function that computes the activation, softmax with each sink."""
        is_softmax = activation == "softmax"
        functions = {"eager": eager_attention_forward, "sdpa": sdpa_with_sink_forward} if is_softmax else ELEMENTWISE
        for sink in sinks if is_softmax else (None,):
            logit, attention_sink = None, None
            if sink is not None:
                logit, attention_sink = torch.full(states[0].shape[1:2], sink, requires_grad=True), "learned"
            module = layer(activation, normalization, sink=logit, attention_sink=attention_sink)
            for name, function in functions.items():
                output, _ = function(module, *states, visible, scaling=1.0)
                tensors = results(output, states if sink is None else [*states, logit])
                assert all(tensor.isfinite().all() for tensor in tensors), name
                yield tensors

    @all_cases
    def test_scores_of_ten_thousand(self, dtype, activation, normalization):
        """Rows of large scores of either sign, and of both."""
        signs = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]])
        key = (100 * signs[:, None, :, None] * torch.tensor([1.0, 0.0, 0.0])).to(dtype).requires_grad_()
        query = key[1:].detach().expand(2, -1, -1, -1).flip(2).clone().requires_grad_()
        scores = (query @ key.transpose(2, 3)).float()
        assert (scores.abs() - 1e4).abs().max() <= 1e4 * torch.finfo(dtype).eps
        assert scores.min() < 0 < scores.max()
        states = [query, key, torch.randn(2, 1, 6, 3).to(dtype).requires_grad_()]
        visible = torch.ones(2, 1, 6, 6).tril().bool()
        for output, *_ in self.finite_results(activation, normalization, states, visible, sinks=(None, 0.0, 9e3)):
            if activation in PHI:
                with torch.no_grad():
                    expected = reference(*states, visible, activation, normalization, 1.0)
                assert error(output, expected) <= 4 * torch.finfo(dtype).eps

    @all_cases
    def test_equal_scores(self, dtype, activation, normalization):
        """All scores 0, where several functions have a zero or a kink."""
        query = torch.zeros(1, 1, 6, 3, dtype=dtype, requires_grad=True)
        key, value = (torch.randn(1, 1, 6, 3).to(dtype).requires_grad_() for _ in range(2))
        visible = torch.ones(1, 1, 6, 6).tril().bool()
        for output, *_ in self.finite_results(activation, normalization, [query, key, value], visible, sinks=(None, 0.0)):
            if activation in ("relu", "relu_squared", "squared", "tanh", "identity", "gelu", "silu"):
                assert (output == 0).all()

    @all_cases
    def test_nothing_visible(self, dtype, activation, normalization):
        """Rows that see nothing, first, in the middle, and all of a batch; whole tiles of them too."""
        visible = torch.ones(2, 1, 9, 9).tril().bool()
        visible[0, 0, 0], visible[0, 0, 4:8], visible[1] = False, False, False
        nothing = ~visible.any(dim=-1)[:, 0]
        states = [torch.randn(2, 1, 9, 3).to(dtype).requires_grad_() for _ in range(3)]
        for output, *gradients in self.finite_results(activation, normalization, states, visible, sinks=(None, 0.0, 3.0)):
            assert (output[nothing] == 0).all()
            assert (output[~nothing] != 0).any()
            assert (gradients[0].transpose(1, 2)[nothing] == 0).all()
            assert all((gradient[1] == 0).all() for gradient in gradients[1:3])

    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    @elementwise_functions
    def test_no_weight_is_positive(self, function, activation):
        """A row whose `phi` are all 0 gets 0 under every normaliser."""
        query = torch.rand(1, 1, 6, 3, requires_grad=True)
        key, value = (-torch.rand(1, 1, 6, 3) - 0.1).requires_grad_(), torch.randn(1, 1, 6, 3, requires_grad=True)
        for normalization in ("sum", "length", "none"):
            output, _ = function(layer(activation, normalization), query, key, value, None, scaling=1.0)
            for tensor in results(output, [query, key, value]):
                assert (tensor == 0).all()

    @almost_nothing
    @elementwise_functions
    def test_almost_no_weight(self, function, activation, score):
        """A sum too small to divide by counts as 0."""
        query, key = torch.full((1, 1, 6, 1), float(score), requires_grad=True), torch.ones(1, 1, 6, 1, requires_grad=True)
        value = torch.randn(1, 1, 6, 1, requires_grad=True)
        output, _ = function(layer(activation, "sum"), query, key, value, None, scaling=1.0)
        assert (output == 0).all()
        for tensor in results(output, [query, key, value]):
            assert tensor.isfinite().all()

    def test_nothing_is_left_uninitialised(self):
        """With deterministic algorithms PyTorch fills new memory with NaN."""
        layout = LAYOUTS["nothing_visible"]
        states = layout.states()
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(3).isnan().all()
            actual = run(tiled_attention_forward, layout, layer("softplus"), states)
        finally:
            torch.use_deterministic_algorithms(False)
        check(actual, expected_of(layout, "softplus", "sum", states), 1e-5)
