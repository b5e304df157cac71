"""The parts that a layer has under fields of their own: norms of queries and keys, the sink, and what follows each head."""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .attention_parts_nlq import AttentionCall, AttentionPart
from .parallel_nlq import own_heads, shared_by_heads, sum_over_processes


class NLQRMSNorm(nn.RMSNorm):
    """RMSNorm of each head, with one gain for all heads."""

    tp_mesh = None  # the processes that share the heads

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads, head_dim)` -> the same shape."""
        weight = None if self.weight is None else shared_by_heads(self.weight, self.tp_mesh)
        return nn.functional.rms_norm(heads, self.normalized_shape, weight, self.eps)


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
        if self.weight is not None:
            states = states * own_heads(self.weight, self.tp_mesh, dim=0)
        return states.to(heads.dtype).view(heads.shape)


class NLQL2Norm(nn.Module):
    """Unit-length heads, times a learned scale per head if `num_heads` is given (Henry et al. 2020, arXiv 2010.04245)."""

    tp_mesh = None  # the processes that share the heads

    def __init__(self, head_dim: int, num_heads: int | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.scale = nn.Parameter(torch.full((num_heads,), math.sqrt(head_dim))) if num_heads else None

    def initialize(self) -> None:
        if self.scale is not None:
            init.constant_(self.scale, math.sqrt(self.head_dim))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, length, heads, head_dim)` -> the same shape."""
        # In float32, because float16 rounds the epsilon that keeps a zero vector at zero to 0
        dtype = torch.promote_types(heads.dtype, torch.float32)
        heads = nn.functional.normalize(heads.to(dtype), dim=-1).to(heads.dtype)
        return heads if self.scale is None else heads * own_heads(self.scale, self.tp_mesh, dim=0)[:, None]


class NLQSharedLinear(nn.Linear):
    """A linear layer that all heads use."""

    tp_mesh = None  # the processes that share the heads

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` -> `(..., out_features)`."""
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return nn.functional.linear(states, *(shared_by_heads(parameter, self.tp_mesh) for parameter in parameters))


class NLQHeadProjection(nn.Module):
    """A square matrix for each head's output, the fourth matrix beside query, key and value. It starts as the identity."""

    tp_mesh = None  # the processes that share the heads

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))

    def initialize(self) -> None:
        init.copy_(self.weight, torch.eye(self.weight.shape[-1]).expand_as(self.weight))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """`(batch, query, heads, head_dim)` -> the same shape."""
        return torch.einsum("bqhd,hde->bqhe", heads, own_heads(self.weight, self.tp_mesh, dim=0))


class QKNorm(AttentionPart):
    name = "qk_norm"
    formula = "norm(q_i) . norm(k_j)"
    source = "Henry et al. 2020, arXiv 2010.04245 (l2); OLMo 2, arXiv 2501.00656 (rms_all_heads)"

    @classmethod
    def layer_modules(cls, config) -> dict[str, nn.Module]:
        head_dim, query_heads = config.head_dim, config.num_query_heads
        options = {"eps": config.layer_norm_eps, "elementwise_affine": config.norm_gain}
        if config.qk_norm == "rms":
            return {name: NLQRMSNorm(head_dim, **options) for name in ("q_norm", "k_norm")}
        if config.qk_norm == "rms_all_heads":
            widths = {"q_norm": query_heads * head_dim, "k_norm": config.num_key_value_heads * head_dim}
            return {name: NLQAllHeadsRMSNorm(width, **options) for name, width in widths.items()}
        return {"q_norm": NLQL2Norm(head_dim, query_heads), "k_norm": NLQL2Norm(head_dim)}

    def change_qkv(self, call, query, key, value):
        return call.layer.q_norm(query), call.layer.k_norm(key), value


