"""Configuration of NLQ, a GPT-style model with switches for query projection, attention activation and more."""

# ruff: noqa: E402 - the version check comes before anything that an old Transformers lacks.
from transformers.utils.versions import require_version


MINIMUM_TRANSFORMERS = "5.21.0"
require_version(f"transformers>={MINIMUM_TRANSFORMERS}", "Upgrade with `pip install -U transformers`: NLQ needs it.")

import contextlib
import copy
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import transformers
from huggingface_hub.dataclasses import strict
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from .activations_nlq import FUNCTIONS, AttentionActivation, did_you_mean, get_attention_activation
from .cache_nlq import LAYER_TYPE, LinearState
from .parts_base_nlq import MLP_HOOKS, WEIGHT_HOOKS, AttentionPart
from .parts_builtin_nlq import ATTENTION_PARTS, parts_of
from .parts_nlq import PARTS
from .parts_user_nlq import add_to_package, code_of, find_part, save_parts


if TYPE_CHECKING:
    # Transformers copies the files that it finds in import lines. With this line it copies the model with any
    # configuration
    from .modeling_nlq import NLQModel  # noqa: F401


__version__ = "0.2.0"

logger = logging.get_logger(__name__)

# The value of `attn_implementation` that leaves the choice of a backend to each layer and call.
AUTOMATIC = "nlq"

AUTO_MAP = {
    "AutoConfig": "configuration_nlq.NLQConfig",
    "AutoModel": "modeling_nlq.NLQModel",
    "AutoModelForCausalLM": "modeling_nlq.NLQForCausalLM",
    "AutoModelForMaskedLM": "modeling_nlq.NLQForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_nlq.NLQForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_nlq.NLQForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_nlq.NLQForQuestionAnswering",
}
SEQ2SEQ_AUTO_MAP = {
    "AutoConfig": "configuration_seq2seq_nlq.NLQSeq2SeqConfig",
    "AutoModel": "modeling_seq2seq_nlq.NLQSeq2SeqModel",
    "AutoModelForSeq2SeqLM": "modeling_seq2seq_nlq.NLQForConditionalGeneration",
}


