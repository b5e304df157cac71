"""The configuration class: what it accepts, refuses, and keeps; and every file of `configuration/`."""

import functools
import json
import logging

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from huggingface_hub.errors import StrictDataclassError
from support.model_cases import (
    DELTA,
    ELEMENTWISE_KINDS,
    LINEAR_KINDS,
    PART_SWITCHES,
    ROTARY,
    ROW_KINDS,
    SOFTMAX_KINDS,
    parametrize_switches,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from modeling_nlq import NLQConfig, NLQForCausalLM, linear_nlq
from modeling_nlq.configuration import find, names
from modeling_nlq.linear_nlq import chunked_delta_form, chunked_form
from modeling_nlq.parts_builtin_nlq import DifferentialAttention
from modeling_nlq.parts_user_nlq import AUTO_MAP
from modeling_nlq.training.loading import load_config
from modeling_nlq.training.run.recipe import load_recipe
from modeling_nlq.training.size import Size, auto_class_of, matching_intermediate_size, measure


SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY = {**SIZES, "max_position_embeddings": 16}
# arXiv 2603.13381, table 1 and its public code: parameters that are no embeddings
PAPER = {
    "linear": 84_953_856,
    "residual": 84_953_856,
    "identity": 77_875_968,
    "nonlinear": 84_972_288,
    "mlp-3328": 89_672_448,
    "mlp-3456": 92_031_744,
    "mlp-3552": 93_801_216,
    "mlp-3648": 95_570_688,
    "mlp-3840": 99_109_632,
}


@pytest.mark.parametrize("name", PAPER)
def test_sizes_are_the_papers(name):
    size = measure(load_config(f"gpt3-small-{name}"))
    assert size.non_embedding == PAPER[name]
    assert size.total == size.non_embedding + 50304 * 768 + 1024 * 768


@pytest.mark.parametrize("is_causal, visible, context", [(True, 16, 100), (False, 33, 100), (False, 33, 24)])
def test_flops_of_windows(is_causal, visible, context):
    switches = {**TINY, "head_dim": 8, "is_causal": is_causal, "per_layer_config": {1: {"sliding_window": None}}}
    whole, windowed = (
        measure(NLQConfig(**switches, sliding_window=window), context).flops_per_token for window in (None, 16)
    )
    assert whole - windowed == 6 * 2 * 2 * (context - min(context, visible)) * 4 * 8


@pytest.mark.thin(6)
@pytest.mark.parametrize("key_value_heads", [4, 2])
@parametrize_switches(PART_SWITCHES | SOFTMAX_KINDS | ELEMENTWISE_KINDS | ROW_KINDS | LINEAR_KINDS)
def test_flops_of_parts_and_activations_equal_those_pytorch_counts(monkeypatch, switches, key_value_heads):
    sizes = {**TINY, "query_projection": "linear", **switches}
    sizes |= {"num_key_value_heads": key_value_heads, "sliding_window": None}
    is_linear = switches.get("attention_activation") == "linear_attention"
    config = NLQConfig(**sizes, attn_implementation="nlq" if is_linear else "eager")
    model, context = NLQForCausalLM(config), config.max_position_embeddings
    # `eager` returns the weights too, which no training needs
    monkeypatch.setattr(DifferentialAttention, "change_returned_weights", lambda part, call, weights: weights)

    def count(chunk_size=None):
        for form in (chunked_form, chunked_delta_form):
            monkeypatch.setattr(linear_nlq, form.__name__, functools.partial(form, chunk_size=chunk_size))
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, context, dtype=torch.long), use_cache=False)
        return counter.get_total_flops() / context

    per_layer = 2 * config.hidden_size * config.num_hidden_layers
    counted = count()
    if is_linear:  # the pairs within a chunk grow with its size: what is left at 0 are the products with the state
        counted = 2 * count(4) - count(8)
    if is_linear and config.linear_attention_update == "additive":
        counted -= per_layer  # with the sum of the keys, which normalises
    if config.differential_attention == "v1":  # whose keys have as many zeros as elements
        counted -= context * per_layer
    # Elementwise products, which PyTorch does not count
    counted += sum(2 * weight.numel() for name, weight in model.named_parameters() if "convolutions" in name)
    if config.depth_attention:  # scores and means of 1 output, of 2, and so on up to the final norm
        counted += 4 * config.hidden_size * sum(range(1, 2 * config.num_hidden_layers + 2))
    assert measure(config).flops_per_token == 3 * counted


@pytest.mark.parametrize("without", [0, 1])
def test_flops_of_depth_attention_count_what_each_layer_adds(without):
    """Two outputs in the layer without cross-attention and three in the other."""
    layers = {without: {"cross_attention": False}}
    switches = {**TINY, "num_hidden_layers": 2, "add_cross_attention": True, "per_layer_config": layers}
    plain, mixed = (measure(NLQConfig(**switches, depth_attention=value)).flops_per_token for value in (False, True))
    assert mixed - plain == 3 * 4 * switches["hidden_size"] * sum(range(1, 2 + 3 + 2))


