"""Switches of whole models, by name, and the kinds of attention weights, from the table of activations."""

import pytest
import torch
from support.reference import NON_NEGATIVE, PHI

from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForConditionalGeneration,
    NLQForMaskedLM,
    NLQSeq2SeqConfig,
    configuration_nlq,
)
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS


VOCABULARY = 13
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}

PROJECTIONS = tuple(configuration_nlq.PROJECTIONS)


# What the weights of a layer are: every activation, softmax with each sink, and linear attention with each decay
ROW_BY_ROW = [name for name, row in ATTENTION_ACTIVATIONS.items() if row.kind in ("simplex", "row")]
SOFTMAX_KINDS = {"softmax": {"attention_activation": "softmax"}} | {
    f"softmax_sink_{sink}": {"attention_activation": "softmax", "attention_sink": sink} for sink in ("zero", "learned")
}
ELEMENTWISE_KINDS = {name: {"attention_activation": name} for name in PHI}
ROW_KINDS = {name: {"attention_activation": name} for name in ROW_BY_ROW}
LINEAR_KINDS = {
    name: {"attention_activation": "linear_attention", "linear_attention_decay": decay}
    for name, decay in {"linear": None, "linear_fixed": "fixed", "linear_learned": "learned"}.items()
}
KINDS = {**SOFTMAX_KINDS, **ELEMENTWISE_KINDS, **ROW_KINDS, **LINEAR_KINDS}
# Every allowed normaliser of every activation; None is the activation's own
NORMALIZATIONS = {
    **dict.fromkeys(("softmax", *ROW_BY_ROW), (None, "sum")),
    "stick_breaking": (None, "none"),
    **{name: (None, "length", "none", *(["sum"] if name in NON_NEGATIVE else [])) for name in PHI},
    **dict.fromkeys(("gelu_new", "hardswish", "laplace", "mish", "quick_gelu", "relu6"), (None,)),
}
ACTIVATION_AND_NORMALIZATION = [
    pytest.param(name, normalization, id=f"{name}-{normalization}")
    for name, normalizations in NORMALIZATIONS.items()
    for normalization in normalizations
]
# Design A has a ReLU after each Add/Norm, design B has one before each sub-layer.
BLOCKS = {
    "pre": {},
    "post": {"norm_position": "post"},
    "design_a": {"norm_position": "post", "residual_activation": "relu"},
    "design_b": {"norm_position": "post", "sublayer_activation": "relu"},
    "pre_both_functions": {"sublayer_activation": "tanh", "residual_activation": "mish"},
    "post_both_functions": {
        "norm_position": "post",
        "sublayer_activation": "silu",
        "residual_activation": "leaky_relu",
    },
    "output": {"norm_position": "output", "norm_type": "rmsnorm"},
    "sandwich": {"norm_position": "sandwich", "sublayer_activation": "silu"},
    "parallel": {"parallel_residual": True},
    "parallel_post": {"parallel_residual": True, "norm_position": "post", "residual_activation": "tanh"},
    "parallel_output": {"parallel_residual": True, "norm_position": "output", "mlp_type": "gated"},
    "parallel_sandwich": {"parallel_residual": True, "norm_position": "sandwich", "norm_type": "rmsnorm"},
    "llama": {"norm_type": "rmsnorm", "mlp_type": "gated", "hidden_act": "silu", "intermediate_size": 11},
    "hidden_relu": {"hidden_act": "relu"},
    "hidden_relu2": {"hidden_act": "relu2"},
    "hidden_gelu_new": {"hidden_act": "gelu_new"},
}
SWITCHES = {
    "defaults": {},
    "attention_scaling": {"attention_scaling": 0.7},
    "sink_zero": {"attention_sink": "zero"},
    "sink_learned": {"attention_sink": "learned"},
    "qk_norm_rms": {"qk_norm": "rms"},
    "qk_norm_l2": {"qk_norm": "l2"},
    "qk_norm_rms_all_heads": {"qk_norm": "rms_all_heads", "num_key_value_heads": 2},
    "sliding_window": {"sliding_window": 3},
    "some_biases": {"query_key_value_bias": True, "mlp_bias": True, "mlp_type": "gated"},
    "other_biases": {"query_key_value_bias": False, "attention_output_bias": False, "mlp_bias": False},
    "qk_norm_l2_and_attention_scaling": {"qk_norm": "l2", "attention_scaling": 0.7},
    "gate_headwise": {"attention_gate": "headwise"},
    "gate_elementwise": {"attention_gate": "elementwise"},
    "head_projection": {"head_projection": True},
    "output_scaling": {"attention_output_scaling": 0.3},
    "output_activation": {"attention_output_activation": "gelu"},
    "output_activation_linear": {"attention_output_activation": "linear"},
    "everything_after_the_heads": {
        "head_projection": True,
        "attention_output_scaling": 3.0,
        "attention_output_activation": "tanh",
        "attention_gate": "elementwise",
    },
    "positions_none": {"position_embedding": "none"},
    "grouped_queries": {"num_key_value_heads": 2},
    "one_key_value_head": {
        "num_key_value_heads": 1,
        "attention_sink": "learned",
        "qk_norm": "l2",
        "head_projection": True,
    },
    "narrow_heads": {"head_dim": 2, "query_projection": "bottleneck", "attention_gate": "elementwise"},
    "wide_heads": {"head_dim": 6, "query_projection": "upcycled", "attention_gate": "headwise"},
    "large_epsilon": {"layer_norm_eps": 0.1, "qk_norm": "rms"},
    "untied_embeddings": {"tie_word_embeddings": False},
    "norms_without_gain": {"norm_gain": False, "qk_norm": "rms", "embedding_norm": True},
    "norms_of_all_heads_without_gain": {"norm_gain": False, "qk_norm": "rms_all_heads", "norm_type": "rmsnorm"},
    "embedding_norm_and_softcapping": {"embedding_norm": True, "final_logit_softcapping": 2.0},
    "bottleneck": {"projection_bottleneck_size": 5},
    "projection_activation": {"projection_activation": "tanh"},
    "projection_without_activation": {"projection_activation": "linear"},
    "layers_differ": {
        "query_projection": "linear",
        "per_layer_config": {
            1: {
                "query_projection": "nonlinear",
                "key_projection": "bottleneck",
                "projection_activation": "silu",
                "attention_activation": "squared",
                "attention_normalization": "length",
                "attention_scaling": 0.4,
                "qk_norm": "rms",
                "attention_gate": "headwise",
                "attention_output_activation": "silu",
                "attention_output_scaling": 1.5,
                "head_projection": True,
                "sliding_window": 4,
            }
        },
    },
    "only_one_layer_has_sinks": {"per_layer_config": {0: {"attention_sink": "learned"}}},
}
# Parts, each with what strains it most
PART_SWITCHES = {
    "exclusive_fixed": {"exclusive_attention": "fixed", "num_key_value_heads": 2, "head_projection": True},
    "exclusive_learned": {"exclusive_attention": "learned", "attention_gate": "elementwise"},
    "value_residual_fixed": {"value_residual": "fixed", "num_hidden_layers": 3, "num_key_value_heads": 2},
    "value_residual_learned": {
        "value_residual": "learned",
        "per_layer_config": {0: {"attention_activation": "squared"}},
    },
    "length_scaling": {"attention_length_scaling": "log", "attention_sink": "learned", "qk_norm": "l2"},
    "length_scaling_of_relu": {"attention_length_scaling": "log", "attention_activation": "relu", "sliding_window": 3},
    "forget_gate_fixed": {"forget_gate": "fixed", "num_key_value_heads": 1, "attention_sink": "learned"},
    "forget_gate_learned": {"forget_gate": "learned", "num_key_value_heads": 2},
    "forget_gate_and_window": {"forget_gate": "learned", "sliding_window": 3},
    "forget_gate_of_sigmoid": {"forget_gate": "learned", "attention_activation": "sigmoid", "num_key_value_heads": 2},
    "forget_gate_of_relu_sums": {
        "forget_gate": "learned",
        "attention_activation": "relu_squared",
        "attention_normalization": "sum",
    },
    "forget_gate_of_entmax": {"forget_gate": "learned", "attention_activation": "entmax15"},
    "differential_v1": {"differential_attention": "v1", "num_key_value_heads": 2, "qk_norm": "rms"},
    "differential_v2": {"differential_attention": "v2", "query_projection": "bottleneck", "attention_sink": "learned"},
    "canon": {"canon": "ABCD", "num_key_value_heads": 2, "mlp_type": "gated", "qk_norm": "rms"},
    "canon_and_window": {"canon": "AC", "sliding_window": 3},
    "canon_of_linear_attention": {"canon": "BD", "attention_activation": "linear_attention"},
    "value_gate": {"attention_gate": "value", "num_key_value_heads": 2, "qk_norm": "l2"},
    "selective": {"selective_attention": True, "num_key_value_heads": 2, "attention_sink": "learned"},
    "selective_and_forget_gate": {
        "selective_attention": True,
        "forget_gate": "fixed",
        "attention_activation": "sigmoid",
    },
    "selective_and_stick_breaking": {"selective_attention": True, "attention_activation": "stick_breaking"},
    "parallax": {"parallax": True, "num_key_value_heads": 2, "qk_norm": "l2", "query_projection": "linear"},
    "parallax_of_squared": {"parallax": True, "attention_activation": "squared", "sliding_window": 3},
    "softpick": {"attention_activation": "softpick", "num_key_value_heads": 2},
    "stick_breaking": {"attention_activation": "stick_breaking", "attention_length_scaling": "log"},
    "stick_breaking_and_window": {
        "attention_activation": "stick_breaking",
        "sliding_window": 3,
        "exclusive_attention": "learned",
    },
    "all_parts": {
        "query_projection": "linear",
        "num_key_value_heads": 2,
        "exclusive_attention": "learned",
        "value_residual": "learned",
        "attention_length_scaling": "log",
        "forget_gate": "learned",
        "differential_attention": "v2",
        "attention_sink": "learned",
        "qk_norm": "l2",
        "head_projection": True,
        "attention_gate": "headwise",
    },
    "more_parts": {
        "query_projection": "linear",
        "num_key_value_heads": 2,
        "canon": "ABCD",
        "parallax": True,
        "forget_gate": "learned",
        "value_residual": "learned",
        "attention_length_scaling": "log",
        "attention_gate": "value",
        "mlp_type": "gated",
    },
    "parts_of_linear_attention": {
        "attention_activation": "linear_attention",
        "exclusive_attention": "learned",
        "value_residual": "learned",
    },
}
# As many switches at once as go together, for some activations, one beside a layer of another
RICH = {
    "softmax": {"attention_sink": "learned", "qk_norm": "l2", "attention_gate": "headwise", "head_projection": True},
    "sigmoid": {
        "position_embedding": "rope",
        "qk_norm": "rms",
        "norm_position": "post",
        "residual_activation": "relu",
    },
    "squared": {
        "query_projection": "upcycled",
        "num_key_value_heads": 2,
        "use_bias": True,
        "attention_gate": "elementwise",
    },
    "entmax15": {"qk_norm": "rms", "attention_gate": "headwise", "num_key_value_heads": 2},
    "linear_attention": {
        "linear_attention_decay": "learned",
        "position_embedding": "rope",
        "qk_norm": "l2",
        "num_key_value_heads": 2,
        "head_projection": True,
        "per_layer_config": {1: {"attention_activation": "softmax", "linear_attention_decay": None}},
    },
}
LINEAR_SWITCHES = {
    "plain": {},
    "fixed_decay": {"linear_attention_decay": "fixed"},
    "learned_decay": {"linear_attention_decay": "learned"},
    "attention_scaling": {"attention_scaling": 1.7},
    "qk_norm_rms": {"qk_norm": "rms", "linear_attention_decay": "learned"},
    "qk_norm_l2": {"qk_norm": "l2", "linear_attention_decay": "fixed"},
    "grouped_queries": {"num_key_value_heads": 2, "linear_attention_decay": "learned"},
    "one_key_value_head": {"num_key_value_heads": 1, "linear_attention_decay": "fixed"},
    "wide_heads": {"head_dim": 6, "query_projection": "upcycled", "linear_attention_decay": "learned"},
    "everything_after_the_heads": SWITCHES["everything_after_the_heads"],
    "layers_differ": {
        "linear_attention_decay": "learned",
        "per_layer_config": {0: {"attention_activation": "softmax", "linear_attention_decay": None}},
    },
}


