"""A temperature: each head learns how sharp its attention is, `softmax(exp(t_h) s)` (Henry et al. 2020, arXiv
2010.04245).
"""

import torch
from torch import nn

from modeling_nlq import AttentionPart


class Temperature(AttentionPart):
    name = "temperature"
    formula = "exp(t_h) s_ij"
    start = "zero"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.log_factor_bias = nn.Parameter(torch.zeros(config.num_query_heads, 1))

    def change_qkv(self, call, query, key, value):
        return query * self.log_factor_bias.exp(), key, value
