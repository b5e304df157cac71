"""The weights of every activation: their gradients, and queries that see nothing."""

import pytest
import torch
from support.attention_cases import layer, mask_of
from support.model_cases import ALL_ACTIVATION_AND_NORMALIZATION, NORMALIZATIONS, random_tokens

from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, get_attention_activation
from modeling_nlq.attention_nlq import attention_weights, eager_attention_forward


# Two queries with five and three visible keys of six. Scores away from 0, 3 and 6, where some functions have a kink.
SCORES = [[-2.5, 0.7, 1.9, 0.4, -0.3, 9.0], [1.3, 9.0, -0.8, 9.0, 3.7, 9.0]]
VISIBLE = mask_of("111110", "101010").bool()[None, None]


class TestGradients:
    """Automatic differentiation against finite differences, in float64."""

    def test_every_activation_is_tested(self):
        """Linear attention, which has no scores, in `test_linear_forms.py`."""
        assert set(NORMALIZATIONS) >= set(ATTENTION_ACTIVATIONS) - {"linear_attention"}

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    def test_weights(self, activation, normalization):
        module = layer(activation, normalization)
        scores = torch.tensor([[SCORES]], dtype=torch.float64, requires_grad=True)

        def weights(scores):
            count = VISIBLE.sum(dim=-1)[:, 0]
            return attention_weights(scores, VISIBLE, count, module.activation, module.normalization)

        assert torch.autograd.gradcheck(weights, scores)

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    def test_attention(self, activation, normalization):
        module = layer(activation, normalization)
        # Unit keys make the queries' entries the scores, so that this too is away from the kinks.
        query = torch.tensor([[[[1.3, -0.8, 0.6], [-2.5, 0.7, 1.9], [0.4, 3.7, -0.3]]]], dtype=torch.float64)
        key = torch.eye(3, dtype=torch.float64)[None, None].clone()
        value = torch.randn(1, 1, 3, 3, dtype=torch.float64)

        def output(*states):
            return eager_attention_forward(module, *states, attention_mask=None, scaling=1.0)[0]

        assert torch.autograd.gradcheck(output, [states.requires_grad_() for states in (query, key, value)])

    def test_sink(self):
        scores = torch.tensor([[SCORES]], dtype=torch.float64, requires_grad=True)
        sink = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)

        def weights(scores, sink):
            return attention_weights(scores, VISIBLE, VISIBLE.sum(-1)[:, 0], get_attention_activation("softmax"), "sum", sink)

        assert torch.autograd.gradcheck(weights, (scores, sink))


class TestNothingVisible:
    """A query that sees no key gets exactly 0, and nothing becomes infinite or NaN."""

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
    def test_attention(self, activation, normalization, dtype):
        module = layer(activation, normalization)
        states = [torch.randn(2, 3, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
        visible = torch.ones(2, 1, 5, 5).tril().bool()
        visible[0, 0, 0] = False
        visible[1] = False
        output, weights = eager_attention_forward(module, *states, attention_mask=visible, scaling=1.0)
        assert (weights[0, :, 0] == 0).all()
        assert (weights[1] == 0).all()
        assert (output[0, 0] == 0).all()
        assert (output[1] == 0).all()
        assert (weights[0, :, 1:].abs().sum(dim=-1) > 0).any()  # the others see something
        for gradient in torch.autograd.grad(output.float().square().sum(), states):
            assert gradient.isfinite().all()
            assert (gradient[1] == 0).all()

    @pytest.mark.parametrize("sink", [-3.0, 0.0], ids=["sink_-3", "sink_0"])
    def test_sink(self, sink):
        sink = torch.full((3,), sink, requires_grad=True)
        module = layer("softmax", "sum", sink=sink)
        states = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
        visible = torch.ones(2, 1, 5, 5).tril().bool()
        visible[1] = False
        output, weights = eager_attention_forward(module, *states, attention_mask=visible, scaling=1.0)
        assert (weights[1] == 0).all()
        assert (output[1] == 0).all()
        for gradient in torch.autograd.grad(output.square().sum(), [*states, sink]):
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    def test_all_scores_zero(self, activation, normalization):
        module = layer(activation, normalization)
        query = torch.zeros(1, 1, 4, 3, requires_grad=True)
        key, value = (torch.randn(1, 1, 4, 3, requires_grad=True) for _ in range(2))
        output, weights = eager_attention_forward(module, query, key, value, attention_mask=None, scaling=1.0)
        if activation in ("relu", "relu_squared", "squared"):
            assert (weights == 0).all()
            assert (output == 0).all()
        for gradient in torch.autograd.grad(output.sum(), [query, key, value]):
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    def test_sum_of_nothing_positive(self, activation):
        scores = (-torch.rand(1, 1, 3, 5) - 0.1).requires_grad_()
        visible, count = torch.ones(1, 1, 3, 5).bool(), torch.full((1, 3), 5)
        weights = attention_weights(scores, visible, count, get_attention_activation(activation), "sum")
        assert (weights == 0).all()
        assert (torch.autograd.grad(weights.sum(), scores)[0] == 0).all()

    @pytest.mark.parametrize(
        "activation, score",
        [("relu", 1e-40), ("relu_squared", 1e-21), ("squared", 1e-21), ("softplus", -95.0)],
    )
    def test_sum_of_almost_nothing(self, activation, score):
        scores = torch.full((1, 1, 1, 3), score, requires_grad=True)
        visible, count = torch.ones(1, 1, 1, 3).bool(), torch.full((1, 1), 3)
        weights = attention_weights(scores, visible, count, get_attention_activation(activation), "sum")
        assert weights.isfinite().all()
        assert torch.autograd.grad(weights.square().sum(), scores)[0].isfinite().all()

    @pytest.mark.parametrize(
        "implementation, activation",
        [
            *(pytest.param("eager", name, id=f"eager-{name}") for name in (*NORMALIZATIONS, "linear_attention")),
            pytest.param("nlq", "linear_attention", id="nlq-linear_attention"),
            pytest.param("sdpa", "softmax", id="sdpa-softmax"),
        ],
    )
    def test_model(self, make_model, implementation, activation):
        model = make_model(implementation=implementation, attention_activation=activation, use_bias=True)
        heads = []
        for block in model.model.layers:
            block.self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0]))
        logits = model(random_tokens(3, 6), attention_mask=mask_of("000000", "000111", "111111")).logits
        assert logits.isfinite().all()
        for output in heads:
            assert (output[0] == 0).all()
            assert (output[1, :3] == 0).all()
            assert (output[1:, 3:] != 0).any()
        logits.square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
