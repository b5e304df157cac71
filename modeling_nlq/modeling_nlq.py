"""NLQ models: GPT-style decoders whose query projection, attention activation and block are configuration."""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import BlockMask, create_causal_mask, create_masks_for_generate, find_packed_sequence_indices
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.auto import modeling_auto
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from .attention_nlq import (
    AUTOMATIC,
    AttentionActivation,
    Visibility,
    boolean_mask,
    eager_attention_forward,
    get_attention_activation,
    make_visibility,
)
from .backends_nlq import ATTENTION_BACKENDS, find_backend, use_fused_kernels
from .configuration_nlq import NLQConfig
from .linear_nlq import fixed_log_decay, initial_decay_bias, linear_attention
from .loss_nlq import causal_lm_loss
from .projections_nlq import make_projection


logger = logging.get_logger(__name__)

# Its block mask would count with the cache's own length, which has moved on by the time the kernel runs.
NO_STATIC_CACHE = "attn_implementation='flex_attention' takes no static cache; use a dynamic one, or 'nlq'"


class NLQL2Norm(nn.Module):
    """Unit-length heads, times a learned scale per head if `num_heads` is given (Henry et al. 2020, arXiv 2010.04245)."""

    def __init__(self, head_dim: int, num_heads: int | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.scale = nn.Parameter(torch.full((num_heads,), math.sqrt(head_dim))) if num_heads else None

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads, head_dim)` -> the same shape."""
        # In float32: float16 has no number as small as the epsilon that keeps a zero vector at zero
        dtype = torch.promote_types(heads.dtype, torch.float32)
        heads = nn.functional.normalize(heads.to(dtype), dim=-1).to(heads.dtype)
        return heads if self.scale is None else heads * self.scale[:, None]


class NLQHeadProjection(nn.Module):
    """A square matrix for each head's output, the fourth matrix beside query, key and value; the identity at first."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, query, heads, head_dim)` -> the same shape."""
        return torch.einsum("bqhd,hde->bqhe", heads, self.weight)


class NLQAttention(nn.Module):
    """Multi-head attention: project, score, weigh by any activation, and shape what comes out.

    What comes out of each head passes, in this order and where switched on, through `head_projection`,
    `attention_output_scaling`, `attention_output_activation`, the gate, and the output projection.
    """

    def __init__(self, config: NLQConfig, layer_idx: int):
        super().__init__()
        # The global configuration: only it knows the attention implementation of the moment. The layer's own copy gives the
        # switches, read here once.
        self.config = config
        layer = config.per_layer_config[layer_idx]
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.scaling = layer.score_scaling
        self.attention_activation = layer.attention_activation
        self.attention_normalization = layer.attention_normalization
        self.output_scaling = layer.attention_output_scaling

        query_size = config.num_attention_heads * self.head_dim
        key_value_size = config.num_key_value_heads * self.head_dim
        options = {
            "use_bias": config.use_bias,
            "bottleneck_size": layer.projection_bottleneck_size,
            "activation": layer.projection_activation,
            "eps": config.layer_norm_eps,
        }
        self.q_proj = make_projection(layer.query_projection, config.hidden_size, query_size, **options)
        self.k_proj = make_projection(layer.key_projection, config.hidden_size, key_value_size, **options)
        self.v_proj = make_projection(layer.value_projection, config.hidden_size, key_value_size, **options)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.use_bias)
        self.o_proj.ends_sublayer = True

        self.q_norm = self.k_norm = None
        if layer.qk_norm == "rms":
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.layer_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.layer_norm_eps)
        elif layer.qk_norm == "l2":
            self.q_norm = NLQL2Norm(self.head_dim, config.num_attention_heads)
            self.k_norm = NLQL2Norm(self.head_dim)

        self.attention_sink = layer.attention_sink
        if layer.attention_sink == "learned":
            # `bias` in its name keeps it out of Trainer's weight decay
            self.sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))

        self.linear_attention_decay = layer.linear_attention_decay
        if layer.linear_attention_decay == "learned":
            # Its sigmoid is the rate; `bias` in its name keeps it out of Trainer's weight decay
            self.decay_bias = nn.Parameter(initial_decay_bias(config.num_key_value_heads).float())

        self.head_proj = NLQHeadProjection(config.num_attention_heads, self.head_dim) if layer.head_projection else None
        self.output_activation = None
        if layer.attention_output_activation is not None:
            self.output_activation = ACT2FN[layer.attention_output_activation]
        self.gate_proj = None
        if layer.attention_gate is not None:
            gate_size = query_size if layer.attention_gate == "elementwise" else config.num_attention_heads
            self.gate_proj = nn.Linear(config.hidden_size, gate_size, bias=config.use_bias)

    @property
    def activation(self) -> AttentionActivation:
        """The table's row, looked up by name: a registered function may be replaced, and few functions can be pickled."""
        return get_attention_activation(self.attention_activation)

    @property
    def normalization(self) -> str:
        """The normaliser of the weights."""
        return self.attention_normalization or self.activation.normalization

    @property
    def sink(self) -> torch.Tensor | None:
        """`(heads,)`: the logit of each head's sink, or `None`."""
        if self.attention_sink == "zero":
            return torch.zeros(self.config.num_attention_heads, device=self.o_proj.weight.device)
        return self.sink_bias if self.attention_sink == "learned" else None

    @property
    def log_decay(self) -> torch.Tensor | None:
        """`(key_value_heads,)`: the logarithm of what a linear layer keeps from token to token, or `None` if it keeps all."""
        if self.linear_attention_decay == "learned":
            return nn.functional.logsigmoid(self.decay_bias.to(torch.promote_types(self.decay_bias.dtype, torch.float32)))
        if self.linear_attention_decay == "fixed":
            weight = self.o_proj.weight
            log_decay = fixed_log_decay(self.config.num_key_value_heads)
            return log_decay.to(torch.promote_types(weight.dtype, torch.float32)).to(weight.device)
        return None

    def find_backend(self, output_attentions: bool | None = None, **kwargs) -> str:
        """The name of the backend that computes this layer in this call.

        Raises:
            ValueError: if `attn_implementation` names one that cannot.
        """
        # diff with Llama: a function that would return softmax whatever it is asked for must not run for anything else
        return find_backend(
            self.config._attn_implementation,
            [self.layer_idx],
            self.activation,
            self.attention_sink,
            dropout=self.attention_dropout if self.training else 0.0,
            needs_weights=self.config.output_attentions if output_attentions is None else output_attentions,
        )

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(batch, length, hidden)` -> query, key and value, `(batch, heads, length, head_dim)` each, as they are scored.

        Args:
            hidden_states: what the layer is given.
            position_embeddings: cosines and sines of rotary positions, `(batch or 1, length, head_dim)` each, or `None`.
        """
        # No -1: its size is ambiguous for an empty batch
        query_shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        key_value_shape = (*hidden_states.shape[:-1], self.num_heads // self.num_key_value_groups, self.head_dim)
        query_states = self.q_proj(hidden_states).view(query_shape)
        key_states = self.k_proj(hidden_states).view(key_value_shape)
        value_states = self.v_proj(hidden_states).view(key_value_shape)
        if self.q_norm is not None:
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        # (batch, length, heads, head_dim) -> (batch, heads, length, head_dim)
        query_states, key_states = query_states.transpose(1, 2), key_states.transpose(1, 2)
        value_states = value_states.transpose(1, 2)
        if position_embeddings is not None:
            cos, sin = position_embeddings
            query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        return query_states, key_states, value_states

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: Visibility | torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(batch, query, hidden)` -> the same shape, and the weights `(batch, heads, query, key)` if the backend has them."""
        name = self.find_backend(**kwargs)
        if self.activation.kind == "linear":
            attn_output = self._attend_linearly(hidden_states, position_embeddings, attention_mask, past_key_values, name)
            return self._shape_output(hidden_states, attn_output), None
        query_states, key_states, value_states = self.project(hidden_states, position_embeddings)
        if past_key_values is not None:
            key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)

        if self.config._attn_implementation == AUTOMATIC:
            name = use_fused_kernels(name, self.activation, query_states)
        if name in ATTENTION_BACKENDS:
            attention_interface: Callable = ATTENTION_BACKENDS[name].function
        else:
            attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)

        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )

        return self._shape_output(hidden_states, attn_output), attn_weights

    def _attend_linearly(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        visibility: Visibility | torch.Tensor | None,
        past_key_values: Cache | None,
        backend: str,
    ) -> torch.Tensor:
        """`(batch, query, hidden)` -> `(batch, query, heads, head_dim)`, with a state in the place of keys and values."""
        if isinstance(visibility, torch.Tensor):
            raise ValueError(
                f"attention_activation='linear_attention' (layer {self.layer_idx}) takes no 4-D attention_mask, "
                "for it forms no weights that it could hide; give a padding mask (batch, key), or use another activation there"
            )
        query_states, key_states, value_states = self.project(hidden_states)
        cache = state = None
        if past_key_values is not None:
            cache = past_key_values.layers[self.layer_idx] if self.layer_idx < len(past_key_values.layers) else None
            if not hasattr(cache, "get_state"):
                raise ValueError(
                    f"attention_activation='linear_attention' (layer {self.layer_idx}) needs a cache that knows it: make it by "
                    "DynamicCache(config=model.config)"
                )
            state = cache.get_state()
        elif visibility is not None:
            visibility.check(hidden_states.shape[1], hidden_states.shape[1])
        attn_output, state = linear_attention(
            query_states,
            key_states,
            value_states,
            visibility,
            scaling=self.scaling,
            log_decay=self.log_decay,
            position_embeddings=position_embeddings,
            state=state,
            form="parallel" if backend == "eager" and cache is None else "chunked",
        )
        if cache is not None:
            cache.set_state(state, hidden_states.shape[1])
        return attn_output

    def _shape_output(self, hidden_states: torch.Tensor, attn_output: torch.Tensor) -> torch.Tensor:
        """`(batch, query, heads, head_dim)` -> `(batch, query, hidden)`: all that comes after the weights."""
        if self.head_proj is not None:
            attn_output = self.head_proj(attn_output)
        if self.output_scaling is not None:
            attn_output = attn_output * self.output_scaling
        if self.output_activation is not None:
            attn_output = self.output_activation(attn_output)
        if self.gate_proj is not None:
            gate = torch.sigmoid(self.gate_proj(hidden_states))
            attn_output = attn_output * gate.view(*attn_output.shape[:3], gate.shape[-1] // self.num_heads)
        return self.o_proj(attn_output.flatten(2))


class NLQMLP(nn.Module):
    """Two linear layers with an activation between."""

    def __init__(self, config: NLQConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)
        self.fc2.ends_sublayer = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act_fn(self.fc1(hidden_states)))


class NLQDecoderLayer(GradientCheckpointingLayer):
    """Attention, then MLP. For each of them, `F`, with the functions `a` and `r` (nothing by default):

    `norm_position="pre"`: `x = r(x + F(a(norm(x))))`; `"post"`: `x = r(norm(x + F(a(x))))`.
    """

    def __init__(self, config: NLQConfig, layer_idx: int):
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.self_attn = NLQAttention(config, layer_idx)
        self.mlp = NLQMLP(config)
        self.self_attn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.use_bias)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.use_bias)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.sublayer_activation = _function_or_identity(config.sublayer_activation)
        self.residual_activation = _function_or_identity(config.residual_activation)

    def _before(self, hidden_states: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return self.sublayer_activation(norm(hidden_states) if self.is_pre_norm else hidden_states)

    def _after(self, residual: torch.Tensor, output: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        hidden_states = residual + self.dropout(output)
        return self.residual_activation(hidden_states if self.is_pre_norm else norm(hidden_states))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Visibility | torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`(batch, query, hidden)` -> the same shape."""
        output, _ = self.self_attn(
            self._before(hidden_states, self.self_attn_norm),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = self._after(hidden_states, output, self.self_attn_norm)
        output = self.mlp(self._before(hidden_states, self.mlp_norm))
        return self._after(hidden_states, output, self.mlp_norm)


def _function_or_identity(name: str | None) -> nn.Module:
    return nn.Identity() if name is None else ACT2FN[name]


class NLQPreTrainedModel(PreTrainedModel):
    config: NLQConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NLQDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": NLQDecoderLayer, "attentions": NLQAttention}

    def __init__(self, config: NLQConfig, *inputs, **kwargs):
        # The generic heads build their body by `AutoModel.from_config`, which must know this very configuration class: that
        # of a downloaded folder is not the one imported above. A subclass with a name of its own registers itself.
        if type(config).__name__ == NLQConfig.__name__:
            AutoModel.register(type(config), NLQModel, exist_ok=True)
        config.validate()  # keyword overrides of `from_pretrained` are set after the configuration checked itself
        super().__init__(config, *inputs, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Does nothing for the classes of this file: `NLQConfig` carries the code and all six Auto classes everywhere.

        A model class registered on its own would write its name at the time of saving over that, and the file that defines
        it; under FSDP2 both are PyTorch's.
        """
        if cls.__module__ != __name__:
            super().register_for_auto_class(auto_class)

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        # Marks on the modules that own the parameters: of custom code, Transformers passes no others in here
        if getattr(module, "ends_sublayer", False):
            # Radford et al. 2019, section 2.3: the residual stream's variance does not grow with depth
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)
        elif getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)
        elif isinstance(module, NLQHeadProjection):
            init.copy_(module.weight, torch.eye(module.weight.shape[-1]).expand_as(module.weight))
        elif isinstance(module, NLQL2Norm) and module.scale is not None:
            init.constant_(module.scale, math.sqrt(module.head_dim))
        elif isinstance(module, NLQAttention):
            if module.attention_sink == "learned":
                init.zeros_(module.sink_bias)
            if module.linear_attention_decay == "learned":
                init.copy_(module.decay_bias, initial_decay_bias(len(module.decay_bias)))

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The backend to use: Transformers' choice if it can compute every layer's activation, else one that can.

        Raises:
            ValueError: if the backend asked for cannot compute the activation of some layer.
        """
        layers = [(layer.activation, layer.attention_sink) for layer in self.config.per_layer_config]
        if requested_attention is None:
            if self.config.output_attentions or any(activation.name != "softmax" for activation, _ in layers):
                return AUTOMATIC
            return super().get_correct_attn_implementation(None, is_init_check)
        known = ("eager", *ATTENTION_BACKENDS, *ALL_ATTENTION_FUNCTIONS.valid_keys())
        if requested_attention not in known:
            choices = ", ".join((AUTOMATIC, *ATTENTION_BACKENDS))
            raise ValueError(f'Specified `attn_implementation="{requested_attention}"` is not supported; use one of {choices}')
        for layer in layers:
            find_backend(requested_attention, [index for index, other in enumerate(layers) if other == layer], *layer)
        return super().get_correct_attn_implementation(requested_attention, is_init_check)


class NLQModel(NLQPreTrainedModel):
    """Embeddings, blocks and, with `norm_position="pre"`, a final norm."""

    def __init__(self, config: NLQConfig):
        super().__init__(config)
        # diff with Llama: no `padding_idx`; with end-of-text as padding it would zero a real row
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = self.rotary_emb = None
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        elif config.position_embedding == "rope":
            self.rotary_emb = LlamaRotaryEmbedding(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(NLQDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.Identity()
        if config.norm_position == "pre":
            self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.use_bias)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: `(batch, query)` token ids.
            attention_mask: `(batch, key)`, 0 for padding; or a mask `(batch, 1 or heads, query, key)`.
            position_ids: `(batch or 1, query)`. By default a token's place among the tokens that are not padding. Where they do
                not rise by one, a new packed document begins, which sees nothing of those before it; but an `attention_mask`
                that is given, even one of all ones, says that each row is one text, and so does a cache.
            past_key_values: the cache; also returned.
            inputs_embeds: `(batch, query, hidden)`, in place of `input_ids`.
            use_cache: whether to make a cache if none is given; by default `config.use_cache`.
            cu_seq_lens_q: `(documents + 1,)`, where packed documents begin, and the number of tokens; instead of `position_ids`
                or beside them.

        Raises:
            ValueError: for no input or two, for packed documents together with a cache, for positions of another shape or
                beyond the learned ones, for a cache under gradient checkpointing, and for `is_causal=False`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if (inputs := input_ids if inputs_embeds is None else inputs_embeds).shape[1] == 0:
            raise ValueError(
                f"{'input_ids' if inputs_embeds is None else 'inputs_embeds'}={tuple(inputs.shape)} holds no tokens"
            )
        if not kwargs.pop("is_causal", True):
            raise ValueError("is_causal=False is not supported: NLQ models see the past only")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        self._check_position_shape(position_ids, inputs_embeds.shape[:2])
        if position_ids is not None:
            position_ids = position_ids.expand(inputs_embeds.shape[0], -1)
        if self.training and any(layer.gradient_checkpointing for layer in self.layers):
            # Transformers drops the cache at each layer's call, after everything here was counted from it
            if past_key_values is not None:
                raise ValueError(
                    "past_key_values cannot be used with gradient checkpointing in training, which drops the cache; call "
                    "gradient_checkpointing_disable(), or eval()"
                )
            if use_cache:
                logger.warning_once("use_cache=True has no effect with gradient checkpointing in training")
            use_cache = False

        if isinstance(attention_mask, dict):
            attention_mask = self._read_masks(attention_mask)
        padding_mask = self._find_padding_mask(attention_mask)
        query_length = key_length = inputs_embeds.shape[1]
        query_offset = 0 if past_key_values is None else past_key_values.get_seq_length()
        if padding_mask is not None and isinstance(query_offset, int):
            self._check_padding_mask(padding_mask, inputs_embeds.shape[0], query_offset + query_length)
        is_packable = attention_mask is None
        boundaries = self._find_boundaries(position_ids, **kwargs)
        if boundaries is not None:
            position_ids = self._read_boundaries(boundaries, inputs_embeds.shape[:2], attention_mask, position_ids)
        segments = self._find_packed_documents(position_ids, past_key_values, use_cache) if is_packable else None
        if padding_mask is not None and not is_tracing(padding_mask) and padding_mask.all():
            attention_mask = padding_mask = None  # a mask that hides nothing is dropped, to save its cost
        wants_cache = self.config.use_cache if use_cache is None else use_cache
        if past_key_values is None and segments is None and wants_cache:
            past_key_values = DynamicCache(config=self.config)

        if past_key_values is not None:
            key_length, _ = past_key_values.get_mask_sizes(query_length, 0)
            if isinstance(query_offset, torch.Tensor):
                query_offset = query_offset.to(inputs_embeds.device)
        visibility = make_visibility(query_length, key_length, query_offset, inputs_embeds.device, padding_mask, segments)

        is_plain = position_ids is None and padding_mask is None and isinstance(query_offset, int)
        # Transformers' masks and flash attention look for packed documents in the positions they are given
        mask_position_ids = None if segments is None else position_ids
        if position_ids is None:
            position_ids = visibility.query_index[None]
            if padding_mask is not None:
                position_ids = (padding_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, visibility.query_index]
        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            self._check_positions(query_offset + query_length - 1 if is_plain else position_ids)
            hidden_states = hidden_states + self.embed_positions(position_ids)
        position_embeddings = None if self.rotary_emb is None else self.rotary_emb(hidden_states, position_ids)
        hidden_states = self.dropout(hidden_states)

        # Fewer than there are where assisted decoding lets the first layers draft
        layers = self.layers[: self.config.num_hidden_layers]
        # One mask for each backend, all of them before the first layer advances the cache they are counted from
        backends = [layer.self_attn.find_backend(**kwargs) for layer in layers]
        mask_inputs = (visibility, inputs_embeds, attention_mask, past_key_values, mask_position_ids)
        masks = {backend: self._make_mask(backend, *mask_inputs) for backend in dict.fromkeys(backends)}
        visible_count = None if isinstance(attention_mask, BlockMask) else visibility.visible_count

        for layer, backend in zip(layers, backends):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[backend],
                position_embeddings=position_embeddings,
                position_ids=mask_position_ids,
                past_key_values=past_key_values,
                **({"visible_count": visible_count} if backend == "flex_attention" else {}),
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    @staticmethod
    def _read_masks(masks: dict[str, torch.Tensor | BlockMask | None]) -> torch.Tensor | BlockMask | None:
        """The one mask all layers are to have, of those that generation makes for each type of layer."""
        given = [mask for mask in masks.values() if mask is not None]
        padding = [mask for mask in given if isinstance(mask, torch.Tensor) and mask.ndim == 2]
        return next(iter(padding or given), None)

    @staticmethod
    def _find_padding_mask(attention_mask: torch.Tensor | BlockMask | None) -> torch.Tensor | None:
        """The attention mask if it is one of padding, `(batch, key)`; any other shape than that and 4-D is an error."""
        if isinstance(attention_mask, torch.Tensor):
            if attention_mask.ndim not in (2, 4):
                shape = tuple(attention_mask.shape)
                raise ValueError(f"attention_mask={shape} must be (batch, key) or (batch, 1 or heads, query, key)")
            return attention_mask if attention_mask.ndim == 2 else None
        if attention_mask is not None and not isinstance(attention_mask, BlockMask):
            raise ValueError(f"attention_mask must be a tensor, not {type(attention_mask).__name__}")
        return None

    @staticmethod
    def _check_padding_mask(padding_mask: torch.Tensor, batch: int, seen: int) -> None:
        if padding_mask.shape[0] != batch or padding_mask.shape[1] < seen:
            shape = tuple(padding_mask.shape)
            raise ValueError(f"attention_mask={shape} must be (batch, key)={(batch, seen)}, cached positions included")

    @staticmethod
    def _check_position_shape(position_ids: torch.Tensor | None, shape: tuple[int, int]) -> None:
        if position_ids is None:
            return
        batch, length = shape
        if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            allowed = " or ".join(str((rows, length)) for rows in dict.fromkeys((batch, 1)))
            raise ValueError(f"position_ids={tuple(position_ids.shape)} must be (batch or 1, query)={allowed}")

    @staticmethod
    def _find_boundaries(
        position_ids: torch.Tensor | None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor | None:
        """`cu_seq_lens_q`, checked; other ways to say where packed documents begin are no substitute for it or positions."""
        if cu_seq_lens_q is None:
            if cu_seq_lens_k is not None or (seq_idx is not None and position_ids is None):
                raise ValueError("packed documents need position_ids or cu_seq_lens_q; cu_seq_lens_k or seq_idx is not enough")
            return None
        if not isinstance(cu_seq_lens_q, torch.Tensor) or cu_seq_lens_q.ndim != 1 or cu_seq_lens_q.is_floating_point():
            raise ValueError(f"cu_seq_lens_q={cu_seq_lens_q!r} must be a tensor (documents + 1,) of integers")
        if cu_seq_lens_k is not None and not is_tracing(cu_seq_lens_q) and not torch.equal(cu_seq_lens_k, cu_seq_lens_q):
            raise ValueError("cu_seq_lens_k must equal cu_seq_lens_q: a document's queries see its own keys")
        return cu_seq_lens_q

    @staticmethod
    def _read_boundaries(
        boundaries: torch.Tensor,
        shape: tuple[int, int],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """The positions `(1, query)` that restart at each of `boundaries`, `cu_seq_lens_q` as padding-free collators pass them.

        Raises:
            ValueError: if the boundaries do not fit the other inputs.
        """
        batch, length = shape
        if batch != 1 or attention_mask is not None:
            raise ValueError("cu_seq_lens_q: packed documents come in a batch of 1 and without an attention_mask")
        index = torch.arange(length, device=boundaries.device)
        document = torch.bucketize(index, boundaries, right=True) - 1
        positions = (index - boundaries[document])[None]
        if is_tracing(boundaries):
            return positions if position_ids is None else position_ids
        if boundaries[0] != 0 or boundaries[-1] != length or (boundaries.diff() < 0).any():
            raise ValueError(f"cu_seq_lens_q={boundaries.tolist()} must rise from 0 to the number of tokens, {length}")
        if position_ids is None:
            return positions
        if ((position_ids.diff() == 1) != (document.diff() == 0)).any():
            raise ValueError(f"cu_seq_lens_q={boundaries.tolist()} does not agree with position_ids, which restart elsewhere")
        return position_ids

    def _find_packed_documents(
        self,
        position_ids: torch.Tensor | None,
        past_key_values: Cache | None,
        use_cache: bool | None,
    ) -> torch.Tensor | None:
        """The number `(batch, query)` of each token's packed document, or `None` if there is one document per row.

        As in Transformers, there is one where a cache is given: `generate` leaves out a mask of ones.
        """
        if position_ids is None or position_ids.shape[-1] <= 1 or past_key_values is not None:
            return None
        segments = find_packed_sequence_indices(position_ids)
        if segments is None:
            return None
        if use_cache and not is_tracing(position_ids):
            raise ValueError(
                "packed documents (position_ids that restart, without an attention_mask) cannot be cached; set "
                "use_cache=False, or give a mask if each row is one text"
            )
        if position_ids.shape[0] > 1 and is_flash_attention_requested(self.config):
            raise ValueError(
                f"attn_implementation={self.config._attn_implementation!r} takes packed documents in a batch of 1, not "
                f"{position_ids.shape[0]}; flatten the batch (DataCollatorWithFlattening), or use 'sdpa'"
            )
        return segments

    def _make_mask(
        self,
        backend: str,
        visibility: Visibility,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | BlockMask | None,
        past_key_values: Cache | None,
        position_ids: torch.Tensor | None,
    ):
        """The mask in the form that a backend takes."""
        takes_visibility = backend in ATTENTION_BACKENDS and ATTENTION_BACKENDS[backend].takes_visibility
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
            if not takes_visibility and backend != "sdpa":
                raise ValueError(f"attn_implementation={backend!r} takes no 4-D attention_mask; use 'nlq', 'sdpa' or 'eager'")
            return boolean_mask(attention_mask)
        if not isinstance(attention_mask, torch.Tensor | None) and backend != "flex_attention":
            raise ValueError(f"attn_implementation={backend!r} takes no BlockMask; use 'flex_attention'")
        if backend == "flex_attention" and getattr(past_key_values, "is_compileable", False):
            raise ValueError(NO_STATIC_CACHE)
        if takes_visibility:
            return visibility
        return create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )

    def _check_positions(self, positions: int | torch.Tensor) -> None:
        if isinstance(positions, torch.Tensor):
            if is_tracing(positions):
                return
            positions = int(positions.max())
        if positions >= self.config.max_position_embeddings:
            raise ValueError(
                f"position {positions} is beyond the learned ones: max_position_embeddings="
                f"{self.config.max_position_embeddings} allows sequences of at most that many tokens"
            )


class NLQForCausalLM(NLQPreTrainedModel, GenerationMixin):
    """NLQ with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NLQConfig):
        super().__init__(config)
        self.model = NLQModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # Transformers reads it off the class's name, which a subclass may change
        self.loss_function = causal_lm_loss
        self.post_init()

    def _get_name(self) -> str:
        # The name that Transformers knows this class by (see the end of this file), also where FSDP2 or a user derived
        # another; `repr` prints it too
        return NLQForCausalLM.__name__

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache: as in `NLQModel`.
            labels: `(batch, query)` token ids, shifted inside; -100 is ignored.
            logits_to_keep: how many last positions get logits (0: all), or their indices.

        Returns:
            The loss, if labels are given (mean over tokens, in nats), and logits `(batch, kept, vocabulary)`.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def create_masks_for_generate(
        config: NLQConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ):
        # diff with Transformers: our backends take the padding, not a dense mask; as long as the static cache, so that its
        # shape stays the same from token to token
        implementation = config._attn_implementation
        if implementation == "flex_attention" and getattr(past_key_values, "is_compileable", False):
            raise ValueError(NO_STATIC_CACHE)
        is_own = implementation in ATTENTION_BACKENDS and ATTENTION_BACKENDS[implementation].takes_visibility
        if implementation != AUTOMATIC and not is_own:
            return create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, position_ids, **kwargs)
        if attention_mask is None:
            return None
        key_length, _ = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)
        return nn.functional.pad(attention_mask, (0, key_length - attention_mask.shape[-1]))


# The losses of the three heads below average over their own batch, so Trainer must do the averaging under gradient
# accumulation: it does where the model says that it takes no `num_items_in_batch`.


class NLQForSequenceClassification(GenericForSequenceClassification, NLQPreTrainedModel):
    accepts_loss_kwargs = False


class NLQForTokenClassification(GenericForTokenClassification, NLQPreTrainedModel):
    accepts_loss_kwargs = False


class NLQForQuestionAnswering(GenericForQuestionAnswering, NLQPreTrainedModel):
    accepts_loss_kwargs = False


# Trainer's label smoothing shifts the labels of models whose class names it finds here, and of no others; the pipelines
# complain of the others.
for _names, _class in (
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, NLQForCausalLM),
    (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, NLQForSequenceClassification),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, NLQForTokenClassification),
    (modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, NLQForQuestionAnswering),
):
    _names.setdefault(NLQConfig.model_type, _class.__name__)

__all__ = [
    "NLQForCausalLM",
    "NLQForQuestionAnswering",
    "NLQForSequenceClassification",
    "NLQForTokenClassification",
    "NLQModel",
    "NLQPreTrainedModel",
]
