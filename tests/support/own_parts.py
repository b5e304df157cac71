"""Attention parts of a user's own: one that is right, and the usual faults."""

DISTANCE = '''
"""Scores fall with the distance, by a trained slope for each head (ALiBi, arXiv 2108.12409, has fixed slopes)."""

import torch
from torch import nn

from modeling_nlq import AttentionPart, ScoreBias


class Distance(AttentionPart):
    name = "distance"
    formula = "s_ij - slope_h * (tokens from j to i)"
    needs_places = True
    state_size = 1  # in the cache, for each token: 1, or 0 for padding

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.slope_bias = nn.Parameter(torch.linspace(-1.0, -5.0, config.num_query_heads))

    def token_state(self, call):
        is_token = call.places.is_valid
        if is_token is None:
            is_token = call.hidden_states.new_ones(call.hidden_states.shape[:2])
        return is_token.float()[:, None, :, None].expand(-1, call.layer.config.num_key_value_heads, -1, -1)

    def score_bias(self, call, state):
        place = state[:, :1, :, 0].cumsum(dim=-1)  # (batch, 1, key)
        lost = -self.slope_bias.exp()[:, None] * place
        return ScoreBias(lost[..., call.places.query_index], lost)
'''
_COUNTS_PADDING = DISTANCE.replace("is_token = call.places.is_valid\n        if is_token is None:\n    ", "if True:\n    ")

_HEAD = """
import torch

from modeling_nlq import AttentionPart, ScoreBias


class Idea(AttentionPart):
    name = "idea"
    needs_places = True
"""
# A bias that is no difference of places counts the tokens of earlier documents
_FORGETS_DOCUMENTS = DISTANCE.replace("* place\n", "* place.sqrt()\n")
# A count that begins anew with each call
_FORGETS_CHUNKS = (
    _HEAD
    + """
    def change_projections(self, call, query, key, value):
        count = call.places.visible_count - call.places.query_index[0]
        return query * count.clamp(min=0).double().log1p().transpose(1, 2)[..., None], key, value
"""
)
# A count of the cache's keys, which a static cache has more of
_LENGTH_OF_CACHE = (
    _HEAD
    + """
    def change_attended(self, call, query, key, value):
        count = call.places.visible_count
        if key.shape[2] > query.shape[2]:
            count = key.shape[2] - torch.arange(query.shape[2]).flip(0)
            count = count.clamp(max=call.layer.sliding_window or 1000)
        return query * count.double().log1p()[..., None], key, value
"""
)
_SEES_THE_FUTURE = (
    _HEAD
    + """
    def change_output(self, call, heads):
        return heads - heads.mean(dim=1, keepdim=True)
"""
)
# By name: the file, the invariant that fails, and the smallest case
FAULTS = {
    "counts_padding": (_COUNTS_PADDING, "a padded text equals the text alone", "2 tokens with 2 of padding between them"),
    "forgets_documents": (_FORGETS_DOCUMENTS, "packed documents equal separate ones", "documents of 1 and 2 tokens"),
    "forgets_chunks": (_FORGETS_CHUNKS, "cached decoding equals the full pass", "2 tokens in chunks of 1, 1"),
    "length_of_the_cache": (_LENGTH_OF_CACHE, "a static cache equals the full pass", "2 tokens in chunks of 1, 1"),
    "sees_the_future": (_SEES_THE_FUTURE, "no token sees the future", "2 tokens, of which those from number 2 on change"),
}
