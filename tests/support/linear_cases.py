"""Linear attention by its three forms and by the formula, and the cases that it is tested on.

Shapes as in `attention_cases`: query and key `(batch, heads, length, head_dim)`, outputs
`(batch, query, heads, head_dim)`.
"""

import functools
import math

import pytest
import torch
from support import reference
from support.attention_cases import SCALING, Layout, causal, set_chunks
from support.model_cases import GATED_DELTA
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modeling_nlq import NLQConfig, linear_nlq
from modeling_nlq.linear_nlq import linear_attention, recurrent_step


# The rate of each key and value head as a logit, as layers learn it.
DECAYS = {
    "none": None,
    "fixed": [math.log(2 ** (5 + head) - 1) for head in range(3)],
    "learned": [1.2, -0.7, 4.0],
    "forgets_at_once": [-12.0, 0.3, -200.0],
}
# A form by name, or the chunked one by the number of tokens in a chunk.
FORMS = ("parallel", "recurrent", 1, 2, 3, 5, 64)


def recurrent_form(inputs, state=None, chunk_size=None):
    outputs = []
    for index in range(inputs.query.shape[-2]):
        output, state = recurrent_step(inputs, index, state)
        outputs.append(output)
    return torch.stack(outputs, dim=-2), state


def run_form(form, states, mask=None, logits=None, rotary=None, state=None, scaling=SCALING):
    log_decay = None if logits is None else torch.nn.functional.logsigmoid(logits)
    with pytest.MonkeyPatch.context() as patch:
        set_chunks(patch, recurrent_form if form == "recurrent" else linear_nlq.chunked_form, form)
        options = {"log_decay": log_decay, "position_embeddings": rotary, "state": state}
        return linear_attention(
            *states, mask, scaling, form="parallel" if form == "parallel" else "chunked", **options
        )


def decay_logits(decay, layout, dtype=torch.float64):
    if DECAYS[decay] is None:
        return None
    return torch.tensor(DECAYS[decay][: layout.key_value_heads], dtype=dtype, requires_grad=True)


class Rotary:
    """Rotary positions of one batch, as a layer is given them, and one head's, by the formula."""

    config = NLQConfig(hidden_size=8, num_attention_heads=2, position_embedding="rope", query_projection="linear")

    def __init__(self, layout):
        # Any positions will do: that documents restart is said by the mask
        shift = 5 * torch.arange(layout.batch)[:, None]
        self.positions = torch.arange(layout.query_length) + shift
        self.embeddings = LlamaRotaryEmbedding(self.config)(torch.zeros(1, dtype=torch.float64), self.positions)

    def turn(self, row):
        return functools.partial(reference.rotate, positions=self.positions[row].double(), config=self.config)


def formula(layout, states, logits=None, rotary=None, scaling=SCALING):
    """The output `(batch, query, heads, head_dim)`, head by head from `reference.py`."""
    query, key, value = (tensor.double() for tensor in states)
    group = layout.heads // layout.key_value_heads
    rows = []
    for row in range(layout.batch):
        heads = []
        for head in range(layout.heads):
            decay = 1.0 if logits is None else reference.sigmoid(logits.double()[head // group])
            states_of_head = (query[row, head], key[row, head // group], value[row, head // group])
            turn = None if rotary is None else rotary.turn(row)
            heads.append(
                reference.linear_attention(*states_of_head, layout.visible[row, head], scaling, decay, turn)[0]
            )
        rows.append(torch.stack(heads, dim=1))
    # Also what nothing is seen of has a gradient, of 0
    return torch.stack(rows) + 0.0 * sum(tensor.sum() for tensor in inputs_of(states, logits))


def inputs_of(states, logits):
    return states if logits is None else [*states, logits]


def causal_layout(length, **sizes):
    return Layout(causal, query_length=length, key_length=length, **sizes)


_LINEAR = {"attention_activation": "linear_attention"}
MODELS = {
    "linear": _LINEAR,
    "fixed": {**_LINEAR, "linear_attention_decay": "fixed", "position_embedding": "rope"},
    "learned": {**_LINEAR, "linear_attention_decay": "learned", "num_key_value_heads": 2},
    "delta": {**GATED_DELTA, "num_key_value_heads": 2, "position_embedding": "rope"},
    "linear_first": {"per_layer_config": {0: {**_LINEAR, "linear_attention_decay": "learned"}}},
    "linear_last": {
        "attention_activation": "sigmoid",
        "position_embedding": "rope",
        "per_layer_config": {1: {**_LINEAR, "linear_attention_decay": "fixed"}},
    },
}
all_models = pytest.mark.parametrize("switches", MODELS.values(), ids=MODELS)
BOTH_CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=24),
}
both_caches = pytest.mark.parametrize("make_cache", BOTH_CACHES.values(), ids=BOTH_CACHES)


def linear_layers(cache):
    # By name: Transformers' table may hold the class of a downloaded copy of the same file
    return [layer for layer in cache.layers if type(layer).__name__ == "NLQLinearAttentionCacheLayer"]