class AttentionSink(AttentionPart):
    """Backends read the logits from the layer, which is why this part has no hook."""

    name = "attention_sink"
    formula = "exp(s_j) / (exp(b_h) + sum_k exp(s_k))"
    source = "gpt-oss; Xiao et al. 2023, arXiv 2309.17453"

    @classmethod
    def check(cls, config) -> None:
        if config.activation.name != "softmax":
            raise ValueError(
                f"attention_sink={config.attention_sink!r} needs attention_activation='softmax', not {config.activation.name!r}"
            )


class HeadProjection(AttentionPart):
    name = "head_projection"
    formula = "y_i W_h"
    source = "the fourth matrix beside query, key and value"

    @classmethod
    def layer_modules(cls, config) -> dict[str, nn.Module]:
        return {"head_proj": NLQHeadProjection(config.num_attention_heads, config.head_dim)}

    def change_output(self, call: AttentionCall, heads: torch.Tensor) -> torch.Tensor:
        return call.layer.head_proj(heads)


class OutputScaling(AttentionPart):
    name = "attention_output_scaling"
    formula = "c y_i"

    def change_output(self, call: AttentionCall, heads: torch.Tensor) -> torch.Tensor:
        return heads * call.layer.output_scaling


class OutputActivation(AttentionPart):
    name = "attention_output_activation"
    formula = "act(y_i)"

    @classmethod
    def layer_modules(cls, config) -> dict[str, nn.Module]:
        return {"output_activation": ACT2FN[config.attention_output_activation]}

    def change_output(self, call: AttentionCall, heads: torch.Tensor) -> torch.Tensor:
        return call.layer.output_activation(heads)


class AttentionGate(AttentionPart):
    """A gate of the outputs. With `"value"`, one matrix for all heads reads the token's own value."""

    name = "attention_gate"
    formula = "y_i * sigmoid(x_i W_g), or y_i * sigmoid(v_i W_g)"
    source = "Qiu et al. 2025, arXiv 2505.06708; of values: arXiv 2510.09017"

    @classmethod
    def check(cls, config) -> None:
        if config.attention_gate == "value" and config.differential_attention == "v1":
            raise ValueError(
                "attention_gate='value': with differential_attention='v1' a head reads the values of two groups, and a token "
                "has no value of its own there; use 'v2', or another gate"
            )

    @classmethod
    def layer_modules(cls, config) -> dict[str, nn.Module]:
        if config.attention_gate == "value":
            return {"value_gate_proj": NLQSharedLinear(config.head_dim, config.head_dim, bias=config.use_bias)}
        width = config.num_attention_heads * (config.head_dim if config.attention_gate == "elementwise" else 1)
        return {"gate_proj": nn.Linear(config.hidden_size, width, bias=config.use_bias)}

    @classmethod
    def calls_per_token(cls, config) -> dict[str, int]:
        return {"value_gate_proj": config.num_key_value_heads}

    @classmethod
    def split_layers(cls, config) -> dict[str, str]:
        return {} if config.attention_gate == "value" else {"gate_proj": "colwise"}

    def change_output(self, call: AttentionCall, heads: torch.Tensor) -> torch.Tensor:
        gate = self._gate(call, heads.shape[2])
        return (heads.unflatten(2, (gate.shape[2], -1)) * gate[:, :, :, None]).flatten(2, 3)

    def measure(self, call: AttentionCall) -> dict[str, torch.Tensor]:
        heads = self.config.num_attention_heads
        gate = self._gate(call, heads).mean(dim=(0, 1, 3))
        return {"mean_gate": gate.repeat_interleave(heads // len(gate))}

    def _gate(self, call: AttentionCall, heads: int) -> torch.Tensor:
        """Returns `(batch, query, heads or groups, head_dim or 1)`."""
        if self.config.attention_gate != "value":
            return torch.sigmoid(call.layer.gate_proj(call.hidden_states)).unflatten(-1, (heads, -1))
        return torch.sigmoid(call.layer.value_gate_proj(call.values.transpose(1, 2)))
