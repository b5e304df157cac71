"""What attention weights are: the table of attention activations, which keys a query sees, and the eager backend.

Shapes: batch, heads, query (positions of this call), key (cached positions plus those of this call), head_dim.

Scores are `s = attention_scaling * q . k`. The weights are `phi(s) / Z` on the keys a query sees and 0 elsewhere, where the
normaliser `Z` is the sum of `phi` (`"sum"`), the number `n` of visible keys (`"length"`), or 1 (`"none"`). `n` depends on the
query alone, never on the padded, cached or total length: that is what makes cached decoding, padding and packing exact.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils.import_utils import is_tracing


# Transformers' function names without the two that own parameters: a switch names a function, not a layer.
FUNCTIONS = tuple(sorted(set(ACT2FN) - {"prelu", "xielu"}))


@dataclass(frozen=True)
class AttentionActivation:
    """One row of the table of attention activations.

    Attributes:
        name: the value of the switch `attention_activation`.
        function: `phi`, element by element. For softmax it is `exp`, whose sum is taken in a numerically safe order.
        normalization: the canonical normaliser, used when `attention_normalization` is `None`.
        non_negative: whether `phi >= 0` everywhere, which the normaliser `"sum"` needs.
        source: where the formula comes from.
        subtract_log_count: whether `log n` is subtracted from the scores when the normaliser is `"none"`.
    """

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]
    normalization: str
    non_negative: bool
    source: str
    subtract_log_count: bool = False


def _identity(scores: torch.Tensor) -> torch.Tensor:
    return scores


def _relu_squared(scores: torch.Tensor) -> torch.Tensor:
    return torch.relu(scores).square()


ATTENTION_ACTIVATIONS = {
    activation.name: activation
    for activation in (
        AttentionActivation("softmax", torch.exp, "sum", True, "Vaswani et al. 2017, arXiv 1706.03762"),
        AttentionActivation("sigmoid", torch.sigmoid, "none", True, "Ramapuram et al. 2024, arXiv 2409.04431", True),
        AttentionActivation("relu", torch.relu, "length", True, "Wortsman et al. 2023, arXiv 2309.08586"),
        AttentionActivation("relu_squared", _relu_squared, "length", True, "So et al. 2021; Hua et al. 2022"),
        AttentionActivation("squared", torch.square, "sum", True, "p_i^2 / sum_j p_j^2"),
        AttentionActivation("softplus", nn.functional.softplus, "sum", True, "a smooth map onto the simplex"),
        AttentionActivation("tanh", torch.tanh, "length", False, "a bounded map, neither positive nor summing to one"),
        AttentionActivation("identity", _identity, "length", False, "no activation at all"),
    )
}
# Named here so that asking for one says so, instead of offering a near miss.
UNAVAILABLE_ACTIVATIONS = ("linear", "sparsemax", "entmax15")
LIBRARY_ACTIVATIONS = tuple(name for name in FUNCTIONS if name not in ATTENTION_ACTIVATIONS and name != "linear")


@functools.cache
def get_attention_activation(name: str) -> AttentionActivation:
    """The table's row for `name`, or one made for any other parameter-free function of Transformers (`ACT2FN`).

    Raises:
        ValueError: if `name` is neither.
    """
    if name in ATTENTION_ACTIVATIONS:
        return ATTENTION_ACTIVATIONS[name]
    if name in LIBRARY_ACTIVATIONS:
        return AttentionActivation(name, ACT2FN[name], "length", False, "transformers.activations.ACT2FN")
    problem = "is not available yet" if name in UNAVAILABLE_ACTIVATIONS else "is unknown"
    choices = ", ".join((*ATTENTION_ACTIVATIONS, *LIBRARY_ACTIVATIONS))
    raise ValueError(f"attention_activation={name!r} {problem}; choose one of {choices}")


class Visibility(NamedTuple):
    """Which keys each query sees, in O(length) memory.

    Attributes:
        query_index: `(query,)`, each query's own place on the key axis; it sees no key after that.
        visible_count: `(batch or 1, query)`, the number `n` of keys each query sees.
        key_is_valid: `(batch, key)` booleans, false for padding, or `None` if every key is valid.
        segments: `(batch, key)` numbers of the packed documents (query and key axis agree), or `None` if not packed.
    """

    query_index: torch.Tensor
    visible_count: torch.Tensor
    key_is_valid: torch.Tensor | None = None
    segments: torch.Tensor | None = None

    def dense(self, key_length: int) -> torch.Tensor:
        """The boolean mask `(batch or 1, 1, query, key)`, true where the query sees the key."""
        key_index = torch.arange(key_length, device=self.query_index.device)
        visible = (key_index <= self.query_index[:, None])[None, None]
        if self.key_is_valid is not None:
            visible = visible & self.key_is_valid[:, None, None, :]
        if self.segments is not None:
            visible = visible & (self.segments[:, None, :, None] == self.segments[:, None, None, :])
        return visible


def make_visibility(
    query_length: int,
    key_length: int,
    query_offset: int | torch.Tensor,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> Visibility:
    """Causal visibility of the last `query_length` positions, with padding or packing.

    Args:
        query_length: number of queries in this call.
        key_length: number of keys, those of a static cache that are still empty included.
        query_offset: number of keys before the first query; a tensor if a static cache counts them.
        attention_mask: `(batch, up to key)` booleans, false for padding.
        segments: `(batch, key)`, a number per packed document; excludes `attention_mask` and a cache.
    """
    query_index = torch.arange(query_length, device=device) + query_offset
    if segments is not None:
        starts_here = torch.ones_like(segments, dtype=torch.bool)
        starts_here[:, 1:] = segments[:, 1:] != segments[:, :-1]
        document_start = torch.where(starts_here, query_index, 0).cummax(dim=-1).values
        return Visibility(query_index, query_index - document_start + 1, segments=segments)
    if attention_mask is not None:
        key_is_valid = nn.functional.pad(attention_mask.bool(), (0, max(key_length - attention_mask.shape[-1], 0)))
        key_is_valid = key_is_valid[:, :key_length]
        return Visibility(query_index, key_is_valid.cumsum(dim=-1)[:, query_index], key_is_valid)
    return Visibility(query_index, query_index[None] + 1)


def boolean_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Reads a caller's own 4-D mask `(batch, 1 or heads, query, key)` as booleans, true where a query sees a key.

    Additive masks may hold 0 (visible) and large negative numbers (hidden) only: a bias has no meaning for most activations.

    Raises:
        ValueError: if a floating-point mask holds anything else.
    """
    if not attention_mask.is_floating_point():
        return attention_mask.bool()
    hidden = attention_mask <= -1e4  # the lowest float16 number is -65504
    if not is_tracing(attention_mask) and not (hidden | (attention_mask == 0)).all():
        raise ValueError(
            "attention_mask: a 4-D floating-point mask must hold only 0 (visible) and the dtype's lowest number (hidden); "
            "additive biases are not supported"
        )
    return ~hidden


