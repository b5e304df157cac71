"""Configurations as they are published on the Hub: every field is read, and the sizes are those of the models."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from support.family_cases import ONE_OF_EACH, make_family_model
from support.remote_code import WITHOUT_THIS_PACKAGE
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_nlq import NLQForCausalLM
from modeling_nlq.training.conversion.converting import convert
from modeling_nlq.training.conversion.families import FAMILIES
from modeling_nlq.training.conversion.renaming import class_in_family, empty_model, nearest_in_family
from modeling_nlq.training.conversion.upcycling import only_adds
from modeling_nlq.training.models import load_config
from modeling_nlq.training.parameters import measure


# Name -> (parameters, config.json without what names versions)
PUBLISHED = {
    "llama-160m": (
        162_417_408,
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "max_position_embeddings": 2048,
            "model_type": "llama",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-06,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": 32000,
        },
    ),
    "DiffLlama-0.3B-handcut": (
        1_235_818_496,  # the 4.94 GB of its float32 weights
        {
            "architectures": ["DiffLlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "diffllama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": 128256,
        },
    ),
    "SmolLM2-135M": (
        134_515_008,
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 49152,
        },
    ),
    "Llama-3.2-1B-Instruct": (
        1_235_814_400,
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 128256,
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 32000,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": 128012,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pad_token_id": 128012,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
    ),
    "OLMo-2-0425-1B": (
        1_484_916_736,
        {
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": 100257,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "model_type": "olmo2",
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "pad_token_id": 100277,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": False,
            "vocab_size": 100352,
        },
    ),
    "pythia-160m": (
        162_322_944,
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neox",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "use_cache": True,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
    ),
    "gpt2": (
        124_439_808,
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
    ),
}


@pytest.mark.parametrize("parameters, values", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configuration(parameters, values, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = AutoConfig.from_pretrained(tmp_path)
    family = FAMILIES[config.model_type]
    assert family.not_read(config) == []
    ours = family.read(config)
    assert empty_model(NLQForCausalLM, ours).num_parameters() == parameters
    assert ours.eos_token_id == values["eos_token_id"]

    back, plain = nearest_in_family(config.model_type, ours)
    assert only_adds(ours, plain), "a conversion back needs no other numbers"
    extra = {"is_llama_config", "rope_interleaved", "pretraining_tp", "max_window_layers", "use_mrope", "n_ctx"}
    extra |= {"mlp_bias"} - {field.name for field in dataclasses.fields(config)}
    without_effect = {*extra, "task_specific_params", "no_rope_layer_interval", "architectures", "dtype"}

    def comparable(config):
        values = copy.deepcopy(config.to_dict())
        return {name: value for name, value in values.items() if name not in without_effect and not name.startswith("_")}

    assert comparable(back) == comparable(config)


@pytest.mark.slow
@pytest.mark.parametrize("family, name", ONE_OF_EACH.items(), ids=ONE_OF_EACH)
def test_back_needs_no_package(family, name, tmp_path):
    make_family_model(name).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "nlq")
    convert(tmp_path / "nlq", tmp_path / "back", to=family)
    script = WITHOUT_THIS_PACKAGE + (
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "one, two = (AutoModelForCausalLM.from_pretrained(path) for path in sys.argv[1:])\n"
        "assert type(one) is type(two) and type(one).__module__.startswith('transformers.')\n"
        "assert one.state_dict().keys() == two.state_dict().keys()\n"
        "assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "source"), str(tmp_path / "back")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# Name of a shape in `configuration/models` -> the published model
SHIPPED = {
    "llama-160m": "llama-160m",
    "smollm2-135m": "SmolLM2-135M",
    "qwen3-0.6b": "Qwen3-0.6B",
    "pythia-160m": "pythia-160m",
    "olmo2-1b": "OLMo-2-0425-1B",
}


@pytest.mark.parametrize("name, original", SHIPPED.items(), ids=SHIPPED)
def test_shipped_shape_is_that_of_the_original(name, original):
    values = PUBLISHED[original][1]
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert measure(load_config(name)).total == parameters == PUBLISHED[original][0]
    # A recipe sets the token ids, and all shapes have a cache
    free = {"architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "use_cache"}
    parts = ("query_key_value", "attention_output", "mlp")
    ours, theirs = (
        {**each.to_dict(), **{f"{part}_bias": each.has_bias(part) for part in parts}}
        for each in (load_config(name), FAMILIES[config.model_type].read(config))
    )
    assert {key: ours[key] for key in ours.keys() - free} == {key: theirs[key] for key in ours.keys() - free}


@pytest.mark.parametrize("name", ["tiny-llama", *SHIPPED])
def test_variant_has_as_many_parameters(name):
    """Another query, and everything else equal."""
    query = "bottleneck" if name.startswith("qwen3") else "nonlinear"  # its queries are wider than `hidden_size`
    ours, variant = load_config(name), load_config(f"{name}-{query}")
    assert variant.query_projection == query
    free = {"query_projection", "projection_bottleneck_size"}
    assert {key for key, value in variant.to_dict().items() if value != ours.to_dict()[key]} <= free
    assert measure(variant).non_embedding == pytest.approx(measure(ours).non_embedding, rel=2e-3 if "tiny" in name else 5e-4)


@pytest.mark.parametrize("name", ["tiny-llama", *SHIPPED])
def test_shipped_shape_can_go_back(name):
    """A model that was trained here in the shape of a family can be written as one, and no number changes."""
    ours = load_config(name)
    family = "llama" if name not in SHIPPED else PUBLISHED[SHIPPED[name]][1]["model_type"]
    theirs, plain = nearest_in_family(family, ours)
    assert only_adds(ours, plain)
    model = empty_model(class_in_family(family, NLQForCausalLM), theirs)
    assert model.num_parameters() == empty_model(NLQForCausalLM, ours).num_parameters()
