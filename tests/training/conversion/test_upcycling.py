"""Switches changed in a trained model: the outputs stay, new parameters learn, and other changes are refused."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from support.conversion_cases import (
    Frozen,
    assert_same_function,
    layer_switches,
    make_gpt2,
    output_of,
    parametrize_cases,
    upcycle,
)
from support.grids import parametrize_grid
from support.model_cases import GATED_DELTA, KINDS, random_tokens
from support.properties import examples
from support.random_models import OF_MODEL, model_switches, some_switches
from transformers import GenerationConfig, GPT2ForSequenceClassification

from modeling_nlq.configuration_nlq import PER_LAYER_SWITCHES
from modeling_nlq.training.conversion.draft import to_nlq


pytestmark = pytest.mark.thin(4)


# Models with linear projections, to which every switch below can be added
LINEAR_SOURCES = {
    "gpt2": "gpt2",
    "linear": {},
    "grouped_queries": {"num_key_value_heads": 2},
    # Softmax without rotary positions ignores the bias of keys
    "sigmoid": {"attention_activation": "sigmoid", "use_bias": True},
    "qk_norm_rms": {"qk_norm": "rms", "use_bias": True},
    "qk_norm_l2": {"qk_norm": "l2", "num_key_value_heads": 2},
    "post_norm": {"norm_position": "post", "attention_scaling": 0.7, "attention_output_scaling": 1.7},
    "sink_and_gate": {"attention_sink": "learned", "attention_gate": "headwise", "use_bias": True},
    "layers_differ": {
        "per_layer_config": {
            0: {"attention_activation": "relu", "attention_scaling": 0.9},
            1: {"head_projection": True},
        }
    },
}
# (model whose pairs of queries can begin as copies, tolerance)
PAIRED_SOURCES = {
    **{name: (LINEAR_SOURCES[name], 0.0) for name in ("linear", "grouped_queries", "qk_norm_l2", "sink_and_gate")},
    "one_key_head": ({"num_key_value_heads": 1, "position_embedding": "rope"}, 0.0),
    "qk_norm_rms_all_heads": ({"qk_norm": "rms_all_heads", "use_bias": True}, 1e-6),
    "bottleneck": ({"query_projection": "bottleneck", "use_bias": True}, 1e-6),
    "other_parts": ({"exclusive_attention": "learned", "value_residual": "learned"}, 0.0),
}
STARTING_PARTS = {"exclusive_attention": "learned", "value_residual": "learned", "differential_attention": "v2"}
# `None` is the default of the function, not a switch.
SWITCHES_FOR_ALL = {
    "default": None,
    "queries": {"query_projection": "upcycled"},
    "all_projections": {f"{role}_projection": "upcycled" for role in ("query", "key", "value")},
    "bottleneck": {"query_projection": "upcycled", "projection_bottleneck_size": 3, "projection_activation": "silu"},
    "wide": {"intermediate_size": 53},
    "canon": {"canon": "ABCD"},
    "parallax": {"parallax": True},
}
# Those below are already in place in some of the sources.
SWITCHES_FOR_SOME = {
    "gate_value": {"attention_gate": "value"},
    "together": {
        "query_projection": "upcycled",
        "value_projection": "upcycled",
        "attention_gate": "elementwise",
        "head_projection": True,
        "attention_output_scaling": 0.5,
        "attention_scaling": 2.0,
        "use_bias": True,
        "intermediate_size": 50,
        "tie_word_embeddings": False,
    },
    "more_positions": {"max_position_embeddings": 40},
    "second_layer": {"per_layer_config": {1: {"query_projection": "upcycled", "attention_gate": "elementwise"}}},
}
SIMPLE_SOURCES = ("gpt2", "linear", "grouped_queries", "sigmoid", "qk_norm_rms", "post_norm")
# (source, switches) beyond the two products
OTHERS = {
    "sink_zero_to_learned": ({"attention_sink": "zero"}, {"attention_sink": "learned"}),
    "head_projection_folded": (
        {
            "head_projection": True,
            "attention_gate": "headwise",
            "attention_output_scaling": 0.7,
            "num_key_value_heads": 2,
        },
        {"head_projection": False},
    ),
    "bottleneck_to_upcycled": ({"query_projection": "bottleneck", "use_bias": True}, {"query_projection": "upcycled"}),
    "wider_bottleneck": ({"query_projection": "nonlinear", "use_bias": True}, {"projection_bottleneck_size": 11}),
    "values_of_keys_to_linear": ({"value_projection": "key", "use_bias": True}, {"value_projection": "linear"}),
    "values_of_keys_to_upcycled": ({"value_projection": "key"}, {"value_projection": "upcycled"}),
    "values_of_more_key_heads": ({"value_projection": "key", "num_key_value_heads": 2}, {"num_key_value_heads": 4}),
    "length_bias": ({}, {"attention_length_scaling": "log_bias"}),
    "gate_of_outputs": ({}, {"attention_gate": "headwise", "gate_source": "output", "gate_rank": 3}),
    "gate_of_softplus": ({}, {"attention_gate": "elementwise", "gate_activation": "softplus"}),
    "parallax_scaling": ({"parallax": True}, {"attention_scaling": 0.25}),  # half of it, which is not rounded
    "canon_key_heads": ({"canon": "ABCD", "num_key_value_heads": 2}, {"num_key_value_heads": 4}),
    "output_of_zero": ({"attention_output_scaling": 0.0}, {"attention_output_scaling": 0.5}),
    "scaling_of_bottleneck_keys": (
        {"key_projection": "bottleneck"},
        {"attention_scaling": 0.3, "query_projection": "upcycled"},
    ),
    "angles_of_no_use": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "more_key_heads": (
        {"num_key_value_heads": 2, "value_projection": "bottleneck", "use_bias": True},
        {"num_key_value_heads": 4},
    ),
    "rates_of_copied_heads": (
        {**GATED_DELTA, "num_key_value_heads": 2, "value_projection": "bottleneck"},
        {"num_key_value_heads": 4},
    ),
    "forgetting_of_copied_heads": (
        {"num_key_value_heads": 2, "forget_gate": "learned", "exclusive_attention": "fixed"},
        {"num_key_value_heads": 4},
    ),
}
UPCYCLING = {
    f"{source}-{name}": (LINEAR_SOURCES[source], switches)
    for source in LINEAR_SOURCES
    for name, switches in {**SWITCHES_FOR_ALL, **(SWITCHES_FOR_SOME if source in SIMPLE_SOURCES else {})}.items()
    if (source, name) != ("gpt2", "second_layer")  # its layers differ already; see `test_layers_that_differ_already`
}
UPCYCLING |= OTHERS


@pytest.fixture(scope="session")
def make_source(make_model):
    def make(source, dtype=torch.float32):
        if source == "gpt2":
            return to_nlq(make_gpt2(dtype=dtype, n_positions=32, scale_attn_by_inverse_layer_idx=True))
        return make_model(dtype, **{"query_projection": "linear", **source})

    return make


def assert_only_these_changed(config, before, switches):
    expected = layer_switches(before)
    for index, layer in enumerate(expected):
        layer.update({name: value for name, value in switches.items() if name in PER_LAYER_SWITCHES})
        layer.update(switches.get("per_layer_config", {}).get(index, {}))
    assert layer_switches(config) == expected
    free = {*PER_LAYER_SWITCHES, "per_layer_config", "dtype", "architectures", "_name_or_path", "transformers_version"}
    values, values_before = config.to_dict(), before.to_dict()
    assert values.keys() - free == values_before.keys() - free
    for name in values.keys() - free:
        assert values[name] == switches.get(name, values_before[name]), name


def assert_new_weights_learn(model, before):
    old, tokens = {name: value.shape for name, value in before.named_parameters()}, random_tokens(2, 12)
    new = [name for name, value in model.named_parameters() if old.get(name) != value.shape]
    parameters, optimizer = dict(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    for name in new:
        assert parameters[name].grad.isfinite().all() and parameters[name].grad.abs().max() > 0, name


@pytest.mark.thin(6)
@parametrize_grid(
    {
        "source, switches": UPCYCLING,
        "dtype, tolerance": {"float64": (torch.float64, 1e-10), "float32": (torch.float32, 1e-6)},
    },
    strength=1,
)
def test_same_function(make_source, source, switches, dtype, tolerance):
    source = make_source(source, dtype)
    with Frozen(source):
        model = upcycle(source, switches)
    assert type(model) is type(source) and not model.training
    tokens = random_tokens(2, 24)
    expected = output_of(source, tokens)
    assert (output_of(model, tokens) - expected).abs().max() <= tolerance * expected.abs().max()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(parameter.isfinite().all() and parameter.requires_grad for parameter in model.parameters())
    assert_only_these_changed(
        model.config, source.config, {"query_projection": "upcycled"} if switches is None else switches
    )
    if not model.config.tie_word_embeddings:
        assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert_new_weights_learn(model, source)


def test_generation_config_and_mode(make_source):
    source = make_source({"eos_token_id": 1, "residual_dropout": 0.3}).train()
    source.generation_config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.6, eos_token_id=1)
    with Frozen(source):
        chosen = upcycle(source, {"eos_token_id": 5}).generation_config
    assert (chosen.temperature, chosen.eos_token_id) == (0.6, 5)


def test_layers_that_differ_already(make_source):
    source = upcycle(make_source({}, torch.float64), {"per_layer_config": {1: {"query_projection": "residual"}}})
    switches = {"query_projection": "upcycled", "attention_output_scaling": 0.7}
    for asked in (switches, {"per_layer_config": {1: switches}}):
        model = upcycle(source, asked)
        assert switches.items() <= layer_switches(model.config)[1].items()
        assert (layer_switches(model.config)[0]["query_projection"] == "upcycled") == (asked is switches)
        assert_same_function(model, source, 1e-10)
    with pytest.raises(ValueError, match="layer 0: attention_activation"):
        upcycle(make_source(LINEAR_SOURCES["layers_differ"]), {"per_layer_config": {1: switches}})


@parametrize_cases(
    "switches", {**{name: {name: value} for name, value in STARTING_PARTS.items()}, "all": STARTING_PARTS}
)
@parametrize_cases("source, tolerance", PAIRED_SOURCES)
def test_parts_start_without_effect(make_source, source, tolerance, switches):
    """The difference is 0 where no number is rounded."""
    source, tokens = make_source(source), random_tokens(2, 24)
    switches = {name: value for name, value in switches.items() if getattr(source.config, name) is None}
    model = upcycle(source, switches)
    for each in (source, model):
        each.set_attn_implementation("eager")
    logits = output_of(model, tokens)
    difference = (logits - output_of(source, tokens)).abs().max().item()
    assert difference <= (tolerance if "differential_attention" in switches else 0.0) * logits.abs().max().item()
    assert_new_weights_learn(model, source)


# Field of a plain model -> a value that would change the function
REFUSED_ALWAYS = {
    "value_projection": "identity",
    "attention_scaling": 0.0,
    "attention_sink": "learned",
    "attention_activation": "sigmoid",
    "query_projection": "nonlinear",
    "qk_norm": "rms",
    "layer_norm_eps": 0.1,
    "max_position_embeddings": 16,
    "position_embedding": "none",
    "num_key_value_heads": 2,
    "forget_gate": "fixed",
    "attention_length_scaling": "log",
    "differential_attention": "v1",
}
OUTPUT_GATE = {"attention_gate": "headwise", "gate_source": "output"}
# (source, switches); the error names the first switch
REFUSED = {
    **{f"{name}={value}": ({}, {name: value}) for name, value in REFUSED_ALWAYS.items()},
    "sink in a layer": ({}, {"per_layer_config": {1: {"attention_sink": "learned"}}}),
    **{
        f"{name}={before} to {after}": ({name: before}, {name: after})
        for name, before, after in (
            ("attention_sink", "learned", None),
            ("attention_activation", "sigmoid", "softmax"),
            ("query_projection", "upcycled", "linear"),
            ("attention_gate", "headwise", None),
            ("tie_word_embeddings", False, True),
            ("value_residual", "fixed", "learned"),
            ("sliding_window", 4, 5),
            ("query_key_value_bias", True, False),
            ("value_projection", "linear", "key"),
        )
    },
    "scale_of_values": ({"value_projection": "key"}, {"attention_scaling": 2.0}),
    "scale_before_gate": ({**OUTPUT_GATE}, {"attention_output_scaling": 0.5}),
    "gate_activation": ({**OUTPUT_GATE}, {"gate_activation": "softplus"}),
    "gate_source": ({**OUTPUT_GATE}, {"gate_source": "input"}),
    "heads_before_gate": ({**OUTPUT_GATE}, {"differential_attention": "v2"}),
    "narrower_bottleneck": ({"query_projection": "nonlinear"}, {"projection_bottleneck_size": 3}),
    "normalization": ({"attention_activation": "sigmoid"}, {"attention_normalization": "length"}),
    "angles": ({"position_embedding": "rope"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "scale_before_function": ({"attention_output_activation": "tanh"}, {"attention_output_scaling": 0.5}),
    "scale_of_unit_length": ({**GATED_DELTA, "qk_norm": "rms"}, {"attention_scaling": 0.3}),
    "scale_of_linear": ({"attention_activation": "linear_attention"}, {"attention_scaling": 0.3}),
    "rates_of_more_heads": (
        {"attention_activation": "linear_attention", "linear_attention_decay": "fixed", "num_key_value_heads": 2},
        {"num_key_value_heads": 4},
    ),
    "good_and_bad": ({}, {"qk_norm": "rms", "query_projection": "upcycled", "attention_gate": "headwise"}),
}


@parametrize_cases("source, switches", REFUSED)
def test_switches_without_a_start_are_refused(make_source, source, switches):
    source = make_source(source)
    with Frozen(source), pytest.raises(ValueError) as error:
        upcycle(source, switches)
    name, value = next(iter(switches.items()))
    if name == "per_layer_config":
        name, value = next(iter(next(iter(value.values())).items()))
    message = str(error.value)
    assert name in message and str(value) in message
    assert len(message) > len(f"{name}={value!r}") + 15, "no reason"


def test_other_refusals(make_source):
    with pytest.raises(
        ValueError, match=r"forget_gate='fixed' cannot stay: the rates depend on max_position_embeddings"
    ):
        upcycle(make_source({"forget_gate": "fixed"}), {"differential_attention": "v2"})
    classifier = to_nlq(make_gpt2(GPT2ForSequenceClassification, num_labels=3))
    with pytest.raises(ValueError, match="id2label"):  # a head of another size would be a new one
        upcycle(classifier, {"id2label": {index: str(index) for index in range(5)}})
    with pytest.raises(StrictDataclassError, match="query_projection"):
        upcycle(make_source({}), {"query_projection": "cubic"})


drawn_switches = some_switches([*OF_MODEL, *PER_LAYER_SWITCHES], lambda switches: True, most=4)


@pytest.mark.slow
@given(
    source=st.sampled_from(sorted(KINDS)).flatmap(lambda kind: model_switches(kind, "eager")),
    switches=drawn_switches | st.builds(lambda own: {"per_layer_config": {1: own}}, drawn_switches),
)
@examples(150)
def test_any_switch_is_refused_or_keeps_the_outputs(make_source, source, switches):
    try:
        source = make_source(source, torch.float64)
    except (ValueError, StrictDataclassError):
        return  # there is no such model
    with Frozen(source):
        try:
            model = upcycle(source, switches)
        except (ValueError, StrictDataclassError):
            return
    input_ids = random_tokens(2, 24)
    torch.testing.assert_close(output_of(model, input_ids), output_of(source, input_ids), rtol=1e-9, atol=1e-9)
    for name, value in switches.items():
        if name == "per_layer_config":
            for index, wanted in value.items():
                assert wanted.items() <= layer_switches(model.config)[index].items()
        elif name not in PER_LAYER_SWITCHES:
            assert getattr(model.config, name) == value
