"""Families of Transformers' models that are special cases of NLQ, with their names for fields and parameters.

`FAMILIES` has a row for each, made of parts, because families share most of them. A field that no part reads cannot be
converted unless it has its default value.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from modeling_nlq import NLQConfig
from modeling_nlq.configuration_nlq import PER_LAYER_SWITCHES


class Part(NamedTuple):
    """Fields of a family's configuration that correspond to fields of `NLQConfig`.

    `read` may return a list with a value for each layer, and `write` other fields, which are left out.
    """

    fields: tuple[str, ...]
    read: Callable[[PreTrainedConfig], dict[str, Any]]
    write: Callable[[Sequence[NLQConfig]], dict[str, Any]]


def _equal(*same: str, **renamed: str) -> Part:
    """Makes the part for fields that have the same names in `NLQConfig`, or those that are given."""
    names = {**{name: name for name in same}, **renamed}
    return Part(
        tuple(names),
        lambda config: {ours: getattr(config, theirs) for theirs, ours in names.items()},
        lambda layers: {theirs: getattr(layers[0], ours) for theirs, ours in names.items()},
    )


def _read_rope(config: PreTrainedConfig, is_partial: bool = False) -> dict[str, Any]:
    parameters = dict(config.rope_parameters)
    kind = parameters.get("rope_type")
    factor = parameters.get("partial_rotary_factor", 1.0)
    # `proportional` turns the rest of a whole head by an angle of 0
    if factor != 1.0 and not is_partial and kind != "proportional":
        raise ValueError(f"partial_rotary_factor={factor!r}: {config.model_type} rotates whole heads")
    if kind == "yarn" and config.model_type == "nanochat":
        raise ValueError("rope_type='yarn' scales queries and keys, and NanoChat's norm takes the factor back")
    return {"position_embedding": "rope", "rope_parameters": parameters}


def _write_rope(layers: Sequence[NLQConfig], is_partial: bool = False) -> dict[str, Any]:
    parameters = dict(layers[0].rope_parameters or {})
    if is_partial:  # without a factor, the family would rotate a quarter of each head
        parameters.setdefault("partial_rotary_factor", 1.0)
    elif parameters.get("rope_type") != "proportional":
        parameters.pop("partial_rotary_factor", None)
    return {"rope_parameters": parameters}


def _read_head_dim(config: PreTrainedConfig) -> dict[str, Any]:
    # The classes read the field even if they do not declare it
    return {"head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}


def _bias(name: str, *parts: str) -> Part:
    """Makes the part for a field that sets the biases of several parts of an NLQ model."""
    return Part(
        (name,),
        lambda config: {f"{part}_bias": getattr(config, name) for part in parts},
        lambda layers: {name: any(layers[0].has_bias(part) for part in parts)},
    )


def _read_windows(config: PreTrainedConfig) -> dict[str, Any]:
    windows = {"full_attention": None}
    if getattr(config, "use_sliding_window", True) and config.sliding_window is not None:
        windows["sliding_attention"] = config.sliding_window
    return {"sliding_window": [windows[kind] for kind in config.layer_types]}


def _write_windows(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    windows = [layer.sliding_window for layer in layers]
    return {
        "use_sliding_window": any(windows),
        "sliding_window": next(filter(None, windows), None),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def _read_scaling(config: PreTrainedConfig) -> dict[str, Any]:
    usual = 1.0 / math.sqrt(config.n_embd // config.n_head)
    scaling = usual if config.scale_attn_weights else 1.0
    divisors = [index + 1 if config.scale_attn_by_inverse_layer_idx else 1 for index in range(config.n_layer)]
    scalings = [scaling / divisor for divisor in divisors]
    return {"attention_scaling": [None if value == usual else value for value in scalings]}


def _write_scaling(layers: Sequence[NLQConfig]) -> dict[str, Any]:
    scalings = [layer.score_scaling for layer in layers]
    by_inverse_index = [scalings[0] / (index + 1) for index in range(len(scalings))]
    return {
        "scale_attn_weights": scalings[0] != 1.0,  # any other factor is moved into the weights
        "scale_attn_by_inverse_layer_idx": len(scalings) > 1 and scalings == by_inverse_index,
    }


class Layout(NamedTuple):
    """How a family stores a tensor: `read` splits it into tensors of NLQ, `write` is the inverse."""

    read: Callable[[torch.Tensor, PreTrainedConfig], Sequence[torch.Tensor]]
    write: Callable[[Sequence[torch.Tensor], PreTrainedConfig], torch.Tensor]


_SAME_LAYOUT = Layout(lambda tensor, _: [tensor], lambda tensors, _: tensors[0])
# A `Conv1D` stores its matrix transposed, input x output
_CONV1D = Layout(lambda tensor, _: [tensor.t()], lambda tensors, _: tensors[0].t())
_FUSED_CONV1D = Layout(lambda tensor, _: tensor.t().chunk(3), lambda tensors, _: torch.cat(list(tensors)).t())


def _swapped_halves(heads: str) -> Layout:
    """Makes the layout of NanoChat, which rotates queries and keys in the other direction."""

    def swap(tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
        return tensor.unflatten(0, (getattr(config, heads), 2, -1)).flip(1).flatten(0, 2)

    return Layout(lambda tensor, config: [swap(tensor, config)], lambda tensors, config: swap(tensors[0], config))


def _read_interleaved(fused: torch.Tensor, config: PreTrainedConfig) -> Sequence[torch.Tensor]:
    # Its rows are ordered by head, and then by query, key and value
    return [part.flatten(0, 1) for part in fused.unflatten(0, (config.num_attention_heads, 3, -1)).unbind(1)]


def _write_interleaved(tensors: Sequence[torch.Tensor], config: PreTrainedConfig) -> torch.Tensor:
    return torch.stack([part.unflatten(0, (config.num_attention_heads, -1)) for part in tensors], 1).flatten(0, 2)


@dataclass(frozen=True)
class Family:
    """A model type of Transformers with its configuration and parameters in terms of NLQ's.

    Attributes:
        switches: fields of `NLQConfig` with the same value in the whole family.
        without_effect: fields that do not change the outputs.
        block_names: names of a block's modules, NLQ's -> the family's, if they differ. It fuses those with one name.
        body_names: the same for the modules around the blocks.
        classifier: name of the head of a token classifier.
        layouts: for modules that the family stores differently, by the last part of their names.
    """

    name: str
    switches: dict[str, Any]
    parts: tuple[Part, ...]
    without_effect: tuple[str, ...] = ()
    block_names: dict[str, str] = field(default_factory=dict)
    body_names: dict[str, str] = field(default_factory=dict)
    classifier: str = "score"
    layouts: dict[str, Layout] = field(default_factory=dict)

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        return CONFIG_MAPPING[self.name]

    def read(self, config: PreTrainedConfig) -> NLQConfig:
        """Makes an equal configuration of NLQ; raises `ValueError` or `StrictDataclassError` if there is none."""
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("quantization_config: quantized weights cannot be converted")
        is_causal = self.switches.get("is_causal", True)
        if getattr(config, "is_causal", is_causal) != is_causal:
            raise ValueError(f"is_causal={not is_causal} must be {is_causal} for {self.name}")
        values = {"query_projection": "linear", **self.switches, **_library_fields(config)}
        for part in self.parts:
            values.update(part.read(config))
        values["attention_dropout"] = values["attention_dropout"] or 0.0  # some families allow `None`
        by_layer = {name: values[name] for name in PER_LAYER_SWITCHES if isinstance(values.get(name), list)}
        values.update({name: layers[0] for name, layers in by_layer.items()})
        overrides = {}
        for index in range(values["num_hidden_layers"]):
            switches = {name: layers[index] for name, layers in by_layer.items() if layers[index] != layers[0]}
            if switches:
                overrides[index] = switches
        return NLQConfig(**values, per_layer_config=overrides or None)

    def write(self, config: NLQConfig) -> PreTrainedConfig:
        """Makes the nearest configuration of the family."""
        layers = list(config.per_layer_config)
        values = _library_fields(config)
        for part in self.parts:
            values.update({name: value for name, value in part.write(layers).items() if name in part.fields})
        return self.config_class(**values)

    def not_read(self, config: PreTrainedConfig) -> list[str]:
        """Lists the fields of a configuration that NLQ does not have, in words."""
        known = {
            *(field.name for field in fields(PreTrainedConfig)),
            *(name for part in self.parts for name in part.fields),
            *self.without_effect,
            *_WITHOUT_EFFECT,
            *_LIBRARY_FIELDS,
            "quantization_config",  # which `read` refuses
        }
        default = self.config_class()
        values = {name: value for name, value in config.to_dict().items() if name not in known and name[0] != "_"}
        return [
            f"{name}={value!r}: NLQ models have no such field"
            for name, value in values.items()
            if value not in (None, False, [], {}, "", getattr(default, name, None))
        ]

    def layout(self, name: str) -> Layout:
        """Returns how the family stores a parameter, by its name there."""
        return self.layouts.get(name.split(".")[-2], _SAME_LAYOUT)

    def module_name(self, name: str) -> str:
        """Translates the name of a module of the body, such as `layers.0.self_attn`."""
        first, _, rest = name.partition(".")
        if first != "layers":
            return self.body_names.get(name, name)
        index, _, module = rest.partition(".")
        return f"{self.body_names.get(first, first)}.{index}.{self.block_names.get(module, module)}"


# Fields of any Transformers model, and of its head
_LIBRARY_FIELDS = ("id2label", "label2id", "problem_type", "classifier_dropout", "token_classification_bias")
# Fields of published checkpoints that leave the outputs unchanged, or that a configuration derives others from
_WITHOUT_EFFECT = (
    "auto_map",
    *(f"{kind}_token" for kind in ("bos", "cls", "eos", "mask", "pad", "sep", "unk")),  # as text; the ids count
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


_TOKENS = _equal("bos_token_id", "eos_token_id", "pad_token_id")
_COMMON = _equal(
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("max_position_embeddings", "initializer_range", "attention_dropout", "tie_word_embeddings", "use_cache"),
)
_ROPE = Part(("rope_parameters",), _read_rope, _write_rope)
_PARTIAL_ROPE = Part(("rope_parameters",), partial(_read_rope, is_partial=True), partial(_write_rope, is_partial=True))
_NO_ROPE_LAYERS = Part(
    ("no_rope_layers",),  # 1 where a layer has rotary positions
    lambda config: {"position_embedding": [("none", "rope")[has_rope] for has_rope in config.no_rope_layers]},
    lambda layers: {"no_rope_layers": [int(layer.position_embedding == "rope") for layer in layers]},
)
_HEAD_DIM = Part(("head_dim",), _read_head_dim, lambda layers: {"head_dim": layers[0].head_dim})
_HIDDEN_DROPOUT = Part(
    ("hidden_dropout",),
    lambda config: {"embedding_dropout": config.hidden_dropout, "residual_dropout": config.hidden_dropout},
    lambda layers: {"hidden_dropout": layers[0].residual_dropout},
)
_NO_ATTENTION_DROPOUT = Part(("attention_dropout",), lambda _: {}, lambda _: {"attention_dropout": 0.0})
_ATTENTION_BIAS = _bias("attention_bias", "query_key_value", "attention_output")
_MLP_BIAS = _bias("mlp_bias", "mlp")
_RESIDUAL_DROPOUT = _equal("residual_dropout")
_WINDOW = _equal("sliding_window")
_WINDOWS = Part(("use_sliding_window", "sliding_window", "layer_types"), _read_windows, _write_windows)

_DECODER = (_TOKENS, _COMMON, _equal("num_key_value_heads"), _HEAD_DIM, _ROPE)
_LLAMA_NAMES = {"self_attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_QKV = tuple(f"self_attn.{kind}_proj" for kind in "qkv")


def _like_llama(name: str, *parts: Part, switches: dict[str, Any] | None = None, **others: Any) -> Family:
    """Makes a family with Llama's fields, norms and names, and with what differs."""
    switches = {"norm_type": "rmsnorm", "mlp_type": "gated", **(switches or {})}
    parts = (*_DECODER, _equal(rms_norm_eps="layer_norm_eps"), *parts)
    return Family(name, switches, parts, **{"block_names": _LLAMA_NAMES, **others})


