"""Weights that change their form: GPT-2 in and out, the paper's checkpoints, switches turned on in a trained model, and
`nlq convert`, which writes the result to a folder or leaves everything as it was.
"""

import argparse
import copy
import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import paper_reference
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GenerationConfig,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import modeling_nlq
from modeling_nlq import (
    NLQConfig,
    NLQForCausalLM,
    NLQForQuestionAnswering,
    NLQForSequenceClassification,
    NLQForTokenClassification,
    NLQModel,
)
from modeling_nlq.configuration_nlq import PER_LAYER_SWITCHES
from modeling_nlq.training.cli import main
from modeling_nlq.training.conversion import convert, from_gpt2, to_gpt2
from modeling_nlq.training.paper import from_paper, read_checkpoint
from modeling_nlq.training.upcycling import upcycle


def examples(count):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )


def parametrize_cases(names, cases):
    """Over the values of a dictionary, its keys being the ids."""
    values = [pytest.param(*(case if "," in names else (case,)), id=name) for name, case in cases.items()]
    return pytest.mark.parametrize(names, values)


parametrize_bias = pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])
# Of float64 the formulas, of float32 the rounding that a user sees
parametrize_dtype = pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)


def random_tokens(batch_size, length, vocab_size=13):
    return torch.randint(vocab_size, (batch_size, length))


@torch.no_grad()
def output_of(model, input_ids, **inputs):
    """The logits, or what takes their place in models with another head."""
    output = model(input_ids, **inputs)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits])
    return output.last_hidden_state if "last_hidden_state" in output else output.logits


def assert_same_function(actual, expected, tolerance=1e-5, length=None, **inputs):
    """Both models give the same logits at all positions they know, as they are: no call of `eval()` before."""
    length = length or min(expected.config.max_position_embeddings, 24)
    input_ids = random_tokens(2, length, expected.config.vocab_size)
    theirs = output_of(expected, input_ids, **inputs)
    assert theirs.isfinite().all()
    assert theirs.std() > 0.05, "a function as flat as this would hide differences"
    torch.testing.assert_close(output_of(actual, input_ids, **inputs), theirs, rtol=tolerance, atol=tolerance)


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def assert_no_shared_memory(one, other):
    places = {tensor.untyped_storage().data_ptr() for tensor in one.state_dict().values()}
    assert places.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in other.state_dict().values())


class Frozen:
    """Checks at the end of a `with` block that a model, its configuration and its mode are what they were."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.state = copy.deepcopy(self.model.state_dict())
        self.config, self.training = self.model.config.to_dict(), self.model.training

    def __exit__(self, *error):
        assert_same_state(self.model.state_dict(), self.state)
        assert self.model.config.to_dict() == self.config
        assert self.model.training == self.training


def randomize(model, seed=0):
    """Random weights, gains and biases: the initial ones would hide whatever is multiplied by 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / min(parameter.shape) ** 0.5)
    return model


