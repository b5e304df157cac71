"""Sparsemax and entmax: weights that are exactly 0, and the package that computes them."""

import itertools
import sys

import entmax
import pytest
import torch
from support.attention_cases import layer
from support.model_cases import VOCABULARY

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.attention_nlq import attention_weights


class TestSparse:
    """Projections onto the simplex: those that the package `entmax` computes by bisection, in float64."""

    SOLVERS = {
        "sparsemax": lambda scores: entmax.sparsemax_bisect(scores, dim=-1, n_iter=100),
        "entmax15": lambda scores: entmax.entmax_bisect(scores, alpha=1.5, dim=-1, n_iter=100),
    }

    @pytest.mark.parametrize("activation", SOLVERS)
    @pytest.mark.parametrize("magnitude", [0.01, 1.0, 30.0])
    def test_bisection(self, activation, magnitude):
        """Weights, their gradient and their exact zeros are the solver's, for the scores that a query sees."""
        generator = torch.Generator().manual_seed(0)
        scores = magnitude * torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64)
        scores.requires_grad_()
        visible = (torch.rand(2, 1, 9, 9, generator=generator) < 0.7).tril()
        count = visible.sum(dim=-1)
        row = get_attention_activation(activation)
        weights = attention_weights(scores, visible, count, row, "sum")
        direction = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        gradient = torch.autograd.grad((weights * direction).sum(), scores)[0]
        assert ((weights == 0) | visible).all() and ((gradient == 0) | visible).all()
        number_of_zeros = 0
        for place in itertools.product(range(2), range(3), range(9)):
            seen = visible[place[0], 0, place[2]]
            if not seen.any():
                assert (weights[place] == 0).all() and (gradient[place] == 0).all()
                continue
            given = scores[place][seen].detach().requires_grad_()
            expected = self.SOLVERS[activation](given)
            torch.testing.assert_close(weights[place][seen], expected, rtol=1e-9, atol=1e-9)
            number_of_zeros += (weights[place][seen] == 0).sum()
            slope = torch.autograd.grad((expected * direction[place][seen]).sum(), given)[0]
            torch.testing.assert_close(gradient[place][seen], slope, rtol=1e-6, atol=1e-6)
        assert (number_of_zeros > 0) == (magnitude >= 1)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("activation", SOLVERS)
    def test_large_scores(self, activation, dtype):
        """Only differences count, and a hidden key gets nothing, however low the others are."""
        module = layer(activation, None)
        for shift in (-3e4, 0.0, 3e4):
            scores = torch.tensor([[[[0.0, -0.5, -1e5, -3e4, 0.25, 9.0]]]]) + shift
            visible = torch.tensor([True, True, True, True, False, False]).expand(1, 1, 1, 6)
            weights = attention_weights(scores.to(dtype), visible, visible.sum(-1)[:, 0], module.activation, "sum")
            expected = self.SOLVERS[activation](scores.to(dtype)[0, 0, 0, :4].double())
            torch.testing.assert_close(weights[0, 0, 0, :4].double(), expected, rtol=1e-5, atol=1e-5)
            assert (weights[..., 2:] == 0).all()

    @pytest.mark.parametrize("activation", SOLVERS)
    def test_sums_to_one(self, activation):
        scores = 3 * torch.randn(2, 3, 50, 50)
        visible = torch.ones(1, 1, 50, 50).tril().bool()
        weights = attention_weights(scores, visible, visible.sum(-1)[:, 0], get_attention_activation(activation), "sum")
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 3, 50))
        assert (weights >= 0).all()


class TestModels:
    """Exact zeros, and the package that computes them."""

    @pytest.mark.parametrize("activation", ["sparsemax", "entmax15"])
    def test_exact_zeros(self, make_model, activation, tokens):
        model = make_model(attention_activation=activation, attention_scaling=2.0)
        for weights in model(tokens, output_attentions=True).attentions:
            seen = weights[..., torch.ones(9, 9).tril().bool()]
            assert 0.1 < (seen == 0).float().mean() < 0.95
            assert (weights[..., torch.ones(9, 9).triu(1).bool()] == 0).all()
            torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 9))

    @pytest.mark.parametrize("activation", ["sparsemax", "entmax15"])
    def test_without_the_package(self, monkeypatch, activation, tokens):
        """The model can be made, loaded and saved; running it says what is missing."""
        monkeypatch.setitem(sys.modules, "entmax", None)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
        model = NLQForCausalLM(NLQConfig(**sizes, attention_activation=activation))
        with pytest.raises(ImportError, match=f"attention_activation='{activation}' needs the package entmax: pip install"):
            model(tokens)
        assert NLQForCausalLM(NLQConfig(**sizes))(tokens).logits.isfinite().all()

    @pytest.mark.parametrize("activation", ["sparsemax", "entmax15"])
    @pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "nlq_tiled"])
    def test_other_backends(self, make_model, activation, name):
        with pytest.raises(
            ValueError,
            match=rf"'{name}' cannot compute .*'{activation}' \(layer 0, 1\); use one of nlq, eager, nlq_rows, nlq_sparse$",
        ):
            make_model(implementation=name, attention_activation=activation)
