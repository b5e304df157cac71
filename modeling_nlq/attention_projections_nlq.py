"""The projections of one attention layer: query, key and value before the attention, and the output after it."""

import math

import torch
from torch import nn
from transformers.activations import ACT2FN

from .activations_nlq import AttentionActivation, get_attention_activation
from .configuration_nlq import NLQConfig
from .parallel_nlq import own_heads, shared_by_heads, sum_over_processes
from .projections_nlq import PROJECTIONS, NLQBottleneck
from .rotary_nlq import rotate


class NLQRMSNorm(nn.RMSNorm):
    """RMSNorm of each head, with one gain for all heads."""

    tp_mesh = None  # the processes that share the heads

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads, head_dim)` -> the same shape."""
        return nn.functional.rms_norm(heads, self.normalized_shape, shared_by_heads(self.weight, self.tp_mesh), self.eps)


class NLQAllHeadsRMSNorm(nn.RMSNorm):
    """RMSNorm over the width of all heads, with a gain for each element (OLMo 2, arXiv 2501.00656)."""

    tp_mesh = None  # the processes that share the heads

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads, head_dim)` -> the same shape."""
        states = heads.flatten(2)
        if self.tp_mesh is None:
            return super().forward(states).view(heads.shape)
        dtype = torch.promote_types(heads.dtype, torch.float32)
        total = sum_over_processes(states.to(dtype).square().sum(dim=-1, keepdim=True), self.tp_mesh)
        states = states.to(dtype) * torch.rsqrt(total / self.normalized_shape[0] + self.eps)
        return (states * own_heads(self.weight, self.tp_mesh, dim=0)).to(heads.dtype).view(heads.shape)


class NLQL2Norm(nn.Module):
    """Unit-length heads, times a learned scale per head if `num_heads` is given (Henry et al. 2020, arXiv 2010.04245)."""

    tp_mesh = None  # the processes that share the heads

    def __init__(self, head_dim: int, num_heads: int | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.scale = nn.Parameter(torch.full((num_heads,), math.sqrt(head_dim))) if num_heads else None

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads, head_dim)` -> the same shape."""
        # In float32, because float16 rounds the epsilon that keeps a zero vector at zero to 0
        dtype = torch.promote_types(heads.dtype, torch.float32)
        heads = nn.functional.normalize(heads.to(dtype), dim=-1).to(heads.dtype)
        return heads if self.scale is None else heads * own_heads(self.scale, self.tp_mesh, dim=0)[:, None]


