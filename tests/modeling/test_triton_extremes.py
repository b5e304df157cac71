"""Nothing becomes infinite or NaN in `nlq_triton`."""

import pytest
import torch
from support.attention_cases import (
    ALL_COMBINATIONS,
    NON_NEGATIVE,
    PHI,
    SCALING,
    THREE,
    combinations,
    error,
    layer,
    reference,
    results,
)
from support.elementwise_backends import poisoned_memory, set_triton_tiles
from support.grids import parametrize_grid
from support.triton_cases import DEVICE, MARKS

from modeling_nlq.activations_nlq import LIBRARY_ACTIVATIONS, get_attention_activation
from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.attention import triton_attention_forward
from modeling_nlq.masking_nlq import make_visibility


pytestmark = MARKS


def finite_results(activation, normalization, states, visible):
    states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in states]
    with poisoned_memory(DEVICE):
        output, _ = triton_attention_forward(layer(activation, normalization), *states, visible.to(DEVICE), scaling=1.0)
        tensors = [tensor.cpu() for tensor in results(output, states)]
    assert all(tensor.isfinite().all() for tensor in tensors)
    return tensors


CASES = [
    *((torch.float32, *pair) for pair in ALL_COMBINATIONS),
    *((torch.float32, name, "length") for name in LIBRARY_ACTIVATIONS),
    *((torch.bfloat16, name, "sum") for name in NON_NEGATIVE),
    *((torch.float16, name, "sum") for name in NON_NEGATIVE),
    (torch.bfloat16, "sigmoid", "none"),
    (torch.bfloat16, "mish", "none"),
]


@pytest.mark.usefixtures("small_tiles")
class TestNoNaN:
    """Nothing becomes infinite or NaN, whatever the scores and however little is visible."""

    all_cases = parametrize_grid(
        {
            "dtype": {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16},
            "activation": (*PHI, *(name for name in LIBRARY_ACTIVATIONS if name not in PHI)),
            "normalization": ("sum", "length", "none"),
        },
        allowed=lambda **case: tuple(case.values()) in CASES,
        strength=1,
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
            monkeypatch.setattr(triton_attention, "MIN_SPLIT_KEYS", 1)
        assert get_attention_activation(activation).function(torch.tensor(score)) > 0
        states = [torch.full((1, 1, 6, 1), float(score)), torch.ones(1, 1, 6, 1), torch.randn(1, 1, 6, 1)]
        visible = torch.ones(1, 1, 6, 6).tril().bool()
        output, *_ = finite_results(activation, "sum", states, visible)
        assert (output == 0).all()

    @pytest.mark.slow
    def test_equal_scores(self):
        """All scores 0, where several functions have a zero or a kink."""
        states = [torch.zeros(1, 1, 6, 3), torch.randn(1, 1, 6, 3), torch.randn(1, 1, 6, 3)]
        visible = torch.ones(1, 1, 6, 6).tril().bool()
        for name, normalization in ALL_COMBINATIONS:
            output, *_ = finite_results(name, normalization, states, visible)
            if name not in ("sigmoid", "softplus"):
                assert (output == 0).all()

    @pytest.mark.slow
    @parametrize_grid(
        {
            "activation, normalization": (("softplus", "none"), ("relu", "length")),
            "query_length, key_length": {"one_query": (1, 1000), "one_key": (1000, 1)},
        },
        strength=1,
    )
    def test_sums_over_many_tiles(self, monkeypatch, activation, normalization, query_length, key_length):
        """They are taken in float32: in bfloat16, terms of one sign would soon be too small to change the sum."""
        set_triton_tiles(monkeypatch, 16, 16)
        monkeypatch.setattr(triton_attention, "MIN_SPLIT_KEYS", 10**9)
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