_ROWS = (
    _like_llama("llama", _ATTENTION_BIAS, _MLP_BIAS),
    _like_llama("mistral", _WINDOW),
    _like_llama(
        "eurobert",
        *(_ATTENTION_BIAS, _MLP_BIAS, _equal("mask_token_id")),
        switches={"is_causal": False},
        without_effect=("classifier_pooling", "clf_pooling"),  # of a head with a further layer, which is not converted
        classifier="classifier",
    ),
    _like_llama("cwm", _MLP_BIAS, _WINDOWS._replace(fields=("sliding_window", "layer_types"))),
    _like_llama("qwen2", _WINDOWS, switches={"query_key_value_bias": True}),
    _like_llama("qwen3", _ATTENTION_BIAS, _WINDOWS, switches={"qk_norm": "rms"}),
    _like_llama("smollm3", _NO_ROPE_LAYERS, _ATTENTION_BIAS, _MLP_BIAS, _WINDOWS),
    _like_llama(
        "arcee",
        *(_ATTENTION_BIAS, _MLP_BIAS),
        switches={"mlp_type": "plain"},
        block_names={**_LLAMA_NAMES, "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    ),
    _like_llama(
        "seed_oss",
        *(_MLP_BIAS, _RESIDUAL_DROPOUT),
        *(_bias("attention_bias", "query_key_value"), _bias("attention_out_bias", "attention_output")),
    ),
    _like_llama(
        "nanochat",
        *(_equal("final_logit_softcapping"), _ATTENTION_BIAS),
        switches={"mlp_type": "plain", "norm_gain": False, "embedding_norm": True, "qk_norm": "rms"},
        layouts={"q_proj": _swapped_halves("num_attention_heads"), "k_proj": _swapped_halves("num_key_value_heads")},
    ),
    _like_llama(
        "olmo2",
        _ATTENTION_BIAS,
        switches={"norm_position": "output", "qk_norm": "rms_all_heads"},
        block_names={
            "self_attn_output_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        },
    ),
    _like_llama(
        "diffllama",
        *(_ATTENTION_BIAS, _NO_ATTENTION_DROPOUT),
        switches={"differential_attention": "v1"},
        without_effect=("lambda_std_dev",),  # of the initial vectors
        block_names={**_LLAMA_NAMES, "self_attn.parts.differential_attention": "self_attn"},
    ),
    Family(
        "starcoder2",
        {"use_bias": True},
        (
            *(*_DECODER, _RESIDUAL_DROPOUT, _WINDOW),
            _equal("embedding_dropout", norm_epsilon="layer_norm_eps"),
            _bias("use_bias", "query_key_value", "attention_output", "mlp"),
        ),
        block_names={**_LLAMA_NAMES, "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"},
    ),
    Family(
        "olmo",
        {"mlp_type": "gated", "norm_gain": False},  # its epsilon is our default
        (*_DECODER, _ATTENTION_BIAS),
        block_names=_LLAMA_NAMES,
    ),
    Family(
        "gpt_neox",
        {"use_bias": True},
        (
            *(_TOKENS, _COMMON, _HIDDEN_DROPOUT, _PARTIAL_ROPE, _ATTENTION_BIAS),
            _equal("layer_norm_eps", use_parallel_residual="parallel_residual"),
        ),
        block_names={
            **_LLAMA_NAMES,
            **dict.fromkeys(_QKV, "attention.query_key_value"),
            "self_attn.o_proj": "attention.dense",
            "mlp.fc1": "mlp.dense_h_to_4h",
            "mlp.fc2": "mlp.dense_4h_to_h",
        },
        body_names={"embed_tokens": "embed_in", "norm": "final_layer_norm"},
        classifier="classifier",
        layouts={"query_key_value": Layout(_read_interleaved, _write_interleaved)},
    ),
    Family(
        "gpt2",
        {"use_bias": True},
        (
            _TOKENS,
            _equal(
                *("vocab_size", "initializer_range", "tie_word_embeddings", "use_cache"),
                n_positions="max_position_embeddings",
                n_embd="hidden_size",
                n_layer="num_hidden_layers",
                n_head="num_attention_heads",
                n_inner="intermediate_size",
                activation_function="hidden_act",
                resid_pdrop="residual_dropout",
                embd_pdrop="embedding_dropout",
                attn_pdrop="attention_dropout",
                layer_norm_epsilon="layer_norm_eps",
            ),
            Part(("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), _read_scaling, _write_scaling),
        ),
        # They set the order of operations and the second head of a class; `n_ctx` is an old name
        without_effect=(
            *("reorder_and_upcast_attn", "n_ctx"),
            *(f"summary_{name}" for name in ("type", "use_proj", "activation", "first_dropout", "proj_to_labels")),
        ),
        block_names={
            "self_attn_norm": "ln_1",
            "mlp_norm": "ln_2",
            **dict.fromkeys(_QKV, "attn.c_attn"),
            "self_attn.o_proj": "attn.c_proj",
            "mlp.fc1": "mlp.c_fc",
            "mlp.fc2": "mlp.c_proj",
        },
        body_names={"layers": "h", "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"},
        classifier="classifier",
        layouts={"c_attn": _FUSED_CONV1D, "c_proj": _CONV1D, "c_fc": _CONV1D},
    ),
)
FAMILIES = {family.name: family for family in _ROWS}
