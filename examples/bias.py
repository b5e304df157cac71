"""Scores fall with the distance, by a trained slope for each head (ALiBi, arXiv 2108.12409, has fixed slopes)."""

import torch
from torch import nn

from modeling_nlq import AttentionPart, ScoreBias


class Bias(AttentionPart):
    name = "bias"
    formula = "s_ij - slope_h * (tokens from j to i)"
    needs_token_context = True

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.slope_bias = nn.Parameter(torch.linspace(-1.0, -5.0, config.num_query_heads))

    def score_bias(self, call, state):
        slope, tokens = self.slope_bias.exp()[:, None], call.token_context
        return ScoreBias(-slope * tokens.query_position[:, None], -slope * tokens.key_position[:, None])