class NLQHeadProjection(nn.Module):
    """A square matrix for each head's output, the fourth matrix beside query, key and value. It starts as the identity."""

    tp_mesh = None  # the processes that share the heads

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, query, heads, head_dim)` -> the same shape."""
        return torch.einsum("bqhd,hde->bqhe", heads, own_heads(self.weight, self.tp_mesh, dim=0))


class NLQAttentionProjections(nn.Module):
    """The projections before and after the attention of one layer, shared by `NLQAttention` and `NLQLinearAttention`.

    The output of each head passes, in this order and where configured, through `head_projection`, `attention_output_scaling`,
    `attention_output_activation`, the gate, and the output projection.
    """

    tp_mesh = None  # the processes that share the heads

    def __init__(self, config: NLQConfig, layer_idx: int):
        super().__init__()
        # `config` is the global configuration, because only it has the current attention implementation. The switches come from
        # the layer's own copy, which is read here once.
        self.config = config
        layer = config.per_layer_config[layer_idx]
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.has_rotary_positions = layer.position_embedding == "rope"
        self.scaling = layer.score_scaling
        self.attention_activation = layer.attention_activation
        self.output_scaling = layer.attention_output_scaling

        query_size = config.num_attention_heads * self.head_dim
        key_value_size = config.num_key_value_heads * self.head_dim
        # diff with Llama: each projection is a sum of terms. A term with weights is a module, and a missing one is `None`
        sizes = {"query": query_size, "key": key_value_size, "value": key_value_size}
        self.projections = {name: PROJECTIONS[getattr(layer, f"{name}_projection")] for name in sizes}
        for name, projection in self.projections.items():
            linear = bottleneck = None
            if projection.linear:
                linear = nn.Linear(config.hidden_size, sizes[name], bias=config.has_bias("query_key_value"))
            if projection.bottleneck:
                bottleneck = NLQBottleneck(
                    config.hidden_size,
                    sizes[name],
                    bottleneck_size=layer.projection_bottleneck_size,
                    activation=layer.projection_activation,
                    use_bias=config.use_bias,
                    eps=config.layer_norm_eps,
                    starts_at_zero=projection.starts_at_zero,
                )
            # The names that Transformers, PEFT and quantizers know belong to plain linear layers only
            self.register_module(f"{name[0]}_proj", linear)
            self.register_module(f"{name[0]}_bottleneck", bottleneck)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.has_bias("attention_output"))
        self.o_proj.ends_sublayer = True  # read by `_init_weights`

        self.q_norm = self.k_norm = None
        if layer.qk_norm == "rms":
            self.q_norm = NLQRMSNorm(self.head_dim, eps=config.layer_norm_eps)
            self.k_norm = NLQRMSNorm(self.head_dim, eps=config.layer_norm_eps)
        elif layer.qk_norm == "rms_all_heads":
            self.q_norm = NLQAllHeadsRMSNorm(query_size, eps=config.layer_norm_eps)
            self.k_norm = NLQAllHeadsRMSNorm(key_value_size, eps=config.layer_norm_eps)
        elif layer.qk_norm == "l2":
            self.q_norm = NLQL2Norm(self.head_dim, config.num_attention_heads)
            self.k_norm = NLQL2Norm(self.head_dim)

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
        """The row of the table, found by name: a registered function may be replaced, and few functions can be pickled."""
        return get_attention_activation(self.attention_activation)

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(batch, length, hidden)` -> query, key and value, `(batch, heads, length, head_dim)` each.

        Args:
            hidden_states: the input of the layer.
            position_embeddings: cosines and sines of rotary positions, `(batch or 1, length, rotated)` each, of which `rotated`
                is `head_dim` or a part of it; or `None`.
        """
        query_states = self._apply_projection("query", hidden_states)
        key_states = self._apply_projection("key", hidden_states)
        value_states = self._apply_projection("value", hidden_states)
        if self.q_norm is not None:
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        # (batch, length, heads, head_dim) -> (batch, heads, length, head_dim)
        query_states, key_states = query_states.transpose(1, 2), key_states.transpose(1, 2)
        value_states = value_states.transpose(1, 2)
        if position_embeddings is not None:
            query_states, key_states = rotate(query_states, key_states, *position_embeddings)
        return query_states, key_states, value_states

    def _apply_projection(self, name: str, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, hidden)` -> `(batch, length, heads, head_dim)`, for the `"query"`, `"key"` or `"value"`."""
        linear, bottleneck = getattr(self, f"{name[0]}_proj"), getattr(self, f"{name[0]}_bottleneck")
        terms = []
        if self.projections[name].identity:
            terms.append(own_heads(hidden_states, self.tp_mesh, dim=-1))
        if linear is not None:
            terms.append(linear(hidden_states))
        if bottleneck is not None:
            terms.append(own_heads(bottleneck(hidden_states), self.tp_mesh, dim=-1))
        states = sum(terms[1:], start=terms[0])
        # `unflatten` takes longer
        return states.view(*states.shape[:-1], states.shape[-1] // self.head_dim, self.head_dim)

    def project_output(self, hidden_states: torch.Tensor, attn_output: torch.Tensor) -> torch.Tensor:
        """`(batch, query, heads, head_dim)` -> `(batch, query, hidden)`; the gate reads `hidden_states`, the layer's input."""
        if self.head_proj is not None:
            attn_output = self.head_proj(attn_output)
        if self.output_scaling is not None:
            attn_output = attn_output * self.output_scaling
        if self.output_activation is not None:
            attn_output = self.output_activation(attn_output)
        if self.gate_proj is not None:
            gate = torch.sigmoid(self.gate_proj(hidden_states))
            attn_output = attn_output * gate.unflatten(-1, (attn_output.shape[2], -1))
        return self.o_proj(attn_output.flatten(2))
