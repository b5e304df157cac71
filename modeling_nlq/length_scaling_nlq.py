"""Scores that grow with the logarithm of the number of visible keys (Scalable-Softmax, arXiv 2501.19399)."""

import math

import torch
from torch import nn

from .attention_parts_nlq import AttentionCall, AttentionPart
from .parallel_nlq import own_heads


class LengthScaling(AttentionPart):
    """Scores times `s_h log n_i`; `n_i` is the number of keys that the query sees. Sinks and biases are not scaled."""

    name = "attention_length_scaling"
    formula = "s_h log(n_i) s_ij"
    source = "Nakanishi 2025, arXiv 2501.19399"
    needs_token_context = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        window = config.sliding_window or config.max_position_embeddings
        longest = max(2, min(window, config.max_position_embeddings))
        # A query that sees all keys begins with a factor of 1. `bias` in the name keeps it out of Trainer's weight decay
        self.scale_bias = nn.Parameter(torch.full((config.num_query_heads,), 1.0 / math.log(longest)))

    @classmethod
    def check(cls, config) -> None:
        activation = config.activation
        normalization = config.attention_normalization or activation.normalization
        if activation.kind == "linear" or (activation.is_homogeneous and normalization == "sum"):
            raise ValueError(
                f"attention_length_scaling={config.attention_length_scaling!r}: attention_activation={activation.name!r} "
                f"normalised by {normalization!r} cancels a factor of the scores; use another activation or normaliser"
            )

    def start_without_effect(self, layer) -> str | None:
        return "its factor depends on the number of keys"

    def change_qkv(self, call: AttentionCall, query, key, value):
        log_count = call.token_context.visible_count.clamp(min=1).to(torch.promote_types(query.dtype, torch.float32)).log()
        factor = own_heads(self.scale_bias, call.tp_mesh, dim=0) * log_count.transpose(1, 2)  # (batch, query, heads)
        return (query * factor[..., None]).to(query.dtype), key, value
