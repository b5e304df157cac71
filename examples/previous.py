"""A memory of the token before: a trained bonus for it in each head (previous-token heads, Olsson et al., arXiv
2209.11895).
"""

import torch
from torch import nn

from modeling_nlq import AttentionPart


class Previous(AttentionPart):
    name = "previous"
    formula = "s_ij + b_h where j is the token before i"
    needs_token_context = True
    causal_only = True
    start = "zero"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.bonus_bias = nn.Parameter(torch.zeros(config.num_query_heads, 1, 1))

    def change_scores(self, call, scores, visible):
        tokens = call.token_context
        is_before = tokens.key_position[:, None, None, :] == tokens.query_position[:, None, :, None] - 1
        return scores + self.bonus_bias * is_before