GPT2_SIZES = {
    "vocab_size": 29,
    "n_positions": 24,
    "n_embd": 12,
    "n_head": 3,
    "n_layer": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_gpt2(cls=GPT2LMHeadModel, dtype=torch.float32, seed=0, **options):
    return randomize(cls(GPT2Config(**{**GPT2_SIZES, **options})).to(dtype), seed).eval()


# Every option of GPT-2's configuration that the conversion has to read
GPT2_OPTIONS = {
    "defaults": {},
    "one_head": {"n_head": 1},
    "one_layer": {"n_layer": 1},
    "odd_width": {"n_embd": 15},
    "odd_width_one_head": {"n_embd": 7, "n_head": 1},
    "n_inner_odd": {"n_inner": 13},
    "n_inner_narrow": {"n_inner": 3},
    "n_inner_of_the_default_size": {"n_inner": 48},
    "gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "unscaled": {"scale_attn_weights": False},
    "scaled_by_layer": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "scaled_by_layer_only": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_layer": 3},
    "untied": {"tie_word_embeddings": False},
    "epsilon": {"layer_norm_epsilon": 0.1},
    "few_positions": {"n_positions": 5},
    "dropouts": {"embd_pdrop": 0.15, "resid_pdrop": 0.25, "attn_pdrop": 0.35},
    "no_dropouts": {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "no_token_ids": {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    "several_ends": {"eos_token_id": [3, 4]},
    "initializer_range": {"initializer_range": 0.05},
    "no_cache": {"use_cache": False},
}
GPT2_FIELDS = (
    *(name for name in GPT2_SIZES),
    "activation_function",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "layer_norm_epsilon",
    "initializer_range",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "use_cache",
    "tie_word_embeddings",
    "add_cross_attention",
    "id2label",
    "label2id",
    "problem_type",
)


def assert_same_gpt2_config(actual, expected):
    assert type(actual) is GPT2Config
    assert {name: getattr(actual, name) for name in GPT2_FIELDS} == {name: getattr(expected, name) for name in GPT2_FIELDS}
    assert (actual.n_inner or 4 * actual.n_embd) == (expected.n_inner or 4 * expected.n_embd)
    assert getattr(actual, "classifier_dropout", None) == getattr(expected, "classifier_dropout", None)


HEADS = {
    "model": (GPT2Model, NLQModel),
    "causal_lm": (GPT2LMHeadModel, NLQForCausalLM),
    "sequence_classification": (GPT2ForSequenceClassification, NLQForSequenceClassification),
    "token_classification": (GPT2ForTokenClassification, NLQForTokenClassification),
    "question_answering": (GPT2ForQuestionAnswering, NLQForQuestionAnswering),
}


class TestFromGPT2:
    @parametrize_dtype
    @parametrize_cases("options", GPT2_OPTIONS)
    def test_logits(self, options, dtype, tolerance):
        gpt2 = make_gpt2(dtype=dtype, **options)
        with Frozen(gpt2):
            nlq = from_gpt2(gpt2)
        assert type(nlq) is NLQForCausalLM
        assert not nlq.training
        assert_same_function(nlq, gpt2, tolerance)
        assert_no_shared_memory(nlq, gpt2)

    @parametrize_cases("options", GPT2_OPTIONS)
    def test_there_and_back(self, options):
        gpt2 = make_gpt2(**options)
        nlq = from_gpt2(gpt2)
        with Frozen(nlq):
            back = to_gpt2(nlq)
        assert type(back) is GPT2LMHeadModel
        assert not back.training
        assert_same_state(back.state_dict(), gpt2.state_dict())
        assert_no_shared_memory(back, nlq)
        if options != GPT2_OPTIONS["one_layer"]:  # divided by its number, the first layer is as it was
            assert_same_gpt2_config(back.config, gpt2.config)
        assert_same_function(back, gpt2, 0.0)

    @given(st.data())
    @examples(25)
    def test_any_options(self, data):
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
        nlq = from_gpt2(gpt2)
        back = to_gpt2(nlq)
        input_ids = random_tokens(2, options["n_positions"], options["vocab_size"])
        torch.testing.assert_close(output_of(nlq, input_ids), output_of(gpt2, input_ids), rtol=1e-10, atol=1e-10)
        assert_same_state(back.state_dict(), gpt2.state_dict())
        assert_same_gpt2_config(back.config, gpt2.config)

    def test_options_matter(self):
        """No test above would notice an option that was passed over if it left the logits as they are."""
        input_ids = random_tokens(1, 5, 29)
        names = ("defaults", "gelu", "relu", "silu", "unscaled", "scaled_by_layer", "scaled_by_layer_only", "epsilon")
        logits = [output_of(make_gpt2(**{**GPT2_OPTIONS[name], "n_layer": 3}), input_ids) for name in names]
        for index, one in enumerate(logits):
            assert all((one - other).abs().max() > 1e-4 for other in logits[:index])

    def test_configuration(self):
        options = {"embd_pdrop": 0.15, "resid_pdrop": 0.25, "attn_pdrop": 0.35, "initializer_range": 0.05, "use_cache": False}
        config = from_gpt2(make_gpt2(**options, n_inner=13, layer_norm_epsilon=1e-4)).config
        assert isinstance(config, NLQConfig)
        assert (config.embedding_dropout, config.residual_dropout, config.attention_dropout) == (0.15, 0.25, 0.35)
        assert (config.initializer_range, config.use_cache, config.layer_norm_eps) == (0.05, False, 1e-4)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
        assert (config.vocab_size, config.max_position_embeddings, config.intermediate_size) == (29, 24, 13)
        assert (config.query_projection, config.attention_activation, config.hidden_act) == ("linear", "softmax", "gelu_new")
        assert config.use_bias

    def test_dropout_while_training(self):
        """The same masks at the same places."""
        gpt2 = make_gpt2(embd_pdrop=0.15, resid_pdrop=0.25, attn_pdrop=0.35, attn_implementation="eager")
        nlq = from_gpt2(gpt2).train()
        nlq.set_attn_implementation("eager")
        input_ids, outputs = random_tokens(2, 9, 29), []
        for model in (gpt2.train(), nlq):
            torch.manual_seed(3)
            outputs.append(output_of(model, input_ids))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)

    @parametrize_cases("gpt2_class, nlq_class", HEADS)
    def test_heads(self, gpt2_class, nlq_class):
        labels = {"num_labels": 3} if "Classification" in gpt2_class.__name__ else {}
        gpt2 = make_gpt2(gpt2_class, **labels)
        nlq = from_gpt2(gpt2)
        assert type(nlq) is nlq_class
        assert_same_function(nlq, gpt2)
        back = to_gpt2(nlq)
        assert type(back) is gpt2_class
        assert_same_state(back.state_dict(), gpt2.state_dict())
        assert_same_gpt2_config(back.config, gpt2.config)

    def test_labels(self):
        names = {"id2label": {0: "bad", 1: "good", 2: "neither"}, "label2id": {"bad": 0, "good": 1, "neither": 2}}
        gpt2 = make_gpt2(
            GPT2ForTokenClassification, **names, classifier_dropout=0.45, problem_type="multi_label_classification"
        )
        nlq = from_gpt2(gpt2)
        assert nlq.config.id2label == names["id2label"]
        assert nlq.config.label2id == names["label2id"]
        assert nlq.config.problem_type == "multi_label_classification"
        assert nlq.dropout.p == 0.45
        assert_same_gpt2_config(to_gpt2(nlq).config, gpt2.config)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_dtype(self, dtype):
        gpt2 = make_gpt2(dtype=dtype)
        nlq = from_gpt2(gpt2)
        assert {parameter.dtype for parameter in nlq.parameters()} == {dtype}
        assert torch.equal(nlq.model.embed_tokens.weight, gpt2.transformer.wte.weight)
        back = to_gpt2(nlq)
        assert_same_state(back.state_dict(), gpt2.state_dict())
        assert nlq.config.dtype == back.config.dtype == dtype

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_tied(self, tied):
        gpt2 = make_gpt2(tie_word_embeddings=tied)
        nlq = from_gpt2(gpt2)
        assert (nlq.lm_head.weight is nlq.model.embed_tokens.weight) == tied
        back = to_gpt2(nlq)
        assert (back.lm_head.weight is back.transformer.wte.weight) == tied

    @parametrize_cases("options", {name: GPT2_OPTIONS[name] for name in ("defaults", "scaled_by_layer", "untied")})
    def test_generation(self, options):
        gpt2 = make_gpt2(**{**options, "eos_token_id": None})
        with torch.no_grad():
            gpt2.transformer.wpe.weight.mul_(9.0)  # else the model repeats itself, which would say little
        nlq = from_gpt2(gpt2)
        input_ids = random_tokens(3, 5, 29)
        attention_mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
        choices = {"max_new_tokens": 12, "do_sample": False}
        for mask in (torch.ones_like(input_ids), attention_mask):
            expected = gpt2.generate(input_ids, attention_mask=mask, **choices)
            assert len(expected[:, 5:].unique()) > 3
            assert torch.equal(nlq.generate(input_ids, attention_mask=mask, **choices), expected)
            assert torch.equal(to_gpt2(nlq).generate(input_ids, attention_mask=mask, **choices), expected)

    def test_generation_config(self):
        gpt2 = make_gpt2()
        gpt2.generation_config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.6, eos_token_id=7)
        nlq = from_gpt2(gpt2)
        for converted in (nlq, to_gpt2(nlq)):
            chosen = converted.generation_config
            assert (chosen.max_new_tokens, chosen.do_sample, chosen.temperature, chosen.eos_token_id) == (3, True, 0.6, 7)

    def test_cross_attention(self):
        gpt2 = make_gpt2(add_cross_attention=True)
        with pytest.raises(ValueError, match=r"(?i)cross.?attention"):
            from_gpt2(gpt2)
        nlq = from_gpt2(gpt2, allow_lossy=True)
        assert type(nlq) is NLQForCausalLM
        assert_same_function(nlq, gpt2)  # nothing given to attend to

    def test_double_heads(self):
        gpt2 = make_gpt2(GPT2DoubleHeadsModel)
        with pytest.raises(ValueError, match="multiple_choice_head"):
            from_gpt2(gpt2)
        nlq = from_gpt2(gpt2, allow_lossy=True)
        assert type(nlq) is NLQForCausalLM
        assert_same_function(nlq, gpt2)

    def test_another_model(self, make_model):
        with pytest.raises((TypeError, ValueError), match=r"(?i)nlq"):
            from_gpt2(make_model())
        with pytest.raises((TypeError, ValueError), match=r"(?i)gpt-?2"):
            to_gpt2(make_gpt2())


# What GPT-2 computes too, with other weights. `make_model` draws biases and gains.
EXACT = {
    "plain": {},
    "grouped_queries": {"num_key_value_heads": 2},
    "one_key_value_head": {"num_key_value_heads": 1},
    "scaling": {"attention_scaling": 0.7},
    "scaling_negative": {"attention_scaling": -0.4},
    "scaling_zero": {"attention_scaling": 0.0},
    "output_scaling": {"attention_output_scaling": 0.3},
    "scalings_and_groups": {"attention_scaling": 0.7, "attention_output_scaling": 3.0, "num_key_value_heads": 2},
    "head_dim_given": {"head_dim": 4},
    "queries_identity": {"query_projection": "identity"},
    "queries_residual": {"query_projection": "residual"},
    "queries_identity_scaled": {"query_projection": "identity", "attention_scaling": 0.7, "num_key_value_heads": 2},
    "queries_residual_scaled": {"query_projection": "residual", "attention_scaling": 0.7},
    "layers_differ": {"per_layer_config": {1: {"query_projection": "residual", "attention_scaling": 0.9}}},
    "layers_scaled": {"per_layer_config": {0: {"attention_output_scaling": 0.5}, 1: {"attention_scaling": 0.9}}},
    "untied": {"tie_word_embeddings": False},
    "epsilon": {"layer_norm_eps": 0.1},
    "relu": {"hidden_act": "relu"},
    "normalization_named": {"attention_normalization": "sum"},
}
# Linear too, or nothing at all, but not promised: the result is exact, or there is none.
EXACT_OR_REFUSED = {
    "keys_identity": {"key_projection": "identity"},
    "values_identity": {"value_projection": "identity"},
    "values_residual": {"value_projection": "residual"},
    "head_projection": {"head_projection": True},
    "head_projection_grouped": {"head_projection": True, "num_key_value_heads": 2, "attention_output_scaling": 0.4},
    "no_positions": {"position_embedding": "none"},
    "output_activation_linear": {"attention_output_activation": "linear"},
    "sublayer_activation": {"sublayer_activation": "relu"},
    "residual_activation": {"residual_activation": "mish"},
}
# (switches, the one that is in the way, its value)
INEXACT = {
    "sigmoid": ({"attention_activation": "sigmoid"}, "attention_activation", "sigmoid"),
    "relu": ({"attention_activation": "relu"}, "attention_activation", "relu"),
    "sigmoid_by_length": (
        {"attention_activation": "sigmoid", "attention_normalization": "length"},
        "attention_activation",
        "sigmoid",
    ),
    "queries_nonlinear": ({"query_projection": "nonlinear"}, "query_projection", "nonlinear"),
    "queries_mlp": ({"query_projection": "mlp"}, "query_projection", "mlp"),
    "queries_upcycled": ({"query_projection": "upcycled"}, "query_projection", "upcycled"),
    "keys_upcycled": ({"key_projection": "upcycled"}, "key_projection", "upcycled"),
    "values_mlp": ({"value_projection": "mlp", "num_key_value_heads": 2}, "value_projection", "mlp"),
    "sink_zero": ({"attention_sink": "zero"}, "attention_sink", "zero"),
    "sink_learned": ({"attention_sink": "learned"}, "attention_sink", "learned"),
    "gate_headwise": ({"attention_gate": "headwise"}, "attention_gate", "headwise"),
    "gate_elementwise": ({"attention_gate": "elementwise"}, "attention_gate", "elementwise"),
    "qk_norm_rms": ({"qk_norm": "rms"}, "qk_norm", "rms"),
    "qk_norm_l2": ({"qk_norm": "l2"}, "qk_norm", "l2"),
    "output_activation": ({"attention_output_activation": "gelu"}, "attention_output_activation", "gelu"),
    "one_layer": ({"per_layer_config": {1: {"attention_activation": "squared"}}}, "attention_activation", "squared"),
    "one_layer_sink": ({"per_layer_config": {0: {"attention_sink": "zero"}}}, "attention_sink", "zero"),
}
IMPOSSIBLE = {
    "rope": ({"position_embedding": "rope"}, "position_embedding", "rope"),
    "post_norm": ({"norm_position": "post"}, "norm_position", "post"),
    "narrow_heads": ({"head_dim": 2}, "head_dim", "2"),
    "wide_heads": ({"head_dim": 6}, "head_dim", "6"),
}


class TestToGPT2:
    @pytest.fixture(scope="class")
    def make(self, make_model):
        return lambda **switches: make_model(**{"query_projection": "linear", "hidden_act": "gelu_new", **switches})

    @parametrize_dtype
    @parametrize_bias
    @parametrize_cases("switches", EXACT)
    def test_exact(self, make, switches, use_bias, dtype, tolerance):
        nlq = make(dtype=dtype, use_bias=use_bias, **switches)
        with Frozen(nlq):
            gpt2 = to_gpt2(nlq)
        assert type(gpt2) is GPT2LMHeadModel
        assert {parameter.dtype for parameter in gpt2.parameters()} == {dtype}
        assert (gpt2.lm_head.weight is gpt2.transformer.wte.weight) == nlq.config.tie_word_embeddings
        assert_same_function(gpt2, nlq, tolerance)
        assert_same_function(from_gpt2(gpt2), nlq, tolerance)

    @parametrize_bias
    @parametrize_cases("switches", EXACT_OR_REFUSED)
    def test_exact_or_refused(self, make, switches, use_bias):
        nlq = make(dtype=torch.float64, use_bias=use_bias, **switches)
        try:
            gpt2 = to_gpt2(nlq)
        except ValueError as error:
            assert any(name in str(error) for name in switches)
        else:
            assert_same_function(gpt2, nlq, 1e-10)

    @parametrize_cases("switches, name, value", INEXACT)
    def test_inexact(self, make, switches, name, value):
        nlq = make(use_bias=True, **switches)
        with Frozen(nlq), pytest.raises(ValueError, match=rf"{name}\W+{value}"):
            to_gpt2(nlq)
        with Frozen(nlq):
            gpt2 = to_gpt2(nlq, allow_lossy=True)
        assert type(gpt2) is GPT2LMHeadModel
        assert output_of(gpt2, random_tokens(2, 9)).isfinite().all()
        for theirs, ours in zip(gpt2.transformer.h, nlq.model.layers):
            assert torch.equal(theirs.mlp.c_fc.weight, ours.mlp.fc1.weight.T)  # what has a counterpart is there

    @parametrize_cases("switches, name, value", IMPOSSIBLE)
    @pytest.mark.parametrize("allow_lossy", [False, True], ids=["exactly", "lossy"])
    def test_impossible(self, make, switches, name, value, allow_lossy):
        with pytest.raises(ValueError, match=rf"{name}\W+{value}"):
            to_gpt2(make(**switches), allow_lossy=allow_lossy)

    def test_lossy_is_exact_where_it_can_be(self, make):
        nlq = make(attention_scaling=0.7, num_key_value_heads=2)
        assert_same_function(to_gpt2(nlq, allow_lossy=True), nlq)

    def test_every_reason_is_named(self, make):
        nlq = make(attention_sink="zero", attention_gate="headwise", qk_norm="rms")
        with pytest.raises(ValueError, match=r"(?s)(?=.*attention_sink)(?=.*attention_gate)(?=.*qk_norm)"):
            to_gpt2(nlq)

    def test_configuration(self, make):
        options = {"embedding_dropout": 0.15, "residual_dropout": 0.25, "attention_dropout": 0.35, "initializer_range": 0.05}
        gpt2 = to_gpt2(make(**options, layer_norm_eps=1e-4, eos_token_id=[3, 4], use_cache=False, hidden_act="silu"))
        config = gpt2.config
        assert (config.embd_pdrop, config.resid_pdrop, config.attn_pdrop) == (0.15, 0.25, 0.35)
        assert (config.initializer_range, config.use_cache, config.layer_norm_epsilon) == (0.05, False, 1e-4)
        # Not 50256, which a GPT-2 configuration fills in
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [3, 4], None)
        assert (config.vocab_size, config.n_positions, config.n_inner, config.activation_function) == (13, 32, 24, "silu")
        assert not getattr(config, "auto_map", None)

    @pytest.mark.parametrize("gpt2_class, nlq_class", [pytest.param(*pair, id=name) for name, pair in HEADS.items()])
    def test_heads_without_biases(self, gpt2_class, nlq_class):
        sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        labels = {"num_labels": 3} if "Classification" in nlq_class.__name__ else {}
        config = NLQConfig(**sizes, **labels, query_projection="linear", pad_token_id=0, max_position_embeddings=9)
        nlq = randomize(nlq_class(config)).eval()
        gpt2 = to_gpt2(nlq)
        assert type(gpt2) is gpt2_class
        assert_same_function(gpt2, nlq)

    def test_head_without_bias(self):
        """GPT-2's head for tokens always has one."""
        sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = NLQConfig(**sizes, query_projection="linear", token_classification_bias=False, max_position_embeddings=9)
        nlq = randomize(NLQForTokenClassification(config)).eval()
        assert nlq.score.bias is None
        gpt2 = to_gpt2(nlq)
        assert_same_function(gpt2, nlq)
        assert (gpt2.classifier.bias == 0).all()

    def test_bfloat16(self, make):
        nlq = make(dtype=torch.bfloat16, num_key_value_heads=2)
        gpt2 = to_gpt2(nlq)
        assert {parameter.dtype for parameter in gpt2.parameters()} == {torch.bfloat16}
        keys = gpt2.transformer.h[0].attn.c_attn.weight.T[16:32].reshape(4, 4, 16)
        ours = nlq.model.layers[0].self_attn.k_proj.weight.reshape(2, 4, 16)
        assert torch.equal(keys, ours[[0, 0, 1, 1]])