@pytest.mark.parametrize("name", names("models"))
def test_shipped_models_build(name):
    config = AutoConfig.from_pretrained(find("models", name))
    with torch.device("meta"):
        model = auto_class_of(config).from_config(config)
    assert type(model).__name__ == config.architectures[0]
    if name.startswith("tiny-") and type(config) is NLQConfig:
        is_tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert 1e6 < model.num_parameters() < (2.2e6 if is_tied else 3e6)


@pytest.mark.parametrize("name", sorted({*names("recipes")} - {"heal"}))  # whose model its user converts
def test_shipped_recipes_go_through_the_parser(name):
    recipe = load_recipe(name, {"bf16": False, "torch_compile": False})
    if type(recipe.config) is NLQConfig:
        assert max(recipe.sample_lengths) <= recipe.config.max_position_embeddings
    arguments = recipe.arguments
    assert arguments.lr_scheduler_type in ("cosine_with_min_lr", "cosine")
    assert (arguments.max_steps > 0) == (name != "ladder")  # whose scales set it


@pytest.mark.parametrize("name", names("accelerate"))
def test_shipped_accelerate_files_are_valid(name):
    config = load_config_from_file(str(find("accelerate", name)))
    assert (config.distributed_type == DistributedType.NO) == (config.num_processes == 1)


SQUARED = {"attention_activation": "squared", "attention_normalization": "length", "norm_position": "post"}
ROUND_TRIPS = {
    "defaults": {},
    "switches": {**SQUARED, "use_bias": True},
    "numbers": {"attention_scaling": 0.5, "attention_output_scaling": 2, "eos_token_id": [1, 2]},
    "per_layer": {"per_layer_config": {1: LINEAR_KINDS["linear_learned"], 2: {"qk_norm": "rms"}}},
    "rope": ROTARY["yarn"] | {"position_embedding": "rope"},
    "modern": ROTARY["not_in_each_layer"] | ROTARY["partial"] | {"position_embedding": "rope", "sliding_window": 8},
}


@parametrize_switches(ROUND_TRIPS)
def test_saved_configurations_load_as_they_were(switches, tmp_path):
    config = NLQConfig(**{**TINY, **switches})
    config.save_pretrained(tmp_path)
    loaded = NLQConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    first = (tmp_path / "config.json").read_text()
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == first
    stored = json.loads(first)
    assert loaded.auto_map == config.auto_map == AUTO_MAP and stored["nlq_version"]
    assert stored["auto_map"] == {name: path for name, path in AUTO_MAP.items() if name != "AutoModelForMaskedLM"}


# Switches, and words of the message, which names field and value, and what is allowed
LINEAR = {"attention_activation": "linear_attention"}


def layers(index, **switches):
    return {"per_layer_config": {index: switches}}


def rope(**options):
    return {"position_embedding": "rope", "rope_parameters": {"rope_theta": 1e4, **options}}


