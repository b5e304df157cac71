"""Attention parts of a user's own: some that are right, and the usual faults."""

import textwrap

from support.paths import REPOSITORY


IDEAS = {path.stem: path for path in (REPOSITORY / "examples").glob("[!_]*.py")}
DISTANCE = IDEAS["bias"].read_text().replace('"bias"', '"distance"')
# The same by a counter in the cache, for each token 1, or 0 for padding
_STATE = """
    def token_state(self, call):
        is_token = call.token_context.is_valid
        if is_token is None:
            is_token = call.hidden_states.new_ones(call.hidden_states.shape[:2])
        return is_token.float()[:, None, :, None].expand(-1, call.layer.config.num_key_value_heads, -1, -1)

    def score_bias(self, call, state):
        place = state[:, :1, :, 0].cumsum(dim=-1)  # (batch, 1, key)
        lost = -self.slope_bias.exp()[:, None] * place
        return ScoreBias(lost[..., call.token_context.query_index], lost)
"""
_COUNTER = DISTANCE.partition("    def score_bias")[0] + _STATE.lstrip("\n")
_COUNTER = _COUNTER.replace("    needs_token_context = True", "    needs_token_context = True\n    state_size = 1")
_COUNTS_PADDING = _COUNTER.replace(
    "is_token = call.token_context.is_valid\n        if is_token is None:\n    ", "if True:\n    "
)

