"""Switches turned on in a trained model: the same function at first, gradients where there is more to learn."""

import math
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from support.conversion_cases import (
    HEADS,
    Frozen,
    assert_no_shared_memory,
    assert_same_function,
    assert_same_state,
    layer_switches,
    make_gpt2,
    output_of,
    parametrize_bias,
    parametrize_cases,
)
from support.grids import parametrize_grid
from support.model_cases import random_tokens
from support.properties import examples
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2ForSequenceClassification,
)

from modeling_nlq.configuration_nlq import PER_LAYER_SWITCHES
from modeling_nlq.training.conversion.renaming import from_nlq, to_nlq
from modeling_nlq.training.conversion.upcycling import upcycle


# Where upcycling begins: each with linear projections, so that every switch below can be turned on
LINEAR_SOURCES = {
    "gpt2": "gpt2",
    "linear": {},
    "biased": {"use_bias": True},
    "grouped_queries": {"num_key_value_heads": 2},
    "rope": {"position_embedding": "rope", "use_bias": True},
    # With biases: to softmax without rotary positions, one of the keys would make no difference
    "sigmoid": {"attention_activation": "sigmoid", "use_bias": True},
    "qk_norm_rms": {"qk_norm": "rms", "use_bias": True},
    "qk_norm_l2": {"qk_norm": "l2", "num_key_value_heads": 2},
    "post_norm": {"norm_position": "post", "attention_scaling": 0.7, "attention_output_scaling": 1.7},
    "sink_and_gate": {"attention_sink": "learned", "attention_gate": "headwise", "use_bias": True},
    "layers_differ": {
        "per_layer_config": {0: {"attention_activation": "relu", "attention_scaling": 0.9}, 1: {"head_projection": True}}
    },
}
# Models in which pairs of queries can begin as copies. Some norms are over all heads, and sum the copies up in another order
PAIRED_SOURCES = {
    "linear": ({}, 0.0),
    "biased": ({"use_bias": True}, 0.0),
    "grouped_queries": ({"num_key_value_heads": 2}, 0.0),
    "one_key_head": ({"num_key_value_heads": 1, "position_embedding": "rope"}, 0.0),
    "qk_norm_rms": ({"qk_norm": "rms", "num_key_value_heads": 2}, 0.0),
    "qk_norm_l2": ({"qk_norm": "l2", "num_key_value_heads": 2}, 0.0),
    "qk_norm_rms_all_heads": ({"qk_norm": "rms_all_heads", "use_bias": True}, 1e-6),
    "sink_and_gate": ({"attention_sink": "learned", "attention_gate": "headwise", "use_bias": True}, 0.0),
    "fourth_matrix": ({"head_projection": True, "attention_output_scaling": 0.7}, 0.0),
    "bottleneck": ({"query_projection": "bottleneck", "use_bias": True}, 1e-6),
    "upcycled": ({"query_projection": "upcycled", "num_key_value_heads": 2}, 1e-6),
    "forgetting": ({"forget_gate": "learned", "num_key_value_heads": 2}, 0.0),
    "length_scaling": ({"attention_length_scaling": "log", "sliding_window": 5}, 0.0),
    "other_parts": ({"exclusive_attention": "learned", "value_residual": "learned"}, 0.0),
}
STARTING_PARTS = {"exclusive_attention": "learned", "value_residual": "learned", "differential_attention": "v2"}
# `None` is the default of the function, not a switch.
SWITCHES_FOR_ALL = {
    "default": None,
    "nothing": {},
    "queries": {"query_projection": "upcycled"},
    "keys_and_values": {"key_projection": "upcycled", "value_projection": "upcycled"},
    "all_projections": {f"{role}_projection": "upcycled" for role in ("query", "key", "value")},
    "bottleneck": {"query_projection": "upcycled", "projection_bottleneck_size": 3, "projection_activation": "silu"},
    "biases": {"use_bias": True},
    "biases_and_queries": {"use_bias": True, "query_projection": "upcycled"},
    "output_scaling": {"attention_output_scaling": 0.5},
    "output_scaling_uneven": {"attention_output_scaling": -0.7},
    "wide": {"intermediate_size": 53},
    "exclusive_attention": {"exclusive_attention": "learned"},
    "value_residual": {"value_residual": "learned"},
    "canon": {"canon": "ABCD"},
    "parallax": {"parallax": True},
}
# Those below are already in place in some of the sources.
SWITCHES_FOR_SOME = {
    "head_projection": {"head_projection": True},
    "gate_headwise": {"attention_gate": "headwise"},
    "gate_elementwise": {"attention_gate": "elementwise"},
    "gate_value": {"attention_gate": "value"},
    "scaling": {"attention_scaling": 0.3},
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
    "untied": {"tie_word_embeddings": False},
    "more_positions": {"max_position_embeddings": 40},
    "second_layer": {"per_layer_config": {1: {"query_projection": "upcycled", "attention_gate": "elementwise"}}},
}
SIMPLE_SOURCES = ("gpt2", "linear", "biased", "grouped_queries", "rope", "sigmoid", "qk_norm_rms", "post_norm")
# (source, switches) beyond the two products
OTHER_UPCYCLING = {
    "sink_zero_to_learned": ({"attention_sink": "zero"}, {"attention_sink": "learned"}),
    "sink_zero_to_learned_in_one": ({"attention_sink": "zero"}, {"per_layer_config": {0: {"attention_sink": "learned"}}}),
    "identity_to_residual": ({"query_projection": "identity"}, {"query_projection": "residual"}),
    "head_projection_folded": ({"head_projection": True}, {"head_projection": False}),
    "head_projection_folded_into_gated": (
        {"head_projection": True, "attention_gate": "headwise", "attention_output_scaling": 0.7, "num_key_value_heads": 2},
        {"head_projection": False},
    ),
    "identity_to_nonlinear": ({"query_projection": "identity"}, {"query_projection": "nonlinear"}),
    "identity_to_nonlinear_biased": ({"query_projection": "identity", "use_bias": True}, {"query_projection": "nonlinear"}),
    "identity_to_residual_biased": ({"query_projection": "identity", "use_bias": True}, {"query_projection": "residual"}),
    "keys_identity_to_nonlinear": ({"key_projection": "identity"}, {"key_projection": "nonlinear"}),
    # Scores of parallax have no factor; more key heads and a wider MLP need more channels of canon layers
    "parallax_scaling": ({"parallax": True}, {"attention_scaling": 0.25}),  # half of it: no rounding
    "parallax_residual": ({"parallax": True}, {"query_projection": "residual"}),
    "canon_key_heads": ({"canon": "ABCD", "num_key_value_heads": 2}, {"num_key_value_heads": 4}),
    "canon_paired": ({"canon": "B"}, {"differential_attention": "v2"}),
    "canon_wider": ({"canon": "ABCD", "mlp_type": "gated"}, {"intermediate_size": 60}),
    "nonlinear_gate": ({"query_projection": "nonlinear"}, {"attention_gate": "elementwise"}),
    "nonlinear_heads": ({"query_projection": "nonlinear"}, {"head_projection": True, "attention_gate": "headwise"}),
    "nonlinear_output_scaling": ({"query_projection": "nonlinear"}, {"attention_output_scaling": 0.5}),
    "nonlinear_biases": ({"query_projection": "nonlinear"}, {"use_bias": True}),
    "nonlinear_keys": ({"query_projection": "nonlinear"}, {"key_projection": "upcycled"}),
    "upcycled_again": ({"query_projection": "upcycled"}, {"value_projection": "upcycled", "attention_gate": "headwise"}),
    "upcycled_biases": ({"query_projection": "upcycled"}, {"use_bias": True}),
    "gate_behind_function": ({"attention_output_activation": "tanh"}, {"attention_gate": "elementwise"}),
    "gate_and_scale": ({"attention_output_scaling": 0.3}, {"attention_gate": "headwise", "attention_output_scaling": 0.6}),
    "gate_biased_later": ({"attention_gate": "elementwise"}, {"use_bias": True}),
    "rope_scaling": ({"position_embedding": "rope"}, {"attention_scaling": 0.3}),
    "rope_more_positions": ({"position_embedding": "rope"}, {"max_position_embeddings": 64}),
    "second_layer_scaling": ({}, {"per_layer_config": {1: {"attention_scaling": 0.3}}}),
    "second_layer_output": ({}, {"per_layer_config": {1: {"attention_output_scaling": 0.3, "head_projection": True}}}),
    "same_values": ({}, {"attention_activation": "softmax", "query_projection": "linear", "hidden_size": 16}),
    "parts_stay": (
        {"exclusive_attention": "learned", "value_residual": "learned", "forget_gate": "fixed", "differential_attention": "v2"},
        {"value_projection": "upcycled", "attention_gate": "headwise", "use_bias": True},
    ),
    "values_of_copied_heads": (
        {"num_key_value_heads": 2, "differential_attention": "v1", "value_residual": "fixed"},
        {"num_key_value_heads": 4},
    ),
    "forgetting_of_copied_heads": (
        {"num_key_value_heads": 2, "forget_gate": "learned", "exclusive_attention": "fixed"},
        {"num_key_value_heads": 4},
    ),
    "more_keys_of_pairs": ({"differential_attention": "v2", "num_key_value_heads": 2}, {"num_key_value_heads": 4}),
    "parts_in_one_layer": ({}, {"per_layer_config": {1: {"exclusive_attention": "learned", "value_residual": "learned"}}}),
    "no_values_before_the_first_layer": ({}, {"per_layer_config": {0: {"value_residual": "fixed"}}}),
    "dropouts": ({}, {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.3}),
    "training_fields": ({}, {"initializer_range": 0.1, "use_cache": False, "eos_token_id": 3}),
}
UPCYCLING = {
    **{
        f"{source}-{name}": (LINEAR_SOURCES[source], SWITCHES_FOR_ALL[name])
        for source in LINEAR_SOURCES
        for name in SWITCHES_FOR_ALL
    },
    **{
        f"{source}-{name}": (LINEAR_SOURCES[source], SWITCHES_FOR_SOME[name])
        for source in SIMPLE_SOURCES
        for name in SWITCHES_FOR_SOME
        if (source, name) != ("gpt2", "second_layer")  # its layers differ already; see `test_layers_that_differ_already`
    },
    **OTHER_UPCYCLING,
}
UPCYCLED = {"query_projection": "upcycled"}
# There may be weights that keep the function, and there may be no way to find them.
SAME_OR_REFUSED = {
    "scale_before_function": ({"attention_output_activation": "tanh"}, {"attention_output_scaling": 0.5}),
    "keys_without_weights": ({"key_projection": "identity"}, {"attention_scaling": 0.3}),
    "queries_without_weights": ({"query_projection": "identity"}, {"attention_scaling": 0.3}),
    "nothing_with_weights": ({"query_projection": "identity", "key_projection": "identity"}, {"attention_scaling": 0.3}),
    "scaling_and_upcycled_keys": ({"key_projection": "bottleneck"}, {"attention_scaling": 0.3, "query_projection": "upcycled"}),
    "scaling_and_residual_keys": ({"key_projection": "residual"}, {"attention_scaling": 0.3}),
    "identity_to_linear": ({"query_projection": "identity"}, {"query_projection": "linear"}),
    "residual_to_linear": ({"query_projection": "residual"}, {"query_projection": "linear"}),
    "residual_to_upcycled": ({"query_projection": "residual", "use_bias": True}, {"query_projection": "upcycled"}),
    "values_residual_to_upcycled": ({"value_projection": "residual"}, {"value_projection": "upcycled"}),
    "nonlinear_to_upcycled": ({"query_projection": "nonlinear"}, {"query_projection": "upcycled"}),
    "bottleneck_to_upcycled": ({"query_projection": "bottleneck", "use_bias": True}, {"query_projection": "upcycled"}),
    "bottleneck_to_nonlinear": ({"query_projection": "bottleneck"}, {"query_projection": "nonlinear"}),
    "identity_to_bottleneck": ({"query_projection": "identity"}, {"query_projection": "bottleneck"}),
    "linear_to_residual": ({}, {"query_projection": "residual"}),
    "wider_bottleneck": ({"query_projection": "nonlinear", "use_bias": True}, {"projection_bottleneck_size": 11}),
    "unused_bottleneck": ({}, {"projection_bottleneck_size": 3, "projection_activation": "relu"}),
    "more_key_value_heads": ({"num_key_value_heads": 2}, {"num_key_value_heads": 4}),
    "more_nonlinear_heads": (
        {"num_key_value_heads": 2, "value_projection": "bottleneck", "use_bias": True},
        {"num_key_value_heads": 4},
    ),
    "gate_of_another_kind": ({"attention_gate": "headwise", "use_bias": True}, {"attention_gate": "elementwise"}),
    "angles_of_no_use": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "normalization_named": ({"attention_activation": "sigmoid"}, {"attention_normalization": "none"}),
    "fourth_matrix_dropped": ({"head_projection": True, "attention_output_scaling": 0.3}, {"head_projection": False}),
    "fourth_matrix_before_gate": ({"head_projection": True, "attention_gate": "headwise"}, {"head_projection": False}),
    "fourth_matrix_before_function": (
        {"head_projection": True, "attention_output_activation": "tanh"},
        {"head_projection": False},
    ),
    "fourth_matrix_and_gate": ({"head_projection": True}, {"head_projection": False, "attention_gate": "elementwise"}),
    "fourth_matrix_and_scale": ({"head_projection": True}, {"head_projection": False, "attention_output_scaling": 0.4}),
    "attention_without_output": ({"attention_output_scaling": 0.0}, {"attention_output_scaling": 0.5}),
    "scores_of_zero": ({"attention_scaling": 0.0}, {"attention_scaling": 0.5}),
}


