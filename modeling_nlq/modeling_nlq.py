"""NLQ models: GPT-style decoders and encoders with a configurable query projection, activation and block."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.auto import modeling_auto
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.utils import ModelOutput, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .activations_nlq import AttentionActivation, at_least_float32, get_attention_activation
from .attention_nlq import eager_attention_forward, in_full_precision
from .backends_nlq import (
    ATTENTION_BACKENDS,
    AttentionRequest,
    choose_implementation,
    choose_paged_implementation,
    layer_mask,
    make_layer_masks,
    supports_flash_attention,
)
from .cache_nlq import CACHE_NAME, LinearState, cache_layer_with, cache_of_both, check_key_width
from .configuration_nlq import AUTOMATIC, VALUE_PROJECTIONS, NLQConfig
from .integrations_nlq import (
    NLQGenerationMixin,
    NLQIntegrationMixin,
    accept_both_cache_names,
    check_arguments,
    register_default_targets,
)
from .linear_nlq import attend_to_state, fixed_log_decay, initial_decay_bias, linear_attention, rotate, state_of_source
from .loss_nlq import causal_lm_loss
from .masking_nlq import LayerMasks, can_be_read, read_sequences, refuse_packed
from .ops_nlq import autocast_dtype
from .parts_base_nlq import (
    HOOKS,
    MLP_HOOKS,
    AttentionCall,
    AttentionPart,
    ScoreBias,
    from_columns,
    join_columns,
    materialized_by,
    own_heads,
    to_columns,
)
from .parts_builtin_nlq import parts_of
from .parts_user_nlq import add_to_package


if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
else:
    FSDPModule = ()  # `isinstance` of it is never true


# Shapes: batch, heads (of queries), groups (of keys and values), query or length (tokens of this call), key (cached
# tokens and those of this call), head_dim, hidden
Rotation = tuple[Tensor, Tensor]  # cosines and sines, (batch or 1, length, head_dim or less)


class NLQMLP(nn.Module):
    def __init__(self, config: NLQConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.has_bias("mlp"))
        self.act_fn = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.has_bias("mlp"))
        self.fc2.ends_sublayer = True

    def forward(self, hidden_states: Tensor, call: AttentionCall | None = None) -> Tensor:
        inner = self.fc1(hidden_states)
        if call is not None:
            (inner,) = call.change_mlp("change_mlp_inner", inner)
        return self.fc2(self.act_fn(inner))


class NLQGatedMLP(nn.Module):
    """`W_down(act(W_gate x) * W_up x)` (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: NLQConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.has_bias("mlp"))
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.has_bias("mlp"))
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.has_bias("mlp"))
        self.down_proj.ends_sublayer = True

    def forward(self, hidden_states: Tensor, call: AttentionCall | None = None) -> Tensor:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if call is not None:
            gate, up = call.change_mlp("change_mlp_inner", gate, up)
        return self.down_proj(self.act_fn(gate) * up)


MLPS = {"plain": NLQMLP, "gated": NLQGatedMLP}


def make_norm(config: NLQConfig) -> nn.Module:
    options = {"eps": config.layer_norm_eps, "elementwise_affine": config.norm_gain}
    if config.norm_type == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, **options)
    return nn.LayerNorm(config.hidden_size, bias=config.use_bias, **options)


class NLQBottleneck(nn.Module):
    """`f(X) = LayerNorm(act(RMSNorm(X) W1) W2)` (Karbevski 2026, arXiv 2603.13381)."""

    def __init__(self, layer: NLQConfig, input_size: int, output_size: int, starts_at_zero: bool):
        super().__init__()
        inner_size, use_bias = layer.projection_bottleneck_size, layer.use_bias
        eps = layer.layer_norm_eps
        self.input_norm = nn.RMSNorm(input_size, eps=eps)
        self.fc1 = nn.Linear(input_size, inner_size, bias=use_bias)
        self.activation = ACT2FN[layer.projection_activation]
        self.fc2 = nn.Linear(inner_size, output_size, bias=use_bias)
        self.output_norm = nn.LayerNorm(output_size, eps=eps, bias=use_bias)
        self.output_norm.starts_at_zero = starts_at_zero  # read by `_init_weights`

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output_norm(self.fc2(self.activation(self.fc1(self.input_norm(hidden_states)))))


def make_terms(layer: NLQConfig, name: str) -> tuple[nn.Linear | None, NLQBottleneck | None]:
    """Makes the terms with weights of the projection `"query"`, `"key"` or `"value"`."""
    projection = VALUE_PROJECTIONS[getattr(layer, f"{name}_projection")]
    is_query = name == "query"
    input_size = layer.hidden_size if is_query else layer.key_value_input_size
    output_size = (layer.num_query_heads if is_query else layer.num_key_value_heads) * layer.head_dim
    linear = bottleneck = None
    if projection.linear:
        linear = nn.Linear(input_size, output_size, bias=layer.has_bias("query_key_value"))
    if projection.bottleneck:
        bottleneck = NLQBottleneck(layer, input_size, output_size, projection.starts_at_zero)
    return linear, bottleneck


