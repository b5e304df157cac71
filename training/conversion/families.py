"""The families of Transformers' models that are special cases of NLQ: the fields and names that each has for the same things.

`FAMILIES` has a row for each. A row is made of parts, because families share most of them. What no part of a family reads, and
is not the default, has no counterpart here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    ArceeConfig,
    CwmConfig,
    DiffLlamaConfig,
    GPT2Config,
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

from modeling_nlq import NLQConfig
from modeling_nlq.configuration_nlq import PER_LAYER_SWITCHES

from ..text import one_line


class Part(NamedTuple):
    """Fields of a family's configuration, and what they are in an NLQ model.

    Attributes:
        fields: their names in the family.
        read: function from a configuration of the family to fields of `NLQConfig`; a list has a value for each layer.
        write: function from the configurations of the layers of an NLQ model to fields of the family.
    """

    fields: tuple[str, ...]
    read: Callable[[PreTrainedConfig], dict[str, Any]]
    write: Callable[[Sequence[NLQConfig]], dict[str, Any]]


def _equal(**names: str) -> Part:
    """Fields with the same values; keywords are the names of the family, values those of `NLQConfig`."""
    return Part(
        tuple(names),
        lambda config: {ours: getattr(config, theirs) for theirs, ours in names.items()},
        lambda layers: {theirs: getattr(layers[0], ours) for theirs, ours in names.items()},
    )


def _read_rope(config: PreTrainedConfig) -> dict[str, Any]:
    return {"position_embedding": "rope", "rope_parameters": dict(config.rope_parameters)}


def _read_whole_rope(config: PreTrainedConfig) -> dict[str, Any]:
    factor = config.rope_parameters.get("partial_rotary_factor", 1.0)
    # `proportional` is the exception: it turns the rest of a whole head by an angle of 0
    if factor != 1.0 and config.rope_parameters.get("rope_type") != "proportional":
        raise ValueError(
            f"rope_parameters: partial_rotary_factor={factor!r}: Transformers' {config.model_type} rotates whole heads"
        )
    return _read_rope(config)


def _read_rope_before_norm(config: PreTrainedConfig) -> dict[str, Any]:
    if config.rope_parameters.get("rope_type") == "yarn" and config.rope_parameters.get("attention_factor") != 1.0:
        raise ValueError(
            "rope_parameters: the norms after rotation take yarn's factor of the scores out again; set attention_factor to "
            f"1.0, with which Transformers' {config.model_type} computes the same"
        )
    return _read_whole_rope(config)


def _write_rope(layers: Sequence[NLQConfig], **others: float) -> dict[str, Any]:
    parameters = dict(layers[0].rope_parameters or {})
    if parameters.get("rope_type") != "proportional":
        parameters.pop("partial_rotary_factor", None)
    return {"rope_parameters": {**parameters, **others}}


def _write_partial_rope(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    # Without it the family would rotate a quarter of each head
    return _write_rope(layers, partial_rotary_factor=(layers[0].rope_parameters or {}).get("partial_rotary_factor", 1.0))


def _read_rope_by_layer(config: PreTrainedConfig) -> dict[str, Any]:
    has_rope = config.no_rope_layers[: config.num_hidden_layers]  # 1 where a layer has rotary positions
    return {**_read_whole_rope(config), "position_embedding": ["rope" if has else "none" for has in has_rope]}


def _write_rope_by_layer(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    return {**_write_rope(layers), "no_rope_layers": [int(layer.position_embedding == "rope") for layer in layers]}


def _head_dim(config: PreTrainedConfig) -> dict[str, Any]:
    # All classes with this part read the field, also those that do not declare it
    return {"head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}


def _write_head_dim_unless_usual(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    usual = layers[0].hidden_size // layers[0].num_attention_heads
    return {} if layers[0].head_dim == usual else {"head_dim": layers[0].head_dim}


def _bias(name: str, *parts: str) -> Part:
    """A field for the biases of several parts, of which each has its own field here."""
    return Part(
        (name,),
        lambda config: {f"{part}_bias": getattr(config, name) for part in parts},
        lambda layers: {name: any(layers[0].has_bias(part) for part in parts)},
    )


def _read_windows(config: PreTrainedConfig) -> dict[str, Any]:
    windows, uses_windows = {"full_attention": None}, getattr(config, "use_sliding_window", True)
    if uses_windows and config.sliding_window is not None:
        windows["sliding_attention"] = config.sliding_window
    if unknown := sorted(set(config.layer_types) - windows.keys()):
        raise ValueError(
            f"layer_types: {', '.join(unknown)} must be one of {', '.join(windows)}, with "
            f"use_sliding_window={uses_windows} and sliding_window={config.sliding_window}"
        )
    return {"sliding_window": [windows[kind] for kind in config.layer_types]}


def _write_windows(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    windows = [layer.sliding_window for layer in layers]
    return {
        "use_sliding_window": any(windows),
        "sliding_window": next(filter(None, windows), None),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def _write_windows_alone(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    return {name: value for name, value in _write_windows(layers).items() if name != "use_sliding_window"}


def _read_scaling(config: PreTrainedConfig) -> dict[str, Any]:
    usual = 1.0 / math.sqrt(config.n_embd // config.n_head)
    scaling = usual if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scalings = [scaling / (index + 1) for index in range(config.n_layer)]
        return {"attention_scaling": [None if value == usual else value for value in scalings]}
    return {"attention_scaling": None if scaling == usual else scaling}


def _write_scaling(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    scalings = [layer.score_scaling for layer in layers]
    return {
        "scale_attn_weights": scalings[0] != 1.0,  # any other factor is moved into the weights
        "scale_attn_by_inverse_layer_idx": len(scalings) > 1
        and scalings == [scalings[0] / (index + 1) for index in range(len(scalings))],
    }


def _write_n_inner(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    size = layers[0].intermediate_size
    return {"n_inner": None if size == 4 * layers[0].hidden_size else size}


def _as_it_is(name: str, tensors: Sequence[torch.Tensor], config: PreTrainedConfig) -> Sequence[torch.Tensor]:
    return tensors


def _swap_halves(name: str, tensors: Sequence[torch.Tensor], config: PreTrainedConfig) -> Sequence[torch.Tensor]:
    """Swaps the halves of each head of queries and keys, which is its own inverse: NanoChat turns them the other way round."""
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for part, number in heads.items():
        if part in name:
            return [tensor.unflatten(0, (number, 2, -1)).flip(1).flatten(0, 2) for tensor in tensors]
    return tensors


def _read_interleaved(name: str, tensors: Sequence[torch.Tensor], config: PreTrainedConfig) -> Sequence[torch.Tensor]:
    """Rows of a fused matrix, ordered by head and then by query, key and value, to three matrices."""
    if not _is_fused(name):
        return tensors
    (fused,) = tensors
    return [part.flatten(0, 1) for part in fused.unflatten(0, (config.num_attention_heads, 3, -1)).unbind(1)]


def _write_interleaved(name: str, tensors: Sequence[torch.Tensor], config: PreTrainedConfig) -> Sequence[torch.Tensor]:
    if not _is_fused(name):
        return tensors
    by_head = [part.unflatten(0, (config.num_attention_heads, -1)) for part in tensors]
    return [torch.stack(by_head, 1).flatten(0, 2)]


def _read_conv1d(name: str, tensors: Sequence[torch.Tensor], config: PreTrainedConfig) -> Sequence[torch.Tensor]:
    """A `Conv1D` stores its matrix transposed, input x output, and GPT-2 has query, key and value in one."""
    (tensor,) = tensors
    tensor = tensor.t() if _is_conv1d(name) else tensor
    return tensor.chunk(3) if _is_fused(name) else [tensor]


def _write_conv1d(name: str, tensors: Sequence[torch.Tensor], config: PreTrainedConfig) -> Sequence[torch.Tensor]:
    tensor = torch.cat(list(tensors)) if _is_fused(name) else tensors[0]
    return [tensor.t() if _is_conv1d(name) else tensor]


def _is_fused(name: str) -> bool:
    return any(f".{module}." in name for module in ("query_key_value", "c_attn"))


def _is_conv1d(name: str) -> bool:
    return any(name.endswith(f".{module}.weight") for module in ("c_attn", "c_proj", "c_fc"))


@dataclass(frozen=True)
class Family:
    """A type of Transformers' models, and what its configuration and parameters are in an NLQ model.

    Attributes:
        config_class: the configuration; its `model_type` names the family.
        switches: fields of `NLQConfig` with one value for the whole family.
        parts: the fields of its configuration.
        without_effect: other fields, which do not change the outputs.
        block_names: names of the modules of a block, NLQ's -> the family's; others are equal. Modules of NLQ that share a name
            in the family are fused there.
        body_names: the same for the modules around the blocks.
        classifier: name of the head of a classifier of tokens.
        read_tensors: function that makes the tensors of an NLQ model from the one of the family with the given name.
        write_tensors: its inverse.
    """

    config_class: type[PreTrainedConfig]
    switches: dict[str, Any]
    parts: tuple[Part, ...]
    without_effect: tuple[str, ...] = ()
    block_names: dict[str, str] = field(default_factory=dict)
    body_names: dict[str, str] = field(default_factory=dict)
    classifier: str = "score"
    read_tensors: Callable[[str, Sequence[torch.Tensor], PreTrainedConfig], Sequence[torch.Tensor]] = _as_it_is
    write_tensors: Callable[[str, Sequence[torch.Tensor], PreTrainedConfig], Sequence[torch.Tensor]] = _as_it_is

    def read(self, config: PreTrainedConfig) -> NLQConfig:
        """Makes the configuration of the NLQ model that computes the same.

        Raises:
            ValueError: for a value without a counterpart in the fields that have one.
        """
        if config.is_heterogeneous:
            raise ValueError(f"per_layer_config: the layers of a {config.model_type} model cannot be converted one by one")
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("quantization_config: quantized weights cannot be converted; save the model without it first")
        if not getattr(config, "is_causal", True):
            raise ValueError("is_causal=False: the attention of NLQ models is causal")
        values = {"query_projection": "linear", **self.switches, **_library_fields(config)}
        for part in self.parts:
            values.update(part.read(config))
        values["attention_dropout"] = values["attention_dropout"] or 0.0  # some families allow `None`
        by_layer = {name: values[name] for name in PER_LAYER_SWITCHES if isinstance(values.get(name), list)}
        values.update({name: of_layers[0] for name, of_layers in by_layer.items()})
        overrides = {}
        for index in range(values["num_hidden_layers"]):
            own = {name: of_layers[index] for name, of_layers in by_layer.items() if of_layers[index] != of_layers[0]}
            if own:
                overrides[index] = own
        try:
            return NLQConfig(**values, per_layer_config=overrides or None)
        except StrictDataclassError as error:
            raise ValueError(one_line(error)) from error

    def write(self, config: NLQConfig) -> PreTrainedConfig:
        """Makes the configuration of the family that is nearest to that of an NLQ model."""
        layers = list(config.per_layer_config)
        values = _library_fields(config)
        for part in self.parts:
            values.update(part.write(layers))
        return self.config_class(**values)

    def not_read(self, config: PreTrainedConfig) -> list[str]:
        """Lists the fields and values of a configuration that have no counterpart in NLQ, in words."""
        known = {field.name for field in fields(PreTrainedConfig)} | {*self.without_effect, *_WITHOUT_EFFECT, *_LIBRARY_FIELDS}
        known |= {"quantization_config", *(name for part in self.parts for name in part.fields)}  # which `read` refuses
        default, found = self.config_class(), []
        for name, value in config.to_dict().items():
            if name in known or name.startswith("_") or value in (None, False, [], {}, "", getattr(default, name, None)):
                continue
            found.append(f"{name}={value!r}: NLQ models have no such field")
        return found

    def module_name(self, name: str) -> str:
        """The name in the family of a module of the body, which may be one of a block (`layers.0.self_attn`)."""
        first, _, rest = name.partition(".")
        if first != "layers":
            return self.body_names.get(name, name)
        index, _, module = rest.partition(".")
        return f"{self.body_names.get(first, first)}.{index}.{self.block_names.get(module, module)}"


# Fields of any Transformers model, and of its head
_LIBRARY_FIELDS = ("id2label", "label2id", "problem_type", "classifier_dropout", "token_classification_bias")
# Fields of published checkpoints that change nothing. From some of them a configuration makes fields that do
_WITHOUT_EFFECT = (
    "auto_map",
    "gradient_checkpointing",
    "is_causal",  # `read` refuses False
    "is_decoder",
    "is_llama_config",
    "max_sequence_length",
    "max_window_layers",
    "model_type",
    "no_rope_layer_interval",
    "pretraining_tp",
    "task_specific_params",
    "tokenizer_class",
    "transformers.js_config",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
)


def _library_fields(config: PreTrainedConfig) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in _LIBRARY_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


_TOKENS = _equal(bos_token_id="bos_token_id", eos_token_id="eos_token_id", pad_token_id="pad_token_id")
_COMMON = _equal(
    vocab_size="vocab_size",
    hidden_size="hidden_size",
    intermediate_size="intermediate_size",
    num_hidden_layers="num_hidden_layers",
    num_attention_heads="num_attention_heads",
    hidden_act="hidden_act",
    max_position_embeddings="max_position_embeddings",
    initializer_range="initializer_range",
    attention_dropout="attention_dropout",
    tie_word_embeddings="tie_word_embeddings",
    use_cache="use_cache",
)
_GROUPED = _equal(num_key_value_heads="num_key_value_heads", rms_norm_eps="layer_norm_eps")
_ROPE = Part(("rope_parameters",), _read_whole_rope, _write_rope)
_ROPE_BEFORE_NORM = Part(("rope_parameters",), _read_rope_before_norm, _write_rope)
_PARTIAL_ROPE = Part(("rope_parameters",), _read_rope, _write_partial_rope)
_ROPE_BY_LAYER = Part(("rope_parameters", "no_rope_layers"), _read_rope_by_layer, _write_rope_by_layer)
_HEAD_DIM = Part(("head_dim",), _head_dim, lambda layers: {"head_dim": layers[0].head_dim})
_UNDECLARED_HEAD_DIM = Part(("head_dim",), _head_dim, _write_head_dim_unless_usual)
_HIDDEN_DROPOUT = Part(
    ("hidden_dropout",),
    lambda config: {"embedding_dropout": config.hidden_dropout, "residual_dropout": config.hidden_dropout},
    lambda layers: {"hidden_dropout": layers[0].residual_dropout},
)
_NO_ATTENTION_DROPOUT = Part(("attention_dropout",), lambda config: {}, lambda layers: {"attention_dropout": 0.0})
_ATTENTION_BIAS = _bias("attention_bias", "query_key_value", "attention_output")
_MLP_BIAS = _bias("mlp_bias", "mlp")
_QUERY_KEY_VALUE_BIAS, _OUTPUT_BIAS = (
    _bias("attention_bias", "query_key_value"),
    _bias("attention_out_bias", "attention_output"),
)
_RESIDUAL_DROPOUT = _equal(residual_dropout="residual_dropout")
_WINDOW = _equal(sliding_window="sliding_window")
_WINDOWS = Part(("use_sliding_window", "sliding_window", "layer_types"), _read_windows, _write_windows)

_WINDOWS_ALONE = Part(("sliding_window", "layer_types"), _read_windows, _write_windows_alone)

_LLAMA_BLOCK = {"norm_type": "rmsnorm", "mlp_type": "gated"}
_LLAMA_NAMES = {"self_attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_PLAIN_MLP_NAMES = {"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
_LLAMA_PARTS = (_TOKENS, _COMMON, _GROUPED)

_ROWS = (
    Family(LlamaConfig, _LLAMA_BLOCK, (*_LLAMA_PARTS, _ROPE, _HEAD_DIM, _ATTENTION_BIAS, _MLP_BIAS), (), _LLAMA_NAMES),
    Family(MistralConfig, _LLAMA_BLOCK, (*_LLAMA_PARTS, _ROPE, _HEAD_DIM, _WINDOW), (), _LLAMA_NAMES),
    Family(CwmConfig, _LLAMA_BLOCK, (*_LLAMA_PARTS, _ROPE, _HEAD_DIM, _MLP_BIAS, _WINDOWS_ALONE), (), _LLAMA_NAMES),
    Family(
        Qwen2Config,
        {**_LLAMA_BLOCK, "query_key_value_bias": True},
        (*_LLAMA_PARTS, _ROPE, _UNDECLARED_HEAD_DIM, _WINDOWS),
        block_names=_LLAMA_NAMES,
    ),
    Family(
        Qwen3Config,
        {**_LLAMA_BLOCK, "qk_norm": "rms"},
        (*_LLAMA_PARTS, _ROPE, _HEAD_DIM, _ATTENTION_BIAS, _WINDOWS),
        block_names=_LLAMA_NAMES,
    ),
    Family(
        SmolLM3Config,
        _LLAMA_BLOCK,
        (*_LLAMA_PARTS, _ROPE_BY_LAYER, _UNDECLARED_HEAD_DIM, _ATTENTION_BIAS, _MLP_BIAS, _WINDOWS),
        block_names=_LLAMA_NAMES,
    ),
    Family(
        ArceeConfig,
        {"norm_type": "rmsnorm"},
        (*_LLAMA_PARTS, _ROPE, _HEAD_DIM, _ATTENTION_BIAS, _MLP_BIAS),
        block_names={**_LLAMA_NAMES, **_PLAIN_MLP_NAMES},
    ),
    Family(
        SeedOssConfig,
        _LLAMA_BLOCK,
        (*_LLAMA_PARTS, _ROPE, _HEAD_DIM, _QUERY_KEY_VALUE_BIAS, _OUTPUT_BIAS, _MLP_BIAS, _RESIDUAL_DROPOUT),
        block_names=_LLAMA_NAMES,
    ),
    Family(
        Starcoder2Config,
        {"use_bias": True},
        (
            _TOKENS,
            _COMMON,
            _equal(num_key_value_heads="num_key_value_heads", norm_epsilon="layer_norm_eps"),
            _equal(embedding_dropout="embedding_dropout"),
            _bias("use_bias", "query_key_value", "attention_output", "mlp"),
            _RESIDUAL_DROPOUT,
            _ROPE,
            _UNDECLARED_HEAD_DIM,
            _WINDOW,
        ),
        block_names={**_LLAMA_NAMES, "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"},
    ),
    Family(
        OlmoConfig,
        {"mlp_type": "gated", "norm_gain": False},  # whose epsilon is our default
        (
            _TOKENS,
            _COMMON,
            _equal(num_key_value_heads="num_key_value_heads"),
            _ROPE,
            _UNDECLARED_HEAD_DIM,
            _ATTENTION_BIAS,
        ),
        block_names=_LLAMA_NAMES,
    ),
    Family(
        NanoChatConfig,
        {"norm_type": "rmsnorm", "norm_gain": False, "embedding_norm": True, "qk_norm": "rms"},
        (
            *_LLAMA_PARTS,
            _equal(final_logit_softcapping="final_logit_softcapping"),
            _ROPE_BEFORE_NORM,
            _UNDECLARED_HEAD_DIM,
            _ATTENTION_BIAS,
        ),
        block_names=_LLAMA_NAMES,
        read_tensors=_swap_halves,
        write_tensors=_swap_halves,
    ),
    Family(
        Olmo2Config,
        {**_LLAMA_BLOCK, "norm_position": "output", "qk_norm": "rms_all_heads"},
        (*_LLAMA_PARTS, _ROPE, _UNDECLARED_HEAD_DIM, _ATTENTION_BIAS),
        block_names={
            "self_attn_output_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        },
    ),
    Family(
        DiffLlamaConfig,
        {**_LLAMA_BLOCK, "differential_attention": "v1"},
        (*_LLAMA_PARTS, _ROPE, _HEAD_DIM, _ATTENTION_BIAS, _NO_ATTENTION_DROPOUT),
        without_effect=("lambda_std_dev",),  # of the initial vectors
        block_names={**_LLAMA_NAMES, "self_attn.parts.differential_attention": "self_attn"},
    ),
    Family(
        GPTNeoXConfig,
        {"use_bias": True},
        (
            _TOKENS,
            _COMMON,
            _equal(layer_norm_eps="layer_norm_eps", use_parallel_residual="parallel_residual"),
            _HIDDEN_DROPOUT,
            _PARTIAL_ROPE,
            _ATTENTION_BIAS,
        ),
        block_names={
            "self_attn_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "self_attn.q_proj": "attention.query_key_value",
            "self_attn.k_proj": "attention.query_key_value",
            "self_attn.v_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "mlp.fc1": "mlp.dense_h_to_4h",
            "mlp.fc2": "mlp.dense_4h_to_h",
        },
        body_names={"embed_tokens": "embed_in", "norm": "final_layer_norm"},
        classifier="classifier",
        read_tensors=_read_interleaved,
        write_tensors=_write_interleaved,
    ),
    Family(
        GPT2Config,
        {"use_bias": True},
        (
            _TOKENS,
            _equal(
                vocab_size="vocab_size",
                n_positions="max_position_embeddings",
                n_embd="hidden_size",
                n_layer="num_hidden_layers",
                n_head="num_attention_heads",
                activation_function="hidden_act",
                resid_pdrop="residual_dropout",
                embd_pdrop="embedding_dropout",
                attn_pdrop="attention_dropout",
                layer_norm_epsilon="layer_norm_eps",
                initializer_range="initializer_range",
                tie_word_embeddings="tie_word_embeddings",
                use_cache="use_cache",
            ),
            Part(("n_inner",), lambda config: {"intermediate_size": config.n_inner}, _write_n_inner),
            Part(("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), _read_scaling, _write_scaling),
        ),
        # The order of operations, the second head of a class that is named in `LossyConversion`, and an old name
        without_effect=(
            "reorder_and_upcast_attn",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "n_ctx",
        ),
        block_names={
            "self_attn_norm": "ln_1",
            "mlp_norm": "ln_2",
            "self_attn.q_proj": "attn.c_attn",
            "self_attn.k_proj": "attn.c_attn",
            "self_attn.v_proj": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.fc1": "mlp.c_fc",
            "mlp.fc2": "mlp.c_proj",
        },
        body_names={"layers": "h", "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"},
        classifier="classifier",
        read_tensors=_read_conv1d,
        write_tensors=_write_conv1d,
    ),
)
FAMILIES = {family.config_class.model_type: family for family in _ROWS}