@pytest.fixture(scope="session")
def make_source(make_model):
    """A function from a source of the tables here to a model with random weights, linear projections by default."""

    def make(source, dtype=torch.float32):
        if source == "gpt2":
            return to_nlq(make_gpt2(dtype=dtype, n_positions=32, scale_attn_by_inverse_layer_idx=True))
        return make_model(dtype, **{"query_projection": "linear", **source})

    return make


def assert_only_these_changed(config, before, switches):
    """The configuration has the given values in all layers, and its other fields as before."""
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


def check_upcycled(source, switches, tolerance):
    """Checks that the function stays and no memory is shared; returns the new model."""
    with Frozen(source):
        model = upcycle(source) if switches is None else upcycle(source, switches)
    assert type(model) is type(source)
    assert not model.training
    assert_no_shared_memory(model, source)
    input_ids = random_tokens(2, min(24, source.config.max_position_embeddings), source.config.vocab_size)
    expected = output_of(source, input_ids)
    assert (output_of(model, input_ids) - expected).abs().max() <= tolerance * expected.abs().max()
    return model


class TestUpcycling:
    @parametrize_grid(
        {
            "source, switches": UPCYCLING,
            "dtype, tolerance": {"float64": (torch.float64, 1e-10), "float32": (torch.float32, 1e-6)},
        },
        strength=1,
    )
    def test_same_function(self, make_source, source, switches, dtype, tolerance):
        source = make_source(source, dtype)
        model = check_upcycled(source, switches, tolerance)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        if switches is None:
            switches = UPCYCLED
        assert_only_these_changed(model.config, source.config, switches)
        if not model.config.tie_word_embeddings:
            assert model.lm_head.weight is not model.model.embed_tokens.weight
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name
            assert parameter.requires_grad, name

    @parametrize_cases(
        "source, switches",
        {
            name: UPCYCLING[name]
            for name in (
                "gpt2-default",
                "grouped_queries-all_projections",
                "qk_norm_rms-together",
                "layers_differ-queries",
                "biased-second_layer",
                "sigmoid-untied",
                "linear-more_positions",
                "linear-biases",
                "sink_zero_to_learned_in_one",
                "identity_to_nonlinear",
            )
        },
    )
    def test_saved_and_loaded(self, make_source, source, switches, tmp_path):
        model = upcycle(make_source(source), switches)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_same_state(loaded.state_dict(), model.state_dict())
        assert layer_switches(loaded.config) == layer_switches(model.config)
        switches = UPCYCLED if switches is None else switches
        for name in switches.keys() - {*PER_LAYER_SWITCHES, "per_layer_config"}:
            assert getattr(loaded.config, name) == switches[name]
        input_ids = random_tokens(2, 9)
        assert torch.equal(output_of(loaded, input_ids), output_of(model, input_ids))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_low_precision(self, make_source, dtype):
        """The logits stay the same to the bit where nothing is scaled."""
        source = make_source("gpt2", dtype)
        model = upcycle(source, {"query_projection": "upcycled", "head_projection": True})
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        input_ids = random_tokens(2, 9)
        assert torch.equal(output_of(model, input_ids), output_of(source, input_ids))

    def test_copied_weights(self, make_source):
        source = make_source("gpt2")
        state = upcycle(source, {"query_projection": "upcycled", "intermediate_size": 60}).state_dict()
        for name, tensor in source.state_dict().items():
            copied = state[name]
            if ".mlp." in name:
                copied = copied[tuple(slice(size) for size in tensor.shape)]
            assert torch.equal(copied, tensor), name

    def test_seed(self, make_source):
        source = make_source({"use_bias": True})
        switches = {**SWITCHES_FOR_SOME["together"], "max_position_embeddings": 40}
        states = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            states.append(upcycle(source, switches).state_dict())
        assert_same_state(states[1], states[0])
        differing = {name for name, tensor in states[2].items() if not torch.equal(tensor, states[0][name])}
        assert {name for name in states[0] if re.search(r"[qv]_proj\.fc[12]\.weight", name)} <= differing
        for name in differing:
            assert name not in source.state_dict() or re.search(r"mlp\.fc|embed_positions", name), name

    def test_new_weights(self, make_source):
        """New weights start as in a new model: matrices with deviation `initializer_range`, the last gain 0."""
        switches = {"query_projection": "upcycled", "projection_bottleneck_size": 200}
        model = upcycle(make_source({"hidden_size": 64, "initializer_range": 0.05}), switches)
        for layer in model.model.layers:
            bottleneck = layer.self_attn.q_bottleneck
            for matrix in (bottleneck.fc1.weight, bottleneck.fc2.weight):
                assert matrix.std().item() == pytest.approx(0.05, rel=0.1)
            assert (bottleneck.input_norm.weight == 1).all()
            assert (bottleneck.output_norm.weight == 0).all()

    @parametrize_cases("gpt2_class, nlq_class", HEADS)
    def test_heads(self, gpt2_class, nlq_class):
        labels = {"num_labels": 3} if "Classification" in gpt2_class.__name__ else {}
        source = to_nlq(make_gpt2(gpt2_class, dtype=torch.float64, **labels))
        switches = {"query_projection": "upcycled", "attention_gate": "headwise"}
        assert_only_these_changed(check_upcycled(source, switches, 1e-10).config, source.config, switches)

    def test_generation_config(self, make_source):
        source = make_source("gpt2")
        source.generation_config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.6)
        assert upcycle(source).generation_config.temperature == 0.6

    def test_more_positions_can_be_used(self, make_source):
        source = make_source({})
        model = upcycle(source, {"max_position_embeddings": 48})
        input_ids = random_tokens(1, 48)
        logits = output_of(model, input_ids)
        assert logits.isfinite().all()
        torch.testing.assert_close(logits[:, :32], output_of(source, input_ids[:, :32]), rtol=1e-6, atol=1e-6)

    def test_untied_weights_part(self, make_source):
        model = upcycle(make_source({}), {"tie_word_embeddings": False})
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()

    def test_equal_weights_can_be_tied(self, make_source):
        source = make_source({"tie_word_embeddings": False})
        with torch.no_grad():
            source.lm_head.weight.copy_(source.model.embed_tokens.weight)
        try:
            model = upcycle(source, {"tie_word_embeddings": True})
        except ValueError:
            return
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert_same_function(model, source)

    @pytest.mark.parametrize("source", ["gpt2", "layers_differ"])
    def test_layers_that_differ_already(self, make_source, source):
        """New settings of a layer join those that it has, and the function stays, or upcycling refuses."""
        source = make_source(LINEAR_SOURCES[source], torch.float64)
        switches = {"query_projection": "upcycled", "attention_output_scaling": 0.7}
        with Frozen(source):
            try:
                model = upcycle(source, {"per_layer_config": {1: switches}})
            except ValueError as error:
                assert "layer 0: attention_activation" in str(error)
                return
        assert switches.items() <= layer_switches(model.config)[1].items()
        assert layer_switches(model.config)[0]["query_projection"] == "linear"
        assert_same_function(model, source, 1e-10)

    @parametrize_cases("switches", {**{name: {name: value} for name, value in STARTING_PARTS.items()}, "all": STARTING_PARTS})
    @parametrize_cases("source, tolerance", PAIRED_SOURCES)
    def test_parts_start_without_effect(self, make_source, source, tolerance, switches):
        """Without a difference, however small, where no number is rounded."""
        source = make_source(source)
        switches = {name: value for name, value in switches.items() if getattr(source.config, name) is None}
        source.set_attn_implementation("eager")
        model = upcycle(source, switches)
        model.set_attn_implementation("eager")
        input_ids = random_tokens(2, 24)
        logits = output_of(model, input_ids)
        difference = (logits - output_of(source, input_ids)).abs().max().item()
        assert difference <= (tolerance if "differential_attention" in switches else 0.0) * logits.abs().max().item()
        found = gradients(model, input_ids)
        for name in found.keys() - source.state_dict().keys():
            assert found[name].abs().max() > 0, name

    def test_pairs_of_identity_queries(self, make_source):
        """Twice as many heads of queries are wider than the input, which a matrix holds then."""
        switches = {"differential_attention": "v2", "query_projection": "upcycled"}
        for kind in ("identity", "residual", "nonlinear"):
            source = make_source({"query_projection": kind, "use_bias": True}, torch.float64)
            with pytest.raises(StrictDataclassError, match=f"query_projection='{kind}' adds the input itself"):
                upcycle(source, {"differential_attention": "v2"})
            assert_same_function(upcycle(source, switches), source, 1e-10)

    @parametrize_cases("source, switches", SAME_OR_REFUSED)
    def test_same_or_refused(self, make_source, source, switches):
        source = make_source(source, torch.float64)
        with Frozen(source):
            try:
                model = upcycle(source, switches)
            except ValueError as error:
                assert any(name in str(error) for name in switches)
                return
        assert_only_these_changed(model.config, source.config, switches)
        assert_same_function(model, source, 1e-10)

    def test_switches_are_left_alone(self, make_source):
        switches = {"per_layer_config": {1: {"query_projection": "upcycled"}}}
        upcycle(make_source({}), switches)
        assert switches == {"per_layer_config": {1: {"query_projection": "upcycled"}}}

    @pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluating"])
    def test_mode(self, make_source, mode):
        """The mode of the source, training or not, stays as it is."""
        source = make_source({"residual_dropout": 0.3}).train(mode)
        with Frozen(source):
            upcycle(source)