class NLQAttention(nn.Module):
    """Multi-head attention with any projections, any activation of the scores and any backend."""

    tp_mesh = None  # the processes that share the heads

    def __init__(self, config: NLQConfig, layer_idx: int):
        super().__init__()
        self.config = config  # it alone has the current attention implementation
        layer = self.layer_config(config, layer_idx)
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = layer.num_query_heads
        self.num_key_value_groups = self.num_heads // config.num_key_value_heads
        self.scaling = layer.score_scaling
        self.attention_dropout = config.attention_dropout
        self.is_causal = layer.is_causal
        self.sliding_window = layer.sliding_window
        self.has_rotary_positions = layer.position_embedding == "rope"
        self.attention_activation = layer.attention_activation
        self.attention_normalization = layer.attention_normalization
        self.attention_sink = layer.attention_sink
        self.output_scaling = layer.attention_output_scaling
        # The window, and whether a query sees the key of its own token
        self.visible_keys = (layer.sliding_window, layer.activation.sees_own_key)

        # diff with Llama: a projection is a sum of terms; a missing one is `None`
        names = ("query", "key", "value")
        self.projections = {name: VALUE_PROJECTIONS[getattr(layer, f"{name}_projection")] for name in names}
        self.value_is_key = layer.value_projection == "key"
        self.caches_keys_alone = layer.caches_keys_alone
        # It rotates the keys of such a cache
        needs_angles = self.caches_keys_alone and self.has_rotary_positions
        self.rotary_emb = GPTNeoXRotaryEmbedding(config) if needs_angles else None
        self.q_proj, self.q_bottleneck = make_terms(layer, "query")
        self.k_proj, self.k_bottleneck = make_terms(layer, "key")
        self.v_proj, self.v_bottleneck = make_terms(layer, "value")
        output_size = config.num_attention_heads * self.head_dim
        self.o_proj = nn.Linear(output_size, config.hidden_size, bias=config.has_bias("attention_output"))
        self.o_proj.ends_sublayer = True  # read by `_init_weights`
        # `bias` in its name keeps it out of Trainer's weight decay
        self.sink_bias = nn.Parameter(torch.zeros(self.num_heads)) if layer.attention_sink == "learned" else None
        self._add_parts(layer)

    def _add_parts(self, layer):
        parts = {}
        for part in parts_of(layer):
            if part.needs_first_values and self.layer_idx == 0:
                continue
            for name, module in part.layer_modules(layer).items():
                setattr(self, name, module)
            parts[part.name] = part(layer, self.layer_idx)
        self.parts = nn.ModuleDict(parts)
        # Names, because copies of the layer have other modules
        self._names_by_hook = {hook: [name for name, part in parts.items() if part.has_hook(hook)] for hook in HOOKS}
        self.has_score_bias = bool(self._names_by_hook["score_bias"])
        self.has_mlp_hooks = any(self._names_by_hook[hook] for hook in MLP_HOOKS)
        self.has_residual_hook = bool(self._names_by_hook["change_residual"])
        self.materializes = materialized_by(parts.values())
        self.needs_token_context = self.rotary_emb is not None
        self.needs_token_context |= any(part.needs_token_context for part in parts.values())
        self.needs_first_values = any(part.needs_first_values for part in parts.values())
        self.needs_exact_output = any(part.needs_exact_output for part in parts.values())
        # The first layer hands its values on where another one reads them
        is_first = self.layer_idx == 0 and not layer.is_cross_attention
        self.returns_values = is_first and self.config.needs_first_values

    @staticmethod
    def layer_config(config: NLQConfig, layer_idx: int) -> NLQConfig:
        return config.per_layer_config[layer_idx]

    def initialize(self) -> None:
        if self.sink_bias is not None:
            init.zeros_(self.sink_bias)

    @property
    def activation(self) -> AttentionActivation:
        """The row of the table, read again because users may replace it."""
        return get_attention_activation(self.attention_activation)

    @property
    def normalization(self) -> str:
        return self.attention_normalization or self.activation.normalization

    @property
    def sink(self) -> Tensor | float | None:
        """`(heads,)`, the logit of each head's sink, or 0.0, or `None`."""
        if self.attention_sink == "learned":
            return own_heads(self.sink_bias, self.tp_mesh, dim=0)
        return None if self.attention_sink is None else 0.0

    def parts_with(self, hook) -> Sequence[AttentionPart]:
        names = self._names_by_hook[hook]
        return [self.parts[name] for name in names] if names else ()

    def attention_request(self, *of_call) -> AttentionRequest:
        """Returns what this layer requests; `of_call` are the fields after `dropout`."""
        dropout = self.attention_dropout if self.training else 0.0
        parts = (self.has_score_bias, self.materializes)
        return AttentionRequest(self.activation, self.attention_sink, *parts, dropout, *of_call)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotation | None = None,
        attention_mask: LayerMasks | Tensor | None = None,
        cache: Cache | None = None,
        first_values: Tensor | None = None,
        source: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, ...]:
        """`(batch, query, hidden)` -> the same shape, and the weights `(batch, heads, query, key)` or `None`.

        A layer with `returns_values` also returns its values, `(batch, query, groups, head_dim)`.
        """
        if first_values is None and self.needs_first_values:
            raise ValueError(f"first_values=None (layer {self.layer_idx}): give what the first layer returns")
        # diff with Llama: the model makes the masks and chooses the backends of all layers
        name, mask, token_context = layer_mask(self, attention_mask, hidden_states, cache, source, **kwargs)
        call = self.make_call(hidden_states, token_context, first_values, cache, source)
        positions = position_embeddings if self.has_rotary_positions else None
        attn_output, attn_weights = self.attend(call, positions, name, mask, kwargs)
        if attn_weights is not None:
            for part in self.parts_with("change_returned_weights"):
                attn_weights = part("change_returned_weights", call, attn_weights)
        for part in self.parts_with("change_output"):
            attn_output = part("change_output", call, attn_output)
        output = self.o_proj(attn_output.flatten(2))
        return (output, attn_weights, call.values.transpose(1, 2)) if self.returns_values else (output, attn_weights)

    def make_call(self, hidden_states, *args) -> AttentionCall:
        call = AttentionCall(self, hidden_states, *args)
        for part in self.parts_with("change_input"):
            call.hidden_states = part("change_input", call, call.hidden_states)
        return call

    def project(self, call, position_embeddings=None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value of the new tokens, `(batch, heads or groups, length, head_dim)` each."""
        query = self._sum_terms("query", call.hidden_states)
        states = (query, *self.project_source(call, query))
        for part in self.parts_with("change_qkv"):
            states = part("change_qkv", call, *states)
        query, key, value = (each.transpose(1, 2) for each in states)  # heads before length
        call.values = value if call.source is None else None
        if position_embeddings is not None:
            query, key = rotate(query, key, *position_embeddings)
        return query, key, value

    def project_source(self, call, query) -> tuple[Tensor, Tensor]:
        source = call.hidden_states if call.source is None else call.source
        key = self._sum_terms("key", source)
        return key, key if self.value_is_key else self._sum_terms("value", source)

    def _sum_terms(self, name, hidden_states) -> Tensor:
        """Returns a projection, `(batch, length, hidden)` -> `(batch, length, heads, head_dim)`."""
        linear, bottleneck = (getattr(self, f"{name[0]}_{term}") for term in ("proj", "bottleneck"))
        terms = [own_heads(hidden_states, self.tp_mesh, dim=-1)] if self.projections[name].identity else []
        if linear is not None:
            terms.append(linear(hidden_states))
        if bottleneck is not None:
            terms.append(own_heads(bottleneck(hidden_states), self.tp_mesh, dim=-1))
        states = sum(terms[1:], start=terms[0])
        # `unflatten` takes longer
        return states.view(*states.shape[:-1], states.shape[-1] // self.head_dim, self.head_dim)

    def prepare(
        self, call, position_embeddings=None, arguments=None
    ) -> tuple[Tensor, Tensor, Tensor, ScoreBias | None]:
        """Returns query, key and value of all tokens, and a bias of the scores, and adds new tokens to the cache.

        A paged cache changes the `arguments` of flash attention.
        """
        query, key, value = self.project(call, position_embeddings)
        stateful_parts = self.parts_with("token_state")
        if stateful_parts:
            dtype = at_least_float32(key)
            call.states = {part.name: part("token_state", call).to(dtype) for part in stateful_parts}
        if call.cache is not None:
            keys_alone = self.holds_keys_alone(call.cache)
            if keys_alone:
                key, value = value, self._position_columns(call, value, position_embeddings)
            if stateful_parts:
                columns = to_columns(list(call.states.values()), key.dtype)
                key = torch.cat([key, columns], dim=-1)
                check_key_width(call.cache, self.layer_idx, key)
            key, value = self.update_cache(call.cache, key, value, arguments)
            if stateful_parts:
                call.states = from_columns(key[..., self.head_dim :], stateful_parts)
                key = key[..., : self.head_dim]
            if keys_alone:
                key, value = self._keys_of_values(key, value, position_embeddings), key
        bias = None
        for part in self.parts_with("score_bias"):
            part_bias = part("score_bias", call, (call.states or {}).get(part.name))
            # A bias of positions alone has one row for the whole batch
            part_bias = ScoreBias(*(term.expand(query.shape[0], -1, -1) for term in part_bias))
            bias = part_bias if bias is None else ScoreBias(bias.query + part_bias.query, bias.key + part_bias.key)
        for part in self.parts_with("change_cached_qkv"):
            query, key, value = part("change_cached_qkv", call, query, key, value)
        return query, key, value, bias

    def holds_keys_alone(self, cache) -> bool:
        """Tells whether a cache holds keys before norm and positions, and no values.

        Not if it is paged, rounds what it holds, or was made in advance with a place for values.
        """
        if not self.caches_keys_alone or isinstance(cache, PagedAttentionCache):
            return False
        is_made = self.layer_idx < len(cache.layers)
        layer = cache.layers[self.layer_idx] if is_made else cache.layer_class_to_replicate
        has_values = is_made and layer.is_initialized and layer.values.shape[-1] == self.head_dim
        return not (has_values or hasattr(layer, "_quantize"))

    def _position_columns(self, call, key, position_embeddings) -> Tensor:
        """Returns what such a cache holds beside keys `(batch, groups, length, head_dim)`: their rotary positions.

        Only the call that brings a token knows the caller's position of it.
        """
        if position_embeddings is None:
            return key[..., :0]
        positions = call.token_context.position_ids[:, None, :, None].to(at_least_float32(key))
        return to_columns([positions.expand(*key.shape[:3], 1)], key.dtype)

    def _keys_of_values(self, value, columns, position_embeddings) -> Tensor:
        key = value
        if (norm := getattr(self, "k_norm", None)) is not None:
            key = norm(key.transpose(1, 2)).transpose(1, 2)
        if position_embeddings is not None:
            angles = self.rotary_emb(position_embeddings[0], join_columns(columns)[:, 0, :, 0])
            _, key = rotate(key[:, :0], key, *angles)
        return key

    def update_cache(self, cache, key, value, arguments) -> tuple[Tensor, Tensor]:
        # Before Transformers 5.24, Llama's attention functions updated a paged cache
        more = {"kwargs": arguments} if isinstance(cache, PagedAttentionCache) else {}
        return cache.update(key, value, self.layer_idx, **more)

    def attend(self, call, position_embeddings, name, mask, kwargs) -> tuple[Tensor, Tensor | None]:
        """Returns outputs `(batch, query, heads, head_dim)`, and weights or `None`."""
        *states, bias = self.prepare(call, position_embeddings, kwargs)
        if bias is not None:
            kwargs["score_bias"] = bias
        if self.materializes is not None:
            kwargs["call"] = call

        # diff with Llama: Transformers' functions know softmax only
        if name in ATTENTION_BACKENDS:
            attention_interface: Callable = ATTENTION_BACKENDS[name].function
            if self.needs_exact_output and ATTENTION_BACKENDS[name].has_float32:
                attention_interface = in_full_precision(attention_interface)
        else:
            attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        sliding_window = self.sliding_window
        if sliding_window and not self.is_causal:
            sliding_window += 1  # flash attention counts the token itself

        kwargs["dropout"] = self.attention_dropout if self.training else 0.0
        return attention_interface(self, *states, mask, scaling=self.scaling, sliding_window=sliding_window, **kwargs)

    def change_residual(self, call, states, earlier) -> tuple[Tensor, Tensor]:
        """Returns what `call.reader` reads of the residual stream, and the stream that its output is added to."""
        stream = states
        for part in self.parts_with("change_residual"):
            states = part("change_residual", call, states, earlier)
            stream = states if part.replaces_stream else stream
        return states, stream

    def change_mlp(self, hook, call, *states) -> tuple[Tensor, ...]:
        for part in self.parts_with(hook):
            changed = part(hook, call, *states)
            states = changed if isinstance(changed, tuple) else (changed,)
        return states


class NLQLinearAttention(NLQAttention):
    """Linear attention, which stores a state instead of keys and values and calls no backend."""

    def __init__(self, config: NLQConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layer = self.layer_config(config, layer_idx)
        self.linear_attention_decay = layer.linear_attention_decay
        self.largest_beta = layer.linear_attention_beta
        heads = config.num_key_value_heads
        if self.linear_attention_decay == "learned":
            # Its sigmoid is the rate
            self.decay_bias = nn.Parameter(initial_decay_bias(heads).to(torch.get_default_dtype()))
        # The names are those of Gated DeltaNet, with `bias` for the same reason as `sink_bias`
        is_delta = layer.linear_attention_update == "delta"
        self.b_proj = nn.Linear(config.hidden_size, heads, bias=False) if is_delta else None
        self.a_proj = None
        if self.linear_attention_decay == "gated":
            self.a_proj = nn.Linear(config.hidden_size, heads, bias=False)
            self.a_log_bias = nn.Parameter(torch.zeros(heads))
            self.dt_bias = nn.Parameter(torch.ones(heads))

    def initialize(self):
        if self.linear_attention_decay == "learned":
            init.copy_(self.decay_bias, initial_decay_bias(len(self.decay_bias)))
        elif self.linear_attention_decay == "gated":
            # As in Transformers' `qwen3_next`
            init.copy_(self.a_log_bias, torch.empty_like(self.a_log_bias).uniform_(0.01, 16.0).log_())
            init.ones_(self.dt_bias)

    def rates(self, hidden_states) -> dict[str, Tensor | None]:
        """Returns the `log_decay` and `beta` of `linear_attention`, given the layer's input."""
        if self.b_proj is None:
            return {"log_decay": self.log_decay}
        strength = self.b_proj(hidden_states)
        beta = self.largest_beta * torch.sigmoid(strength.to(at_least_float32(strength)))
        log_decay = self.log_decay
        if self.a_proj is not None:
            biases = (own_heads(each, self.tp_mesh, dim=0) for each in (self.a_log_bias, self.dt_bias))
            log_rate, bias = (each.to(beta.dtype) for each in biases)
            log_rate = log_rate.clamp(max=80.0)  # where the rate overflows, its gradient would be NaN
            # Softplus comes last: compiled, its gradient must not be transposed
            steps = (self.a_proj(hidden_states) + bias).transpose(1, 2).contiguous()
            log_decay = -log_rate.exp()[:, None] * F.softplus(steps)
        return {"log_decay": log_decay, "beta": beta.transpose(1, 2)}

    @property
    def log_decay(self) -> Tensor | None:
        """`(key_value_heads,)`, the logarithm of the decay per token, unless the layer's input decides."""
        if self.linear_attention_decay in (None, "gated"):
            return None
        if self.linear_attention_decay == "learned":
            dtype = at_least_float32(self.decay_bias)
            log_decay = F.logsigmoid(self.decay_bias.to(dtype))
        else:
            log_decay = fixed_log_decay(self.config.num_key_value_heads)
        return own_heads(log_decay, self.tp_mesh, dim=0)

    def attend(self, call, position_embeddings, name, mask, kwargs):
        length = call.hidden_states.shape[1]
        query, key, value = self.project(call)  # rotary positions come later, in at least float32
        cache_layer = state = None
        if (cache := call.cache) is not None:
            name = "attention_activation='linear_attention'"
            cache_layer = cache_layer_with("get_state", cache, self.layer_idx, name)
            state = cache_layer.get_state()
        elif mask is not None:
            mask.check(length, length)
        if self.needs_exact_output:  # the output gets the type of the values
            value = value.to(at_least_float32(value))
        attn_output, state = linear_attention(
            query,
            key,
            value,
            mask,
            scaling=self.scaling,
            position_embeddings=position_embeddings,
            state=state,
            form="parallel" if self.config._attn_implementation == "eager" and cache_layer is None else "chunked",
            is_causal=self.is_causal,
            has_gradient=self.training,
            **self.rates(call.hidden_states),
        )
        if cache_layer is not None:
            cache_layer.set_state(state, length)
        return attn_output, None


class NLQCrossAttention(NLQAttention):
    """Attention to an encoder's tokens, with keys and values that are projected once for a cache."""

    @staticmethod
    def layer_config(config, layer_idx):
        return config.per_layer_config[layer_idx].cross_attention_config

    def has_source(self, cache) -> bool:
        return cache is not None and cache.is_updated.get(self.layer_idx, False)

    def make_call(self, hidden_states, token_context, first_values, cache, source):
        source = source[:, :0] if self.has_source(cache) else source
        return super().make_call(hidden_states, token_context, first_values, cache, source)

    def project_source(self, call, query):
        if not self.has_source(call.cache):
            return super().project_source(call, query)
        # Quantized layers and some adapters fail without tokens
        is_own_type = self.projections["key" if self.value_is_key else "value"].identity
        dtype = call.source.dtype if is_own_type else autocast_dtype(call.source)
        states = query[:, :0, :: self.num_key_value_groups].to(dtype)
        return states, states

    def holds_keys_alone(self, cache):
        return super().holds_keys_alone(cache.cross_attention_cache)

    def update_cache(self, cache, key, value, *_):
        half, index = cache.cross_attention_cache, self.layer_idx
        if self.has_source(cache):
            return half.layers[index].keys, half.layers[index].values
        cache.is_updated[index] = True
        return half.update(key, value, index)


class NLQLinearCrossAttention(NLQCrossAttention):
    """Linear attention to an encoder's tokens, which stores the sums over them."""

    def attend(self, call, position_embeddings, name, mask, kwargs):
        query, key, value = self.project(call)
        numerator = row = None
        if not self.has_source(call.cache):
            state = state_of_source(key, value, None if mask is None else mask.key_is_valid)
            numerator, row = state.numerator, state.denominator[:, :, None]
        if call.cache is not None:
            numerator, row = self.update_cache(call.cache, numerator, row)
        state = LinearState(numerator, row.squeeze(2))
        attn_output = attend_to_state(query, state, self.scaling)
        return attn_output if self.needs_exact_output else attn_output.to(value.dtype), None


class NLQDecoderLayer(GradientCheckpointingLayer):
    """Attention, perhaps attention to an encoder's tokens, and MLP, by the formulas of `norm_position`."""

    def __init__(self, config: NLQConfig, layer_idx: int):
        super().__init__()
        self.parallel_residual = config.parallel_residual
        layer = config.per_layer_config[layer_idx]
        attention_class = NLQLinearAttention if layer.activation.kind == "linear" else NLQAttention
        self.self_attn = attention_class(config, layer_idx)
        self.has_mlp_hooks = self.self_attn.has_mlp_hooks
        self.has_residual_hook = self.self_attn.has_residual_hook
        self.returns_added = config.changes_stream
        self.is_last = layer_idx == config.num_hidden_layers - 1
        self.mlp = MLPS[config.mlp_type](config)
        # diff with Llama: a norm may stand before a sub-layer, after it, or after the sum. A single sum has `mlp_norm`
        self.is_post_norm = config.norm_position == "post"
        has_two_sums = self.is_post_norm and not config.parallel_residual
        has_input_norm = config.norm_position in ("pre", "sandwich")
        has_output_norm = config.norm_position in ("output", "sandwich")
        # A missing module is `None`, because one that does nothing would cost a call for each token
        self.self_attn_norm = make_norm(config) if has_input_norm or has_two_sums else None
        self.mlp_norm = make_norm(config) if has_input_norm or self.is_post_norm else None
        self.self_attn_output_norm = make_norm(config) if has_output_norm else None
        self.mlp_output_norm = make_norm(config) if has_output_norm else None
        self.cross_attn = self.cross_attn_norm = self.cross_attn_output_norm = None
        if (cross := layer.cross_attention_config) is not None:
            attention_class = NLQLinearCrossAttention if cross.activation.kind == "linear" else NLQCrossAttention
            self.cross_attn = attention_class(config, layer_idx)
            self.cross_attn_norm = make_norm(config) if has_input_norm or has_two_sums else None
            self.cross_attn_output_norm = make_norm(config) if has_output_norm else None
        self.dropout = nn.Dropout(config.residual_dropout) if config.residual_dropout else None
        self.sublayer_activation = ACT2FN[config.sublayer_activation] if config.sublayer_activation else None
        self.residual_activation = ACT2FN[config.residual_activation] if config.residual_activation else None

    def _sublayer_input(self, residual, norm) -> Tensor:
        return call_if_set(self.sublayer_activation, residual if self.is_post_norm else call_if_set(norm, residual))

    def _residual_output(self, total, norm) -> Tensor:
        return call_if_set(self.residual_activation, call_if_set(norm, total) if self.is_post_norm else total)

    def forward(
        self,
        hidden_states: Tensor,
        first_values: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *earlier: Tensor,
        attention_mask: LayerMasks | Tensor | None = None,
        position_embeddings: Rotation | None = None,
        cache: Cache | None = None,
        encoder_attention_mask: LayerMasks | Tensor | None = None,
        encoder_cache: EncoderDecoderCache | None = None,
        **kwargs,
    ) -> Tensor | tuple[Tensor, ...]:
        """`(batch, query, hidden)` -> the same shape.

        Returns a tuple where later layers need more: the values of the first layer, and what each sub-layer added to
        the residual stream.

        Args:
            encoder_hidden_states: `(batch, source, encoder hidden)`; cross-attention stores them in `encoder_cache`.
            earlier: the embeddings and what each earlier sub-layer added to the stream, where a part changes it.
        """
        # diff with Llama: reentrant checkpointing differentiates positional tensors only
        if isinstance(hidden_states, tuple):
            raise ValueError("hidden_states: give each later layer the two results of the first")
        index = self.self_attn.layer_idx
        if self.returns_added and len(earlier) <= 2 * index:  # two sub-layers or more add something in each layer
            raise ValueError(f"earlier (layer {index}): give the embeddings and what all layers before it have added")
        read, hidden_states = self._read_stream("attention", hidden_states, earlier)
        mlp_call = None
        if self.has_mlp_hooks:  # before the attention advances the cache
            *_, token_context = layer_mask(self.self_attn, attention_mask, hidden_states, cache, **kwargs)
            mlp_call = AttentionCall(self.self_attn, hidden_states, token_context, cache=cache)
        output, _, *values = self.self_attn(
            self._sublayer_input(read, self.self_attn_norm),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            cache=cache,
            first_values=first_values,
            **kwargs,
        )
        added = [call_if_set(self.dropout, call_if_set(self.self_attn_output_norm, output))]
        hidden_states = hidden_states + added[-1]
        if not self.parallel_residual:
            hidden_states = self._residual_output(hidden_states, self.self_attn_norm)
            reader = "mlp" if self.cross_attn is None else "cross_attention"
            read, hidden_states = self._read_stream(reader, hidden_states, (*earlier, *added))
        if self.cross_attn is not None:
            output, _ = self.cross_attn(
                self._sublayer_input(read, self.cross_attn_norm),
                attention_mask=encoder_attention_mask,
                cache=encoder_cache,
                source=encoder_hidden_states,
                **{**kwargs, "position_ids": None},  # flash attention reads packed documents from them
            )
            added.append(call_if_set(self.dropout, call_if_set(self.cross_attn_output_norm, output)))
            hidden_states = hidden_states + added[-1]
            if not self.parallel_residual:
                hidden_states = self._residual_output(hidden_states, self.cross_attn_norm)
                read, hidden_states = self._read_stream("mlp", hidden_states, (*earlier, *added))
        output = self._run_mlp(self._sublayer_input(read, self.mlp_norm), mlp_call)
        added.append(call_if_set(self.dropout, call_if_set(self.mlp_output_norm, output)))
        hidden_states = self._residual_output(hidden_states + added[-1], self.mlp_norm)
        if self.is_last:
            hidden_states, _ = self._read_stream("final_norm", hidden_states, (*earlier, *added))
        results = (*values, *added) if self.returns_added else values
        return (hidden_states, *results) if results else hidden_states

    def _read_stream(self, reader, stream, earlier) -> tuple[Tensor, Tensor]:
        """Returns what a sub-layer or the final norm reads, and the stream that a sub-layer's output is added to."""
        if not self.has_residual_hook:
            return stream, stream
        call = AttentionCall(self.self_attn, stream, reader=reader)
        return self._attention_method("change_residual")(call, stream, earlier)

    def _run_mlp(self, hidden_states, call) -> Tensor:
        if call is None:
            return self.mlp(hidden_states)
        self._attention_method("change_mlp")
        call.hidden_states = hidden_states
        (hidden_states,) = call.change_mlp("change_mlp_input", hidden_states)
        return self.mlp(hidden_states, call)

    def _attention_method(self, name: str) -> Callable:
        """Returns a method of the attention that can be called apart from its `forward`."""
        if isinstance(self.self_attn, FSDPModule) and name not in vars(self.self_attn):
            # The attention holds the parameters of its parts, which FSDP2 may have taken away
            register_fsdp_forward_method(self.self_attn, name)
        return getattr(self.self_attn, name)


def call_if_set(module: nn.Module | None, hidden_states: Tensor) -> Tensor:
    return hidden_states if module is None else module(hidden_states)


class NLQPreTrainedModel(NLQIntegrationMixin, PreTrainedModel):
    config: NLQConfig
    _can_record_outputs = {
        "hidden_states": NLQDecoderLayer,
        "attentions": OutputRecorder(NLQAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(NLQCrossAttention, index=1),
    }

    def __init__(self, config: NLQConfig, *inputs, **kwargs):
        # The generic heads build their body by `AutoModel.from_config`
        AutoModel._model_mapping.register(type(config), NLQModel, exist_ok=True)
        config.validate()  # `from_pretrained` has set fields since
        super().__init__(config, *inputs, **kwargs)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):  # FSDP2 derives a class, which a saved model must not name
            cls.__module__, cls.__name__ = cls.__bases__[-1].__module__, cls.__bases__[-1].__name__

    def _initialize_weights(self, module, is_custom_code=False):
        # diff with PreTrainedModel, which skips a module without parameters: a part may set its inner ones
        is_part = isinstance(module, AttentionPart) and type(module).initialize is AttentionPart.initialize
        super()._initialize_weights(module, is_custom_code and not is_part)

    def _init_weights(self, module):
        super()._init_weights(module)
        if getattr(module, "ends_sublayer", False):
            # Radford et al. 2019, section 2.3: the variance of the residual stream does not grow with depth
            sublayers = 3 if self.config.add_cross_attention else 2
            std = self.config.initializer_range / math.sqrt(sublayers * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)
        elif getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)
        elif hasattr(module, "initialize"):
            module.initialize()

    @property
    def _supports_flash_attn(self):
        # Continuous batching switches to it where this is true
        return supports_flash_attention(self.config)

    def get_correct_attn_implementation(self, requested_attention, is_init_check=False):
        requested_attention = choose_implementation(self.config, requested_attention)
        if requested_attention == AUTOMATIC:
            return requested_attention
        return super().get_correct_attn_implementation(requested_attention, is_init_check)


