"""Registered activations with a Triton body."""

import math

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    SCALING,
    check,
    chunk,
    layer,
    layer_for,
    packed,
    padded,
)
from support.attention_cases import run as run_function
from support.elementwise_backends import TRITON, set_triton_tiles
from support.triton_cases import DEVICE, MARKS, TOLERANCE, interpreter_only
from torch import nn

from modeling_nlq import activations_nlq
from modeling_nlq.activations_nlq import get_attention_activation, register_attention_activation
from modeling_nlq.attention_nlq import eager_attention_forward
from modeling_nlq.kernels.triton import activations as triton_activations
from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.activations import register_triton_body, triton_softplus
from modeling_nlq.kernels.triton.attention import triton_attention_forward


triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = MARKS


@triton.jit
def softsign_body(scores):
    """`s / (1 + |s|)`."""
    size = 1.0 + tl.abs(scores)
    return scores / size, 1.0 / (size * size)


@triton.jit
def wrong_slope_body(scores):
    reciprocal = 1.0 / (1.0 + tl.abs(scores))
    return scores * reciprocal, reciprocal


COUNTED = []


@triton.jit
def counted_body(scores):
    """Softplus that notes the size of each tile; only the interpreter can run it."""
    COUNTED.append(tuple(int(size) for size in scores.shape))
    return triton_softplus(scores)


@pytest.mark.usefixtures("small_tiles")
class TestRegisteredActivations:
    """A user's own activation."""

    @pytest.fixture(autouse=True)
    def nothing_is_registered(self, monkeypatch):
        monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
        monkeypatch.setattr(triton_activations, "_REGISTERED", {})

    @pytest.mark.parametrize("normalization", ["length", "none"])
    @pytest.mark.parametrize("name", ["one_key_value_head", "packed"])
    def test_with_a_body(self, name, normalization):
        register_attention_activation("mine", nn.functional.softsign)
        register_triton_body("mine", softsign_body)
        layout = LAYOUTS[name]
        module, states = layer_for(layout, "mine", normalization), layout.states()
        check(TRITON.run(layout, module, states), run_function(eager_attention_forward, layout, module, states), TOLERANCE)

    def test_not_registered(self):
        with pytest.raises(ValueError, match="name='relu' must be an activation of your own"):
            register_triton_body("relu", softsign_body)

    def test_model(self, make_model):
        register_attention_activation("mine", nn.functional.softsign)
        register_triton_body("mine", softsign_body)
        input_ids = torch.randint(13, (2, 9))
        models = [make_model(implementation=name, attention_activation="mine").to(DEVICE) for name in ("nlq_triton", "eager")]
        torch.testing.assert_close(*[model(input_ids.to(DEVICE)).logits for model in models], rtol=1e-4, atol=1e-5)

    def test_without_a_body(self, make_model):
        register_attention_activation("mine", nn.functional.softsign)
        with pytest.raises(ValueError) as error:
            make_model(implementation="nlq_triton", attention_activation="mine")
        assert "'nlq_triton' cannot compute attention_activation='mine' (layer 0, 1); use one of nlq, eager, nlq_tiled" in str(
            error.value
        )
        with pytest.raises(ValueError, match="needs a Triton body of attention_activation='mine'; use one of nlq, nlq_tiled"):
            triton_attention_forward(layer("mine"), *[torch.randn(1, 1, 3, 4, device=DEVICE) for _ in range(3)], None, SCALING)

    @pytest.mark.parametrize(
        "body",
        [nn.functional.softsign, lambda scores: (scores, scores), "softsign", 3],
        ids=["torch_function", "python_function", "name", "number"],
    )
    def test_not_a_triton_function(self, body):
        register_attention_activation("mine", nn.functional.softsign)
        with pytest.raises(ValueError) as error:
            register_triton_body("mine", body)
        assert str(error.value) == f"body={body!r} of 'mine' must be a function decorated with triton.jit"

    @pytest.mark.parametrize(
        "function, body, what",
        [(torch.tanh, softsign_body, "weights"), (nn.functional.softsign, wrong_slope_body, "derivative")],
        ids=["weights", "derivative"],
    )
    def test_another_function(self, function, body, what):
        register_attention_activation("mine", function)
        register_triton_body("mine", body)
        with pytest.raises(ValueError, match=f"^triton_body of 'mine' computes other {what} than its function$"):
            triton_attention_forward(layer("mine"), *[torch.randn(1, 1, 3, 4, device=DEVICE) for _ in range(3)], None, SCALING)

    @interpreter_only
    @pytest.mark.parametrize(
        "layout, pairs",
        [
            pytest.param(chunk(16, 16, 0, batch=1), 10, id="causal"),
            pytest.param(chunk(4, 16, 4, batch=1), 2, id="static_cache"),
            pytest.param(packed("aaaabbbbccccdddd"), 4, id="packed"),
            pytest.param(packed("aaaabbbbccccdddd", "aaaaaaaabbbbbbbb"), 4 + 6, id="packed_differently"),
            pytest.param(padded("0000000011111111", "0000111111111111"), 3 + 6, id="left_padding"),
            pytest.param(padded("1111111100000000"), 7, id="right_padding"),
            pytest.param(padded("0" * 16), 0, id="nothing_visible"),
        ],
    )
    def test_hidden_tiles_are_skipped(self, monkeypatch, layout, pairs):
        set_triton_tiles(monkeypatch, 4, 4)
        register_attention_activation("counted", nn.functional.softplus)
        register_triton_body("counted", counted_body)
        triton_attention._check_body(get_attention_activation("counted"), counted_body, DEVICE)  # which the first call does
        COUNTED.clear()
        module, states = layer_for(layout, "counted"), layout.states()
        output, _ = triton_attention_forward(module, *states, layout.mask(), scaling=SCALING)
        assert [(4, 4)] * pairs * layout.heads == COUNTED
        output.sum().backward()
        assert [(4, 4)] * pairs * layout.heads * 3 == COUNTED

    @interpreter_only
    def test_hidden_keys_are_skipped_in_parts(self, splits):
        """A static cache's empty places, though not those before the keys' own part."""
        register_attention_activation("counted", nn.functional.softplus)
        register_triton_body("counted", counted_body)
        triton_attention._check_body(get_attention_activation("counted"), counted_body, DEVICE)  # which the first call does
        COUNTED.clear()
        layout = chunk(2, 64, torch.tensor(21), batch=1, heads=2, key_value_heads=1)
        states = [tensor.detach() for tensor in layout.states()]
        triton_attention_forward(layer_for(layout, "counted"), *states, layout.mask(), scaling=SCALING)
        assert len(splits) == 1
        assert [(16, 4)] * math.ceil(23 / 4) == COUNTED