def gradients(model, input_ids):
    model.zero_grad()
    model(input_ids, labels=input_ids).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class TestLearningAfterUpcycling:
    @parametrize_cases("source", LINEAR_SOURCES)
    def test_projections(self, make_source, source):
        """At first the last gain learns, and after one step of it all of `f`."""
        model = upcycle(make_source(source), SWITCHES_FOR_ALL["all_projections"])
        input_ids = random_tokens(2, 12)
        found = gradients(model, input_ids)
        projections = [f"model.layers.{index}.self_attn.{kind}_bottleneck." for index in range(2) for kind in "qkv"]
        gains = [name for name in found if name.endswith("_bottleneck.output_norm.weight")]
        assert gains == [f"{name}output_norm.weight" for name in projections]
        for name in gains:
            assert found[name].abs().max() > 0, name
        torch.optim.SGD([parameter for name, parameter in model.named_parameters() if name in gains], lr=0.1).step()
        found = gradients(model, input_ids)
        for name in projections:
            assert found[f"{name}fc2.weight"].abs().max() > 0, name
            assert found[f"{name}fc1.weight"].abs().max() > 0, name

    @pytest.mark.parametrize("gate", ["headwise", "elementwise"])
    @parametrize_bias
    def test_gate_and_head_projection(self, make_source, gate, use_bias):
        switches = {"attention_gate": gate, "head_projection": True, "query_projection": "upcycled"}
        found = gradients(upcycle(make_source({"use_bias": use_bias}), switches), random_tokens(2, 12))
        names = ["gate_proj.weight", "head_proj.weight", "q_bottleneck.output_norm.weight", "o_proj.weight"]
        names += ["gate_proj.bias", "q_bottleneck.output_norm.bias"] if use_bias else []
        for index in range(2):
            for name in names:
                gradient = found[f"model.layers.{index}.self_attn.{name}"]
                assert gradient.abs().max() > 1e-6, name
                assert gradient.isfinite().all(), name

    def test_identity_queries(self, make_source):
        for kind, name in (("residual", "q_proj.weight"), ("nonlinear", "q_bottleneck.output_norm.weight")):
            model = upcycle(make_source({"query_projection": "identity"}), {"query_projection": kind})
            found = gradients(model, random_tokens(2, 12))
            for index in range(2):
                assert found[f"model.layers.{index}.self_attn.{name}"].abs().max() > 0

    def test_wider_mlp(self, make_source):
        """New units get a gradient, and not all the same one."""
        model = upcycle(make_source({"use_bias": True}), {"intermediate_size": 30})
        found = gradients(model, random_tokens(2, 12))
        for index in range(2):
            into, out = (
                found[f"model.layers.{index}.mlp.fc1.weight"][24:],
                found[f"model.layers.{index}.mlp.fc2.weight"][:, 24:],
            )
            largest = into.abs().amax(dim=1) + out.abs().amax(dim=0)
            assert (largest > 0).all()
            assert len(largest.unique()) == 6

    def test_sinks(self, make_source):
        found = gradients(upcycle(make_source({"attention_sink": "zero"}), {"attention_sink": "learned"}), random_tokens(2, 12))
        for index in range(2):
            assert found[f"model.layers.{index}.self_attn.sink_bias"].abs().max() > 0

    def test_biases(self, make_source):
        found = gradients(upcycle(make_source({}), {"use_bias": True}), random_tokens(2, 12))
        names = ["model.norm.bias"]
        for index in range(2):
            layer = f"model.layers.{index}."
            names += [f"{layer}{name}.bias" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.fc1", "mlp_norm")]
        for name in names:
            assert found[name].abs().max() > 0, name


# (source, switches): the field named and its value are those of the switches' first entry.
REFUSED = {
    "sink_learned": ({}, {"attention_sink": "learned"}),
    "sink_zero": ({}, {"attention_sink": "zero"}),
    "sink_dropped": ({"attention_sink": "learned"}, {"attention_sink": None}),
    "sink_unlearned": ({"attention_sink": "learned"}, {"attention_sink": "zero"}),
    "activation": ({}, {"attention_activation": "sigmoid"}),
    "activation_of_sigmoid": ({"attention_activation": "sigmoid"}, {"attention_activation": "softmax"}),
    "normalization": ({"attention_activation": "sigmoid"}, {"attention_normalization": "length"}),
    "queries_identity": ({}, {"query_projection": "identity"}),
    "queries_nonlinear": ({}, {"query_projection": "nonlinear"}),
    "queries_bottleneck": ({}, {"query_projection": "bottleneck"}),
    "keys_bottleneck": ({}, {"key_projection": "bottleneck"}),
    "values_identity": ({}, {"value_projection": "identity"}),
    "nonlinear_to_linear": ({"query_projection": "nonlinear"}, {"query_projection": "linear"}),
    "nonlinear_to_upcycled": ({"query_projection": "nonlinear"}, {"query_projection": "bottleneck"}),
    "upcycled_to_linear": ({"query_projection": "upcycled"}, {"query_projection": "linear"}),
    "projection_activation": ({"query_projection": "nonlinear"}, {"projection_activation": "relu"}),
    "narrower_bottleneck": ({"query_projection": "nonlinear"}, {"projection_bottleneck_size": 3}),
    "qk_norm_rms": ({}, {"qk_norm": "rms"}),
    "qk_norm_l2": ({}, {"qk_norm": "l2"}),
    "qk_norm_dropped": ({"qk_norm": "rms"}, {"qk_norm": None}),
    "norm_position": ({}, {"norm_position": "post"}),
    "output_activation": ({}, {"attention_output_activation": "gelu"}),
    "residual_activation": ({}, {"residual_activation": "relu"}),
    "sublayer_activation": ({}, {"sublayer_activation": "relu"}),
    "hidden_act": ({}, {"hidden_act": "relu"}),
    "epsilon": ({}, {"layer_norm_eps": 0.1}),
    "gate_dropped": ({"attention_gate": "headwise"}, {"attention_gate": None}),
    "head_projection_dropped": ({"head_projection": True, "attention_gate": "elementwise"}, {"head_projection": False}),
    "head_projection_before_value_gate": ({"head_projection": True, "attention_gate": "value"}, {"head_projection": False}),
    "biases_dropped": ({"use_bias": True}, {"use_bias": False}),
    "scaling_zero": ({}, {"attention_scaling": 0.0}),
    "output_scaling_zero": ({}, {"attention_output_scaling": 0.0}),
    "narrower_mlp": ({}, {"intermediate_size": 12}),
    "fewer_positions": ({}, {"max_position_embeddings": 16}),
    "no_positions": ({}, {"position_embedding": "none"}),
    "rotary_positions": ({}, {"position_embedding": "rope"}),
    "other_angles": (
        {"position_embedding": "rope"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ),
    "narrower": ({}, {"hidden_size": 8}),
    "wider": ({}, {"hidden_size": 32}),
    "fewer_key_value_heads": ({}, {"num_key_value_heads": 2}),
    "wider_heads": ({}, {"head_dim": 8}),
    "tied": ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}),
    "vocab_size": ({}, {"vocab_size": 20}),
    "smaller_vocab_size": ({}, {"vocab_size": 7}),
    "more_layers": ({}, {"num_hidden_layers": 3}),
    "fewer_layers": ({}, {"num_hidden_layers": 1}),
    "one_layer_activation": ({}, {"per_layer_config": {1: {"attention_activation": "sigmoid"}}}),
    "one_layer_sink": ({}, {"per_layer_config": {1: {"attention_sink": "learned"}}}),
    "one_layer_queries": ({}, {"per_layer_config": {0: {"query_projection": "nonlinear"}}}),
    "exclusive_fixed": ({}, {"exclusive_attention": "fixed"}),
    "exclusive_dropped": ({"exclusive_attention": "learned"}, {"exclusive_attention": None}),
    "exclusive_unlearned": ({"exclusive_attention": "learned"}, {"exclusive_attention": "fixed"}),
    "values_fixed": ({}, {"value_residual": "fixed"}),
    "values_dropped": ({"value_residual": "fixed"}, {"value_residual": None}),
    "values_learned": ({"value_residual": "fixed"}, {"value_residual": "learned"}),
    "forget_gate": ({}, {"forget_gate": "learned"}),
    "forget_gate_fixed": ({}, {"forget_gate": "fixed"}),
    "length_scaling": ({}, {"attention_length_scaling": "log"}),
    "difference_v1": ({}, {"differential_attention": "v1"}),
    "difference_of_another_version": ({"differential_attention": "v1"}, {"differential_attention": "v2"}),
    "difference_dropped": ({"differential_attention": "v2"}, {"differential_attention": None}),
    "difference_before_function": ({"attention_output_activation": "tanh"}, {"differential_attention": "v2"}),
    "one_layer_difference": ({}, {"per_layer_config": {1: {"differential_attention": "v1"}}}),
    "good_and_bad": ({}, {"qk_norm": "rms", "query_projection": "upcycled", "attention_gate": "headwise"}),
}


