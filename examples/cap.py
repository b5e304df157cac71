"""A soft cap: a trained bound for each head that no score passes, `c tanh(s / c)` (Gemma 2, arXiv 2408.00118, has c =
50).
"""

import torch
from torch import nn

from modeling_nlq import AttentionPart


class Cap(AttentionPart):
    name = "cap"
    formula = "c_h tanh(s_ij / c_h)"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.log_cap_bias = nn.Parameter(torch.full((config.num_query_heads, 1, 1), 3.0))

    def change_scores(self, call, scores, visible):
        cap = self.log_cap_bias.exp()
        return cap * torch.tanh(scores / cap)
