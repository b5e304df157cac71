"""Small random models of the families that NLQ converts, in the shapes that make a difference."""

import functools

import torch
from support.conversion_cases import randomize
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    CwmConfig,
    DiffLlamaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    NanoChatConfig,
    Olmo2Config,
    OlmoConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)


WINDOW = 4  # tokens; the texts are longer
_SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILY_CASES = {
    "llama-grouped": (LlamaConfig, _GROUPED),
    "llama-biases_and_wide_heads": (
        LlamaConfig,
        {**_GROUPED, "head_dim": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-one_key_head_and_llama3": (
        LlamaConfig,
        {
            **_GROUPED,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 8},
            "rms_norm_eps": 0.1,
        },
    ),
    "llama-linear_rope": (
        LlamaConfig,
        {**_SIZES, "mlp_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 20.0, "factor": 3.0}},
    ),
    "llama-proportional_rope": (
        LlamaConfig,
        {**_GROUPED, "rope_parameters": {"rope_type": "proportional", "rope_theta": 20.0, "partial_rotary_factor": 0.5}},
    ),
    "mistral-window": (MistralConfig, {**_GROUPED, "sliding_window": WINDOW}),
    "mistral-window_and_wide_heads": (
        MistralConfig,
        {**_GROUPED, "sliding_window": WINDOW + 1, "head_dim": 10, "tie_word_embeddings": True},
    ),
    "mistral-without_window": (
        MistralConfig,
        {**_GROUPED, "sliding_window": None, "head_dim": 6, "eos_token_id": [2, 3], "hidden_act": "gelu"},
    ),
    "cwm-windows": (CwmConfig, {**_GROUPED, "sliding_window": WINDOW, "head_dim": 6, "mlp_bias": True}),
    "cwm-every_layer": (
        CwmConfig,
        {**_GROUPED, "sliding_window": 5, "head_dim": 4, "layer_types": _LAYERS[:1] * 3},
    ),
    "cwm-default_rope": (
        CwmConfig,
        {
            **_SIZES,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
            **_ROPE,
        },
    ),
    "qwen2-grouped": (Qwen2Config, _GROUPED),
    "qwen2-windows_in_upper_layers": (
        Qwen2Config,
        {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen2-wide_heads_and_yarn": (Qwen2Config, {**_GROUPED, "head_dim": 6, "rope_parameters": _YARN}),
    "qwen3-width_that_is_no_multiple": (Qwen3Config, {**_GROUPED, "hidden_size": 14, "head_dim": 10}),
    "qwen3-windows_and_bias": (
        Qwen3Config,
        {
            **_GROUPED,
            "head_dim": 6,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _LAYERS,
        },
    ),
    "qwen3-one_key_head": (Qwen3Config, {**_SIZES, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}),
    "smollm3-every_second_layer": (SmolLM3Config, {**_GROUPED, "no_rope_layer_interval": 2}),
    "smollm3-windows_and_biases": (
        SmolLM3Config,
        {
            **_GROUPED,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3-windows_in_other_layers": (
        SmolLM3Config,
        {
            **_GROUPED,
            "head_dim": 10,
            "no_rope_layers": [1, 1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _LAYERS,
        },
    ),
    "arcee-grouped": (ArceeConfig, _GROUPED),
    "arcee-biases_and_wide_heads": (ArceeConfig, {**_GROUPED, "head_dim": 6, "attention_bias": True, "mlp_bias": True}),
    "arcee-yarn_and_epsilon": (ArceeConfig, {**_SIZES, "rope_parameters": _YARN, "rms_norm_eps": 0.1}),
    "seed_oss-biases": (SeedOssConfig, {**_GROUPED, "head_dim": 6}),
    "seed_oss-other_biases": (
        SeedOssConfig,
        {
            **_SIZES,
            "head_dim": 8,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
    ),
    "seed_oss-tied": (SeedOssConfig, {**_GROUPED, "head_dim": 4, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "starcoder2-grouped": (Starcoder2Config, _GROUPED),
    "starcoder2-window": (Starcoder2Config, {**_GROUPED, "sliding_window": WINDOW, "tie_word_embeddings": False}),
    "starcoder2-without_biases": (
        Starcoder2Config,
        {**_SIZES, "num_key_value_heads": 1, "use_bias": False, "norm_epsilon": 0.1},
    ),
    "olmo-all_heads": (OlmoConfig, {**_SIZES, "hidden_size": 24}),
    "olmo-grouped": (OlmoConfig, {**_GROUPED, "tie_word_embeddings": True}),
    "olmo-biases": (OlmoConfig, {**_GROUPED, "attention_bias": True, "hidden_act": "gelu"}),
    "nanochat-grouped": (NanoChatConfig, _GROUPED),
    "nanochat-bias_and_cap": (NanoChatConfig, {**_GROUPED, "attention_bias": True, "final_logit_softcapping": 1.0}),
    "nanochat-without_cap": (
        NanoChatConfig,
        {**_SIZES, "num_key_value_heads": 1, "final_logit_softcapping": None, "rms_norm_eps": 0.1, "tie_word_embeddings": True},
    ),
    "olmo2-all_heads": (Olmo2Config, {**_SIZES, "hidden_size": 24}),
    "olmo2-grouped": (Olmo2Config, {**_GROUPED, "rms_norm_eps": 0.1, "tie_word_embeddings": True}),
    "olmo2-biases_and_wide_heads": (Olmo2Config, {**_GROUPED, "head_dim": 10, "attention_bias": True}),
    "diffllama-every_head_has_keys": (DiffLlamaConfig, {**_SIZES, "rms_norm_eps": 0.1, "tie_word_embeddings": True}),
    "diffllama-grouped": (DiffLlamaConfig, {**_GROUPED, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}),
    "diffllama-bias_and_llama3": (
        DiffLlamaConfig,
        {
            **_GROUPED,
            "head_dim": 10,
            "attention_bias": True,
            "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 8},
        },
    ),
    "gpt_neox-partial": (GPTNeoXConfig, {**_SIZES, "hidden_size": 32}),
    "gpt_neox-sequential": (
        GPTNeoXConfig,
        {
            **_SIZES,
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox-without_biases": (
        GPTNeoXConfig,
        {
            **_SIZES,
            "num_attention_heads": 2,
            "hidden_size": 20,
            "attention_bias": False,
            "rope_parameters": {**_YARN, "partial_rotary_factor": 0.4},
            "hidden_act": "relu",
        },
    ),
}
# One of each family, for what does not depend on the shape
ONE_OF_EACH = {
    "llama": "llama-biases_and_wide_heads",
    "mistral": "mistral-window_and_wide_heads",
    "cwm": "cwm-windows",
    "qwen2": "qwen2-windows_in_upper_layers",
    "qwen3": "qwen3-windows_and_bias",
    "smollm3": "smollm3-windows_and_biases",
    "arcee": "arcee-biases_and_wide_heads",
    "seed_oss": "seed_oss-other_biases",
    "starcoder2": "starcoder2-window",
    "olmo": "olmo-biases",
    "nanochat": "nanochat-bias_and_cap",
    "olmo2": "olmo2-grouped",
    "diffllama": "diffllama-bias_and_llama3",
    "gpt_neox": "gpt_neox-partial",
}


def make_config(name: str, **options) -> PreTrainedConfig:
    config_class, values = FAMILY_CASES[name]
    return config_class(**{**values, **options})


def make_family_model(name, auto_class=AutoModelForCausalLM, dtype=torch.float32, seed=0, **options):
    """A model of a case, all of whose weights are random."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for vectors that begin at random values, to which noise is added
        model = auto_class.from_config(make_config(name, **options))
    return randomize(model.to(dtype), seed).eval()


@functools.cache
def shared_family_model(name):
    """The same, for tests that do not change it."""
    return make_family_model(name)