PAPER_SIZES = {"block_size": 11, "vocab_size": 17, "n_layer": 2, "num_heads": 3, "n_embd": 12, "mlp_hidden_size": 20}
PAPER = {
    **PAPER_SIZES,
    **paper_reference.TRAINING_ARGUMENTS,
    "tie_weights": True,
    "head_size": 64,
    "dropout": 0.15,
    "bias": False,
    "scale": 0.31,
    "query_mode": "original",
}
KINDS = {"original": "linear", "residual": "residual", "identity": "identity", "residual_gelu": "nonlinear"}


def make_checkpoint(prefix="", dtype=torch.float32, bottleneck_size=None, without=(), **model_args):
    arguments = {name: value for name, value in {**PAPER, **model_args}.items() if name not in without}
    return paper_reference.random_checkpoint(arguments, prefix, dtype, bottleneck_size=bottleneck_size)


def assert_same_as_paper(model, checkpoint, length=11):
    """In float64 the formulas, in float32 the rounding. The model was made from float32 weights."""
    input_ids = random_tokens(2, length, paper_reference.complete(checkpoint["model_args"])["vocab_size"])
    expected = paper_reference.forward(checkpoint, input_ids)
    assert not model.training
    torch.testing.assert_close(output_of(model, input_ids).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output_of(model.double(), input_ids), expected, rtol=1e-9, atol=1e-9)


class Exploit:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestPaper:
    @pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
    @parametrize_bias
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("mode", KINDS)
    def test_logits(self, mode, tied, use_bias, prefix):
        checkpoint = make_checkpoint(prefix, query_mode=mode, tie_weights=tied, bias=use_bias)
        original = copy.deepcopy(checkpoint)
        model = from_paper(checkpoint)
        assert_same_state(checkpoint["model"], original["model"])
        assert checkpoint["model_args"] == original["model_args"]
        assert type(model) is NLQForCausalLM
        assert model.config.query_projection == KINDS[mode]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert_same_as_paper(model, checkpoint)

    @pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])
    @pytest.mark.parametrize("mode", KINDS)
    @pytest.mark.parametrize("n_embd, num_heads", [(12, 1), (15, 3), (6, 6), (7, 1)])
    def test_shapes(self, mode, n_embd, num_heads, use_bias):
        """Odd widths too, whose bottleneck is rounded down."""
        checkpoint = make_checkpoint(query_mode=mode, n_embd=n_embd, num_heads=num_heads, bias=use_bias)
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    @pytest.mark.parametrize("bottleneck_size", [1, 5, 9])
    def test_other_bottleneck(self, bottleneck_size):
        """The format knows half the width only; other sizes stand in the weights."""
        checkpoint = make_checkpoint(query_mode="residual_gelu", bottleneck_size=bottleneck_size)
        try:
            model = from_paper(checkpoint)
        except ValueError as error:
            assert "residual_in" in str(error)
        else:
            assert_same_as_paper(model, checkpoint)

    # With heads of 4, 1/8 is not 1/sqrt(head size): a scale that is not there is not the one that is None.
    @pytest.mark.parametrize("scale", [None, 0.31, 1, 0.0, "missing"], ids=str)
    @pytest.mark.parametrize("mode", KINDS)
    def test_scale(self, mode, scale):
        checkpoint = make_checkpoint(query_mode=mode, scale=scale, without=["scale"] if scale == "missing" else [])
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    def test_scales_differ(self):
        input_ids = random_tokens(1, 5, 17)
        logits = [
            paper_reference.forward(make_checkpoint(scale=scale, without=without), input_ids)
            for scale, without in ((None, ()), (0.31, ()), (0.0, ()), (0.0, ["scale"]))
        ]
        for index, one in enumerate(logits):
            assert all((one - other).abs().max() > 1e-3 for other in logits[:index])

    # The others kept small
    @parametrize_cases(
        "name, others",
        {
            "block_size": ("block_size", {}),
            "vocab_size": ("vocab_size", {}),
            "n_layer": ("n_layer", {}),
            "num_heads": ("num_heads", {}),
            "n_embd": ("n_embd", {"n_layer": 1}),
            "tie_weights": ("tie_weights", {}),
            "dropout": ("dropout", {}),
            "bias": ("bias", {}),
            "query_mode": ("query_mode", {}),
            "mlp_hidden_size": ("mlp_hidden_size", {"n_layer": 1}),
        },
    )
    def test_defaults(self, name, others):
        checkpoint = make_checkpoint(**others, without=[name])
        model = from_paper(checkpoint)
        assert_same_as_paper(model, checkpoint)
        assert model.config.residual_dropout == (0.0 if name == "dropout" else 0.15)

    def test_training_arguments_may_be_missing(self):
        checkpoint = make_checkpoint(without=[*paper_reference.TRAINING_ARGUMENTS, "head_size"])
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    def test_model_and_arguments_are_enough(self):
        checkpoint = make_checkpoint()
        checkpoint = {name: checkpoint[name] for name in ("model", "model_args")}
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    def test_configuration(self):
        config = from_paper(make_checkpoint(query_mode="residual_gelu")).config
        assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (17, 12, 2, 3)
        assert (config.max_position_embeddings, config.intermediate_size, config.head_dim) == (11, 20, 4)
        assert (config.projection_bottleneck_size, config.attention_scaling) == (6, 0.31)
        assert (config.embedding_dropout, config.residual_dropout, config.attention_dropout) == (0.15, 0.15, 0.15)
        assert (config.hidden_act, config.attention_activation, config.norm_position) == ("gelu", "softmax", "pre")
        assert config.tie_word_embeddings
        assert not config.use_bias

    def test_mask_buffers(self):
        """The slow attention of the code keeps its mask in the state dict."""
        checkpoint = make_checkpoint("_orig_mod.", bias=True)
        for index in range(2):
            checkpoint["model"][f"_orig_mod.transformer.h.{index}.attn.bias"] = torch.ones(11, 11).tril().view(1, 1, 11, 11)
        assert_same_as_paper(from_paper(checkpoint), checkpoint)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    def test_dtype(self, dtype):
        checkpoint = make_checkpoint(dtype=dtype)
        model = from_paper(checkpoint)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert torch.equal(model.model.embed_tokens.weight, checkpoint["model"]["transformer.wte.weight"])

    @parametrize_bias
    @pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
    def test_nanogpt(self, prefix, use_bias):
        """nanoGPT's own: other names, no scale, queries as in GPT-2."""
        arguments = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 11, "vocab_size": 17, "dropout": 0.0}
        checkpoint = paper_reference.random_checkpoint({**arguments, "bias": use_bias}, prefix)
        model = from_paper(checkpoint)
        assert model.config.query_projection == "linear"
        assert model.config.intermediate_size == 48
        assert_same_as_paper(model, checkpoint)


