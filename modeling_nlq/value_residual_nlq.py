"""Value residual: each layer's values are mixed with those of the first layer (ResFormer, arXiv 2410.17897)."""

import torch
from torch import nn

from .attention_parts_nlq import AttentionCall, AttentionPart
from .parallel_nlq import shared_by_heads


class ValueResidual(AttentionPart):
    """`V_l <- a_l V_1 + b_l V_l` in every layer but the first, before the cache; `a = b = 1/2`, at first or always."""

    name = "value_residual"
    formula = "a_l V_1 + b_l V_l"
    source = "Zhou et al. 2024, arXiv 2410.17897"
    needs_first_values = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mixing_bias = None
        if config.value_residual == "learned":
            # `bias` in its name keeps it out of Trainer's weight decay
            self.mixing_bias = nn.Parameter(torch.full((2,), 0.5))

    def start_without_effect(self, layer) -> str | None:
        if self.mixing_bias is None:
            return "the values would become a mixture; use 'learned', which starts at a = 0 and b = 1"
        self.mixing_bias.copy_(torch.tensor([0.0, 1.0]))
        return None

    def change_qkv(self, call: AttentionCall, query, key, value):
        if self.mixing_bias is None:
            return query, key, (call.first_values + value) * 0.5
        first, own = shared_by_heads(self.mixing_bias, call.tp_mesh)
        return query, key, first * call.first_values + own * value