def attention_weights(
    scores: torch.Tensor,
    visible: torch.Tensor,
    visible_count: torch.Tensor,
    activation: AttentionActivation,
    normalization: str,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention weights of every activation, as the formula says, computed in at least float32.

    Args:
        scores: `(batch, heads, query, key)`, already scaled.
        visible: booleans that broadcast to the scores.
        visible_count: `(batch or 1, query)` or, if heads see different keys, `(batch, heads, query)`.
        activation: a row of the table.
        normalization: `"sum"`, `"length"` or `"none"`.
        sink: `(heads,)` logits whose `exp` joins softmax's denominator, or `None`.

    Returns:
        Weights of the scores' shape. A query that sees no key, or whose normaliser is 0, gets weights 0; a sum so small that
        its reciprocal or its gradient overflows counts as 0.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if activation.name == "softmax":
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        if sink is not None:
            column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : visible.shape[-1]]
        return weights.masked_fill(~visible, 0.0)

    count = visible_count.clamp(min=1).to(scores.dtype)
    count = (count if count.ndim == 3 else count[:, None]).unsqueeze(-1)
    scores = scores.masked_fill(~visible, 0.0)
    if activation.subtract_log_count and normalization == "none":
        scores = scores - count.log()
    weights = activation.function(scores).masked_fill(~visible, 0.0)
    if normalization == "sum":
        total = weights.sum(dim=-1, keepdim=True)
        limits = torch.finfo(total.dtype)
        is_zero = total < limits.tiny / limits.eps
        return weights.masked_fill(is_zero, 0.0) / total.masked_fill(is_zero, 1.0)
    return weights / count if normalization == "length" else weights


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention for every activation, with the weights in memory: the reference for all other backends.

    Args:
        module: the attention layer, whose `activation`, `normalization` and `sink` say what to compute.
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: a `Visibility`, a 4-D mask, or `None`: then several queries see the keys up to their own place,
            counted from the first key, and a single query sees all keys.
        scaling: factor of the scores.
        dropout: probability of dropping a weight.

    Returns:
        The output `(batch, query, heads, head_dim)` and the weights `(batch, heads, query, key)`.
    """
    query_length, key_length = query.shape[2], key.shape[2]
    if attention_mask is None:
        offset = 0 if query_length > 1 else key_length - 1
        attention_mask = make_visibility(query_length, key_length, offset, query.device)
    if isinstance(attention_mask, Visibility):
        visible, visible_count = attention_mask.dense(key_length), attention_mask.visible_count
    else:
        visible = boolean_mask(attention_mask)[..., :key_length]
        visible_count = visible.sum(dim=-1)

    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = attention_weights(scores, visible, visible_count, module.activation, module.normalization, module.sink)
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    output = torch.matmul(weights, value).transpose(1, 2).contiguous()
    return output, weights


# Backends of this package, by the name of `attn_implementation`. They take a `Visibility` as their mask.
ATTENTION_BACKENDS = {"eager": eager_attention_forward}
UNAVAILABLE_BACKENDS = ("nlq", "nlq_tiled", "nlq_triton")
# Transformers' own functions. They compute softmax without sinks, whatever the layer asks for.
SOFTMAX_FUNCTIONS = (sdpa_attention_forward, flash_attention_forward, flex_attention_forward)
SOFTMAX_BACKENDS = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def can_compute(function: Callable, activation: AttentionActivation, sink: str | None) -> bool:
    """Whether an attention function computes this activation: the guard against a softmax nobody asked for."""
    if function in ATTENTION_BACKENDS.values():
        return True
    return function in SOFTMAX_FUNCTIONS and activation.name == "softmax" and sink is None


def capable_backends(activation: AttentionActivation, sink: str | None) -> tuple[str, ...]:
    """The values of `attn_implementation` that can compute this activation."""
    with_library = can_compute(sdpa_attention_forward, activation, sink)
    return (*ATTENTION_BACKENDS, *(SOFTMAX_BACKENDS if with_library else ()))
