"""Every switch against the formulas of `reference.py`."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support import reference
from support.attention_cases import mask_of
from support.model_cases import (
    ACTIVATION_AND_NORMALIZATION,
    PART_SWITCHES,
    ROTARY,
    SWITCHES,
    random_tokens,
)


pytestmark = pytest.mark.thin(3)


INPUTS = {
    "holes": {"attention_mask": mask_of("0011110", "1101111")},
    "right": {"attention_mask": mask_of("1111000", "1111111")},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2], [4, 5, 6, 7, 2, 3, 4]])},
    "plain": {},
}


@pytest.mark.parametrize("activation, normalization", ACTIVATION_AND_NORMALIZATION)
def test_every_activation_and_normaliser(make_model, activation, normalization):
    switches = {"attention_activation": activation, "attention_normalization": normalization}
    # Large enough for scores beyond the kinks of hardswish and relu6
    model = make_model(torch.float64, attention_scaling=1.5, **switches)
    reference.check(model, input_ids=random_tokens(2, 7), **INPUTS["holes"])
    if activation != "linear_attention":
        visible = (torch.rand(2, 4, 7, 7) < 0.6).tril()  # a mask for each head
        reference.check(model, input_ids=random_tokens(2, 7), attention_mask=visible, visible=visible)


ALL_SWITCHES = SWITCHES | PART_SWITCHES
ALL_SWITCHES |= {f"rotary_{name}": {**switches, "position_embedding": "rope"} for name, switches in ROTARY.items()}
# They need an order of the tokens, which an encoder does not have
ORDERED = ("forget_gate", "canon", "selective_attention", "stick_breaking", "linear_attention_decay")
ORDERED += ("linear_attention_update",)


@pytest.mark.thin(4)
@pytest.mark.parametrize("is_causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize("name", ALL_SWITCHES)
def test_every_switch(make_model, name, is_causal):
    switches = {"use_bias": sum(map(ord, name)) % 2 == 0, **ALL_SWITCHES[name], "is_causal": is_causal}
    if not is_causal and any(word in str(switches) for word in ORDERED):
        with pytest.raises((ValueError, StrictDataclassError), match="is_causal=False has none; use is_causal=True"):
            make_model(**switches)
        return
    model = make_model(torch.float64, **switches)
    inputs = list(INPUTS.values())[sum(map(ord, name)) % len(INPUTS)]  # `test_invariants.py` mixes
    tolerance = 1e-5 if model.config.has_rotary_positions else 1e-10
    for use_cache in (
        (True, False) if is_causal and "position_ids" not in inputs else (False,)
    ):  # chunks, or all at once
        reference.check(model, tolerance, input_ids=random_tokens(2, 7), use_cache=use_cache, **inputs)


def test_an_encoder_sees_both_ways(make_model):
    for switches in ({"sliding_window": 3}, {"attention_activation": "linear_attention"}):
        model = make_model(torch.float64, "nlq", **switches, is_causal=False)
        for inputs in INPUTS.values():
            reference.check(model, input_ids=random_tokens(2, 7), **inputs)