class NLQModelOutput(BaseModelOutputWithPastAndCrossAttentions):
    """Leaves out the empty `cross_attentions` that `capture_outputs` returns."""

    def __setitem__(self, key, value):
        if not (isinstance(value, tuple) and not value):
            super().__setitem__(key, value)


class NLQModel(NLQPreTrainedModel):
    """Embeddings, blocks and a final norm."""

    def __init__(self, config: NLQConfig):
        super().__init__(config)
        self.is_causal = config.is_causal
        # diff with Llama: no `padding_idx`; with end-of-text as padding it would zero a real row
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = self.rotary_emb = None
        if config.has_learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.has_rotary_positions:
            self.rotary_emb = GPTNeoXRotaryEmbedding(config)  # Llama's, and of a part of each head
        self.embed_norm = make_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(NLQDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.Identity() if config.norm_position == "post" else make_norm(config)
        self.needs_first_values = config.needs_first_values
        self.changes_stream = config.changes_stream
        self.gradient_checkpointing = False
        self.post_init()

    @accept_both_cache_names
    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        past_key_values=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        **kwargs,
    ) -> NLQModelOutput:
        """Computes the last hidden states, `(batch, query, hidden)`.

        Args:
            input_ids: `(batch, query)` token ids.
            attention_mask: `(batch, key)`, 0 for padding; or a mask `(batch, 1 or heads, query, key)`.
            position_ids: `(batch or 1, query)`. By default the index of a token among the tokens that are not padding.
                Where they do not rise by one, a new packed document begins, unless there is a cache or an
                `attention_mask`, even of all ones.
            cache, past_key_values: the cache, by its names since Transformers 5.24 and before; also returned.
            inputs_embeds: `(batch, query, hidden)`, instead of `input_ids`.
            use_cache: whether to make a cache; by default `config.use_cache`, and not in training.
            encoder_hidden_states: `(batch, source, cross_attention_hidden_size)`, with `config.add_cross_attention`.
            encoder_attention_mask: as `attention_mask`, of the source.
        """
        config = self.config
        is_causal = config.is_causal
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("cache and past_key_values are two names for one argument; give one of them")
        cache = past_key_values if cache is None else cache
        is_paged = isinstance(cache, PagedAttentionCache)
        # Continuous batching passes it with its causal mask
        if kwargs.pop("is_causal", is_causal) != is_causal and not is_paged:
            raise ValueError(f"is_causal={not is_causal}: the configuration of this model has is_causal={is_causal}")
        if is_causal != self.is_causal:
            raise ValueError(
                f"is_causal={is_causal}: the model was made with is_causal={self.is_causal}; make it anew"
            )
        if not is_causal:
            kwargs.pop("labels", None)  # `generate` hands them to an encoder, where `Seq2SeqTrainer` predicts
        if not is_paged:  # continuous batching passes more
            check_arguments(kwargs)
        if not is_causal and (use_cache or cache is not None):
            raise ValueError("is_causal=False: an encoder has no cache; leave use_cache and past_key_values out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if not is_causal and input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        self._check_source(encoder_hidden_states, inputs_embeds.shape[0])
        encoder_cache = None
        if isinstance(cache, EncoderDecoderCache) or (cache is not None and config.add_cross_attention):
            encoder_cache = cache_of_both(cache)
            cache = encoder_cache.self_attention_cache
        use_cache = self._check_use_cache(use_cache, cache)
        # In assisted decoding the first layers draft
        layers = list(self.layers)[: config.num_hidden_layers]
        options = {"is_causal": is_causal, **kwargs}
        sequences = read_sequences(inputs_embeds, attention_mask, position_ids, cache, use_cache, **options)
        # diff with Llama: not while training
        wants_cache = config.use_cache and is_causal and not self.training if use_cache is None else use_cache
        if wants_cache and cache is None and sequences.packed_position_ids is None:
            cache = DynamicCache(config=config)
            encoder_cache = cache_of_both(cache) if config.add_cross_attention else None

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            hidden_states = hidden_states + self.embed_positions(self._check_last_position(sequences))
        position_embeddings = None
        if self.rotary_emb is not None:
            position_embeddings = self.rotary_emb(hidden_states, sequences.position_ids)
        hidden_states = self.dropout(call_if_set(self.embed_norm, hidden_states))

        # Other programs may have wrapped or replaced layers
        attention = [getattr(layer, "self_attn", None) for layer in layers]
        masks = make_layer_masks(attention, inputs_embeds, sequences, cache, **kwargs)
        encoder_masks = None
        if encoder_hidden_states is not None:
            refuse_packed(sequences.segments, "would all see the encoder's tokens; give one text per row")
            source = read_sequences(inputs_embeds, encoder_attention_mask, source=encoder_hidden_states)
            attention = [getattr(layer, "cross_attn", None) for layer in layers]
            encoder_masks = make_layer_masks(attention, inputs_embeds, source, **kwargs)
        first_values, added = None, [hidden_states] if self.changes_stream else []
        for layer in layers:
            output = layer(
                hidden_states,
                first_values,
                encoder_hidden_states,
                *added,
                attention_mask=masks,
                position_embeddings=position_embeddings,
                position_ids=sequences.packed_position_ids,
                cache=cache,
                encoder_attention_mask=encoder_masks,
                encoder_cache=encoder_cache,
                **kwargs,
            )
            # A wrapped layer may return a tuple of its own
            hidden_states, *results = output if isinstance(output, tuple) else (output,)
            if self.needs_first_values and first_values is None and results:
                first_values = results.pop(0)
            added += results if self.changes_stream else ()
        cache = cache if encoder_cache is None else encoder_cache
        return NLQModelOutput(last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: cache})

    def _check_source(self, encoder_hidden_states, batch):
        name = "encoder_hidden_states"
        width = self.config.cross_attention_hidden_size or self.config.hidden_size
        expected = f"(batch, source, cross_attention_hidden_size)=({batch}, source, {width})"
        shape = None if encoder_hidden_states is None else tuple(encoder_hidden_states.shape)
        if not self.config.add_cross_attention:
            if shape is not None:
                raise ValueError(f"{name}: this model has no cross-attention; set add_cross_attention=True")
        elif shape is None:
            raise ValueError(f"{name}: add_cross_attention=True needs the tokens of an encoder, {expected}")
        elif len(shape) != 3 or shape[::2] != (batch, width):
            raise ValueError(f"{name}={shape} must be {expected}")

    def _check_use_cache(self, use_cache, cache) -> bool | None:
        """Returns `use_cache`, or `False` under gradient checkpointing."""
        is_checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in (self, *self.layers))
        if not (self.training and torch.is_grad_enabled() and is_checkpointed):
            return use_cache
        if cache is not None:
            raise ValueError("past_key_values: no cache with gradient checkpointing; turn it off, or call eval()")
        return False

    def _check_last_position(self, sequences) -> Tensor:
        positions, last = sequences.position_ids, sequences.last_position
        length = self.config.max_position_embeddings
        if sequences.is_paged:
            # Transformers computes some tokens beyond, and does not use their outputs
            return positions.clamp(max=length - 1)
        if last is None and can_be_read(positions):  # CUDA's embedding has an assertion of its own
            last = int(positions.max())
        if last is not None and last >= length:
            raise ValueError(f"position {last} is beyond the learned ones: max_position_embeddings={length}")
        return positions


