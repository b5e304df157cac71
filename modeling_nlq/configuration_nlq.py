"""Configuration of NLQ, a GPT-style model with switches for query projection, attention activation and more."""

# ruff: noqa: E402 - the version check comes before anything that an old Transformers lacks.
from transformers.utils.versions import require_version


MINIMUM_TRANSFORMERS = "5.21.0"
require_version(f"transformers>={MINIMUM_TRANSFORMERS}", "Upgrade with `pip install -U transformers`: NLQ needs it.")

import contextlib
import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import transformers
from huggingface_hub.dataclasses import strict
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .activations_nlq import FUNCTIONS, AttentionActivation, did_you_mean, get_attention_activation
from .cache_nlq import LAYER_TYPE, LinearState
from .parts_base_nlq import MLP_HOOKS, WEIGHT_HOOKS, AttentionPart
from .parts_builtin_nlq import ATTENTION_PARTS, PartFields, parts_of
from .parts_user_nlq import NLQConfigMixin, add_to_package, code_of, find_part


if TYPE_CHECKING:
    from .modeling_nlq import NLQModel  # noqa: F401, this line makes Transformers copy the model's files


__version__ = "0.2.0"

# The value of `attn_implementation` that leaves the backend to each layer and call
AUTOMATIC = "nlq"

# What an `attention_gate` reads and how; they mean nothing without it
GATE_OPTIONS = ("gate_source", "gate_activation", "gate_rank")

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
    "linear_attention_update",
    "linear_attention_beta",
    *ATTENTION_PARTS,
    *GATE_OPTIONS,
    "attention_parts",
    "cross_attention",
)

# Switches that cross-attention does not support: they need token order or the query's own value
WITHOUT_CROSS_ATTENTION = ("position_embedding", "sliding_window", "linear_attention_decay")
WITHOUT_CROSS_ATTENTION += ("linear_attention_update", "linear_attention_beta")
WITHOUT_CROSS_ATTENTION += tuple(name for name, part in ATTENTION_PARTS.items() if part.of_own_tokens())
# The switches that `cross_attention` may override
CROSS_ATTENTION_SWITCHES = [
    name for name in PER_LAYER_SWITCHES if name not in (*WITHOUT_CROSS_ATTENTION, "cross_attention")
]