def default_auto_map(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the `auto_map` of this code for a model with these fields of a configuration."""
    return SEQ2SEQ_AUTO_MAP if settings.get("is_encoder_decoder") else AUTO_MAP


def is_derived(path: str | list[str | None]) -> bool:
    """Tells whether an entry of `auto_map` names a model's class that is not of this code. Tokenizers have lists."""
    return isinstance(path, str) and path.rpartition("--")[2] not in (*AUTO_MAP.values(), *SEQ2SEQ_AUTO_MAP.values())


def saved_auto_map(folder: str | os.PathLike, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the classes that load a saved model, of this code or derived with a file in its folder.

    Programs such as `accelerate estimate-memory` take the first one, so an encoder must not name a class of decoders.
    """
    refused = "AutoModelForMaskedLM" if settings.get("is_causal", True) else "AutoModelForCausalLM"
    return {name: path for name, path in default_auto_map(settings).items() if name != refused} | {
        name: path
        for name, path in (settings.get("auto_map") or {}).items()
        if is_derived(path)
        and (module := path.partition(".")[0]).isidentifier()
        and Path(folder, f"{module}.py").is_file()
    }


# The switches that may differ between layers, through Transformers' `per_layer_config`
PER_LAYER_SWITCHES = (
    "position_embedding",
    "sliding_window",
    "query_projection",
    "key_projection",
    "value_projection",
    "projection_bottleneck_size",
    "projection_activation",
    "attention_activation",
    "attention_normalization",
    "attention_scaling",
    "linear_attention_decay",
    *ATTENTION_PARTS,
    "attention_parts",
    "cross_attention",
)

# Switches that cross-attention does not support: they need token order or the query's own value
WITHOUT_CROSS_ATTENTION = ("position_embedding", "sliding_window", "linear_attention_decay")
WITHOUT_CROSS_ATTENTION += tuple(name for name, part in ATTENTION_PARTS.items() if part.of_own_tokens())
# The switches that `cross_attention` may override
CROSS_ATTENTION_SWITCHES = [
    name for name in PER_LAYER_SWITCHES if name not in (*WITHOUT_CROSS_ATTENTION, "cross_attention")
]

# Pairs of switches of a layer that exclude each other, with the values that do; `None` is any that is set
EXCLUSIONS = (
    (("attention_dropout", None), ("attention_activation", "linear_attention")),
    (("sliding_window", None), ("attention_activation", "linear_attention")),
    (("parallax", None), ("differential_attention", None)),
    # Its sums would not move with the keys of a window's cache
    (("selective_attention", None), ("sliding_window", None)),
    # A head reads the values of two groups, so a token does not have one value of its own
    (("exclusive_attention", None), ("differential_attention", "v1")),
    (("attention_gate", "value"), ("differential_attention", "v1")),
)


@dataclass(frozen=True)
class Projection:
    """The terms of a projection: the input `X` itself, `X W`, and `f(X)`, which may start at zero."""

    identity: bool = False
    linear: bool = False
    bottleneck: bool = False
    starts_at_zero: bool = False


PROJECTIONS = {
    "linear": Projection(linear=True),
    "identity": Projection(identity=True),
    "residual": Projection(identity=True, linear=True),
    "nonlinear": Projection(identity=True, bottleneck=True),
    "bottleneck": Projection(bottleneck=True),
    "upcycled": Projection(linear=True, bottleneck=True, starts_at_zero=True),
}

# Types with angles that depend on the current length would make cached keys wrong, and are left out
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")

# Keys that Transformers writes into config.json or reads from a configuration, beside the attributes of
# `PreTrainedConfig`
LIBRARY_KEYS = {
    "attn_implementation",
    "auto_map",
    "classifier_dropout",
    "cls_token_id",
    "custom_pipelines",
    "experts_implementation",
    "gradient_checkpointing",
    "is_decoder",
    "mask_token_id",
    "partial_rotary_factor",
    "quantization_config",
    "rope_theta",
    "sep_token_id",
    "task_specific_params",
    "tie_last_hidden_states",
    "token_classification_bias",
}


def check_kernels(settings: Any, source: str, field: str | None = None) -> None:
    """Raises `ValueError` if settings of a file choose a kernel from the Hub, whose code Transformers would run.

    `source` names the file, and `field` the field that `settings` are the value of.
    """
    if field is not None and isinstance(settings, str):
        # Transformers fetches FlashAttention too, unless it is installed
        package = "flash_attn_interface" if "flash_attention_3" in settings else "flash_attn"
        if "/" in settings or ("flash_attention_" in settings and find_spec(package) is None):
            raise ValueError(
                f"{source}: {field}={settings!r} is code from the Hub; a file cannot choose it, pass it as an argument"
            )
    fields = vars(settings) if isinstance(settings, PreTrainedConfig) else settings
    for name, value in fields.items() if isinstance(fields, dict) else ():
        check_kernels(value, source, name if "_implementation" in str(name) else field)


class NLQConfigMixin:
    """Checks names of fields, and saves files of own parts; a base before `PreTrainedConfig`."""

    @classmethod
    def field_names(cls) -> set[str]:
        """Returns the fields that `PreTrainedConfig` lacks, and `per_layer_config`."""
        names = {"per_layer_config", *(field.name for field in fields(cls))}
        return names - {field.name for field in fields(PreTrainedConfig)}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        # diff with PreTrainedConfig, which sets what a caller gives later, without a check, and drops misspelt fields
        check_kernels(config_dict, "config.json")
        overrides = {name: kwargs.pop(name) for name in cls.field_names() & kwargs.keys()}
        cls.check_names(kwargs, warns=False)
        return super().from_dict(config_dict | overrides, **kwargs)

    @classmethod
    def check_names(cls, keys: Iterable[str], is_saved: bool = False, warns: bool = True) -> None:
        """Raises `ValueError` for a key that looks like a misspelt field, and warns of other unknown keys.

        For a saved configuration it only warns, because newer code may have fields that this code lacks.
        """
        known = LIBRARY_KEYS.union(GenerationConfig._get_default_generation_params(), (f.name for f in fields(cls)))
        for key in keys:
            if key in known or key.startswith("_") or hasattr(PreTrainedConfig, key):
                continue
            suggestion = did_you_mean(key, cls.field_names(), cutoff=0.8).strip()
            if suggestion and not is_saved:
                raise ValueError(f"{cls.__name__} has no field {key!r}; {suggestion}")
            if warns:
                logger.warning(f"{cls.__name__} has no field {key!r}: it is kept, but nothing reads it.")

    def name_code(self, auto_map: dict[str, str] | None) -> None:
        """Names this code, whatever an old file says, but for derived classes."""
        derived = {name: path for name, path in (auto_map or {}).items() if is_derived(path)}
        self.auto_map, self.nlq_version = default_auto_map(vars(self)) | derived, __version__

    def save_pretrained(self, save_directory, *args, **kwargs):
        # diff with PreTrainedConfig: the files of parts that belong to no file of this code
        halves = [getattr(self, name) for name in self.sub_configs] or [self]
        user_parts = dict.fromkeys(part for half in halves for part in half._own_parts().values() if part not in PARTS)
        # In memory all classes stay, so that a saved configuration can be loaded with another `is_causal`
        in_memory, self.auto_map = self.auto_map, saved_auto_map(save_directory, vars(self))
        try:
            result = super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.auto_map = in_memory
        if user_parts:
            save_parts(save_directory, user_parts)
        return result


@strict
class NLQConfig(NLQConfigMixin, PreTrainedConfig):
    r"""
    The architecture of an NLQ model. The defaults are the shape of GPT-3 small with nonlinear queries, as in
    [Beyond Linearity in Attention Projections](https://huggingface.co/papers/2603.13381).

    A switch that takes a function takes a key of Transformers' `ACT2FN`, and `None` for nothing.

    Args:
        vocab_size: number of token embeddings.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads; by default as many as query heads.
        head_dim: width of a head; by default `hidden_size // num_attention_heads`.
        intermediate_size: inner width of the MLP; by default `4 * hidden_size`.
        hidden_act: activation of the MLP.
        mlp_type: `"plain"`, `act(X W1) W2`, or `"gated"`, `(act(X W_gate) * X W_up) W_down` (arXiv 2002.05202).
        max_position_embeddings: number of learned positions, in tokens.
        position_embedding: `"learned"`, `"rope"` or `"none"`. Layers may differ in the last two.
        rope_parameters: rotary parameters as in Transformers; rope type `default`, `linear`, `yarn`, `llama3` or
            `proportional`. With a `partial_rotary_factor` only that part of each head is rotated.
        sliding_window: how many tokens a query sees, itself and those before it; by default all. A layer with a window
            caches no more than it.
        use_bias: biases in linear layers and LayerNorms.
        query_key_value_bias: biases of the query, key and value projections; by default as `use_bias`.
        attention_output_bias: bias of the output projection; by default as `use_bias`.
        mlp_bias: biases of the MLP; by default as `use_bias`.
        norm_type: the norms of the blocks and the final norm: `"layernorm"`, or `"rmsnorm"` (arXiv 1910.07467), which
            has no bias.
        layer_norm_eps: epsilon of every norm.
        norm_gain: whether the norms of blocks, queries and keys, and the final norm have learned gains (and LayerNorms
            with `use_bias` biases).
        embedding_norm: a norm of the embeddings, before the first block.
        final_logit_softcapping: logits `c tanh(logits / c)`.
        initializer_range: standard deviation of the initial weights; divided by `sqrt(2 * num_hidden_layers)` in the
            output projections of both sub-layers.
        embedding_dropout: dropout probability after the embeddings.
        residual_dropout: dropout probability of each sub-layer's output.
        attention_dropout: dropout probability of the attention weights.
        norm_position: `"pre"`, `x = r(x + F(a(norm(x))))`; `"post"`, `x = r(norm(x + F(a(x))))`; `"output"`, `x = r(x
            + norm(F(a(x))))`; or `"sandwich"`, `x = r(x + norm(F(a(norm(x)))))`. `F` is attention or MLP. All but
            `"post"` have a final norm.
        parallel_residual: attention and MLP read the same `x`, and both outputs are added to it. With `"post"`, their
            sum has one norm.
        sublayer_activation: the function `a`, before each sub-layer.
        residual_activation: the function `r`, after each residual connection.
        query_projection: `"linear"`, `X W`; `"identity"`, `X`; `"residual"`, `X + X W`; `"nonlinear"`, `X + f(X)`;
            `"bottleneck"`, `f(X)`; `"upcycled"`, `X W + f(X)` with `f = 0` at first.
        key_projection: the same for the keys.
        value_projection: the same for the values.
        projection_bottleneck_size: inner width of `f`; by default `hidden_size // 2`.
        projection_activation: activation inside `f`.
        attention_activation: the function `phi` of the scores; see `docs/attention.md`.
        attention_normalization: `"sum"`, `"length"` or `"none"`; the default depends on the activation.
        attention_scaling: factor of the scores; by default `1 / sqrt(head_dim)`, and half of that for queries with an
            identity term.
        linear_attention_decay: the decay of linear attention: `"fixed"`, RetNet's rate for each key and value head, or
            `"learned"`, a trained rate.
        attention_sink: `"zero"` or `"learned"`, another term `exp(b)` in softmax's denominator.
        qk_norm: `"rms"`, RMSNorm of each head's queries and keys; `"rms_all_heads"`, RMSNorm over the width of all
            heads; or `"l2"`, cosine similarities times a learned scale per query head that replaces the default
            scaling.
        attention_gate: `"headwise"` or `"elementwise"`, heads times `sigmoid(X W_g)` (arXiv 2505.06708); or `"value"`,
            heads times `sigmoid(v W_g)` of the token's own value (arXiv 2510.09017).
        attention_output_activation: function of the concatenated heads.
        attention_output_scaling: factor of each head's output.
        head_projection: a separate matrix (`head_dim x head_dim`) for each head's output.
        exclusive_attention: a head's output loses what points along the token's own value: `"fixed"`, all of it, or
            `"learned"`, a trained share per head (arXiv 2603.09078).
        value_residual: the values of every later layer are mixed with those of the first: `"fixed"`, in equal parts,
            or `"learned"` (arXiv 2410.17897).
        forget_gate: earlier keys lose score with each later token: `"fixed"`, a rate per head, or `"learned"`, a gate
            (arXiv 2503.02130).
        attention_length_scaling: `"log"`, scores times `s_h log n_i` of `n_i` visible keys (arXiv 2501.19399).
        differential_attention: the difference of two softmax maps (arXiv 2410.05258): `"v1"`, of pairs of the heads,
            or `"v2"`, of twice as many query heads.
        canon: sites out of `"ABCD"` where each token gets a weighted sum of itself and the three before it: the input
            of the attention, queries with keys and values, the input of the MLP, and its inside (arXiv 2512.17351).
        selective_attention: a token lowers the scores that later tokens give earlier ones (arXiv 2410.02703).
        parallax: a second query corrects each head's output to first order (arXiv 2605.29157).
        attention_parts: names of parts of your own; see `load_attention_parts`.
        attention_parts_code: a hash of the code of each of them; by default that of the latest.
        add_cross_attention: whether each layer attends to the tokens of an encoder too, between its attention and its
            MLP; see `docs/encoder_decoder.md`.
        cross_attention: switches that differ there; `False` for a layer without it.
        cross_attention_hidden_size: width of the encoder's tokens; by default `hidden_size`.
        cross_attention_max_positions: the most tokens that the encoder reads, from which `attention_length_scaling`
            starts there; by default `max_position_embeddings`.
        is_causal: whether a token sees itself and earlier tokens only. `False` makes an encoder, for `NLQForMaskedLM`:
            a token sees its whole document, or with a `sliding_window` that many tokens on each side.
        classifier_pooling: what `NLQForSequenceClassification` reads: the `"last"` token, the `"first"`, or the
            `"mean"` of all; by default `"last"`, and `"mean"` in an encoder.
        tie_word_embeddings: whether the LM head is the token embedding.
        use_cache: whether to return the key/value cache.
        bos_token_id, eos_token_id, pad_token_id, mask_token_id: token ids.
    """

    model_type = "nlq"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    is_cross_attention = False  # whether this is a `cross_attention_config`

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    mlp_type: Literal["plain", "gated"] = "plain"
    max_position_embeddings: int = 1024
    position_embedding: Literal["learned", "rope", "none"] = "learned"
    rope_parameters: dict | None = None
    sliding_window: int | None = None
    use_bias: bool = False
    query_key_value_bias: bool | None = None
    attention_output_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_type: Literal["layernorm", "rmsnorm"] = "layernorm"
    layer_norm_eps: int | float = 1e-5
    norm_gain: bool = True
    embedding_norm: bool = False
    final_logit_softcapping: int | float | None = None
    initializer_range: int | float = 0.02
    embedding_dropout: int | float = 0.0
    residual_dropout: int | float = 0.0
    attention_dropout: int | float = 0.0

    norm_position: Literal["pre", "post", "output", "sandwich"] = "pre"
    parallel_residual: bool = False
    sublayer_activation: str | None = None
    residual_activation: str | None = None

    query_projection: str = "nonlinear"
    key_projection: str = "linear"
    value_projection: str = "linear"
    projection_bottleneck_size: int | None = None
    projection_activation: str = "gelu"

    attention_activation: str = "softmax"
    attention_normalization: Literal["sum", "length", "none"] | None = None
    attention_scaling: int | float | None = None
    linear_attention_decay: Literal["fixed", "learned"] | None = None
    attention_sink: Literal["zero", "learned"] | None = None
    qk_norm: Literal["rms", "rms_all_heads", "l2"] | None = None
    attention_gate: Literal["headwise", "elementwise", "value"] | None = None
    attention_output_activation: str | None = None
    attention_output_scaling: int | float | None = None
    head_projection: bool = False
    exclusive_attention: Literal["fixed", "learned"] | None = None
    value_residual: Literal["fixed", "learned"] | None = None
    forget_gate: Literal["fixed", "learned"] | None = None
    attention_length_scaling: Literal["log"] | None = None
    differential_attention: Literal["v1", "v2"] | None = None
    canon: str | None = None
    selective_attention: bool = False
    parallax: bool = False
    attention_parts: list[str] | None = None
    attention_parts_code: dict[str, str] | None = None

    add_cross_attention: bool = False
    cross_attention: dict | bool | None = None
    cross_attention_hidden_size: int | None = None
    cross_attention_max_positions: int | None = None
    is_causal: bool = True
    classifier_pooling: Literal["last", "first", "mean"] | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self, **kwargs):
        self.check_names(kwargs, is_saved=kwargs.pop("nlq_version", None) is not None)
        if (overrides := kwargs.get("per_layer_config")) is not None:
            if not isinstance(overrides, dict) or not all(isinstance(layer, dict) for layer in overrides.values()):
                raise ValueError(
                    f"per_layer_config={overrides!r} must map layer numbers to the switches that differ there"
                )
            _check_per_layer_switches(overrides)

        width, heads = self.hidden_size, self.num_attention_heads
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            _check_positive(self, name)
        if self.num_hidden_layers > 10_000:  # listed in Python, for minutes
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must be at most 10000")
        if self.head_dim is None and width % heads:
            raise ValueError(
                f"hidden_size={width} must be a multiple of num_attention_heads={heads}, or head_dim be given"
            )
        defaults = {"num_key_value_heads": heads, "head_dim": width // heads, "intermediate_size": 4 * width}
        for name, value in (defaults | {"projection_bottleneck_size": width // 2}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__(**kwargs)
        with contextlib.suppress(ValueError):  # an unknown part; the validation reports it
            if codes := {name: code for name, part in self._own_parts().items() if (code := code_of(part))}:
                self.attention_parts_code = codes  # as it is now
        self.name_code(kwargs.get("auto_map"))

    def _own_parts(self) -> dict[str, type[AttentionPart]]:
        """Returns the user's own parts in any layer, by name."""
        names = dict.fromkeys(name for layer in self.attention_configs for name in layer.attention_parts or ())
        return {name: find_part(name, (self.attention_parts_code or {}).get(name)) for name in names}

    @property
    def activation(self) -> AttentionActivation:
        """The row of `attention_activation` in the table (of one layer)."""
        return get_attention_activation(self.attention_activation)

    @property
    def distinct_layers(self) -> Sequence["NLQConfig"]:
        """The configurations of the layers, or one where all are the same: reading a configuration takes long."""
        return self.per_layer_config if self.is_heterogeneous else [self]

    @property
    def attention_configs(self) -> Sequence["NLQConfig"]:
        """The `distinct_layers`, and the configurations of their cross-attention."""
        return [*self.distinct_layers, *filter(None, (layer.cross_attention_config for layer in self.distinct_layers))]

    @property
    def cross_attention_config(self) -> "NLQConfig | None":
        """What the cross-attention (of one layer) reads in place of the layer's configuration, if there is one."""
        if not self.add_cross_attention or self.cross_attention is False:
            return None
        config, overrides = copy.copy(self), self.cross_attention if isinstance(self.cross_attention, dict) else {}
        absent = {name: getattr(NLQConfig, name) for name in (*WITHOUT_CROSS_ATTENTION, "attention_parts")}
        absent |= {"position_embedding": "none", "is_causal": False}
        if self.attention_gate == "value":
            absent["attention_gate"] = None
        for name, value in (absent | overrides).items():
            setattr(config, name, value)
        config.is_cross_attention = True
        return config

    @property
    def key_value_input_size(self) -> int:
        """The width of what keys and values are projected from (of one layer)."""
        return (self.is_cross_attention and self.cross_attention_hidden_size) or self.hidden_size

    @property
    def most_visible_keys(self) -> int:
        """The number of keys that a query sees at most (of one layer)."""
        length = (self.is_cross_attention and self.cross_attention_max_positions) or self.max_position_embeddings
        if self.sliding_window is None:
            return length
        return min(length, self.sliding_window if self.is_causal else 2 * self.sliding_window + 1)

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer, for Transformers; not defined if all layers store all keys and values."""
        try:
            types = [layer._layer_type for layer in self.per_layer_config]
        except ValueError:
            types = []  # an unknown activation; the validation reports it
        if set(types) <= {"full_attention"}:
            raise AttributeError("layer_types")  # Transformers asks by `hasattr`
        return types

    @property
    def _layer_type(self) -> str:
        """The kind of cache (of one layer)."""
        if self.activation.kind == "linear":
            return LAYER_TYPE
        if self.number_of_conv_states:  # Transformers' layers of keys and values with states of convolutions
            return "hybrid" if self.sliding_window is None else "hybrid_sliding"
        return "full_attention" if self.sliding_window is None else "sliding_attention"

    @property
    def first_conv_state(self) -> int:
        """The number of the first state of a convolution in the cache (of one layer)."""
        return len(LinearState._fields) if self.activation.kind == "linear" else 0

    @property
    def number_of_conv_states(self) -> int:
        """How many convolutions the cache stores tokens of (of one layer), for Transformers."""
        return sum(part.conv_states(self) for part in parts_of(self))

    @property
    def has_learned_positions(self) -> bool:
        """True if learned positions are added to the token embeddings, which limits the length."""
        return any(layer.position_embedding == "learned" for layer in self.distinct_layers)

    @property
    def has_rotary_positions(self) -> bool:
        """Whether some layer rotates queries and keys."""
        return any(layer.position_embedding == "rope" for layer in self.distinct_layers)

    def has_bias(self, part: Literal["query_key_value", "attention_output", "mlp"]) -> bool:
        """Tells whether the linear layers of a part have biases."""
        has_bias = getattr(self, f"{part}_bias")
        return self.use_bias if has_bias is None else has_bias

    def validate_layer_type(self):
        """Validates nothing: the types of the layers follow from their activations."""

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """The linear layers that tensor parallelism splits, and how. Modules cut what else belongs to heads."""
        # Always: Transformers reads from it that a cache holds some of the heads
        plan = {"self_attn.k_proj": "colwise"}
        for layer in self.attention_configs:
            module = "cross_attn" if layer.is_cross_attention else "self_attn"
            for name in ("query", "key", "value"):
                projection = PROJECTIONS[getattr(layer, f"{name}_projection")]
                if projection.linear:
                    plan[f"{module}.{name[0]}_proj"] = "colwise"
                if projection.bottleneck:
                    plan[f"{module}.{name[0]}_bottleneck.fc1"] = "colwise"
                    plan[f"{module}.{name[0]}_bottleneck.fc2"] = "rowwise"
            for part in parts_of(layer):
                plan |= {f"{module}.{name}": style for name, style in part.split_layers(layer).items()}
            plan[f"{module}.o_proj"] = "rowwise"
        gated = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
        plan |= gated if self.mlp_type == "gated" else {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
        return {f"layers.*.{name}": style for name, style in plan.items()}

    @property
    def num_query_heads(self) -> int:
        """How many heads of queries a layer computes (of one layer)."""
        return max((part.query_heads(self) for part in parts_of(self)), default=self.num_attention_heads)

    @property
    def needs_first_values(self) -> bool:
        """Whether some layer reads the values of the first one."""
        return any(part.needs_first_values for layer in self.distinct_layers for part in parts_of(layer))

    @property
    def score_scaling(self) -> float:
        """The factor of the scores (of one layer): `attention_scaling` or its default."""
        if self.attention_scaling is not None:
            return float(self.attention_scaling)
        if self.qk_norm == "l2":
            return 1.0  # a learned scale replaces it
        # The paper has `Q(X) = (X + f(X)) / 2`. Here the factor contains the 1/2, and `Q(X) = X + f(X)`
        return (0.5 if PROJECTIONS[self.query_projection].identity else 1.0) / math.sqrt(self.head_dim)

    def validate_architecture(self):
        """Checks the fields that differ between layers, sizes, and rotary positions."""
        if self.is_heterogeneous:  # first: what differs between layers cannot be read below
            _check_per_layer_switches(self._heterogeneity_spec.per_layer_overrides)
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if len({layer.position_embedding == "learned" for layer in self.distinct_layers}) > 1:
            raise ValueError("per_layer_config: position_embedding='learned' is of all layers or of none")
        if self.has_rotary_positions:
            rope_type = (self.rope_parameters or {}).get("rope_type")
            if rope_type not in ROPE_TYPES:
                raise ValueError(
                    f"rope_parameters: rope_type={rope_type!r} must be one of {', '.join(ROPE_TYPES)}; a cache does "
                    "not fit angles that depend on the current length"
                )
            # `proportional` rotates the rest too, by an angle of 0
            factor = 1.0 if rope_type == "proportional" else self.rope_parameters.get("partial_rotary_factor", 1.0)
            if not 0 < (rotated := int(self.head_dim * factor)) <= self.head_dim or rotated % 2:
                raise ValueError(
                    f"head_dim={self.head_dim} times partial_rotary_factor={factor}, {rotated} rotated elements, must "
                    "be even and above 0 with position_embedding='rope'"
                )

    def validate_rope(self):
        """Applies Transformers' check if there are rotary positions."""
        if self.has_rotary_positions:
            super().validate_rope()

    def validate_functions(self):
        """Checks the names of functions that are the same in all layers."""
        for name in ("hidden_act", "sublayer_activation", "residual_activation"):
            _check_function(self, name, is_optional=name != "hidden_act")

    def validate_layers(self):
        """Checks the switches of each layer."""
        for index, layer in enumerate(self.distinct_layers):
            try:
                _check_layer(layer)
                _check_cross_attention(layer)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}" if self.is_heterogeneous else str(error)) from None


def _check_per_layer_switches(overrides: Mapping[int, Mapping[str, Any]]) -> None:
    if foreign := sorted({name for switches in overrides.values() for name in switches} - set(PER_LAYER_SWITCHES)):
        allowed = ", ".join(PER_LAYER_SWITCHES)
        raise ValueError(f"per_layer_config: {', '.join(foreign)} cannot be set for a layer; only {allowed} can")


def _check_positive(config: NLQConfig, name: str) -> None:
    if (size := getattr(config, name)) is not None and size < 1:
        raise ValueError(f"{name}={size} must be a positive integer")


def _check_function(config: NLQConfig, name: str, is_optional: bool) -> None:
    value = getattr(config, name)
    if value not in FUNCTIONS and not (value is None and is_optional):
        hint = "" if value is None else f"is unknown; {did_you_mean(value, FUNCTIONS)}"
        raise ValueError(f"{name}={value!r} {hint or 'must be '}one of {', '.join(FUNCTIONS)}")


def _check_layer(layer: NLQConfig) -> None:
    """Checks the switches of one layer."""
    for kind in ("query", "key", "value"):
        name = f"{kind}_projection"
        if (value := getattr(layer, name)) not in PROJECTIONS:
            suggestion = did_you_mean(value, PROJECTIONS)
            raise ValueError(f"{name}={value!r} is unknown; {suggestion}choose one of {', '.join(PROJECTIONS)}")
        heads = layer.num_query_heads if kind == "query" else layer.num_key_value_heads
        width = layer.hidden_size if kind == "query" else layer.key_value_input_size
        if PROJECTIONS[value].identity and heads * layer.head_dim != width:
            allowed = ", ".join(other for other, row in PROJECTIONS.items() if not row.identity)
            raise ValueError(
                f"{name}={value!r} adds the input itself, so its output must have the width hidden_size={width}, not "
                f"{heads} heads x head_dim={layer.head_dim}; use one of {allowed}, or another number of heads"
            )
    if (layer.projection_bottleneck_size or 0) < 1:
        raise ValueError(f"projection_bottleneck_size={layer.projection_bottleneck_size} must be at least 1")
    if layer.sliding_window is not None and layer.sliding_window < 2:  # Transformers' cache does not take 1
        raise ValueError(f"sliding_window={layer.sliding_window} must be at least 2 tokens, or None")
    _check_function(layer, "projection_activation", is_optional=False)
    _check_function(layer, "attention_output_activation", is_optional=True)

    activation = layer.activation  # raises for an unknown name
    normalization = layer.attention_normalization
    if not activation.is_elementwise and normalization not in (None, activation.normalization):
        raise ValueError(
            f"attention_normalization={normalization!r}: {activation.name} has the normaliser "
            f"{activation.normalization!r} only"
        )
    if normalization == "sum" and not activation.non_negative:
        raise ValueError(
            f"attention_normalization='sum' needs weights that are never negative, but attention_activation="
            f"{activation.name!r} can be; use 'length' or 'none'"
        )
    if layer.linear_attention_decay is not None and activation.kind != "linear":
        raise ValueError(
            f"linear_attention_decay={layer.linear_attention_decay!r} needs attention_activation='linear_attention', "
            f"not {activation.name!r}"
        )
    for pair in EXCLUSIONS:
        values = {name: getattr(layer, name) for name, _ in pair}
        if all(values[name] == value if value is not None else values[name] for name, value in pair):
            raise ValueError(" excludes ".join(f"{name}={value!r}" for name, value in values.items()))
    parts = parts_of(layer)
    needs_order = {
        "attention_activation": not activation.sees_own_key,
        "linear_attention_decay": layer.linear_attention_decay,
        **{part.name: part.causal_only for part in parts},
    }
    if not layer.is_causal and (names := [name for name, needs in needs_order.items() if needs]):
        values = ", ".join(f"{name}={getattr(layer, name)!r}" if hasattr(layer, name) else name for name in names)
        if layer.is_cross_attention:
            raise ValueError(f"{values} needs an order of the tokens, which an encoder's lack; name another there")
        raise ValueError(f"{values} needs an order of the tokens, and is_causal=False has none; use is_causal=True")
    for part in parts:
        if part.activations and activation.name not in part.activations:
            allowed = " or ".join(map(repr, part.activations))
            field = f"{part.name}={value!r}" if (value := getattr(layer, part.name, None)) else part.name
            raise ValueError(f"{field} needs attention_activation={allowed}, not {activation.name!r}")
        part.check(layer)
        # Linear attention does not compute scores or weights, and has a state instead
        if activation.kind == "linear" and any(map(part.has_hook, WEIGHT_HOOKS)):
            raise ValueError(
                f"{part.name} changes scores or weights, which attention_activation='linear_attention' lacks"
            )
    for names in (
        [part.name for part in parts if part.has_hook("change_weights")],
        [part.name for part in parts if part.conv_states(layer)],
    ):
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} exclude each other: they change the same weights, or use the same cache"
            )