# Values and fields that no model can have
NOT_ALLOWED = {
    "unknown_kind": {"query_projection": "cubic"},
    "not_a_number": {"attention_scaling": math.nan},
    "wrong_type": {"intermediate_size": "wide"},
    "unknown_field": {"attention_temperature": 0.5},
    "misspelt_field": {"query_projektion": "upcycled"},
    "fewer_heads_than_keys": {"num_attention_heads": 2},
    "unknown_choice": {"norm_position": "sideways"},
    "negative": {"intermediate_size": -1},
    "another_kind_of_model": {"model_type": "gpt2"},
}


class TestUpcyclingRefused:
    @parametrize_cases("source, switches", REFUSED)
    def test_refused(self, make_source, source, switches):
        source = make_source(source)
        with Frozen(source), pytest.raises(ValueError):
            upcycle(source, switches)

    @parametrize_cases("source, switches", REFUSED)
    def test_reason(self, make_source, source, switches):
        with pytest.raises(ValueError) as error:
            upcycle(make_source(source), switches)
        name, value = next(iter(switches.items()))
        if name == "per_layer_config":
            name, value = next(iter(next(iter(value.values())).items()))
        message = str(error.value)
        assert name in message
        assert str(value) in message
        assert len(message) > len(f"{name}={value!r}") + 15, "no reason"

    @pytest.mark.parametrize("switches", [{"max_position_embeddings": 40}, {"differential_attention": "v2"}], ids=str)
    def test_rates_that_would_change(self, make_source, switches):
        with pytest.raises(ValueError, match=r"forget_gate='fixed' cannot stay: the rates depend on max_position_embeddings"):
            upcycle(make_source({"forget_gate": "fixed"}), switches)

    @parametrize_cases("switches", NOT_ALLOWED)
    def test_not_allowed(self, make_source, switches):
        source = make_source({})
        with Frozen(source), pytest.raises((ValueError, StrictDataclassError), match=next(iter(switches))):
            upcycle(source, switches)

    @pytest.mark.parametrize(
        "overrides",
        [{7: {"head_projection": True}}, {1: {"hidden_act": "gelu"}}, {1: 3}, [1]],
        ids=["layer", "field", "value", "list"],
    )
    def test_per_layer_config(self, make_source, overrides):
        source = make_source({})
        with Frozen(source), pytest.raises((ValueError, TypeError, StrictDataclassError)):
            upcycle(source, {"per_layer_config": overrides})

    def test_other_labels(self):
        """A head of another size would be a new one."""
        source = to_nlq(make_gpt2(GPT2ForSequenceClassification, num_labels=3))
        with Frozen(source), pytest.raises(ValueError, match="id2label"):
            upcycle(source, {"id2label": {index: str(index) for index in range(5)}})

    def test_another_precision(self, make_source):
        """Not what a switch is for; a configuration that speaks of another precision than the weights have is wrong."""
        try:
            model = upcycle(make_source({}), {"dtype": "bfloat16"})
        except ValueError:
            return
        assert model.config.dtype == model.dtype

    def test_another_model(self):
        with pytest.raises((TypeError, ValueError), match=r"(?i)gpt-?2"):
            upcycle(make_gpt2())