class TestBadPaperCheckpoint:
    @pytest.mark.parametrize(
        "name, value",
        [
            ("query_mode", "residual_relu"),
            ("query_mode", None),
            ("qk_norm", True),
            ("rotary", False),
            ("n_layer", "two"),
            ("n_layer", 0),
            ("num_heads", 0),
            ("n_embd", "twelve"),
            ("dropout", 1.5),
            ("bias", "no"),
            ("num_heads", 5),
            ("scale", "small"),
            ("scale", math.nan),
        ],
    )
    def test_argument(self, name, value):
        checkpoint = make_checkpoint()
        checkpoint["model_args"][name] = value
        with pytest.raises((ValueError, StrictDataclassError), match=rf"{name}|{NLQ_NAMES.get(name, name)}"):
            from_paper(checkpoint)

    @parametrize_cases(
        "name",
        {
            "c_proj": "transformer.h.1.attn.c_proj.weight",
            "ln_f": "transformer.ln_f.weight",
            "wpe": "transformer.wpe.weight",
            "residual_in": "transformer.h.0.attn.residual_in.weight",
            "rms_norm": "transformer.h.1.attn.residual_rmsnorm_input.weight",
        },
    )
    @pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
    def test_missing_tensor(self, name, prefix):
        checkpoint = make_checkpoint(prefix, query_mode="residual_gelu")
        del checkpoint["model"][prefix + name]
        with pytest.raises(ValueError, match=re.escape(name)):
            from_paper(checkpoint)

    @parametrize_cases(
        "name, shape",
        {
            "norm_of_a_fork": ("transformer.h.1.attn.q_norm.weight", (4,)),
            "third_layer": ("transformer.h.2.ln_1.weight", (12,)),
            "bias": ("transformer.h.0.mlp.c_fc.bias", (20,)),
            "bias_of_head": ("lm_head.bias", (17,)),
            "queries_of_another_mode": ("transformer.h.0.attn.residual_in.weight", (6, 12)),
            "no_mask": ("transformer.h.0.attn.mask", (1, 1, 11, 11)),
        },
    )
    def test_extra_tensor(self, name, shape):
        checkpoint = make_checkpoint()
        checkpoint["model"][name] = torch.zeros(shape)
        with pytest.raises(ValueError, match=re.escape(name)):
            from_paper(checkpoint)

    def test_attention_bias_that_is_no_mask(self):
        """Only the square buffer means nothing."""
        checkpoint = make_checkpoint()
        checkpoint["model"]["transformer.h.0.attn.bias"] = torch.randn(12)
        with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.bias"):
            from_paper(checkpoint)

    def test_all_names_that_are_wrong(self):
        checkpoint = make_checkpoint()
        for index in range(2):
            checkpoint["model"][f"transformer.h.{index}.surplus"] = checkpoint["model"].pop(
                f"transformer.h.{index}.ln_1.weight"
            )
        with pytest.raises(ValueError) as error:
            from_paper(checkpoint)
        for index in range(2):
            assert f"transformer.h.{index}.surplus" in str(error.value)
            assert f"transformer.h.{index}.ln_1.weight" in str(error.value)

    @parametrize_cases(
        "arguments, name",
        {
            "vocab_size": ({"vocab_size": 18}, "transformer.wte.weight"),
            "block_size": ({"block_size": 12}, "transformer.wpe.weight"),
            "mlp_hidden_size": ({"mlp_hidden_size": 24}, "mlp.c_fc.weight"),
            "mode": ({"query_mode": "identity"}, "attn.c_attn.weight"),
        },
    )
    def test_shape(self, arguments, name):
        checkpoint = make_checkpoint()
        checkpoint["model_args"].update(arguments)
        with pytest.raises(ValueError, match=re.escape(name)):
            from_paper(checkpoint)

    @pytest.mark.parametrize("name", ["attn.c_proj.weight", "ln_2.weight", "mlp.c_proj.weight"])
    def test_transposed_or_reshaped(self, name):
        checkpoint = make_checkpoint()
        tensor = checkpoint["model"][f"transformer.h.1.{name}"]
        checkpoint["model"][f"transformer.h.1.{name}"] = tensor[None]
        with pytest.raises(ValueError, match=re.escape(name)):
            from_paper(checkpoint)

    def test_tied_tensors_that_differ(self):
        checkpoint = make_checkpoint()
        checkpoint["model"]["lm_head.weight"][3, 4] += 1e-3
        with pytest.raises(ValueError, match=r"lm_head\.weight|tie_weights"):
            from_paper(checkpoint)

    def test_not_a_tensor(self):
        checkpoint = make_checkpoint()
        checkpoint["model"]["transformer.ln_f.weight"] = [1.0] * 12
        with pytest.raises(ValueError, match=r"transformer\.ln_f\.weight"):
            from_paper(checkpoint)

    @pytest.mark.parametrize("name", ["model", "model_args"])
    def test_part_missing(self, name):
        checkpoint = make_checkpoint()
        del checkpoint[name]
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            from_paper(checkpoint)

    @pytest.mark.parametrize("name", ["model", "model_args"])
    def test_part_of_another_kind(self, name):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            from_paper({**make_checkpoint(), name: ["a list"]})


# By which name the model's configuration would complain of an argument of the paper's
NLQ_NAMES = {
    "n_layer": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "scale": "attention_scaling",
    "bias": "use_bias",
}


def write_text(path):
    path.write_text("no checkpoint, but text\n" * 20)


