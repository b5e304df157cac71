"""Differential attention: the difference of two softmax maps (arXiv 2410.05258), in its first and second version."""

import math

import torch
from torch import nn

from .attention_parts_nlq import AttentionCall, AttentionPart


class DifferentialAttention(AttentionPart):
    """Subtracts one softmax map from another.

    `"v2"`: `num_attention_heads` counts the outputs, and there are twice as many heads of queries. Heads `2h` and `2h + 1`
    share their keys and values, and output `h` is `A_2h - sigmoid(x W)_h A_2h+1`.

    `"v1"`: heads `h` and `h + H/2` pair. Each has the keys of its own group, and both have the values of two groups, `g` and
    `g + G/2`, side by side. `(1 - lambda_init) RMSNorm(A_1 - lambda A_2)` has `lambda = exp(q_1 . k_1) - exp(q_2 . k_2) +
    lambda_init` of four vectors, and `lambda_init = 0.8 - 0.6 exp(-0.3 layer)`, from layer 0 on.
    """

    name = "differential_attention"
    formula = "A_1 - lambda A_2"
    source = "Ye et al. 2024, arXiv 2410.05258; the second version: microsoft/unilm, Diff-Transformer-V2"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.version, self.eps = config.differential_attention, config.layer_norm_eps
        if self.version == "v2":
            self.proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=config.use_bias)
        else:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                self.register_parameter(name, nn.Parameter(torch.normal(0.0, 0.1, (config.head_dim,))))

    @classmethod
    def check(cls, config) -> None:
        value = config.differential_attention
        if config.activation.name != "softmax":
            raise ValueError(
                f"differential_attention={value!r} needs attention_activation='softmax', not {config.activation.name!r}"
            )
        if value == "v1" and (config.num_attention_heads % 2 or config.num_key_value_heads % 2):
            raise ValueError(
                f"differential_attention='v1' pairs heads: num_attention_heads={config.num_attention_heads} and "
                f"num_key_value_heads={config.num_key_value_heads} must be even"
            )

    @classmethod
    def query_heads(cls, config) -> int:
        return config.num_attention_heads * (2 if config.differential_attention == "v2" else 1)

    @classmethod
    def product_cost(cls, config) -> float:
        return 2.0 if config.differential_attention == "v2" else 1.5  # v1 has values of twice the width

    @classmethod
    def refuse_split(cls, config) -> str | None:
        return "its pairs of heads are on several processes; use 'v2'" if config.differential_attention == "v1" else None

    @classmethod
    def refuse_paged(cls, config) -> str | None:
        return super().refuse_paged(config) if config.differential_attention == "v1" else None

    @classmethod
    def split_layers(cls, config) -> dict[str, str]:
        return {"parts.differential_attention.proj": "colwise"} if config.differential_attention == "v2" else {}

    def start_without_effect(self, layer) -> str | None:
        if self.version == "v1":
            return "the norm of the difference has no counterpart; use 'v2'"
        if layer.output_activation is not None:
            return "the attention_output_activation comes before the weights that would be doubled"
        self.proj.weight.zero_()
        if self.proj.bias is not None:
            self.proj.bias.zero_()
        layer.o_proj.weight.mul_(2.0)  # both maps are equal, and sigmoid(0) = 1/2
        return None

    def change_cached_qkv(self, call: AttentionCall, query, key, value):
        if self.version == "v2":
            return query, key, value
        value = torch.cat(value.chunk(2, dim=1), dim=-1).repeat(1, 2, 1, 1)
        # Kernels that are linear in memory need keys as wide as the values; zeros change no score
        query, key = (nn.functional.pad(states, (0, states.shape[-1])) for states in (query, key))
        return query, key, value

    def change_output(self, call: AttentionCall, heads: torch.Tensor) -> torch.Tensor:
        if self.version == "v2":
            first, second = heads.unflatten(2, (-1, 2)).unbind(dim=3)
            return first - self._factor(call)[..., None].to(heads.dtype) * second
        first, second = heads.chunk(2, dim=2)
        difference = first - self._factor(call).to(heads.dtype) * second
        normed = nn.functional.rms_norm(difference, difference.shape[-1:], eps=self.eps)
        return ((1.0 - self.lambda_init) * normed).unflatten(-1, (2, -1)).flatten(2, 3)

    def change_returned_weights(self, call: AttentionCall, weights: torch.Tensor) -> torch.Tensor:
        if self.version == "v2":
            first, second = weights.unflatten(1, (-1, 2)).unbind(dim=2)
            return first - self._factor(call).transpose(1, 2)[..., None].to(weights.dtype) * second
        first, second = weights.chunk(2, dim=1)
        return first - self._factor(call).to(weights.dtype) * second

    def measure(self, call: AttentionCall) -> dict[str, torch.Tensor]:
        factor = self._factor(call)
        return {"factor_of_second_map": factor.mean(dim=(0, 1)) if factor.dim() else factor.expand(call.layer.num_heads // 2)}

    def _factor(self, call: AttentionCall) -> torch.Tensor:
        """Returns the factor of the second map: `(batch, query, heads)`, or one number for `"v1"`."""
        if self.version == "v2":
            return torch.sigmoid(self.proj(call.hidden_states))
        first, second = (
            torch.exp((one * other).sum(dtype=torch.promote_types(one.dtype, torch.float32)))
            for one, other in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        )
        return first - second + self.lambda_init