BAD = [
    ({"query_projection": "cubic"}, ["query_projection='cubic'", "nonlinear", "upcycled"]),
    ({"attention_activation": "softmx"}, ["attention_activation='softmx'", "unknown", "softmax", "silu"]),
    ({"linear_attention_decay": "fixed"}, ["linear_attention_decay='fixed'", "'linear_attention'", "'softmax'"]),
    (
        {**LINEAR, "linear_attention_decay": "fixed", **layers(2, attention_activation="relu")},
        ["layer 2", "linear_attention_decay='fixed'", "'linear_attention'", "'relu'"],
    ),
    ({**LINEAR, "linear_attention_decay": "fast"}, ["linear_attention_decay", "fast", "fixed", "learned"]),
    ({**LINEAR, "linear_attention_decay": "gated"}, ["decay='gated'", "linear_attention_update='delta'"]),
    ({**LINEAR, "linear_attention_beta": 2}, ["linear_attention_beta=2", "linear_attention_update='delta'"]),
    ({"linear_attention_update": "delta"}, ["update='delta'", "'linear_attention'", "'softmax'"]),
    ({**DELTA, "qk_norm": "l2"}, ["qk_norm='l2' excludes linear_attention_update='delta'"]),
    ({**DELTA, "attention_normalization": "sum"}, ["attention_normalization='sum' excludes", "'delta'"]),
    ({**DELTA, "is_causal": False}, ["linear_attention_update='delta' needs an order", "use is_causal=True"]),
    (
        {"add_cross_attention": True, "cross_attention": DELTA},
        ["cross_attention: 'linear_attention_update' cannot be set there"],
    ),
    ({"attention_dropout": 0.1, **layers(1, **LINEAR)}, ["layer 1", "attention_dropout=0.1 excludes", "'linear_"]),
    ({**LINEAR, "attention_sink": "zero"}, ["attention_sink='zero'", "'softmax'", "'linear_attention'"]),
    ({"hidden_act": "prelu"}, ["hidden_act='prelu'", "gelu"]),
    ({"hidden_act": None}, ["hidden_act"]),
    ({"norm_position": "middle"}, ["norm_position", "middle", "pre", "post"]),
    ({"hidden_size": "32"}, ["hidden_size", "int"]),
    ({"num_attention_heads": 5}, ["hidden_size=32", "num_attention_heads=5"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers=0"]),
    ({"num_hidden_layers": 10**7, **layers(1, **LINEAR)}, ["num_hidden_layers=10000000", "at most 10000"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads=3"]),
    ({"head_dim": 0, "query_projection": "linear"}, ["head_dim=0", "positive"]),
    ({"intermediate_size": -1}, ["intermediate_size=-1", "positive"]),
    (
        {"key_projection": "identity", "num_key_value_heads": 2},
        ["key_projection='identity'", "hidden_size=32", "linear", "upcycled"],
    ),
    ({"attention_normalization": "length"}, ["attention_normalization='length'", "'sum'"]),
    ({"attention_activation": "relu", "attention_normalization": "max"}, ["attention_normalization", "max", "length"]),
    ({"attention_activation": "tanh", "attention_normalization": "sum"}, ["'sum'", "'tanh'", "'length'"]),
    (rope(rope_type="dynamic", factor=2.0), ["rope_type='dynamic'", "yarn"]),
    (rope(rope_type="default", partial_rotary_factor=0.4), ["head_dim=8", "partial_rotary_factor=0.4", "3 rotated"]),
    (rope(rope_type="default", partial_rotary_factor=1.5), ["partial_rotary_factor=1.5", "12 rotated"]),
    (layers(1, position_embedding="none"), ["position_embedding='learned'", "all layers or of none"]),
    ({"sliding_window": 1}, ["sliding_window=1", "at least 2", "None"]),
    ({"sliding_window": 4, **layers(1, **LINEAR)}, ["layer 1", "sliding_window=4 excludes"]),
    (layers(1, norm_type="rmsnorm"), ["per_layer_config", "norm_type"]),
    ({"position_embedding": "rope", "head_dim": 7, "query_projection": "linear"}, ["head_dim=7"]),
    (
        {"head_dim": 7, "query_projection": "linear"}
        | rope(rope_type="proportional", factor=1.0, partial_rotary_factor=0.5),
        ["head_dim=7"],
    ),
    ({"num_attention_head": 4}, ["'num_attention_head'", "'num_attention_heads'"]),
    (layers(0, hidden_size=64), ["per_layer_config", "hidden_size"]),
    (layers(1, qk_nrom="l2"), ["per_layer_config", "qk_nrom", "qk_norm"]),
    ({"per_layer_config": [{"qk_norm": "l2"}]}, ["per_layer_config", "layer numbers"]),
    (layers("a", qk_norm="l2"), ["per_layer_config", "layer numbers"]),
    (layers(1, attention_activation="lol"), ["layer 1", "'lol'"]),
    (layers(1, skip=["mlp"]), ["per_layer_config", "skip"]),
]


@pytest.mark.parametrize("switches, words", BAD, ids=str)
def test_bad_values_are_named(switches, words):
    with pytest.raises((ValueError, StrictDataclassError)) as caught:
        NLQConfig(**{**TINY, **switches})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_override_of_from_pretrained_is_validated(tmp_path):
    NLQForCausalLM(NLQConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="attention_activation='nonsense' is unknown"):
        NLQForCausalLM.from_pretrained(tmp_path, attention_activation="nonsense")
    model = NLQForCausalLM.from_pretrained(tmp_path, attention_activation="relu")
    assert model.model.layers[0].self_attn.activation.name == "relu"


def test_unknown_keys_are_kept_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    config = NLQConfig(**TINY, colour="blue")
    assert "'colour'" in caplog.text and config.colour == "blue"
    caplog.clear()
    # What a newer version saved must load: a field like one of ours is a warning there
    NLQConfig(**TINY, nlq_version="99.0", query_projections="linear")
    assert "'query_projections'" in caplog.text


def test_an_mlp_is_widened_to_a_number_of_parameters():
    linear, identity = load_config("gpt3-small-linear"), load_config("gpt3-small-identity")
    width = matching_intermediate_size(identity, measure(linear))
    assert width == 3456  # 12 x 768^2 query weights over 12 x 2 x 768 a unit: 384 more
    matched = load_config("gpt3-small-identity", {"intermediate_size": width})
    assert measure(matched).non_embedding == measure(linear).non_embedding
    with pytest.raises(ValueError, match="no MLP width"):
        matching_intermediate_size(identity, Size(1000, 1000, 1000, 1000))


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'tiny-liner'.*did you mean 'tiny-linear'.*gpt3-small-linear"):
        find("models", "tiny-liner")
    with pytest.raises(ValueError, match="no field 'colour'"):
        load_config("tiny-linear", {"colour": "blue"})
