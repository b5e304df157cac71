"""Small random models of the families that NLQ converts, in the shapes that make a difference."""

import functools

import torch
from support.conversion_cases import randomize
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


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
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

# Family and shape -> fields that differ from `_SIZES` with two heads of keys
FAMILY_CASES = {
    "llama-grouped": {},
    "llama-one_key_head_and_llama3": {
        "num_key_value_heads": 1,
        "head_dim": 10,
        "rope_parameters": _LLAMA3,
        "rms_norm_eps": 0.1,
    },
    "llama-proportional_rope": {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 20.0, "partial_rotary_factor": 0.5}
    },
    "llama-biases_and_wide_heads": {
        "head_dim": 6,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral-window": {"sliding_window": WINDOW},
    "mistral-without_window": {"eos_token_id": [2, 3], "sliding_window": None, "head_dim": 6, "hidden_act": "gelu"},
    "mistral-window_and_wide_heads": {"sliding_window": WINDOW + 1, "head_dim": 10, "tie_word_embeddings": True},
    "cwm-every_layer": {"sliding_window": WINDOW + 1, "head_dim": 4, "layer_types": _LAYERS[:1] * 3},
    "cwm-windows": {"sliding_window": WINDOW, "head_dim": 6, "mlp_bias": True},
    "qwen2-grouped": {},
    "qwen2-wide_heads_and_yarn": {"head_dim": 6, "rope_parameters": _YARN},
    "qwen2-windows_in_upper_layers": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3-width_that_is_no_multiple": {"hidden_size": 14, "head_dim": 10},
    "qwen3-one_key_head": {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3-windows_and_bias": {
        "head_dim": 6,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": _LAYERS,
    },
    "smollm3-every_second_layer": {"no_rope_layer_interval": 2},
    "smollm3-windows_and_biases": {
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "arcee-yarn_and_epsilon": {"rope_parameters": _YARN, "rms_norm_eps": 0.1, "num_key_value_heads": 4},
    "arcee-biases_and_wide_heads": {"head_dim": 6, "attention_bias": True, "mlp_bias": True},
    "seed_oss-biases": {"head_dim": 6},
    "seed_oss-other_biases": {
        "head_dim": 8,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "eurobert-biases": {
        "mask_token_id": 28,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "rope_parameters": _LLAMA3,
        "rms_norm_eps": 0.1,
    },
    "eurobert-grouped": {"mask_token_id": 3},
    "starcoder2-without_biases": {"num_key_value_heads": 1, "use_bias": False, "norm_epsilon": 0.1},
    "starcoder2-window": {"sliding_window": WINDOW, "tie_word_embeddings": False},
    "olmo-grouped": {"tie_word_embeddings": True},
    "olmo-biases": {"attention_bias": True, "hidden_act": "gelu"},
    "nanochat-without_cap": {
        "num_key_value_heads": 1,
        "final_logit_softcapping": None,
        "rms_norm_eps": 0.1,
        "tie_word_embeddings": True,
    },
    "nanochat-bias_and_cap": {"attention_bias": True, "final_logit_softcapping": 1.0},
    "olmo2-all_heads": {"hidden_size": 24, "num_key_value_heads": 4},
    "olmo2-biases_and_wide_heads": {"head_dim": 10, "attention_bias": True},
    "olmo2-grouped": {"rms_norm_eps": 0.1, "tie_word_embeddings": True},
    "diffllama-grouped": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6},
    "diffllama-bias_and_llama3": {"head_dim": 10, "attention_bias": True, "rope_parameters": _LLAMA3},
    "gpt_neox-sequential": {
        "use_parallel_residual": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": True,
    },
    "gpt_neox-without_biases": {
        "hidden_size": 20,
        "num_attention_heads": 2,
        "attention_bias": False,
        "rope_parameters": {**_YARN, "partial_rotary_factor": 0.4},
        "hidden_act": "relu",
    },
    "gpt_neox-partial": {"hidden_size": 32},
    "gpt2-unscaled": {
        "scale_attn_weights": False,
        "layer_norm_epsilon": 0.1,
        "attn_pdrop": 0.35,
        "eos_token_id": [3, 4],
    },
    "gpt2-untied": {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 64, "use_cache": False},
    "gpt2-scaled_by_layer": {
        "scale_attn_by_inverse_layer_idx": True,
        "n_inner": 13,
        "embd_pdrop": 0.15,
        "resid_pdrop": 0.25,
    },
}


def family_of(name: str) -> str:
    return name.partition("-")[0]


# The last of each family, for what does not depend on the shape
ONE_OF_EACH = {family_of(name): name for name in FAMILY_CASES}


def make_config(name: str, **options) -> PreTrainedConfig:
    family = family_of(name)
    values = {**_SIZES, "num_key_value_heads": 2, **FAMILY_CASES[name], **options}
    if family in ("gpt_neox", "gpt2"):  # which have one for each head of queries
        del values["num_key_value_heads"]
    if family == "gpt2":
        width = values.pop("intermediate_size")
        values.setdefault("n_inner", width)
    return CONFIG_MAPPING[family](**values)


def is_encoder(name: str) -> bool:
    return family_of(name) == "eurobert"


def language_model_class(name: str) -> type:
    return AutoModelForMaskedLM if is_encoder(name) else AutoModelForCausalLM


def make_family_model(name, auto_class=None, dtype=torch.float32, seed=0, **options):
    """Makes the model of a case with random weights; a language model by default."""
    auto_class = auto_class or language_model_class(name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # for vectors that begin at random values, to which noise is added
        model = auto_class.from_config(make_config(name, **options))
    return randomize(model.to(dtype), seed).eval()


@functools.cache
def shared_family_model(name):
    """The same, for tests that do not change it."""
    return make_family_model(name)


def comparable(config: PreTrainedConfig) -> dict:
    """Returns the fields that a model reads."""
    dropped = {"max_window_layers", "no_rope_layer_interval", "transformers_version", "architectures", "dtype"}
    values = {
        name: value for name, value in config.to_dict().items() if name not in dropped and not name.startswith("_")
    }
    if values.get("head_dim") == config.hidden_size // config.num_attention_heads:
        del values["head_dim"]  # the default of classes that do not declare it
    if "no_rope_layers" in values:
        values["no_rope_layers"] = values["no_rope_layers"][: config.num_hidden_layers]
    if config.model_type == "gpt2":
        values["n_inner"] = values["n_inner"] or 4 * config.n_embd
        values.pop("intermediate_size", None)
    return values