# Everything a model may have, and everything one may ask for
VALUES = {
    "query_projection": ["linear", "identity", "residual", "nonlinear", "bottleneck", "upcycled"],
    "key_projection": ["linear", "bottleneck", "upcycled"],
    "value_projection": ["linear", "identity", "nonlinear", "upcycled"],
    "projection_bottleneck_size": [None, 5, 11],
    "projection_activation": ["gelu", "silu"],
    "attention_activation": ["softmax", "sigmoid", "relu_squared", "identity"],
    "attention_scaling": [None, 0.7, -0.5, 0.0],
    "attention_output_scaling": [None, 0.3, 0.0],
    "attention_sink": [None, "zero", "learned"],
    "qk_norm": [None, "rms", "l2"],
    "attention_gate": [None, "headwise", "elementwise"],
    "attention_output_activation": [None, "tanh"],
    "head_projection": [False, True],
    "exclusive_attention": [None, "fixed", "learned"],
    "value_residual": [None, "fixed", "learned"],
    "forget_gate": [None, "fixed", "learned"],
    "attention_length_scaling": [None, "log"],
    "differential_attention": [None, "v1", "v2"],
    "use_bias": [False, True],
    "num_key_value_heads": [4, 2, 1],
    "norm_position": ["pre", "post"],
    "position_embedding": ["learned", "rope", "none"],
    "intermediate_size": [24, 25, 40],
    "max_position_embeddings": [32, 33],
    "tie_word_embeddings": [True, False],
    "layer_norm_eps": [1e-5, 1e-3],
    "sublayer_activation": [None, "silu"],
    "residual_activation": [None, "mish"],
}
layer_values = {name: VALUES[name] for name in VALUES if name in PER_LAYER_SWITCHES}