def write_truncated(path):
    torch.save(make_checkpoint(), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def write_pickle(value):
    def write(path):
        with path.open("wb") as file:
            pickle.dump(value, file)

    return write


def write_archive(change, **options):
    """`torch.save` of a checkpoint with something else in it."""

    def write(path):
        checkpoint = make_checkpoint()
        change(checkpoint, path)
        torch.save(checkpoint, path, **options)

    return write


BAD_FILES = {
    "empty": lambda path: path.touch(),
    "text": write_text,
    "truncated": write_truncated,
    "pickled_list": write_pickle([1, 2, 3]),
    "pickled_dict": write_pickle({"model": {}}),
    "saved_list": lambda path: torch.save([1, 2, 3], path),
    "saved_tensor": lambda path: torch.save(torch.zeros(3), path),
    "no_model": lambda path: torch.save({"state_dict": {}, "model_args": {}}, path),
    "a_whole_module": lambda path: torch.save(torch.nn.Linear(2, 2), path),
    "safetensors": lambda path: save_file({"weight": torch.zeros(3)}, path),
    "folder": lambda path: path.mkdir(),
    "missing": lambda path: None,
}
# (what writes the file, what it asks for when it is read)
UNSAFE_FILES = {
    "exploit": (write_archive(lambda checkpoint, path: checkpoint.update(extra=Exploit(path.with_name("made")))), "mkdir"),
    "exploit_in_the_old_format": (
        write_archive(
            lambda checkpoint, path: checkpoint.update(extra=Exploit(path.with_name("made"))),
            _use_new_zipfile_serialization=False,
        ),
        "mkdir",
    ),
    "numpy_scalar": (write_archive(lambda checkpoint, path: checkpoint.update(best_val_loss=np.float64(3.2))), "numpy"),
    "custom_class": (
        write_archive(lambda checkpoint, path: checkpoint.update(config=argparse.Namespace(dropout=0.0))),
        "Namespace",
    ),
}


class TestPaperFile:
    @pytest.mark.parametrize("old_format", [False, True], ids=["zip", "old_format"])
    def test_read(self, tmp_path, old_format):
        checkpoint = make_checkpoint("_orig_mod.", query_mode="residual_gelu")
        torch.save(checkpoint, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=not old_format)
        found = read_checkpoint(tmp_path / "ckpt.pt")
        assert_same_state(found["model"], checkpoint["model"])
        assert found["model_args"] == checkpoint["model_args"]
        assert read_checkpoint(str(tmp_path / "ckpt.pt"))["iter_num"] == 100

    @parametrize_cases("write", BAD_FILES)
    def test_no_checkpoint(self, tmp_path, write, capsys):
        path = tmp_path / "ckpt.pt"
        write(path)
        with pytest.raises((ValueError, OSError), match="ckpt"):
            from_paper(read_checkpoint(path))
        assert "ckpt.pt" in nlq_fails(capsys, "convert", path, tmp_path / "target")
        assert not (tmp_path / "target").exists()

    @parametrize_cases("write, wanted", UNSAFE_FILES)
    def test_more_than_tensors(self, tmp_path, write, wanted, capsys):
        path = tmp_path / "ckpt.pt"
        write(path)
        with pytest.raises(ValueError, match=wanted):
            read_checkpoint(path)
        message = nlq_fails(capsys, "convert", path, tmp_path / "target")
        assert wanted in message
        assert "tensor" in message
        assert "weights_only=False" not in message  # PyTorch's own advice would run it
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt.pt"]

    @pytest.mark.parametrize("mode", KINDS)
    def test_converted(self, tmp_path, mode, capsys):
        checkpoint = make_checkpoint("_orig_mod.", query_mode=mode, tie_weights=mode != "residual", bias=mode == "identity")
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        assert main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "target")]) == 0
        check_folder(tmp_path / "target")
        assert_same_as_paper(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), checkpoint)

    def test_to_gpt2(self, tmp_path):
        checkpoint = make_checkpoint(query_mode="residual", bias=True)
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        convert(str(tmp_path / "ckpt.pt"), tmp_path / "target", to="gpt2")
        input_ids = random_tokens(2, 11, 17)
        logits = output_of(GPT2LMHeadModel.from_pretrained(tmp_path / "target"), input_ids).double()
        # The scale and the identity are now in float32 weights
        torch.testing.assert_close(logits, paper_reference.forward(checkpoint, input_ids), rtol=1e-5, atol=1e-5)

    def test_nonlinear_to_gpt2(self, tmp_path):
        torch.save(make_checkpoint(query_mode="residual_gelu"), tmp_path / "ckpt.pt")
        with pytest.raises(ValueError, match="query_projection"):
            convert(str(tmp_path / "ckpt.pt"), tmp_path / "target", to="gpt2")
        assert not (tmp_path / "target").exists()
        convert(str(tmp_path / "ckpt.pt"), tmp_path / "target", to="gpt2", allow_lossy=True)
        assert type(GPT2LMHeadModel.from_pretrained(tmp_path / "target")) is GPT2LMHeadModel


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
}
# Those below are already in place in some of the sources.
SWITCHES_FOR_SOME = {
    "head_projection": {"head_projection": True},
    "gate_headwise": {"attention_gate": "headwise"},
    "gate_elementwise": {"attention_gate": "elementwise"},
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
    "scaling_and_upcycled_keys": ({"key_projection": "mlp"}, {"attention_scaling": 0.3, "query_projection": "upcycled"}),
    "scaling_and_residual_keys": ({"key_projection": "residual"}, {"attention_scaling": 0.3}),
    "identity_to_linear": ({"query_projection": "identity"}, {"query_projection": "linear"}),
    "residual_to_linear": ({"query_projection": "residual"}, {"query_projection": "linear"}),
    "residual_to_upcycled": ({"query_projection": "residual", "use_bias": True}, {"query_projection": "upcycled"}),
    "values_residual_to_upcycled": ({"value_projection": "residual"}, {"value_projection": "upcycled"}),
    "nonlinear_to_upcycled": ({"query_projection": "nonlinear"}, {"query_projection": "upcycled"}),
    "mlp_to_upcycled": ({"query_projection": "mlp", "use_bias": True}, {"query_projection": "upcycled"}),
    "mlp_to_nonlinear": ({"query_projection": "mlp"}, {"query_projection": "nonlinear"}),
    "identity_to_mlp": ({"query_projection": "identity"}, {"query_projection": "mlp"}),
    "linear_to_residual": ({}, {"query_projection": "residual"}),
    "wider_bottleneck": ({"query_projection": "nonlinear", "use_bias": True}, {"projection_bottleneck_size": 11}),
    "unused_bottleneck": ({}, {"projection_bottleneck_size": 3, "projection_activation": "relu"}),
    "more_key_value_heads": ({"num_key_value_heads": 2}, {"num_key_value_heads": 4}),
    "more_nonlinear_heads": (
        {"num_key_value_heads": 2, "value_projection": "mlp", "use_bias": True},
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
            return from_gpt2(make_gpt2(dtype=dtype, n_positions=32, scale_attn_by_inverse_layer_idx=True))
        return make_model(dtype, **{"query_projection": "linear", **source})

    return make


def layer_switches(config):
    return [{name: getattr(layer, name) for name in PER_LAYER_SWITCHES} for layer in config.per_layer_config]


def assert_only_these_changed(config, before, switches):
    """The configuration has the values asked for, in layers that had others too, and all other fields as before."""
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
    """What `upcycle` promises, but for the gradients; returns the new model."""
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
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-6)], ids=["float64", "float32"])
    @parametrize_cases("source, switches", UPCYCLING)
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
        """Where nothing is scaled, not one bit of the logits."""
        source = make_source("gpt2", dtype)
        model = upcycle(source, {"query_projection": "upcycled", "head_projection": True})
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        input_ids = random_tokens(2, 9)
        assert torch.equal(output_of(model, input_ids), output_of(source, input_ids))

    def test_copied_weights(self, make_source):
        source = make_source("gpt2")
        state = upcycle(source, {"query_projection": "upcycled", "intermediate_size": 60}).state_dict()
        for name, tensor in source.state_dict().items():
            copied = state[name.replace("q_proj.", "q_proj.linear.")]
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
        """As in a new model: matrices as wide as `initializer_range`, the last gain 0."""
        switches = {"query_projection": "upcycled", "projection_bottleneck_size": 200}
        model = upcycle(make_source({"hidden_size": 64, "initializer_range": 0.05}), switches)
        for layer in model.model.layers:
            projection = layer.self_attn.q_proj
            for matrix in (projection.fc1.weight, projection.fc2.weight):
                assert matrix.std().item() == pytest.approx(0.05, rel=0.1)
            assert (projection.input_norm.weight == 1).all()
            assert (projection.output_norm.weight == 0).all()

    @parametrize_cases("gpt2_class, nlq_class", HEADS)
    def test_heads(self, gpt2_class, nlq_class):
        labels = {"num_labels": 3} if "Classification" in gpt2_class.__name__ else {}
        source = from_gpt2(make_gpt2(gpt2_class, dtype=torch.float64, **labels))
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
        """Whether new settings of layers replace the old ones or join them, the function stays, or nothing is made."""
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
        """The source's mode and gradients are nobody's business."""
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
        projections = [f"model.layers.{index}.self_attn.{kind}_proj." for index in range(2) for kind in "qkv"]
        gains = [name for name in found if name.endswith("_proj.output_norm.weight")]
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
        names = ["gate_proj.weight", "head_proj.weight", "q_proj.output_norm.weight", "o_proj.weight"]
        names += ["gate_proj.bias", "q_proj.output_norm.bias"] if use_bias else []
        for index in range(2):
            for name in names:
                gradient = found[f"model.layers.{index}.self_attn.{name}"]
                assert gradient.abs().max() > 1e-6, name
                assert gradient.isfinite().all(), name

    def test_identity_queries(self, make_source):
        for kind, name in (("residual", "linear.weight"), ("nonlinear", "output_norm.weight")):
            model = upcycle(make_source({"query_projection": "identity"}), {"query_projection": kind})
            found = gradients(model, random_tokens(2, 12))
            for index in range(2):
                assert found[f"model.layers.{index}.self_attn.q_proj.{name}"].abs().max() > 0

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
    "queries_mlp": ({}, {"query_projection": "mlp"}),
    "keys_mlp": ({}, {"key_projection": "mlp"}),
    "values_identity": ({}, {"value_projection": "identity"}),
    "nonlinear_to_linear": ({"query_projection": "nonlinear"}, {"query_projection": "linear"}),
    "nonlinear_to_upcycled": ({"query_projection": "nonlinear"}, {"query_projection": "mlp"}),
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
        source = from_gpt2(make_gpt2(GPT2ForSequenceClassification, num_labels=3))
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
    "query_projection": ["linear", "identity", "residual", "nonlinear", "mlp", "upcycled"],
    "key_projection": ["linear", "mlp", "upcycled"],
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
    @examples(300)
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
            gpt2 = to_gpt2(nlq)
        except ValueError:
            return
        input_ids = random_tokens(2, 24)
        torch.testing.assert_close(output_of(gpt2, input_ids), output_of(nlq, input_ids), rtol=1e-9, atol=1e-9)


SENTENCES = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]