_HEAD = """
import torch
from torch import nn

from modeling_nlq import AttentionPart, ScoreBias


class Idea(AttentionPart):
    name = "idea"
    needs_token_context = True
"""
# A bias that is no difference of places counts the tokens of earlier documents
_FORGETS_DOCUMENTS = _COUNTER.replace("* place\n", "* place.sqrt()\n")
# A count that begins anew with each call
_FORGETS_CHUNKS = (
    _HEAD
    + """
    def change_qkv(self, call, query, key, value):
        count = call.token_context.visible_count - call.token_context.query_index[0]
        return query * count.clamp(min=0).double().log1p().transpose(1, 2)[..., None], key, value
"""
)
# A count of the cache's keys, which a static cache has more of
_LENGTH_OF_CACHE = (
    _HEAD
    + """
    def change_cached_qkv(self, call, query, key, value):
        count = call.token_context.visible_count
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


def idea(body: str, hook: str = "change_output(self, call, heads)", **init: str) -> str:
    """Returns a file whose part has one hook, and attributes that `__init__` sets."""
    lines = [f"self.{name} = {value}" for name, value in init.items()]
    lines = [
        "def __init__(self, config, layer_idx):",
        "    super().__init__(config, layer_idx)",
        *(f"    {line}" for line in lines),
    ]
    text = "\n".join([*lines, "", f"def {hook}:", textwrap.indent(textwrap.dedent(body).strip(), "    ")])
    return f"{_HEAD}\n{textwrap.indent(text, '    ')}\n"


_PROJECTIONS = "change_qkv(self, call, query, key, value)"
_GAIN = "nn.Parameter(torch.ones(1))"
# A place among a text's tokens, which is right with padding or a cache, and not with both
_PADDING_OF_THIS_CALL = (
    idea(
        """
    if call.token_context.document is not None:
        place = call.token_context.query_position
    else:
        place = call.token_context.query_index.expand(len(query), -1)
    if call.token_context.is_valid is not None:
        place = place - (~call.token_context.is_valid).cumsum(dim=1)
    return query * (place.clamp(min=0) + 2).to(query.dtype).log()[..., None, None], key, value
    """,
        _PROJECTIONS,
    )
    + """
    @classmethod
    def check(cls, config):
        if config.sliding_window:
            raise ValueError("a window has no such places")
"""
)
# A sum over the text's tokens that the OWNER, and no column of the cache, keeps from call to call
_OWN_CACHE = idea(
    """
    own = value.mean(dim=(2, 3)).sigmoid()
    if call.token_context.is_valid is not None:
        own = own * call.token_context.is_valid
    total = own.cumsum(dim=1)
    if call.token_context.document is not None:
        first = torch.arange(own.shape[1], device=own.device) - call.token_context.query_position
        total = total - (total - own).gather(1, first.expand_as(own))
    if call.cache is not None:
        if call.token_context.query_index[0] > 0:
            total = total + OWNER.last[self.layer_idx]
        OWNER.last = {**getattr(OWNER, "last", {}), self.layer_idx: total[:, -1:]}
    return query * (1 + total)[..., None, None], key, value
    """,
    _PROJECTIONS,
).replace("    needs_token_context = True", "    needs_token_context = True\n    supports_crop = False")

_REPEATED, _FUTURE, _BATCH = (
    "a repeated call gives the same",
    "no token sees the future",
    "texts of a batch equal each text alone",
)
_CACHES, _TRAINING, _DTYPES = (
    "each cache has what belongs to its texts",
    "training equals evaluation",
    "float32, bfloat16 and autocast run",
)
_PLACE, _USED, _SAVED = (
    "no hook changes its inputs in place",
    "every parameter has a gradient",
    "saving and loading changes nothing",
)
# By name: the file, the invariant that fails, and the smallest case
FAULTS = {
    "counts_padding": (
        _COUNTS_PADDING,
        "a padded text equals the text alone",
        "2 tokens with 2 of padding between them",
    ),
    "forgets_documents": (_FORGETS_DOCUMENTS, "packed documents equal separate ones", "documents of 1 and 2 tokens"),
    "forgets_chunks": (_FORGETS_CHUNKS, "cached decoding equals the full pass", "2 tokens in chunks of 1, 1"),
    "length_of_the_cache": (_LENGTH_OF_CACHE, "a static cache equals the full pass", "2 tokens in chunks of 1, 1"),
    "sees_the_future": (
        _SEES_THE_FUTURE,
        "no token sees the future",
        "2 tokens, of which those from number 2 on change",
    ),
    "draws_in_evaluation": (
        idea("return nn.functional.dropout(heads, 0.1)"),
        _REPEATED,
        "1 token, with gradients and without",
    ),
    "keeps_a_tensor_of_its_first_call": (
        idea(
            "self.kept = self.kept or [heads.new_ones(1)]\nreturn heads * self.kept[0] * self.gain",
            kept="None",
            gain=_GAIN,
        ),
        _REPEATED,
        "1 token, with softmax: RuntimeError: Inference tensors",
    ),
    "other_width_of_heads": (
        idea(
            "return heads * self.gain",
            gain="nn.Parameter(torch.ones(config.hidden_size // config.num_attention_heads))",
        ),
        _REPEATED,
        "1 token, with sigmoid, wide heads and a gated MLP: RuntimeError",
    ),
    "block_of_64_sees_itself": (
        idea("late = heads[:, 64:]\nreturn torch.cat([heads[:, :64], late + late.mean(dim=1, keepdim=True)], dim=1)"),
        _FUTURE,
        "66 tokens, of which those from number 66 on change",
    ),
    "padding_of_this_call": (
        _PADDING_OF_THIS_CALL,
        "a padded batch can be cached",
        "2 tokens in chunks of 1, 1, 1 of them padding",
    ),
    "cache_in_the_part": (_OWN_CACHE.replace("OWNER", "self"), _CACHES, "1 and 1 tokens, between which another text"),
    "cache_that_knows_no_beams": (
        _OWN_CACHE.replace("OWNER", "call.cache"),
        _CACHES,
        "2 texts of 2 tokens that change places",
    ),
    "gradient_of_padding": (
        idea(
            "norm = heads.square().sum(dim=-1, keepdim=True).sqrt()\nreturn torch.where(norm > 0, heads / norm, heads)"
        ),
        "a row of padding alone stays finite",
        "a row of 1 token of padding alone, gradients included",
    ),
    "cheats_in_training": (
        idea("return heads.roll(1, dims=1) if self.training else heads"),
        _TRAINING,
        "2 texts of 2 tokens, gradients included",
    ),
    "reads_a_number": (
        idea("return heads * self.gain.item()", gain=_GAIN),
        _USED,
        "layers.0.self_attn.parts.idea.gain has no gradient",
    ),
    "stream_sees_the_future": (
        idea("return states + states.mean(dim=1, keepdim=True)", "change_residual(self, call, states, earlier)"),
        _FUTURE,
        "2 tokens, of which those from number 2 on change",
    ),
    "stream_in_place": (
        idea("return states + earlier[-1].mul_(0.5)", "change_residual(self, call, states, earlier)"),
        "no hook changes its inputs in place",
        "1 token: change_residual changes a tensor in place",
    ),
    "input_in_place": (
        idea("return hidden_states.mul_(0.5)", "change_input(self, call, hidden_states)"),
        _PLACE,
        "1 token: change_input changes a tensor in place",
    ),
    "float32": (
        idea("return heads * self.gain.to(torch.promote_types(heads.dtype, torch.float32))", gain=_GAIN),
        _DTYPES,
        "7 tokens, with softmax: RuntimeError: ",
    ),
    "no_device": (
        idea("return heads * torch.arange(1, heads.shape[2] + 1).to(heads.dtype)[:, None]"),
        "a model can be on another device",
        "7 tokens, with softmax: RuntimeError: Tensor on device cpu",
    ),
}


def _leak(condition: str) -> str:
    return idea(f"return heads + heads.mean(dim=1, keepdim=True) * ({condition})")


# By name: file, failing invariant, smallest case. They need all models and lengths
LATE_FAULTS = {
    "leak_from_509": (
        _leak("(torch.arange(heads.shape[1]) >= 509)[:, None, None]"),
        _FUTURE,
        "511 tokens, of which those from number 511 on change, with softmax",
    ),
    "leak_of_odd_heads": (_leak("heads.shape[2] not in (4, 8, 16)"), _FUTURE, "on change, with num_attention_heads="),
    "third_row_hears_the_first": (
        idea("return torch.cat([heads[:2], heads[2:] + 0.1 * heads[:1].mean()])"),
        _BATCH,
        "text 3 of a batch of 1, 1 and 1 token, with softmax",
    ),
    "padding_before_only": (
        idea("valid = call.token_context.is_valid\nreturn heads if valid is None or valid[0, 0] else 2 * heads"),
        "a padded text equals the text alone",
        "1 token with 2 of padding before them",
    ),
    "cache_of_400": (
        idea("return 2 * heads if call.token_context.query_index[0] > 400 else heads"),
        "cached decoding equals the full pass",
        "402 tokens in chunks of 401, 1, with softmax",
    ),
}
# Parts that are right, though something of them looks like a fault
RIGHT = {
    "buffer_that_is_not_saved": idea(
        "return heads * self.gain", gain="nn.Buffer(torch.full((), 0.5), persistent=False)"
    ),
    "counts_in_the_cache": _COUNTER,
    "dropout": idea(
        """
        heads = torch.dropout(self.dropout(heads), 0.5, self.training)
        return nn.functional.dropout(heads, training=self.training)
        """,
        dropout="nn.Dropout(0.5)",
    ),
    "straight_through": idea("return heads + (heads.sign() - heads).detach()"),
    "keeps_a_loss": idea("self.loss = heads.square().mean()\nreturn heads"),
    "frozen": idea("return heads * self.gain", gain="nn.Parameter(torch.ones(()), requires_grad=False)"),
    "reads_no_parameter": idea("return 2 * heads if heads.isnan().any() else heads"),
    "no_scores": idea("return torch.zeros_like(scores)", "change_scores(self, call, scores, visible)"),
}