def _check_cross_attention(layer: NLQConfig) -> None:
    overrides = layer.cross_attention
    if overrides is True:
        raise ValueError("cross_attention=True must be the switches that differ there, False, or None")
    if not layer.add_cross_attention:
        for name in ("cross_attention", "cross_attention_hidden_size", "cross_attention_max_positions"):
            if getattr(layer, name) is not None:
                raise ValueError(f"{name}={getattr(layer, name)!r} needs add_cross_attention=True")
        return
    if not layer.is_causal:
        raise ValueError("add_cross_attention=True needs is_causal=True: an encoder has no cross-attention")
    for name in ("cross_attention_hidden_size", "cross_attention_max_positions"):
        _check_positive(layer, name)
    for name in overrides or {}:
        if name not in CROSS_ATTENTION_SWITCHES:
            hint, allowed = did_you_mean(name, CROSS_ATTENTION_SWITCHES), ", ".join(CROSS_ATTENTION_SWITCHES)
            raise ValueError(f"cross_attention: {name!r} cannot be set there; {hint}choose from {allowed}")
    try:
        if (cross := layer.cross_attention_config) is None:
            return
        _check_layer(cross)
        for part in parts_of(cross):
            if part.of_own_tokens() or any(map(part.has_hook, ("token_state", *MLP_HOOKS))):
                raise ValueError(f"{part.name} needs the decoder's own tokens or its MLP, and cannot be there")
        if cross.attention_gate == "value":
            raise ValueError("attention_gate='value' needs the token's own value, and cannot be there")
    except ValueError as error:
        raise ValueError(f"cross_attention: {error}") from None


NLQConfig.register_for_auto_class()
add_to_package(__name__)


# `transformers serve` loads a model by `getattr(transformers, config.architectures[0])`, not by `auto_map`. The name
# means the Auto class, which finds the code of each folder. It is an attribute of the module's class, because
# Transformers makes a second module object of itself (`direct_transformers_import`). Only the server sees it: MLflow
# takes any name in `transformers` for built in, and loads it without `trust_remote_code`.
def _served_class(module: ModuleType) -> type:
    if "transformers.cli.serve" in sys.modules:
        return AutoModelForCausalLM
    raise AttributeError(f"module {module.__name__!r} has no attribute 'NLQForCausalLM'")


if type(transformers) is not ModuleType:
    type(transformers).NLQForCausalLM = property(_served_class)