# Pairs of switches that exclude each other, with the values that do; `None` is any that is set
EXCLUSIONS = (
    (("attention_dropout", None), ("attention_activation", "linear_attention")),
    (("sliding_window", None), ("attention_activation", "linear_attention")),
    # Keys and queries are of unit length, and nothing is divided
    (("qk_norm", "l2"), ("linear_attention_update", "delta")),
    (("attention_normalization", None), ("linear_attention_update", "delta")),
    (("parallax", None), ("differential_attention", None)),
    # Its sums would not move with the cache of a window
    (("selective_attention", None), ("sliding_window", None)),
    # A head reads the values of two groups
    (("exclusive_attention", None), ("differential_attention", "v1")),
    (("attention_gate", "value"), ("differential_attention", "v1")),
    (("attention_gate", "value"), ("gate_source", "output")),
    (("attention_gate", "value"), ("gate_rank", None)),
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

# Values can also be the keys, before their norm and positions: no term of their own
VALUE_PROJECTIONS = {**PROJECTIONS, "key": Projection()}

# Not those whose angles depend on the current length, which a cache does not fit
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")


@strict
class NLQConfig(NLQConfigMixin, PartFields, PreTrainedConfig):
    """The architecture of an NLQ model. The defaults are GPT-3 small with nonlinear queries.

    What is not listed here means the same as in `LlamaConfig`, or turns on a part of `ATTENTION_PARTS`, whose class
    explains the values. Functions are keys of Transformers' `ACT2FN`, and `None` for nothing.

    Args:
        intermediate_size: by default `4 * hidden_size`.
        mlp_type: `"plain"`, `act(X W1) W2`, or `"gated"`, `(act(X W_gate) * X W_up) W_down` (arXiv 2002.05202).
        max_position_embeddings: number of learned positions.
        position_embedding: `"learned"`, `"rope"` or `"none"`. Layers may differ in the last two.
        rope_parameters: as in Transformers; rope type `default`, `linear`, `yarn`, `llama3` or `proportional`.
        sliding_window: how many tokens a query sees, itself included; by default all.
        use_bias: biases in linear layers and LayerNorms.
        query_key_value_bias, attention_output_bias, mlp_bias: biases of these layers; by default as `use_bias`.
        norm_type: `"layernorm"`, or `"rmsnorm"` (arXiv 1910.07467), which has no bias.
        norm_gain: whether norms have learned gains (and LayerNorms with `use_bias` biases).
        embedding_norm: a norm of the embeddings.
        final_logit_softcapping: logits `c tanh(logits / c)`.
        initializer_range: standard deviation of the initial weights, divided by `sqrt(2 * num_hidden_layers)` in the
            last matrices of sub-layers.
        embedding_dropout, residual_dropout: after the embeddings, and of each sub-layer's output.
        norm_position: `"pre"`, `x = r(x + F(a(norm(x))))`; `"post"`, `x = r(norm(x + F(a(x))))`; `"output"`,
            `x = r(x + norm(F(a(x))))`; or `"sandwich"`, `x = r(x + norm(F(a(norm(x)))))`. `F` is attention or MLP. All
            but `"post"` have a final norm.
        parallel_residual: whether all sub-layers read the same `x`.
        sublayer_activation, residual_activation: the functions `a` and `r`.
        query_projection: `"linear"`, `X W`; `"identity"`, `X`; `"residual"`, `X + X W`; `"nonlinear"`, `X + f(X)`
            (arXiv 2603.13381); `"bottleneck"`, `f(X)`; `"upcycled"`, `X W + f(X)` with `f = 0` at first.
        key_projection, value_projection: the same for the keys and for the values. Values can also be the `"key"`,
            before `qk_norm` and rotary positions (arXiv 2606.04032).
        projection_bottleneck_size, projection_activation: width, by default `hidden_size // 2`, and activation of `f`.
        attention_activation: the function `phi` of the scores, a key of `ATTENTION_ACTIVATIONS` or of `ACT2FN`.
        attention_normalization: `"sum"`, `"length"` or `"none"`; by default the activation's.
        attention_scaling: factor of the scores; by default `1 / sqrt(head_dim)`, halved if queries contain `X`.
        linear_attention_decay: `"fixed"`, RetNet's rate for each key and value head, or `"learned"`, a trained rate;
            with the update `"delta"` also `"gated"`, `exp(-exp(A) softplus(w_a x + c))` (arXiv 2412.06464).
        linear_attention_update: `"additive"`, or `"delta"`, which replaces what the state holds for a key
            (arXiv 2102.11174).
        linear_attention_beta: the most that `"delta"` replaces; 2 allows negative eigenvalues (arXiv 2411.12537).
        gate_source: what an `attention_gate` reads: the `"input"` of the layer, or the `"output"` of all heads
            (arXiv 2608.11805).
        gate_activation: `"sigmoid"`, or `"softplus"` as in Laguna.
        gate_rank: the rank of the gate's matrix, a product of two as in Kimi Linear (arXiv 2510.26692).
        attention_parts: names of parts of your own; see `load_attention_parts`.
        attention_parts_code: a hash of the code of each; by default the latest.
        add_cross_attention: whether each layer also attends to the tokens of an encoder, before its MLP.
        cross_attention: switches that differ there; `False` for none of it.
        cross_attention_hidden_size: width of the encoder's tokens; by default `hidden_size`.
        cross_attention_max_positions: the most tokens of the encoder; by default `max_position_embeddings`.
        is_causal: `False` makes an encoder: a token sees its whole document, or with a `sliding_window` that many
            tokens on each side.
        classifier_pooling: the token that `NLQForSequenceClassification` reads: `"last"`, `"first"`, or the `"mean"`
            of all; by default `"last"`, and `"mean"` in an encoder.
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
    linear_attention_decay: Literal["fixed", "learned", "gated"] | None = None
    linear_attention_update: Literal["additive", "delta"] = "additive"
    linear_attention_beta: Literal[1, 2] = 1
    gate_source: Literal["input", "output"] = "input"
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    gate_rank: int | None = None
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
            is_by_layer = isinstance(overrides, dict) and all(str(number).isdecimal() for number in overrides)
            if not is_by_layer or not all(isinstance(layer, dict) for layer in overrides.values()):
                raise ValueError(f"per_layer_config={overrides!r} must map layer numbers to switches")
            _check_per_layer_switches(overrides)

        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        for name in sizes:
            _check_positive(self, name)
        if self.num_hidden_layers > 10_000:  # listed in Python, for minutes
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must be at most 10000")
        width, heads = self.hidden_size, self.num_attention_heads
        if self.head_dim is None and width % heads:
            raise ValueError(
                f"hidden_size={width} must be a multiple of num_attention_heads={heads}; or give head_dim"
            )
        defaults = {
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "intermediate_size": 4 * width,
            "projection_bottleneck_size": width // 2,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
            _check_positive(self, name)
        super().__post_init__(**kwargs)
        with contextlib.suppress(ValueError):  # the validation reports unknown parts
            if codes := {name: code for name, part in self._own_parts().items() if (code := code_of(part))}:
                self.attention_parts_code = codes  # as it is now
        self.name_code(kwargs.get("auto_map"), __version__)

    def _own_parts(self) -> dict[str, type[AttentionPart]]:
        names = dict.fromkeys(name for layer in self.attention_configs for name in layer.attention_parts or ())
        return {name: find_part(name, (self.attention_parts_code or {}).get(name)) for name in names}

    @property
    def activation(self) -> AttentionActivation:
        return get_attention_activation(self.attention_activation)

    @property
    def distinct_layers(self) -> Sequence["NLQConfig"]:
        """The layers' configurations, or one if all are the same: reading one takes long."""
        return self.per_layer_config if self.is_heterogeneous else [self]

    @property
    def attention_configs(self) -> Sequence["NLQConfig"]:
        """The `distinct_layers`, and their `cross_attention_config`."""
        return [*self.distinct_layers, *filter(None, (layer.cross_attention_config for layer in self.distinct_layers))]

    @property
    def cross_attention_config(self) -> "NLQConfig | None":
        """What the layer's cross-attention reads in place of this, if it has one."""
        if not self.add_cross_attention or self.cross_attention is False:
            return None
        config = copy.copy(self)
        switches = {name: getattr(NLQConfig, name) for name in (*WITHOUT_CROSS_ATTENTION, "attention_parts")}
        switches |= {"position_embedding": "none", "is_causal": False}
        overrides = self.cross_attention if isinstance(self.cross_attention, dict) else {}
        if self.attention_gate == "value" and "attention_gate" not in overrides:
            switches |= {name: getattr(NLQConfig, name) for name in ("attention_gate", *GATE_OPTIONS)}
        switches |= overrides
        for name, value in switches.items():
            setattr(config, name, value)
        config.is_cross_attention = True
        return config

    @property
    def number_of_sublayers(self) -> int:
        """How many outputs the layer adds to the residual stream."""
        return 2 if self.cross_attention_config is None else 3

    @property
    def key_value_input_size(self) -> int:
        return (self.is_cross_attention and self.cross_attention_hidden_size) or self.hidden_size

    @property
    def most_visible_keys(self) -> int:
        length = (self.is_cross_attention and self.cross_attention_max_positions) or self.max_position_embeddings
        if self.sliding_window is None:
            return length
        return min(length, self.sliding_window if self.is_causal else 2 * self.sliding_window + 1)

    @property
    def caches_keys_alone(self) -> bool:
        """Whether a layer's cache may hold its keys before norm and positions, and no values."""
        if self.value_projection != "key" or self.activation.kind == "linear":
            return False
        if self.head_dim <= 3:  # positions take as many numbers as values
            return False
        return all(part.keeps_keys or not part.has_hook("change_qkv") for part in parts_of(self))

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache of each layer, unless all store all keys."""
        try:
            types = [layer._layer_type for layer in self.per_layer_config]
        except ValueError:
            types = []  # the validation reports an unknown activation
        if set(types) <= {"full_attention"}:
            raise AttributeError("layer_types")  # Transformers asks by `hasattr`
        return types

    @property
    def _layer_type(self) -> str:
        if self.activation.kind == "linear":
            return LAYER_TYPE
        if self.number_of_conv_states:
            return "hybrid" if self.sliding_window is None else "hybrid_sliding"
        return "full_attention" if self.sliding_window is None else "sliding_attention"

    @property
    def first_conv_state(self) -> int:
        return len(LinearState._fields) if self.activation.kind == "linear" else 0

    @property
    def number_of_conv_states(self) -> int:
        """How many convolutions the layer's cache serves, for Transformers."""
        return sum(part.conv_states(self) for part in parts_of(self))

    @property
    def has_learned_positions(self) -> bool:
        return any(layer.position_embedding == "learned" for layer in self.distinct_layers)

    @property
    def has_rotary_positions(self) -> bool:
        return any(layer.position_embedding == "rope" for layer in self.distinct_layers)

    def has_bias(self, part: Literal["query_key_value", "attention_output", "mlp"]) -> bool:
        has_bias = getattr(self, f"{part}_bias")
        return self.use_bias if has_bias is None else has_bias

    def validate_layer_type(self):
        """Validates nothing: the types of the layers follow from their switches."""

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """The linear layers that tensor parallelism splits, and how."""
        # Without it, too, because Transformers reads from it that a cache holds some of the heads
        plan = {"self_attn.k_proj": "colwise"}
        for layer in self.attention_configs:
            module = "cross_attn" if layer.is_cross_attention else "self_attn"
            for name in ("query", "key", "value"):
                projection = VALUE_PROJECTIONS[getattr(layer, f"{name}_projection")]
                if projection.linear:
                    plan[f"{module}.{name[0]}_proj"] = "colwise"
                if projection.bottleneck:
                    plan[f"{module}.{name[0]}_bottleneck.fc1"] = "colwise"
                    plan[f"{module}.{name[0]}_bottleneck.fc2"] = "rowwise"
            if layer.linear_attention_update == "delta":
                plan[f"{module}.b_proj"] = "colwise"
            if layer.linear_attention_decay == "gated":
                plan[f"{module}.a_proj"] = "colwise"
            for part in parts_of(layer):
                plan |= {f"{module}.{name}": style for name, style in part.split_layers(layer).items()}
            plan[f"{module}.o_proj"] = "rowwise"
        gated = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
        plan |= gated if self.mlp_type == "gated" else {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
        return {f"layers.*.{name}": style for name, style in plan.items()}

    @property
    def num_query_heads(self) -> int:
        return max((part.query_heads(self) for part in parts_of(self)), default=self.num_attention_heads)

    @property
    def needs_first_values(self) -> bool:
        return any(part.needs_first_values for layer in self.distinct_layers for part in parts_of(layer))

    @property
    def changes_stream(self) -> bool:
        """Whether a part of a layer changes the residual stream; then all layers return what they add to it."""
        return any(part.has_hook("change_residual") for layer in self.distinct_layers for part in parts_of(layer))

    @property
    def score_scaling(self) -> float:
        if self.attention_scaling is not None:
            return float(self.attention_scaling)
        if self.qk_norm == "l2":
            return 1.0  # a learned scale replaces it
        # The paper has `Q(X) = (X + f(X)) / 2`; here this factor contains the 1/2
        return (0.5 if PROJECTIONS[self.query_projection].identity else 1.0) / math.sqrt(self.head_dim)

    # Transformers calls each `validate_...`

    def validate_architecture(self):
        if self.is_heterogeneous:  # first, because what differs between layers cannot be read below
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
                raise ValueError(f"rope_parameters: rope_type={rope_type!r} must be one of {', '.join(ROPE_TYPES)}")
            # the rest by an angle of 0
            factor = 1.0 if rope_type == "proportional" else self.rope_parameters.get("partial_rotary_factor", 1.0)
            if not 0 < (rotated := int(self.head_dim * factor)) <= self.head_dim or rotated % 2:
                raise ValueError(
                    f"position_embedding='rope': head_dim={self.head_dim} times partial_rotary_factor={factor}, "
                    f"{rotated} rotated elements, must be even and above 0"
                )

    def validate_rope(self):
        if self.has_rotary_positions:
            super().validate_rope()

    def validate_functions(self):
        for name in ("hidden_act", "sublayer_activation", "residual_activation"):
            _check_function(self, name)

    def validate_layers(self):
        for index, layer in enumerate(self.distinct_layers):
            try:
                _check_layer(layer)
                _check_cross_attention(layer)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}" if self.is_heterogeneous else str(error)) from None


def _check_per_layer_switches(overrides):
    if foreign := sorted({name for switches in overrides.values() for name in switches} - set(PER_LAYER_SWITCHES)):
        allowed = ", ".join(PER_LAYER_SWITCHES)
        raise ValueError(f"per_layer_config: {', '.join(foreign)} cannot be set for a layer; only {allowed} can")


def _check_positive(config, name):
    if (size := getattr(config, name)) is not None and size < 1:
        raise ValueError(f"{name}={size} must be a positive integer")


def _check_function(config, name):
    value = getattr(config, name)
    if value not in FUNCTIONS and (value is not None or getattr(NLQConfig, name) is not None):
        hint = "" if value is None else f"is unknown; {did_you_mean(value, FUNCTIONS)}"
        raise ValueError(f"{name}={value!r} {hint or 'must be '}one of {', '.join(FUNCTIONS)}")


def _check_layer(layer):
    for kind in ("query", "key", "value"):
        name, rows = f"{kind}_projection", VALUE_PROJECTIONS if kind == "value" else PROJECTIONS
        if (value := getattr(layer, name)) not in rows:
            suggestion = did_you_mean(value, rows)
            raise ValueError(f"{name}={value!r} is unknown; {suggestion}choose one of {', '.join(rows)}")
        heads = layer.num_query_heads if kind == "query" else layer.num_key_value_heads
        width = layer.hidden_size if kind == "query" else layer.key_value_input_size
        if rows[value].identity and heads * layer.head_dim != width:
            allowed = ", ".join(other for other, row in PROJECTIONS.items() if not row.identity)
            size = f"{heads} heads x head_dim={layer.head_dim}"
            raise ValueError(f"{name}={value!r} adds its input of hidden_size={width} to {size}; use one of {allowed}")
    if (layer.projection_bottleneck_size or 0) < 1:
        raise ValueError(f"projection_bottleneck_size={layer.projection_bottleneck_size} must be at least 1")
    if layer.sliding_window is not None and layer.sliding_window < 2:  # Transformers' cache takes no 1
        raise ValueError(f"sliding_window={layer.sliding_window} must be at least 2 tokens, or None")
    _check_positive(layer, "gate_rank")
    _check_function(layer, "projection_activation")
    _check_function(layer, "attention_output_activation")

    activation = layer.activation  # raises for an unknown name
    normalization = layer.attention_normalization
    if not activation.is_elementwise and normalization not in (None, activation.normalization):
        only = f"{activation.name} has the normaliser {activation.normalization!r} only"
        raise ValueError(f"attention_normalization={normalization!r}: {only}")
    if normalization == "sum" and not activation.non_negative:
        needs = f"needs weights that are never negative, unlike {activation.name!r}"
        raise ValueError(f"attention_normalization='sum' {needs}; use 'length' or 'none'")
    for name in ("linear_attention_decay", "linear_attention_update"):
        if activation.kind != "linear" and (value := getattr(layer, name)) != getattr(NLQConfig, name):
            raise ValueError(f"{name}={value!r} needs 'linear_attention', not {activation.name!r}")
    is_delta = layer.linear_attention_update == "delta"
    for name, value in (("linear_attention_decay", "gated"), ("linear_attention_beta", 2)):
        if not is_delta and getattr(layer, name) == value:
            raise ValueError(f"{name}={value!r} needs linear_attention_update='delta'")
    for name in GATE_OPTIONS:
        if layer.attention_gate is None and (value := getattr(layer, name)) != getattr(NLQConfig, name):
            raise ValueError(f"{name}={value!r} needs an attention_gate; set 'headwise' or 'elementwise'")
    for pair in EXCLUSIONS:
        values = {name: getattr(layer, name) for name, _ in pair}
        if all(values[name] == value if value is not None else values[name] for name, value in pair):
            raise ValueError(" excludes ".join(f"{name}={value!r}" for name, value in values.items()))
    parts = parts_of(layer)
    needs_order = {
        "attention_activation": not activation.sees_own_key,
        "linear_attention_decay": layer.linear_attention_decay,
        "linear_attention_update": is_delta,
        **{part.name: part.causal_only for part in parts},
    }
    if not layer.is_causal and (names := [name for name, needs in needs_order.items() if needs]):
        values = ", ".join(f"{name}={getattr(layer, name)!r}" if hasattr(layer, name) else name for name in names)
        of_decoder = "those of an encoder have none"
        reason = of_decoder if layer.is_cross_attention else "is_causal=False has none; use is_causal=True"
        raise ValueError(f"{values} needs an order of the tokens, and {reason}")
    for part in parts:
        if part.activations and activation.name not in part.activations:
            allowed = " or ".join(map(repr, part.activations))
            field = f"{part.name}={value!r}" if (value := getattr(layer, part.name, None)) else part.name
            raise ValueError(f"{field} needs attention_activation={allowed}, not {activation.name!r}")
        part.check(layer)
        if activation.kind == "linear" and any(map(part.has_hook, WEIGHT_HOOKS)):
            raise ValueError(f"{part.name} changes scores or weights, which 'linear_attention' lacks")
    weighers = [part.name for part in parts if part.has_hook("change_weights")]
    convolvers = [part.name for part in parts if part.conv_states(layer)]
    for names in (weighers, convolvers):
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} exclude each other: both change the weights, or use one cache")


def _check_cross_attention(layer):
    overrides = layer.cross_attention
    if overrides is True:
        raise ValueError("cross_attention=True must be the switches that differ, False, or None")
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


# `transformers serve` loads a model by `getattr(transformers, config.architectures[0])`, so there the name means the
# Auto class. MLflow must not see it, and take it for built in.
def _served_class(module) -> type:
    if "transformers.cli.serve" in sys.modules:
        return AutoModelForCausalLM
    raise AttributeError(f"module {module.__name__!r} has no attribute 'NLQForCausalLM'")


if type(transformers) is not ModuleType:
    type(transformers).NLQForCausalLM = property(_served_class)
