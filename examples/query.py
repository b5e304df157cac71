"""Queries plus a function of themselves, `q + a_h gelu(q)`, without another matrix (`Q(X) = X + f(X)`, arXiv
2603.13381).
"""

import torch
from torch import nn

from modeling_nlq import AttentionPart


class Query(AttentionPart):
    name = "query"
    formula = "q_i + a_h gelu(q_i)"
    start = "zero"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.amount = nn.Parameter(torch.zeros(config.num_query_heads, 1))

    def change_qkv(self, call, query, key, value):
        return query + self.amount * nn.functional.gelu(query), key, value