def chosen(values, max_size):
    names = st.lists(st.sampled_from(sorted(values)), max_size=max_size, unique=True)
    return names.flatmap(lambda names: st.fixed_dictionaries({name: st.sampled_from(values[name]) for name in names}))


def chosen_with_layers(max_size):
    layers = st.dictionaries(st.integers(0, 1), chosen(layer_values, 2), max_size=1)
    return st.tuples(chosen(VALUES, max_size), st.just({}) | layers).map(
        lambda pair: {**pair[0], **({"per_layer_config": pair[1]} if pair[1] else {})}
    )


class TestUpcyclingAnything:
    """From any model to any switches: refused, or the same function and the switches."""

    @given(source=chosen_with_layers(4), switches=chosen_with_layers(3))
    @examples(150)
    def test_anything(self, make_source, source, switches):
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

    @given(source=chosen_with_layers(4))
    @examples(100)
    def test_to_gpt2(self, make_source, source):
        try:
            nlq = make_source(source, torch.float64)
        except (ValueError, StrictDataclassError):
            return
        try:
            gpt2 = from_nlq(nlq, "gpt2")
        except ValueError:
            return
        input_ids = random_tokens(2, 24)
        torch.testing.assert_close(output_of(gpt2, input_ids), output_of(nlq, input_ids), rtol=1e-9, atol=1e-9)


class TestTokenIds:
    def test_reach_generation(self, make_model):
        model = make_model(query_projection="linear", eos_token_id=1)
        assert upcycle(model, {"eos_token_id": 5}).generation_config.eos_token_id == 5

    def test_padding_of_a_classifier(self):
        model = to_nlq(make_gpt2(GPT2ForSequenceClassification, pad_token_id=3))
        with pytest.raises(ValueError, match="pad_token_id=3 cannot become 5: a sequence classifier"):
            upcycle(model, {"pad_token_id": 5})
