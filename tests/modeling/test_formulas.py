"""Every switch against the formulas of `reference.py`."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
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


INPUTS = {
    "holes": {"attention_mask": mask_of("0011110", "1101111")},
    "right": {"attention_mask": mask_of("1111000", "1111111")},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2], [4, 5, 6, 7, 2, 3, 4]])},
    "plain": {},
}
PADDED, PACKED = INPUTS["holes"], INPUTS["packed"]
biases = pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])


class TestDecoders:
    """Logits and attention weights in float64."""

    @biases
    @pytest.mark.parametrize("kind", PROJECTIONS)
    @pytest.mark.parametrize("roles", [("query",), ("key",), ("value",), ("query", "key", "value")], ids="_".join)
    def test_every_projection_of_every_role(self, make_model, roles, kind, use_bias):
        switches = {"query_projection": "linear", **{f"{role}_projection": kind for role in roles}}
        sizes = {"projection_bottleneck_size": None if len(roles) == 1 else 5}
        reference.check(
            make_model(torch.float64, use_bias=use_bias, **switches, **sizes), input_ids=random_tokens(2, 6)
        )

    @pytest.mark.parametrize("activation, normalization", ACTIVATION_AND_NORMALIZATION)
    def test_every_activation_and_normaliser(self, make_model, activation, normalization):
        switches = {"attention_activation": activation, "attention_normalization": normalization}
        # Large enough for scores beyond the kinks of hardswish and relu6
        model = make_model(torch.float64, attention_scaling=1.5, **switches)
        reference.check(model, input_ids=random_tokens(2, 7), **PADDED)

    @pytest.mark.thin(4)
    @biases
    @parametrize_switches(BLOCKS | SWITCHES | PART_SWITCHES)
    def test_every_switch(self, make_model, switches, use_bias):
        reference.check(
            make_model(torch.float64, use_bias=use_bias, **switches), input_ids=random_tokens(2, 7), **PADDED
        )

    @parametrize_switches(ROTARY)
    def test_rotary_positions_of_every_kind(self, make_model, switches):
        model = make_model(torch.float64, position_embedding="rope", **switches)
        reference.check(model, 1e-5, input_ids=random_tokens(2, 7), **PADDED)

    @pytest.mark.parametrize("use_cache", [False, True], ids=["parallel_form", "chunked_form"])
    @parametrize_switches(LINEAR_SWITCHES)
    def test_linear_attention_in_both_forms(self, make_model, switches, use_cache):
        """The rows of padding decay nothing."""
        switches = {"attention_activation": "linear_attention", **switches}
        model = make_model(torch.float64, use_bias=True, **switches)
        reference.check(model, input_ids=random_tokens(2, 7), use_cache=use_cache, **PADDED)
        model = make_model(torch.float64, position_embedding="rope", **switches)
        reference.check(model, 1e-5, input_ids=random_tokens(2, 7), use_cache=use_cache, **PADDED)

    @pytest.mark.parametrize(
        "activation", ["softmax", "sigmoid", "relu", "squared", "sparsemax", "entmax15", "linear_attention"]
    )
    @pytest.mark.parametrize("positions", ["learned", "none"])
    def test_packed_documents_see_themselves(self, make_model, activation, positions):
        model = make_model(torch.float64, attention_activation=activation, position_embedding=positions)
        reference.check(model, input_ids=random_tokens(2, 7), **PACKED)

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", "relu", "squared", "sparsemax", "entmax15"])
    def test_each_head_may_have_its_mask(self, make_model, activation):
        model = make_model(torch.float64, attention_activation=activation)
        visible = (torch.rand(2, 4, 7, 7) < 0.6).tril()
        reference.check(model, input_ids=random_tokens(2, 7), attention_mask=visible, visible=visible)


ALL_SWITCHES = BLOCKS | SWITCHES | PART_SWITCHES
ROTARY_SWITCHES = {f"rotary_{name}": {**switches, "position_embedding": "rope"} for name, switches in ROTARY.items()}
# They need an order of the tokens, which an encoder does not have
ORDERED = ("forget_gate", "canon", "selective", "all_parts", "more_parts", "stick_breaking")


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ALL_SWITCHES | ROTARY_SWITCHES)
def test_every_switch_of_an_encoder(make_model, name):
    switches = {**(ALL_SWITCHES | ROTARY_SWITCHES)[name], "is_causal": False}
    if name.startswith(ORDERED):
        with pytest.raises((ValueError, StrictDataclassError), match="is_causal=False has none; use is_causal=True"):
            make_model(**switches)
        return
    inputs = list(INPUTS.values())[sum(map(ord, name)) % len(INPUTS)]  # `test_invariants.py` mixes
    tolerance = 1e-5 if name.startswith("rotary") else 1e-10
    reference.check(make_model(torch.float64, **switches), tolerance, input_ids=random_tokens(2, 7), **inputs)


def test_a_window_of_an_encoder_reaches_both_ways(make_model):
    for window in (2, 3, 5):
        model = make_model(torch.float64, sliding_window=window, is_causal=False)
        for inputs in INPUTS.values():
            reference.check(model, input_ids=random_tokens(2, 7), **inputs)
