"""Parallax: a second query corrects each head's output to first order (arXiv 2605.29157)."""

import torch
from torch import nn

from .attention_parts_nlq import AttentionCall, AttentionPart


class Parallax(AttentionPart):
    """`(1 + sum_j p_ij t_ij) (p V)_i - ((p * t) V)_i`, with `t = r . k` unscaled, and `r = X W_r` at the query's position.

    That is, the weights become `(1 + sum_k p_ik t_ik - t_ij) p_ij`. Weights that sum to 1 still do, and they can be negative.
    The second query has as many parameters as a query projection.
    """

    name = "parallax"
    formula = "(1 + sum_k p_ik t_ik - t_ij) p_ij, t_ij = (x_i W_r) . k_j"
    source = "arXiv 2605.29157"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        size = config.num_query_heads * config.head_dim
        self.proj = nn.Linear(config.hidden_size, size, bias=config.has_bias("query_key_value"))

    @classmethod
    def check(cls, config) -> None:
        if config.differential_attention is not None:
            raise ValueError(
                f"parallax=True changes the weights of one map, and differential_attention={config.differential_attention!r} "
                "has two; use one of them"
            )

    @classmethod
    def product_cost(cls, config) -> float:
        return 1.5  # another product with the keys

    @classmethod
    def refuse_paged(cls, config) -> str | None:
        return None

    @classmethod
    def split_layers(cls, config) -> dict[str, str]:
        return {"parts.parallax.proj": "colwise"}

    def scale_keys(self, factor: float) -> None:
        for parameter in self.proj.parameters():  # its scores have the keys, but no factor
            parameter.div_(factor)

    def start_without_effect(self, layer) -> str | None:
        for parameter in self.proj.parameters():
            parameter.zero_()
        return None

    def change_qkv(self, call: AttentionCall, query, key, value):
        # More heads, so that they get the query's positions
        second = self.proj(call.hidden_states)
        return torch.cat([query, second.view(query.shape)], dim=2), key, value

    def change_cached_qkv(self, call: AttentionCall, query, key, value):
        return torch.cat(query.chunk(2, dim=1), dim=-1), key, value

    def change_weights(self, call: AttentionCall, weights, own_columns, key):
        change = torch.matmul(own_columns, key.transpose(2, 3)).to(weights.dtype)
        return weights * (1.0 + (weights * change).sum(dim=-1, keepdim=True) - change)
