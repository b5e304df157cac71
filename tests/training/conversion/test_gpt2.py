"""GPT-2 models as NLQ models, and what of NLQ's switches GPT-2 computes too. The same for all families:
`test_families.py`.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.conversion_cases import (
    HEADS,
    Frozen,
    assert_same_function,
    assert_same_state,
    make_gpt2,
    output_of,
    parametrize_cases,
    randomize,
)
from support.family_cases import comparable
from support.grids import parametrize_grid
from support.model_cases import random_tokens
from support.properties import examples
from transformers import GPT2LMHeadModel

from modeling_nlq import NLQConfig, NLQForTokenClassification
from modeling_nlq.training.conversion.draft import from_nlq, to_nlq


pytestmark = pytest.mark.thin(2)


@given(st.data())
@examples(25)
def test_any_options(data):
    n_head = data.draw(st.integers(1, 4))
    options = {
        "n_head": n_head,
        "n_embd": n_head * data.draw(st.integers(2, 7)),  # of heads of one, scaled and unscaled ones are the same
        "n_layer": data.draw(st.integers(2, 3)),
        "n_inner": data.draw(st.none() | st.integers(1, 30)),
        "n_positions": data.draw(st.integers(2, 12)),
        "vocab_size": data.draw(st.integers(5, 17)),
        "activation_function": data.draw(st.sampled_from(["gelu_new", "gelu", "relu", "silu", "tanh"])),
        "scale_attn_weights": data.draw(st.booleans()),
        "scale_attn_by_inverse_layer_idx": data.draw(st.booleans()),
        "tie_word_embeddings": data.draw(st.booleans()),
        "layer_norm_epsilon": data.draw(st.sampled_from([1e-5, 1e-3, 0.3])),
    }
    gpt2 = make_gpt2(dtype=torch.float64, seed=data.draw(st.integers(0, 100)), **options)
    nlq = to_nlq(gpt2)
    back = from_nlq(nlq, "gpt2")
    input_ids = random_tokens(2, options["n_positions"], options["vocab_size"])
    torch.testing.assert_close(output_of(nlq, input_ids), output_of(gpt2, input_ids), rtol=1e-10, atol=1e-10)
    assert_same_state(back.state_dict(), gpt2.state_dict())
    assert comparable(back.config) == comparable(gpt2.config)


# What GPT-2 computes too, with other weights. `make_model` draws biases and gains.
EXACT = {
    "plain": {},
    "grouped_queries": {"num_key_value_heads": 2},
    "one_key_value_head": {"num_key_value_heads": 1},
    "scaling": {"attention_scaling": 0.7},
    "scaling_zero": {"attention_scaling": 0.0},
    "output_scaling": {"attention_output_scaling": 0.3},
    "scalings_and_groups": {"attention_scaling": 0.7, "attention_output_scaling": 3.0, "num_key_value_heads": 2},
    "queries_identity": {"query_projection": "identity"},
    "queries_residual": {"query_projection": "residual"},
    "layers_differ": {"per_layer_config": {1: {"query_projection": "residual", "attention_scaling": 0.9}}},
    "untied": {"tie_word_embeddings": False},
    "epsilon": {"layer_norm_eps": 0.1},
    "relu": {"hidden_act": "relu"},
    "keys_identity": {"key_projection": "identity"},
    "values_residual": {"value_projection": "residual"},
    "head_projection": {"head_projection": True, "num_key_value_heads": 2, "attention_output_scaling": 0.4},
}
# What it computes only in part; the field and the value of the first switch are named
INEXACT = {
    "retention": {"linear_attention_decay": "learned", "attention_activation": "linear_attention"},
    "queries_nonlinear": {"query_projection": "nonlinear"},
    "sink_learned": {"attention_sink": "learned"},
    "gate": {"attention_gate": "elementwise"},
    "qk_norm": {"qk_norm": "rms"},
    "output_activation": {"attention_output_activation": "gelu"},
    "sublayer_activation": {"sublayer_activation": "relu"},
    "one_layer": {"per_layer_config": {1: {"attention_activation": "squared"}}},
}
IMPOSSIBLE = {
    "rope": {"position_embedding": "rope"},
    "no_positions": {"position_embedding": "none"},
    "post_norm": {"norm_position": "post"},
    "wide_heads": {"head_dim": 6},
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
def test_exact(make, switches, use_bias, dtype, tolerance):
    nlq = make(dtype=dtype, use_bias=use_bias, **switches)
    with Frozen(nlq):
        gpt2 = from_nlq(nlq, "gpt2")
    assert type(gpt2) is GPT2LMHeadModel and {parameter.dtype for parameter in gpt2.parameters()} == {dtype}
    assert (gpt2.lm_head.weight is gpt2.transformer.wte.weight) == nlq.config.tie_word_embeddings
    assert_same_function(gpt2, nlq, tolerance)
    assert_same_function(to_nlq(gpt2), nlq, tolerance)


@parametrize_cases("switches", INEXACT)
def test_inexact(make, switches):
    nlq = make(use_bias=True, **switches)
    name, value = next(iter(next(iter(switches.get("per_layer_config", {1: switches}).values())).items()))
    with Frozen(nlq), pytest.raises(ValueError, match=rf"{name}\W+{value}"):
        from_nlq(nlq, "gpt2")
    with Frozen(nlq):
        gpt2 = from_nlq(nlq, "gpt2", allow_lossy=True)
    assert type(gpt2) is GPT2LMHeadModel and output_of(gpt2, random_tokens(2, 9)).isfinite().all()
    for theirs, ours in zip(gpt2.transformer.h, nlq.model.layers):
        assert torch.equal(theirs.mlp.c_fc.weight, ours.mlp.fc1.weight.T)  # what has a counterpart is there


@parametrize_cases("switches", IMPOSSIBLE)
@pytest.mark.parametrize("allow_lossy", [False, True], ids=["exactly", "lossy"])
def test_impossible(make, switches, allow_lossy):
    ((name, value),) = switches.items()
    with pytest.raises(ValueError, match=rf"{name}\W+{value}"):
        from_nlq(make(**switches), "gpt2", allow_lossy=allow_lossy)


def test_configuration(make):
    options = {
        "embedding_dropout": 0.15,
        "residual_dropout": 0.25,
        "attention_dropout": 0.35,
        "initializer_range": 0.05,
    }
    gpt2 = from_nlq(
        make(**options, layer_norm_eps=1e-4, eos_token_id=[3, 4], use_cache=False, hidden_act="silu"), "gpt2"
    )
    config = gpt2.config
    assert (config.embd_pdrop, config.resid_pdrop, config.attn_pdrop) == (0.15, 0.25, 0.35)
    assert (config.initializer_range, config.use_cache, config.layer_norm_epsilon) == (0.05, False, 1e-4)
    # Not 50256, which a GPT-2 configuration fills in
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [3, 4], None)
    assert (config.vocab_size, config.n_positions, config.n_inner, config.activation_function) == (13, 32, 24, "silu")
    assert not getattr(config, "auto_map", None)


@pytest.mark.parametrize("head_bias", [True, False])
@parametrize_cases("gpt2_class, nlq_class", HEADS)
def test_heads_without_biases(gpt2_class, nlq_class, head_bias):
    """GPT-2's head for tokens always has a bias, here 0."""
    sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    labels = {"num_labels": 3} if "Classification" in nlq_class.__name__ else {}
    options = {"token_classification_bias": head_bias} if nlq_class is NLQForTokenClassification else {}
    config = NLQConfig(**sizes, **labels, **options, query_projection="linear", max_position_embeddings=9)
    nlq = randomize(nlq_class(config)).eval()
    gpt2 = from_nlq(nlq, "gpt2")
    assert type(gpt2) is gpt2_class
    assert_same_function(gpt2, nlq)
    if options and not head_bias:
        assert nlq.score.bias is None and (gpt2.classifier.bias == 0).all()