def make_tokenizer(sentences=SENTENCES):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=48, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(sentences * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def run_nlq(*arguments):
    return main([str(argument) for argument in arguments])


def nlq_fails(capsys, *arguments):
    """The one line of error that the command ends with."""
    capsys.readouterr()
    try:
        status = run_nlq(*arguments)
    except SystemExit as error:  # of the parser
        status = error.code
    assert status not in (0, None)
    output = capsys.readouterr()
    assert "Traceback" not in output.err + output.out
    errors = [line for line in output.err.splitlines() if line.startswith("nlq") and "error: " in line]
    assert len(errors) == 1, output.err
    assert output.err.rstrip().endswith(errors[0])
    return errors[0]


def snapshot(folder):
    """Every file and folder below, and what is in it."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def check_folder(folder, is_gpt2=False):
    """All that makes a folder complete, and nothing temporary."""
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= names
    assert not [name for name in names if name.startswith((".", "tmp")) or name.endswith((".bin", ".pt", ".tmp"))]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n")
    assert str(folder.parent) not in card  # nobody else has this folder
    config = json.loads((folder / "config.json").read_text())
    if is_gpt2:
        assert config["model_type"] == "gpt2"
        assert "auto_map" not in config
        assert not [name for name in names if name.endswith((".py", "__pycache__"))]
        assert "custom_code" not in card
        return
    assert config["model_type"] == "nlq"
    package = Path(modeling_nlq.__file__).parent
    code = {name for name in names if name.endswith(".py")}
    assert {"configuration_nlq.py", "modeling_nlq.py"} <= code
    for name in code:
        assert (folder / name).read_bytes() == (package / name).read_bytes()


@pytest.fixture(scope="module")
def gpt2_model():
    model = make_gpt2(vocab_size=48, scale_attn_by_inverse_layer_idx=True)
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=0.6, eos_token_id=2)
    return model


@pytest.fixture(scope="module")
def gpt2_folder(gpt2_model, tmp_path_factory):
    """A saved GPT-2 with its tokenizer."""
    folder = tmp_path_factory.mktemp("sources") / "gpt2"
    gpt2_model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def source(gpt2_folder, tmp_path):
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(gpt2_folder, tmp_path / "source"))


@pytest.fixture
def nlq_folder(make_model, tmp_path):
    folder = tmp_path / "nlq"
    make_model(query_projection="linear", hidden_act="gelu_new").save_pretrained(folder)
    return folder


class TestConvert:
    def test_to_nlq(self, gpt2_folder, gpt2_model, tmp_path):
        before = snapshot(gpt2_folder)
        convert(str(gpt2_folder), tmp_path / "target")
        assert snapshot(gpt2_folder) == before
        check_folder(tmp_path / "target")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert type(loaded) is NLQForCausalLM
        assert_same_function(loaded, gpt2_model)
        chosen = loaded.generation_config
        assert (chosen.max_new_tokens, chosen.do_sample, chosen.temperature, chosen.eos_token_id) == (3, True, 0.6, 2)

    def test_tokenizer(self, gpt2_folder, tmp_path):
        convert(str(gpt2_folder), tmp_path / "target")
        convert(str(tmp_path / "target"), tmp_path / "back", to="gpt2")
        theirs = AutoTokenizer.from_pretrained(gpt2_folder)
        for folder in (tmp_path / "target", tmp_path / "back"):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            for sentence in SENTENCES:
                assert tokenizer(sentence).input_ids == theirs(sentence).input_ids
                assert tokenizer.decode(tokenizer(sentence).input_ids) == sentence
            assert tokenizer.eos_token == "<|endoftext|>"

    def test_another_tokenizer(self, gpt2_folder, tmp_path, capsys):
        other = make_tokenizer(SENTENCES[1:])
        other.save_pretrained(tmp_path / "tokenizer")
        assert other(SENTENCES[0]).input_ids != AutoTokenizer.from_pretrained(gpt2_folder)(SENTENCES[0]).input_ids
        assert run_nlq("convert", gpt2_folder, tmp_path / "target", "--tokenizer", tmp_path / "tokenizer") == 0
        assert AutoTokenizer.from_pretrained(tmp_path / "target")(SENTENCES[0]).input_ids == other(SENTENCES[0]).input_ids

    def test_without_tokenizer(self, source, tmp_path):
        for path in source.glob("tokenizer*"):
            path.unlink()
        convert(str(source), tmp_path / "target")
        check_folder(tmp_path / "target")
        assert not list((tmp_path / "target").glob("tokenizer*"))

    def test_there_and_back(self, gpt2_folder, gpt2_model, tmp_path):
        assert run_nlq("convert", gpt2_folder, tmp_path / "nlq") == 0
        assert run_nlq("convert", tmp_path / "nlq", tmp_path / "gpt2", "--to", "gpt2") == 0
        check_folder(tmp_path / "gpt2", is_gpt2=True)
        back = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
        assert_same_state(back.state_dict(), gpt2_model.state_dict())
        assert_same_gpt2_config(back.config, gpt2_model.config)
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")) is GPT2LMHeadModel
        assert load_file(tmp_path / "gpt2/model.safetensors").keys() == load_file(gpt2_folder / "model.safetensors").keys()

    @parametrize_cases("gpt2_class, nlq_class", HEADS)
    def test_heads(self, tmp_path, gpt2_class, nlq_class):
        labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
        gpt2 = make_gpt2(gpt2_class, **(labels if "Classification" in gpt2_class.__name__ else {}))
        gpt2.save_pretrained(tmp_path / "source")
        convert(str(tmp_path / "source"), tmp_path / "target")
        assert json.loads((tmp_path / "target/config.json").read_text())["architectures"] == [nlq_class.__name__]
        assert_same_function(nlq_class.from_pretrained(tmp_path / "target"), gpt2)
        if "SequenceClassification" in gpt2_class.__name__:
            loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "target")
            assert loaded.config.id2label == labels["id2label"]
        convert(str(tmp_path / "target"), tmp_path / "back", to="gpt2")
        assert_same_state(gpt2_class.from_pretrained(tmp_path / "back").state_dict(), gpt2.state_dict())

    def test_names_of_the_first_release(self, source, gpt2_model, tmp_path):
        """OpenAI's own weights have no prefix, no head, and masks as buffers; their configuration names the head."""
        state = {name: tensor.clone() for name, tensor in gpt2_model.transformer.state_dict().items()}
        state |= {f"h.{index}.attn.bias": torch.ones(24, 24).tril().view(1, 1, 24, 24) for index in range(2)}
        save_file(state, source / "model.safetensors", metadata={"format": "pt"})
        convert(str(source), tmp_path / "target")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert type(loaded) is NLQForCausalLM
        assert_same_function(loaded, gpt2_model)

    def test_buffers_of_old_versions(self, source, gpt2_model, tmp_path):
        """Transformers before 4.27 saved the masks and the value of what is hidden; neither is a weight."""

        def add_buffers(state):
            for index in range(2):
                state[f"transformer.h.{index}.attn.bias"] = torch.ones(24, 24).tril().view(1, 1, 24, 24).bool()
                state[f"transformer.h.{index}.attn.masked_bias"] = torch.tensor(-1e4)

        edit_weights(source / "model.safetensors", add_buffers)
        convert(str(source), tmp_path / "target")
        assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), gpt2_model)

    def test_configuration_without_architectures(self, source, gpt2_model, tmp_path):
        edit_json(source / "config.json", architectures=None)
        convert(str(source), tmp_path / "target")
        assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), gpt2_model)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_dtype(self, tmp_path, dtype):
        gpt2 = make_gpt2(dtype=dtype)
        gpt2.save_pretrained(tmp_path / "source")
        convert(str(tmp_path / "source"), tmp_path / "nlq")
        convert(str(tmp_path / "nlq"), tmp_path / "gpt2", to="gpt2")
        assert {tensor.dtype for tensor in load_file(tmp_path / "nlq/model.safetensors").values()} == {dtype}
        assert json.loads((tmp_path / "nlq/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert_same_state(load_file(tmp_path / "gpt2/model.safetensors"), load_file(tmp_path / "source/model.safetensors"))

    def test_shards(self, gpt2_model, tmp_path):
        gpt2_model.save_pretrained(tmp_path / "source", max_shard_size="8KB")
        assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
        convert(str(tmp_path / "source"), tmp_path / "target")
        assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), gpt2_model)

    def test_pickled_weights(self, source, gpt2_model, tmp_path):
        (source / "model.safetensors").unlink()
        torch.save(gpt2_model.state_dict(), source / "pytorch_model.bin")
        convert(str(source), tmp_path / "target")
        check_folder(tmp_path / "target")
        assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), gpt2_model)

    def test_upcycle(self, gpt2_folder, gpt2_model, tmp_path):
        assert run_nlq("convert", gpt2_folder, tmp_path / "target", "--upcycle") == 0
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert loaded.config.query_projection == "upcycled"
        assert_same_function(loaded, gpt2_model)

    def test_upcycle_with_switches(self, gpt2_folder, gpt2_model, tmp_path):
        switches = {
            "head_projection": "true",
            "attention_output_scaling": "5e-1",
            "intermediate_size": "60",
            "value_projection": "upcycled",
            "per_layer_config": "{1: {attention_gate: headwise}}",
        }
        options = [text for name, value in switches.items() for text in ("--set", f"{name}={value}")]
        assert run_nlq("convert", gpt2_folder, tmp_path / "target", "--upcycle", *options) == 0
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert loaded.config.intermediate_size == 60
        first, second = layer_switches(loaded.config)
        assert (first["attention_gate"], second["attention_gate"]) == (None, "headwise")
        for layer in (first, second):
            assert (layer["head_projection"], layer["attention_output_scaling"]) == (True, 0.5)
            assert layer["value_projection"] == "upcycled"
        assert_same_function(loaded, gpt2_model)

    def test_upcycle_nlq(self, nlq_folder, tmp_path):
        convert(str(nlq_folder), tmp_path / "target", upcycle=True, switches={"attention_gate": "headwise"})
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert loaded.config.attention_gate == "headwise"
        assert_same_function(loaded, NLQForCausalLM.from_pretrained(nlq_folder))

    def test_upcycle_is_reproducible(self, gpt2_folder, tmp_path):
        states = []
        for name in ("one", "two"):
            torch.manual_seed(len(name))
            assert run_nlq("convert", gpt2_folder, tmp_path / name, "--upcycle") == 0
            states.append(load_file(tmp_path / name / "model.safetensors"))
        assert_same_state(*states)

    @pytest.mark.parametrize("target", ["made", "empty", "deep/er"])
    def test_target_that_may_be_written(self, gpt2_folder, tmp_path, target):
        if target == "empty":
            (tmp_path / target).mkdir()
        convert(str(gpt2_folder), str(tmp_path / target))
        check_folder(tmp_path / target)

    def test_relative_paths(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert run_nlq("convert", "source", "target") == 0
        check_folder(tmp_path / "target")
        assert run_nlq("convert", "./target/", "back/", "--to", "gpt2") == 0
        check_folder(tmp_path / "back", is_gpt2=True)

    def test_lossy(self, make_model, tmp_path, capsys):
        make_model(query_projection="linear", attention_sink="learned").save_pretrained(tmp_path / "source")
        message = nlq_fails(capsys, "convert", tmp_path / "source", tmp_path / "target", "--to", "gpt2")
        assert "attention_sink" in message
        assert "--allow-lossy" in message
        assert run_nlq("convert", tmp_path / "source", tmp_path / "target", "--to", "gpt2", "--allow-lossy") == 0
        check_folder(tmp_path / "target", is_gpt2=True)

    def test_lossy_gpt2(self, tmp_path):
        gpt2 = make_gpt2(GPT2DoubleHeadsModel)
        gpt2.save_pretrained(tmp_path / "source")
        with pytest.raises(ValueError, match="multiple_choice_head"):
            convert(str(tmp_path / "source"), tmp_path / "target")
        convert(str(tmp_path / "source"), tmp_path / "target", allow_lossy=True)
        assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), gpt2)

    def test_lossy_cross_attention(self, tmp_path):
        gpt2 = make_gpt2(add_cross_attention=True)
        gpt2.save_pretrained(tmp_path / "source")
        with pytest.raises(ValueError, match=r"(?i)cross.?attention"):
            convert(str(tmp_path / "source"), tmp_path / "target")
        convert(str(tmp_path / "source"), tmp_path / "target", allow_lossy=True)
        assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), gpt2)


