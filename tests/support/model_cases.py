"""Switches of whole models, by name, and the kinds of attention weights, from the table of activations."""

import typing

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.reference import PHI

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
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32}

PROJECTIONS = tuple(configuration_nlq.PROJECTIONS)
# The switches of a part, which mean nothing without it
PART_OF = dict.fromkeys(configuration_nlq.GATE_OPTIONS, "attention_gate")


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
DELTA = {"attention_activation": "linear_attention", "linear_attention_update": "delta"}
GATED_DELTA = {**DELTA, "linear_attention_decay": "gated", "linear_attention_beta": 2}
LINEAR_KINDS |= {"delta": DELTA, "delta_gated": GATED_DELTA}
KINDS = {**SOFTMAX_KINDS, **ELEMENTWISE_KINDS, **ROW_KINDS, **LINEAR_KINDS}
# The values of switches whose type names none
VALUES = {
    **dict.fromkeys(("query_projection", "key_projection"), PROJECTIONS),
    "value_projection": tuple(configuration_nlq.VALUE_PROJECTIONS),
    "gate_rank": (2,),
    **dict.fromkeys(("sublayer_activation", "residual_activation", "projection_activation"), ("relu", "silu", "tanh")),
    "attention_output_activation": ("gelu",),
    "attention_output_scaling": (0.5,),
    "attention_scaling": (0.7,),
    "canon": ("AC", "BD", "ABCD"),
    "final_logit_softcapping": (2.0,),
    "head_dim": (2, 6),
    "hidden_act": ("relu", "relu2", "gelu_new"),
    "layer_norm_eps": (0.1,),
    "num_key_value_heads": (1, 2),
    "projection_bottleneck_size": (5,),
    "sliding_window": (2, 3),
    # Of the kind of a layer, of the whole model, or of users
    **dict.fromkeys(("attention_activation", "position_embedding", "cross_attention", "attention_parts"), ()),
}
OF_MODEL = (
    *("num_key_value_heads", "head_dim", "mlp_type", "norm_type", "norm_position", "norm_gain", "embedding_norm"),
    *("parallel_residual", "sublayer_activation", "residual_activation", "final_logit_softcapping", "use_bias"),
    *("query_key_value_bias", "attention_output_bias", "mlp_bias", "tie_word_embeddings", "hidden_act"),
    "layer_norm_eps",
)


def values_of(field: str) -> tuple:
    """Returns the values of a switch that are tested beside its default, by the type of its field."""
    if field in VALUES:
        return VALUES[field]
    kind = NLQConfig.__dataclass_fields__[field].type
    literals = [each for each in (kind, *typing.get_args(kind)) if typing.get_origin(each) is typing.Literal]
    return tuple(value for each in literals for value in typing.get_args(each)) or (True, False)


def is_accepted(switches: dict) -> bool:
    try:
        NLQConfig(**{**SIZES, **switches})
    except (ValueError, StrictDataclassError):
        return False
    return True


def each_switch(base: dict) -> dict[str, dict]:
    """Returns a case for each value of each switch that goes with `base`, perhaps with linear queries only."""
    cases = {}
    for field in (*OF_MODEL, *configuration_nlq.PER_LAYER_SWITCHES):
        for value in set(values_of(field)) - {getattr(NLQConfig, field), base.get(field)}:
            switches = {**base, **({PART_OF[field]: "elementwise"} if field in PART_OF else {}), field: value}
            if field != "query_projection" and not is_accepted(switches):
                switches["query_projection"] = "linear"
            if is_accepted(switches):
                cases[f"{field}={value}"] = switches
    return dict(sorted(cases.items()))


LIBRARY = ("gelu", "gelu_new", "hardswish", "laplace", "leaky_relu", "mish", "quick_gelu", "relu6", "silu")
# Every allowed normaliser of every activation; None is the activation's own
ACTIVATION_AND_NORMALIZATION = [
    (name, normalization)
    for name in (*ATTENTION_ACTIVATIONS, *LIBRARY)
    for normalization in (None, "sum", "length", "none")
    if is_accepted({"attention_activation": name, "attention_normalization": normalization})
]
SWITCHES = each_switch({})
SWITCHES |= {
    f"linear_{name}": switches
    for name, switches in each_switch(
        {"attention_activation": "linear_attention", "linear_attention_decay": "learned"}
    ).items()
}
AFTER_THE_HEADS = {"head_projection": True, "attention_output_scaling": 3.0, "attention_output_activation": "tanh"}
AFTER_THE_HEADS |= {"attention_gate": "elementwise"}
VALUES_OF_KEYS = {"value_projection": "key", "position_embedding": "rope", "qk_norm": "rms", "num_key_value_heads": 2}
# Parts together, and with what strains them most
PART_SWITCHES = {
    "exclusive_learned": {"exclusive_attention": "learned", "num_key_value_heads": 2, **AFTER_THE_HEADS},
    "value_residual": {"value_residual": "fixed", "num_hidden_layers": 3, "num_key_value_heads": 2},
    "length_scaling": {"attention_length_scaling": "log", "attention_sink": "learned", "qk_norm": "l2"},
    "length_scaling_of_relu": {"attention_length_scaling": "log", "attention_activation": "relu", "sliding_window": 3},
    "forget_gate_fixed": {"forget_gate": "fixed", "num_key_value_heads": 1, "attention_sink": "learned"},
    "forget_gate_learned": {"forget_gate": "learned", "num_key_value_heads": 2, "sliding_window": 3},
    "forget_gate_of_sigmoid": {"forget_gate": "learned", "attention_activation": "sigmoid", "num_key_value_heads": 2},
    "differential_v1": {"differential_attention": "v1", "num_key_value_heads": 2, "qk_norm": "rms"},
    "differential_v2": {"differential_attention": "v2", "query_projection": "bottleneck", "attention_sink": "learned"},
    "depth_attention": {
        "depth_attention": True,
        "input_skip": True,
        "value_residual": "learned",
        "num_hidden_layers": 3,
    },
    "canon": {"canon": "ABCD", "num_key_value_heads": 2, "mlp_type": "gated", "qk_norm": "rms", "sliding_window": 3},
    "value_gate": {"attention_gate": "value", "num_key_value_heads": 2, "qk_norm": "l2"},
    "output_gate": {"attention_gate": "headwise", "gate_source": "output", "gate_rank": 3, **VALUES_OF_KEYS},
    "output_gate_of_softplus": {**AFTER_THE_HEADS, "gate_source": "output", "gate_activation": "softplus"},
    "keys_as_values": {**VALUES_OF_KEYS, "differential_attention": "v1", "sliding_window": 3},
    "keys_as_values_with_states": {**VALUES_OF_KEYS, "forget_gate": "learned", "attention_length_scaling": "log_bias"},
    "selective": {"selective_attention": True, "num_key_value_heads": 2, "attention_sink": "learned"},
    "selective_and_forget_gate": {
        "selective_attention": True,
        "forget_gate": "fixed",
        "attention_activation": "sigmoid",
    },
    "parallax": {"parallax": True, "num_key_value_heads": 2, "qk_norm": "l2", "query_projection": "linear"},
    "parallax_of_squared": {"parallax": True, "attention_activation": "squared", "sliding_window": 3},
    "stick_breaking": {
        "attention_activation": "stick_breaking",
        "attention_length_scaling": "log",
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
        "input_skip": True,
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
