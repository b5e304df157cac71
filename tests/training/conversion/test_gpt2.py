"""NLQ's switches in GPT-2, and GPT-2 models in NLQ. `test_families.py` has what all families share."""

import pytest
import torch
from support.conversion_cases import (
    Frozen,
    assert_same_function,
    from_nlq,
    output_of,
    parametrize_cases,
)
from support.grids import parametrize_grid
from support.model_cases import random_tokens
from transformers import GPT2LMHeadModel

from modeling_nlq.training.conversion.draft import to_nlq


pytestmark = pytest.mark.thin(2)


# Switches that GPT-2 can compute with other weights
EXACT = {
    "plain": {},
    "scalings_and_groups": {"attention_scaling": 0.7, "attention_output_scaling": 3.0, "num_key_value_heads": 2},
    "layers_differ": {"per_layer_config": {1: {"query_projection": "residual", "attention_scaling": 0.9}}},
    "keys_identity": {"key_projection": "identity"},
    "values_residual": {"value_projection": "residual"},
}
# Switches that it cannot compute; the error names the first
INEXACT = {
    "retention": {"linear_attention_decay": "learned", "attention_activation": "linear_attention"},
    "sink_learned": {"attention_sink": "learned"},
    "one_layer": {"per_layer_config": {1: {"attention_activation": "squared"}}},
}


@pytest.fixture(scope="module")
def make(make_model):
    return lambda **switches: make_model(**{"query_projection": "linear", "hidden_act": "gelu_new", **switches})


@parametrize_grid(
    {
        "switches": EXACT,
        "use_bias": [False, True],
        "dtype, tolerance": {"float64": (torch.float64, 1e-10), "float32": (torch.float32, 1e-5)},
    }
)
def test_exact_switches_keep_the_logits(make, switches, use_bias, dtype, tolerance):
    nlq = make(dtype=dtype, use_bias=use_bias, **switches)
    with Frozen(nlq):
        gpt2 = from_nlq(nlq, "gpt2")
    assert type(gpt2) is GPT2LMHeadModel and {parameter.dtype for parameter in gpt2.parameters()} == {dtype}
    assert (gpt2.lm_head.weight is gpt2.transformer.wte.weight) == nlq.config.tie_word_embeddings
    assert_same_function(gpt2, nlq, tolerance)
    assert_same_function(to_nlq(gpt2), nlq, tolerance)


@parametrize_cases("switches", INEXACT)
def test_inexact_switches_are_refused_unless_allowed(make, switches):
    nlq = make(use_bias=True, **switches)
    name, value = next(iter(next(iter(switches.get("per_layer_config", {1: switches}).values())).items()))
    with Frozen(nlq), pytest.raises(ValueError, match=rf"{name}\W+{value}"):
        from_nlq(nlq, "gpt2")
    with Frozen(nlq):
        gpt2 = from_nlq(nlq, "gpt2", allow_lossy=True)
    assert type(gpt2) is GPT2LMHeadModel and output_of(gpt2, random_tokens(2, 9)).isfinite().all()
    for theirs, ours in zip(gpt2.transformer.h, nlq.model.layers):
        assert torch.equal(theirs.mlp.c_fc.weight, ours.mlp.fc1.weight.T)  # what has a counterpart is there


def test_missing_tokens_stay_missing(make):
    config = from_nlq(make(eos_token_id=[3, 4]), "gpt2").config  # which fills in 50256 by default
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [3, 4], None)