def without_last(outputs: ModelOutput) -> dict[str, Any]:
    return {name: value for name, value in outputs.items() if name != "last_hidden_state"}


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else torch.tanh(logits / cap) * cap


class NLQLanguageModel(NLQPreTrainedModel):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    of_decoders: bool

    def __init__(self, config: NLQConfig):
        if config.is_causal != self.of_decoders:
            needed = "NLQForMaskedLM" if self.of_decoders else "NLQForCausalLM"
            raise ValueError(f"is_causal={config.is_causal} needs {needed}; or set is_causal={self.of_decoders}")
        super().__init__(config)
        self.model = NLQModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Transformers would derive it from the name of the class
        self.loss_type = "ForCausalLM" if self.of_decoders else "ForMaskedLM"
        self.post_init()

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return cap_logits(self.lm_head(hidden_states), self.config.final_logit_softcapping)

    def compute_loss(self, logits, labels, **kwargs) -> Tensor | None:
        if labels is None:
            return None
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)


class NLQForMaskedLM(NLQLanguageModel):
    """An encoder with a language-modelling head."""

    of_decoders = False

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ) -> MaskedLMOutput:
        """Computes logits `(batch, query, vocabulary)`; the other arguments are `NLQModel`'s.

        The loss, in nats, is the mean over `labels` `(batch, query)` but -100, for tokens that are not masked.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.compute_logits(outputs.last_hidden_state)
        if labels is not None and labels.shape != logits.shape[:-1]:
            raise ValueError(f"labels={tuple(labels.shape)} must be (batch, length)={tuple(logits.shape[:-1])}")
        loss = self.compute_loss(logits, labels, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, **without_last(outputs))


class NLQForCausalLM(NLQLanguageModel, NLQGenerationMixin):
    """A decoder with a language-modelling head."""

    of_decoders = True

    def __init__(self, config: NLQConfig):
        super().__init__(config)
        self.loss_function = causal_lm_loss

    def _get_name(self):
        return NLQForCausalLM.__name__  # also of derived classes, which the tables below lack

    @accept_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        past_key_values=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        **kwargs,
    ) -> CausalLMOutputWithCrossAttentions:
        """Computes logits `(batch, kept, vocabulary)`; the other arguments are `NLQModel`'s.

        Args:
            labels: `(batch, query)` token ids, shifted inside; -100 is ignored. The loss is their mean, in nats.
            logits_to_keep: how many last positions get logits (0: all), or their indices.
        """
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, past_key_values)
        source = (encoder_hidden_states, encoder_attention_mask)
        outputs = self.model(*inputs, *source, **kwargs)
        logits = self.compute_logits(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = self.compute_loss(logits, labels, **kwargs)
        return CausalLMOutputWithCrossAttentions(loss=loss, logits=logits, **without_last(outputs))

    def _choose_paged_implementation(self):
        return choose_paged_implementation(self.config)


class NLQForSequenceClassification(GenericForSequenceClassification, NLQPreTrainedModel):
    @accept_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """Computes logits `(batch, labels)`, of the token that `classifier_pooling` names or a mean over tokens.

        Padding is read from `attention_mask`, or without one from `config.pad_token_id`. `labels` are `(batch,)`
        classes or numbers, or `(batch, labels)` for several classes. The other arguments are `NLQModel`'s.
        """
        pad_token_id, is_causal = self.config.pad_token_id, self.config.is_causal
        has_ids_only = attention_mask is None and position_ids is None and input_ids is not None
        if has_ids_only and not is_causal and pad_token_id is not None:
            attention_mask = input_ids != pad_token_id
        outputs = self.model(input_ids, attention_mask, position_ids, cache, inputs_embeds, **kwargs)
        logits = self.score(outputs.last_hidden_state)
        pooling = self.config.classifier_pooling or ("last" if is_causal else "mean")
        # diff with Llama, which does not read the mask
        is_token = torch.ones_like(logits[..., 0], dtype=torch.bool)
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            is_token = attention_mask[:, -logits.shape[1] :].to(logits.device) != 0
        elif pad_token_id is None and len(logits) > 1 and pooling == "last":
            raise ValueError("pad_token_id=None: with several rows, give an attention_mask or config.pad_token_id")
        elif pad_token_id is not None and input_ids is not None:
            is_token = (input_ids != pad_token_id).to(logits.device)
        if pooling == "mean":
            share = is_token / is_token.sum(dim=-1, keepdim=True).clamp(min=1)
            pooled_logits = (logits * share[..., None].to(logits.dtype)).sum(dim=1)
        else:
            index = torch.arange(logits.shape[1], device=logits.device)
            token = (index if pooling == "last" else index.flip(0) + 1) * is_token
            pooled_logits = logits[torch.arange(len(logits), device=logits.device), token.argmax(dim=-1)]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled_logits, config=self.config)
            if (num_items := kwargs.get("num_items_in_batch")) is not None:
                # Its share of the mean over all calls of an optimizer step
                loss = loss * (labels.ne(-100).sum() / num_items)
        others = without_last(outputs)
        others.pop("cross_attentions", None)
        return SequenceClassifierOutputWithPast(loss=loss, logits=pooled_logits, **others)


class NLQForTokenClassification(GenericForTokenClassification, NLQPreTrainedModel):
    @accept_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """Computes logits `(batch, query, labels)`; the other arguments are `NLQModel`'s.

        The loss, in nats, is the mean over `labels` `(batch, query)` but -100.
        """
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds)
        outputs = super().forward(*inputs, return_dict=True, **kwargs)
        loss = None
        if labels is not None:
            # diff with Llama, which ignores `num_items_in_batch`
            loss = self.loss_function(outputs.logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, **outputs)


class NLQForQuestionAnswering(GenericForQuestionAnswering, NLQPreTrainedModel):
    accepts_loss_kwargs = False  # the loss is a mean over its own batch


# Trainer's label smoothing shifts labels of these classes only, and pipelines warn about others
_CLASSES = {
    "CAUSAL_LM": NLQForCausalLM,
    "MASKED_LM": NLQForMaskedLM,
    "SEQUENCE_CLASSIFICATION": NLQForSequenceClassification,
    "TOKEN_CLASSIFICATION": NLQForTokenClassification,
    "QUESTION_ANSWERING": NLQForQuestionAnswering,
}
for _task, _class in _CLASSES.items():
    getattr(modeling_auto, f"MODEL_FOR_{_task}_MAPPING_NAMES").setdefault(NLQConfig.model_type, _class.__name__)

register_default_targets(NLQConfig.model_type)
add_to_package(__name__)