def edit_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_weights(path, change):
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def write_empty_folder(path):
    path.mkdir()


def write_bert(path):
    path.mkdir()
    BertConfig().save_pretrained(path)


def write_only_text(path):
    path.mkdir()
    (path / "notes.txt").write_text("nothing here")


def write_only_config(path):
    path.mkdir()
    GPT2Config(**GPT2_SIZES).save_pretrained(path)


def write_broken_config(path):
    path.mkdir()
    (path / "config.json").write_text("{broken")


def write_config_without_type(path):
    path.mkdir()
    (path / "config.json").write_text('{"n_embd": 12}')


# (what writes the source, what the error names)
NO_MODELS = {
    "missing": (lambda path: None, "source"),
    "empty_folder": (write_empty_folder, "source"),
    "folder_of_text": (write_only_text, "source"),
    "text_file": (write_text, "source"),
    "bert": (write_bert, "bert"),
    "configuration_only": (write_only_config, "source"),
    "broken_configuration": (write_broken_config, "config"),
    "configuration_without_type": (write_config_without_type, "source"),
}


def truncate(source):
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[: len(content) // 2])


def weights_edit(change):
    return lambda source: edit_weights(source / "model.safetensors", change)


def rename(state):
    state["transformer.h.0.attn.c_typo.weight"] = state.pop("transformer.h.0.attn.c_attn.weight")


def lose_a_shard(source):
    GPT2LMHeadModel.from_pretrained(source).save_pretrained(source, max_shard_size="8KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    next(source.glob("model-00002*")).unlink()


# (what damages the source, what the error names)
DAMAGES = {
    "truncated": (truncate, ""),
    "missing_key": (weights_edit(lambda state: state.pop("transformer.h.1.mlp.c_fc.bias")), r"h\.1\.mlp\.c_fc\.bias"),
    "extra_key": (weights_edit(lambda state: state.update(surplus=torch.zeros(3))), "surplus"),
    "extra_layer": (
        weights_edit(lambda state: state.update({"transformer.h.2.ln_1.weight": torch.zeros(12)})),
        r"h\.2\.ln_1\.weight",
    ),
    "renamed": (weights_edit(rename), r"(?=.*c_typo\.weight)(?=.*c_attn\.weight)"),
    "shape": (lambda source: edit_json(source / "config.json", n_positions=25), r"wpe\.weight"),
    "fewer_layers_configured": (lambda source: edit_json(source / "config.json", n_layer=1), r"h\.1\."),
    "more_layers_configured": (lambda source: edit_json(source / "config.json", n_layer=3), r"h\.2\."),
    "shard_missing": (lose_a_shard, ""),
    "configuration_of_a_wrong_type": (lambda source: edit_json(source / "config.json", n_layer="two"), "n_layer"),
    "heads_that_do_not_fit": (lambda source: edit_json(source / "config.json", n_head=5), ""),
}


class TestConvertFaults:
    @parametrize_cases("write, named", NO_MODELS)
    def test_no_model(self, tmp_path, capsys, write, named):
        write(tmp_path / "source")
        before = snapshot(tmp_path)
        assert named in nlq_fails(capsys, "convert", tmp_path / "source", tmp_path / "target")
        with pytest.raises((ValueError, OSError)):
            convert(str(tmp_path / "source"), tmp_path / "target")
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model"])
    def test_no_such_name(self, tmp_path, capsys, name):
        assert name in nlq_fails(capsys, "convert", name, tmp_path / "target")
        assert not list(tmp_path.iterdir())

    @parametrize_cases("damage, named", DAMAGES)
    def test_damaged_source(self, source, tmp_path, capsys, damage, named):
        damage(source)
        before = snapshot(tmp_path)
        message = nlq_fails(capsys, "convert", source, tmp_path / "target")
        assert re.search(named, message), message
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("change", ["missing", "extra"])
    def test_damaged_nlq(self, nlq_folder, tmp_path, capsys, change):
        def damage(state):
            if change == "missing":
                del state["model.layers.1.mlp.fc1.weight"]
            else:
                state["model.layers.1.mlp.fc3.weight"] = torch.zeros(2)

        edit_weights(nlq_folder / "model.safetensors", damage)
        for options in ((), ("--to", "gpt2"), ("--upcycle",)):
            message = nlq_fails(capsys, "convert", nlq_folder, tmp_path / "target", *options)
            assert f"model.layers.1.mlp.fc{1 if change == 'missing' else 3}.weight" in message
        assert not (tmp_path / "target").exists()

    def test_head_that_differs_from_tied_embeddings(self, source, tmp_path):
        """What Transformers makes of such a folder, or nothing."""
        edit_weights(source / "model.safetensors", lambda state: state.update({"lm_head.weight": torch.randn(48, 12)}))
        try:
            convert(str(source), tmp_path / "target")
        except ValueError:
            assert not (tmp_path / "target").exists()
        else:
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
            assert_same_function(loaded, GPT2LMHeadModel.from_pretrained(source))

    def test_pickled_exploit(self, source, gpt2_model, tmp_path, capsys):
        (source / "model.safetensors").unlink()
        state = {**gpt2_model.state_dict(), "extra": Exploit(tmp_path / "made")}
        torch.save(state, source / "pytorch_model.bin")
        before = snapshot(tmp_path)
        nlq_fails(capsys, "convert", source, tmp_path / "target")
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("options", [(), ("--to", "gpt2"), ("--upcycle",)], ids=["nlq", "gpt2", "upcycle"])
    def test_code_of_the_source_is_not_run(self, nlq_folder, tmp_path, options):
        """Nor carried on: the folder written holds the code that wrote it."""
        code = f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n"
        for name in ("modeling_nlq.py", "configuration_nlq.py", "custom_generate/generate.py"):
            (nlq_folder / name).parent.mkdir(exist_ok=True)
            (nlq_folder / name).write_text(code)
        assert run_nlq("convert", nlq_folder, tmp_path / "target", *options) == 0
        assert not (tmp_path / "made").exists()
        check_folder(tmp_path / "target", is_gpt2="gpt2" in options)

    def test_code_of_a_gpt2_is_not_run(self, source, gpt2_model, tmp_path):
        (source / "modeling_own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n")
        auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
        edit_json(source / "config.json", auto_map=auto_map)
        convert(str(source), tmp_path / "target")
        assert not (tmp_path / "made").exists()
        check_folder(tmp_path / "target")
        assert_same_function(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), gpt2_model)

    def test_target_with_content(self, gpt2_folder, tmp_path, capsys):
        (tmp_path / "target").mkdir()
        (tmp_path / "target/notes.txt").write_text("mine")
        before = snapshot(tmp_path)
        assert "--overwrite" in nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target")
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("overwrite", [False, True], ids=["plain", "overwrite"])
    def test_target_that_is_a_file(self, gpt2_folder, tmp_path, capsys, overwrite):
        (tmp_path / "target").write_text("mine")
        nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", *(["--overwrite"] if overwrite else []))
        assert (tmp_path / "target").read_text() == "mine"

    @pytest.mark.parametrize("spelling", ["source", "source/", "./source", "other/../source", "link"])
    def test_target_is_source(self, source, tmp_path, capsys, spelling, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other").mkdir()
        (tmp_path / "link").symlink_to(source)
        before = snapshot(source)
        for options in (["--overwrite"], []):
            nlq_fails(capsys, "convert", source, spelling, *options)
            assert snapshot(source) == before

    def test_overwritten_pickle(self, source, nlq_folder):
        """Weights in an old format are weights of the old model too."""
        (nlq_folder / "pytorch_model.bin").write_bytes(b"old")
        convert(str(source), nlq_folder, overwrite=True)
        check_folder(nlq_folder)

    def test_overwritten_shards(self, source, gpt2_model, make_model, tmp_path):
        target = tmp_path / "target"
        make_model().save_pretrained(target, max_shard_size="8KB")
        (target / "notes.txt").write_text("mine")
        (target / "runs").mkdir()
        (target / "runs/log.txt").write_text("mine too")
        assert len(list(target.glob("model-*.safetensors"))) > 1
        assert run_nlq("convert", source, target, "--overwrite") == 0
        check_folder(target)
        assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]
        assert (target / "notes.txt").read_text() == "mine"
        assert (target / "runs/log.txt").read_text() == "mine too"
        assert_same_function(AutoModelForCausalLM.from_pretrained(target), gpt2_model)

    def test_overwritten_again(self, source, tmp_path):
        """With all that a tokenizer can bring along, folders included."""
        tokenizer = make_tokenizer()
        tokenizer.chat_template = {"default": "{{ messages }}", "tool": "{{ tools }}"}
        tokenizer.save_pretrained(source)
        convert(str(source), tmp_path / "target")
        before = snapshot(tmp_path / "target")
        convert(str(source), tmp_path / "target", overwrite=True)
        assert snapshot(tmp_path / "target") == before
        assert AutoTokenizer.from_pretrained(tmp_path / "target").chat_template == tokenizer.chat_template

    def test_overwritten_by_gpt2(self, source, gpt2_model, tmp_path):
        convert(str(source), tmp_path / "nlq")
        convert(str(source), tmp_path / "target")
        convert(str(tmp_path / "nlq"), tmp_path / "target", to="gpt2", overwrite=True)
        check_folder(tmp_path / "target", is_gpt2=True)
        assert_same_state(GPT2LMHeadModel.from_pretrained(tmp_path / "target").state_dict(), gpt2_model.state_dict())

    def test_overwritten_beside_the_checkpoint(self, tmp_path, capsys):
        checkpoint = make_checkpoint()
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        (tmp_path / "config.json").write_text("{}")  # without it, there is no model that could be replaced
        before = snapshot(tmp_path)
        nlq_fails(capsys, "convert", tmp_path / "ckpt.pt", tmp_path)
        assert snapshot(tmp_path) == before
        assert run_nlq("convert", tmp_path / "ckpt.pt", tmp_path, "--overwrite") == 0
        assert_same_state(read_checkpoint(tmp_path / "ckpt.pt")["model"], checkpoint["model"])
        assert_same_as_paper(AutoModelForCausalLM.from_pretrained(tmp_path), checkpoint)

    @parametrize_cases(
        "damage",
        {
            "truncated": truncate,
            "missing_key": DAMAGES["missing_key"][0],
            "tokenizer": lambda source: (source / "tokenizer.json").write_text("{broken"),
        },
    )
    def test_existing_target_survives(self, source, nlq_folder, tmp_path, capsys, damage):
        damage(source)
        before = snapshot(tmp_path)
        nlq_fails(capsys, "convert", source, nlq_folder, "--overwrite")
        assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
    @pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"])
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("writer", [PreTrainedModel, PreTrainedTokenizerFast], ids=["weights", "tokenizer"])
    def test_writing_fails(self, source, nlq_folder, tmp_path, capsys, monkeypatch, existing, error, when, writer):
        target = nlq_folder if existing else tmp_path / "target"
        save = writer.save_pretrained

        def fail(self, folder, *arguments, **options):
            if when == "after":
                save(self, folder, *arguments, **options)
            raise error

        before = snapshot(tmp_path)
        monkeypatch.setattr(writer, "save_pretrained", fail)
        assert run_nlq("convert", source, target, "--overwrite") != 0
        assert "Traceback" not in capsys.readouterr().err
        assert snapshot(tmp_path) == before

    def test_no_such_tokenizer(self, gpt2_folder, tmp_path, capsys):
        assert "no-such-folder" in nlq_fails(
            capsys, "convert", gpt2_folder, tmp_path / "target", "--tokenizer", tmp_path / "no-such-folder"
        )
        assert not list(tmp_path.iterdir())

    def test_tokenizer_that_is_too_large(self, gpt2_folder, tmp_path, capsys):
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([f"<new {index}>" for index in range(9)])
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        options = ("--tokenizer", tmp_path / "tokenizer")
        assert "48" in nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", *options)
        assert not (tmp_path / "target").exists()

    def test_upcycled_gpt2(self, gpt2_folder, tmp_path, capsys):
        message = nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", "--to", "gpt2", "--upcycle")
        assert "gpt2" in message
        with pytest.raises(ValueError, match="gpt2"):
            convert(str(gpt2_folder), tmp_path / "target", to="gpt2", upcycle=True)
        assert not list(tmp_path.iterdir())

    def test_unknown_format(self, gpt2_folder, tmp_path, capsys):
        assert "llama" in nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", "--to", "llama")
        with pytest.raises(ValueError, match="llama"):
            convert(str(gpt2_folder), tmp_path / "target", to="llama")
        assert not list(tmp_path.iterdir())

    def test_switches_without_upcycling(self, gpt2_folder, tmp_path, capsys):
        """Set, or refused; not passed over."""
        try:
            convert(str(gpt2_folder), tmp_path / "target", switches={"head_projection": True})
        except ValueError as error:
            assert "upcycle" in str(error)
            assert "--upcycle" in nlq_fails(
                capsys, "convert", gpt2_folder, tmp_path / "target", "--set", "head_projection=true"
            )
            assert not list(tmp_path.iterdir())
        else:
            assert AutoModelForCausalLM.from_pretrained(tmp_path / "target").config.head_projection

    @pytest.mark.parametrize(
        "setting, named",
        [
            ("head_projection", "head_projection"),
            ("no_such_field=3", "no_such_field"),
            ("query_projektion=upcycled", "query_projektion"),
            ("attention_sink=learned", "attention_sink"),
            ("intermediate_size=wide", "intermediate_size"),
            ("attention_gate=[headwise", "headwise"),
            ("=3", "=3"),
        ],
    )
    def test_bad_setting(self, gpt2_folder, tmp_path, capsys, setting, named):
        assert named in nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", "--upcycle", "--set", setting)
        assert not list(tmp_path.iterdir())

    def test_unknown_option(self, gpt2_folder, tmp_path, capsys):
        assert "--upcycled" in nlq_fails(capsys, "convert", gpt2_folder, tmp_path / "target", "--upcycled")


class TestTokenizerOfAnotherFolder:
    """`--tokenizer` puts one beside any model, whatever its head."""

    @pytest.mark.parametrize("model_class", [GPT2LMHeadModel, GPT2Model, GPT2ForSequenceClassification])
    @pytest.mark.parametrize("to", ["nlq", "gpt2"])
    def test_every_head(self, model_class, to, tmp_path):
        make_gpt2(model_class, pad_token_id=3, vocab_size=48).save_pretrained(tmp_path / "source")
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        convert(tmp_path / "source", tmp_path / "target", to=to, tokenizer=str(tmp_path / "tokenizer"))
        assert AutoTokenizer.from_pretrained(tmp_path / "target").get_vocab() == tokenizer.get_vocab()
        settings = json.loads((tmp_path / "target/config.json").read_text())
        assert settings["eos_token_id"] == tokenizer.eos_token_id
        if model_class is GPT2ForSequenceClassification:
            assert settings["pad_token_id"] == 3, "the token that its answer is read off is another"


class TestTokenIds:
    def test_reach_generation(self, make_model):
        model = make_model(query_projection="linear", eos_token_id=1)
        assert upcycle(model, {"eos_token_id": 5}).generation_config.eos_token_id == 5

    def test_padding_of_a_classifier(self):
        model = from_gpt2(make_gpt2(GPT2ForSequenceClassification, pad_token_id=3))
        with pytest.raises(ValueError, match="pad_token_id=3 cannot become 5: a classifier"):
            upcycle(model, {"pad_token_id": 5})


class TestOtherFindings:
    def test_training_run_is_not_replaced(self, run, tmp_path, capsys):
        shutil.copytree(run[0], tmp_path / "run")
        make_gpt2().save_pretrained(tmp_path / "source")
        before = snapshot(tmp_path / "run")
        assert run_nlq("convert", tmp_path / "source", tmp_path / "run", "--overwrite") == 1
        assert "holds a training run" in capsys.readouterr().err and snapshot(tmp_path / "run") == before

    def test_folder_of_a_checkpoint(self, tmp_path):
        (tmp_path / "out").mkdir()
        torch.save(make_checkpoint(), tmp_path / "out/ckpt.pt")
        done = convert(tmp_path / "out", tmp_path / "target", upcycle=False, switches={"head_projection": True})
        assert (done.source, done.source_class, done.difference) == ("out", "checkpoint", None)

    @pytest.mark.parametrize(
        "words, said",
        [
            (["--upcycle", "--set", "query_projection=linear"], "contradict each other"),
            (["--set", "head_projection=True", "--set", "head_projection=False"], "given twice"),
            (["--set", "head_projection=False"], "head_projection=False already"),
        ],
        ids=["contradiction", "twice", "nothing new"],
    )
    def test_switches_that_make_no_sense(self, words, said, tmp_path, capsys):
        from_gpt2(make_gpt2()).save_pretrained(tmp_path / "source")
        assert run_nlq("convert", tmp_path / "source", tmp_path / "target", *words) == 1
        assert said in capsys.readouterr().err and not (tmp_path / "target").exists()

    def test_rounding_of_low_precision(self, tmp_path):
        from_gpt2(make_gpt2()).to(torch.bfloat16).save_pretrained(tmp_path / "source")
        convert(tmp_path / "source", tmp_path / "target", switches={"query_projection": "residual"})

    def test_layers_with_a_value_of_their_own_are_upcycled_too(self):
        model = upcycle(from_gpt2(make_gpt2()), {"per_layer_config": {1: {"query_projection": "residual"}}})
        layers = upcycle(model).config.per_layer_config
        assert [layer.query_projection for layer in layers] == ["upcycled"] * len(layers)