def _rope(kind: str, theta: float = 10000.0, **options) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **options}}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 8}
# Rotary angles are computed in float32 by Transformers, so these agree to about 1e-7 only.
ROTARY = {
    "default": {},
    "theta": _rope("default", 50.0),
    "linear": _rope("linear", factor=4.0),
    "yarn": _rope("yarn", **_YARN),
    "llama3": _rope("llama3", factor=8.0, **_LLAMA3),
    "partial": _rope("default", 100.0, partial_rotary_factor=0.5),
    "partial_yarn": {"head_dim": 5, "query_projection": "linear", **_rope("yarn", **_YARN, partial_rotary_factor=0.8)},
    "proportional": _rope("proportional", 50.0, factor=2.0, partial_rotary_factor=0.5),
    "not_in_each_layer": {"per_layer_config": {1: {"position_embedding": "none", "sliding_window": 3}}},
    "qk_norm_rms": {"qk_norm": "rms"},
    "qk_norm_l2": {"qk_norm": "l2", "num_key_value_heads": 2},
    "squared": {"attention_activation": "squared"},
}


def make_model(dtype=torch.float32, implementation="eager", seed=0, model_class=None, **switches):
    """Makes a small model with random biases, gains and sinks, which its initial state would hide.

    Without a `model_class` it is an `NLQForCausalLM`; with `is_causal=False` an `NLQForMaskedLM`; and with `decoder`,
    and perhaps `encoder`, an `NLQForConditionalGeneration` of these halves.
    """
    if "decoder" in switches:
        halves = {name: {**SIZES, **switches.pop(name, {})} for name in ("encoder", "decoder")}
        config = NLQSeq2SeqConfig(**halves, **switches, attn_implementation=implementation)
        model_class = NLQForConditionalGeneration
    else:
        config = NLQConfig(**{**SIZES, **switches}, attn_implementation=implementation)
        model_class = model_class or (NLQForCausalLM if config.is_causal else NLQForMaskedLM)
    model = model_class(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if ".lambda_" in name:  # these begin with random numbers
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def parametrize_switches(cases):
    return pytest.mark.parametrize("switches", [pytest.param(switches, id=name) for name, switches in cases.items()])


def random_tokens(batch_size, length, vocab_size=VOCABULARY):
    return torch.randint(vocab_size, (batch_size, length))
