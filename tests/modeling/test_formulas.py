"""Every switch against the formulas of `reference.py`."""

import pytest
import torch
from support import reference
from support.attention_cases import mask_of
from support.model_cases import (
    ACTIVATION_AND_NORMALIZATION,
    BLOCKS,
    LINEAR_SWITCHES,
    PART_SWITCHES,
    PROJECTIONS,
    ROTARY,
    SWITCHES,
    parametrize_switches,
    random_tokens,
)


pytestmark = pytest.mark.thin(3)


def check_against_reference(model, input_ids, tolerance=1e-10, visible=None, **inputs):
    """Logits and attention weights of `model` are those of the formulas, wherever a token is not padding.

    Linear attention shows no weights: of a model with such layers the logits alone are compared.
    """
    has_weights = all(layer.attention_activation != "linear_attention" for layer in model.config.per_layer_config)
    with torch.no_grad():
        output = model(input_ids, output_attentions=has_weights, **inputs)
    inputs.pop("use_cache", None)
    if visible is not None:
        inputs["attention_mask"] = None
    logits, weights = reference.forward(model.config, model.state_dict(), input_ids, visible=visible, **inputs)
    is_real = (
        torch.ones_like(input_ids).bool() if inputs.get("attention_mask") is None else inputs["attention_mask"].bool()
    )
    tolerances = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(output.logits[is_real], logits[is_real], **tolerances)
    if not has_weights:
        return
    assert len(output.attentions) == len(weights)
    for actual, expected in zip(output.attentions, weights):
        torch.testing.assert_close(actual.transpose(1, 2)[is_real], expected.transpose(1, 2)[is_real], **tolerances)


PADDED = {"attention_mask": mask_of("0011110", "1101111")}
biases = pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])


class TestReference:
    """Logits and attention weights in float64."""

    @biases
    @pytest.mark.parametrize("kind", PROJECTIONS)
    @pytest.mark.parametrize("roles", [("query",), ("key",), ("value",), ("query", "key", "value")], ids="_".join)
    def test_projection(self, make_model, roles, kind, use_bias):
        switches = {"query_projection": "linear", **{f"{role}_projection": kind for role in roles}}
        sizes = {"projection_bottleneck_size": None if len(roles) == 1 else 5}
        check_against_reference(make_model(torch.float64, use_bias=use_bias, **switches, **sizes), random_tokens(2, 6))

    @pytest.mark.parametrize("activation, normalization", ACTIVATION_AND_NORMALIZATION)
    def test_activation(self, make_model, activation, normalization):
        switches = {"attention_activation": activation, "attention_normalization": normalization}
        # Large enough for scores beyond the kinks of hardswish and relu6
        model = make_model(torch.float64, attention_scaling=1.5, **switches)
        check_against_reference(model, random_tokens(2, 7), **PADDED)

    @pytest.mark.thin(4)
    @biases
    @parametrize_switches(BLOCKS | SWITCHES | PART_SWITCHES)
    def test_switch(self, make_model, switches, use_bias):
        check_against_reference(
            make_model(torch.float64, use_bias=use_bias, **switches), random_tokens(2, 7), **PADDED
        )

    @parametrize_switches(ROTARY)
    def test_rotary_positions(self, make_model, switches):
        model = make_model(torch.float64, position_embedding="rope", **switches)
        check_against_reference(model, random_tokens(2, 7), 1e-5, **PADDED)

    @pytest.mark.parametrize("use_cache", [False, True], ids=["parallel_form", "chunked_form"])
    @parametrize_switches(LINEAR_SWITCHES)
    def test_linear_attention(self, make_model, switches, use_cache):
        """The rows of padding decay nothing."""
        switches = {"attention_activation": "linear_attention", **switches}
        model = make_model(torch.float64, use_bias=True, **switches)
        check_against_reference(model, random_tokens(2, 7), use_cache=use_cache, **PADDED)
        model = make_model(torch.float64, position_embedding="rope", **switches)
        check_against_reference(model, random_tokens(2, 7), 1e-5, use_cache=use_cache, **PADDED)

    @pytest.mark.parametrize(
        "activation", ["softmax", "sigmoid", "relu", "squared", "sparsemax", "entmax15", "linear_attention"]
    )
    @pytest.mark.parametrize("positions", ["learned", "none"])
    def test_packed_documents(self, make_model, activation, positions):
        model = make_model(torch.float64, attention_activation=activation, position_embedding=positions)
        position_ids = torch.tensor([[0, 1, 2, 0, 0, 1, 2], [4, 5, 6, 7, 2, 3, 4]])
        check_against_reference(model, random_tokens(2, 7), position_ids=position_ids)

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", "relu", "squared", "sparsemax", "entmax15"])
    def test_mask_for_each_head(self, make_model, activation):
        model = make_model(torch.float64, attention_activation=activation)
        visible = (torch.rand(2, 4, 7, 7) < 0.6).tril()
        check_against_reference(model, random_tokens(2, 7), attention_mask=visible, visible=visible)
