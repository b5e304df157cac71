"""Attention functions, as Transformers' `eager_attention_forward`, for every activation of the scores.

They are the backends `eager`, the reference, `nlq_rows`, which is `eager` for some queries at a time, and
`flex_attention`. The `activation`, `normalization` and `sink` of the layer `module` say how scores become weights.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.flex_attention import (
    compile_friendly_flex_attention,
    flex_attention_forward,
    get_flex_attention_lse_kwargs,
)
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils.generic import maybe_autocast

from .activations_nlq import AttentionActivation, at_least_float32, counts_as_zero, hide
from .masking_nlq import FlexMask, Visibility, read_mask, read_visible
from .ops_nlq import Operation
from .parts_base_nlq import AttentionCall, ScoreBias


ROWS = 256  # queries of a block of `nlq_rows`


def attention_weights(
    scores: Tensor,
    visible: Tensor | None,
    visible_count: Tensor | int,
    activation: AttentionActivation,
    normalization: str,
    sink: Tensor | float | None = None,
) -> Tensor:
    """Turns scores into attention weights by any activation, in at least float32.

    A query that sees no key gets weights 0, and so does one whose sum, under `"sum"`, is below `zero_limit`.

    Args:
        scores: `(batch, heads, query, key)`, already scaled.
        visible: booleans that broadcast to the scores; `None` if every query sees all keys.
        visible_count: the number of keys that each query sees, `(batch or 1, 1 or heads, query)`, or one number.
        sink: `(heads,)` logits whose `exp` joins softmax's denominator, or one number for all heads.
    """
    scores = scores.to(at_least_float32(scores))
    if activation.name == "softmax":
        scores = hide(scores, visible, torch.finfo(scores.dtype).min)
        if sink is not None:
            logits = sink.to(scores.dtype) if isinstance(sink, Tensor) else scores.new_full((1,), sink)
            column = logits[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        return hide(weights if sink is None else weights[..., :-1], visible, 0.0)

    if activation.kind == "row":
        return activation.function(scores, visible)

    if activation.kind == "simplex":
        # -1e4 gets no weight, and its sums do not overflow
        largest = hide(scores, visible, -torch.inf).amax(dim=-1, keepdim=True)
        scores = scores - largest.clamp(min=torch.finfo(scores.dtype).min)
        return hide(activation.function(hide(scores, visible, -1e4)), visible, 0.0)

    if isinstance(visible_count, Tensor):
        count = visible_count.clamp(min=1).to(scores.dtype).unsqueeze(-1)
        log_count = count.log()
    else:
        count = max(visible_count, 1)
        log_count = math.log(count)
    scores = hide(scores, visible, 0.0)
    if activation.subtract_log_count and normalization == "none":
        scores = scores - log_count
    weights = hide(activation.function(scores), visible, 0.0)
    if normalization == "sum":
        total = weights.sum(dim=-1, keepdim=True)
        is_zero = counts_as_zero(total)
        return weights.masked_fill(is_zero, 0.0) / total.masked_fill(is_zero, 1.0)
    return weights / count if normalization == "length" else weights


def one_query_by_pytorch(module, query, key, value, attention_mask, scaling, score_bias=None) -> Tensor:
    """Computes what `eager` does for one query, `(batch, 1, heads, head_dim)`, without repeating keys and values."""
    (batch, heads, _, head_dim), dtype = query.shape, query.dtype
    if dtype == torch.float16:  # too small for scores
        query, key, value = query.float(), key.float(), value.float()
    visible, visible_count = read_visible(attention_mask, query, key, module.is_causal)
    by_group = (batch, key.shape[1], heads // key.shape[1], head_dim)
    scores = torch.matmul(query.reshape(by_group), key.transpose(2, 3)).view(batch, heads, 1, key.shape[2])
    scores = scores.to(at_least_float32(scores)) * scaling
    if score_bias is not None:
        scores = scores + score_bias.dense(scores.dtype)
    weights = attention_weights(scores, visible, visible_count, module.activation, module.normalization, module.sink)
    output = torch.matmul(weights.to(query.dtype).view(*by_group[:3], key.shape[2]), value)
    return output.view(batch, 1, heads, head_dim).to(dtype)


one_query_attention = Operation("one_query", one_query_by_pytorch)


def scores_and_weights(
    module: nn.Module,
    query: Tensor,
    columns: Tensor,
    key: Tensor,
    visible: Tensor | None,
    visible_count: Tensor | int,
    scaling: float,
    score_bias: ScoreBias | None = None,
    call: AttentionCall | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns scores and weights, `(batch, heads, query, key)` each, changed by the parts of the layer.

    A part has appended `columns` to the queries. Keys are repeated for their heads.
    """
    changers, weighers = ((), ()) if call is None else map(call.layer.parts_with, ("change_scores", "change_weights"))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    for part in changers:
        scores = part("change_scores", call, scores.to(at_least_float32(scores)), visible)
    if score_bias is not None:
        scores = scores + score_bias.dense(at_least_float32(scores))
    weights = attention_weights(scores, visible, visible_count, module.activation, module.normalization, module.sink)
    for part in weighers:
        weights = part("change_weights", call, weights, columns, key)
    return scores, weights


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility | Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    score_bias: ScoreBias | None = None,
    call: AttentionCall | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Computes attention for every activation, with the weights in memory: the reference for all other backends.

    Args:
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: a `Visibility` or a mask `(batch, 1 or heads, query, key)`; see `read_mask`.
        call: the call of the layer, if parts of it change scores or weights.

    Returns:
        The output `(batch, query, heads, head_dim)` and the weights `(batch, heads, query, key)`.
    """
    visible, visible_count = read_visible(attention_mask, query, key, module.is_causal)
    columns = query[..., key.shape[-1] :]  # appended by a part
    query = query[..., : key.shape[-1]]
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    _, weights = scores_and_weights(module, query, columns, key, visible, visible_count, scaling, score_bias, call)
    weights = F.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    output = torch.matmul(weights, value).transpose(1, 2).contiguous()
    return output, weights


def chunked_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, call=None, **kwargs
) -> tuple[Tensor, None]:
    """Computes `eager` for `ROWS` queries at a time, in memory linear in the length, without returning weights.

    Backward computes the weights again. In causal order, keys after a block's last query are left out.
    """

    def attend(*inputs):
        return eager_attention_forward(module, *inputs)[0]

    queries, keys = query.shape[2], key.shape[2]
    if queries <= ROWS:
        return attend(query, key, value, attention_mask, scaling, dropout, score_bias, call), None
    mask, _ = read_mask(attention_mask, query, key, module.is_causal)
    outputs, bias = [], None
    for start in range(0, queries, ROWS):
        end = min(start + ROWS, queries)
        # No query of the block sees more keys
        last = end + keys - queries if isinstance(mask, Visibility) and module.is_causal else keys
        rows = mask.rows(start, end, last) if isinstance(mask, Visibility) else mask[:, :, start:end]
        if score_bias is not None:
            bias = ScoreBias(score_bias.query[..., start:end], score_bias.key[..., :last])
        inputs = (query[:, :, start:end], key[:, :, :last], value[:, :, :last], rows, scaling, dropout, bias, call)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend, *inputs, use_reentrant=False))
        else:
            outputs.append(attend(*inputs))
    return torch.cat(outputs, dim=1), None


def in_full_precision(function: Callable) -> Callable:
    """Returns an attention function that computes half precision in float32."""

    def attend(module, query, key, value, attention_mask, **kwargs):
        dtype = at_least_float32(query)
        if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
            attention_mask = attention_mask.to(dtype)
        with maybe_autocast(query.device.type, enabled=False):
            return function(module, query.to(dtype), key.to(dtype), value.to(dtype), attention_mask, **kwargs)

    return attend


def log_function(activation: AttentionActivation, scores: Tensor) -> Tensor:
    """Returns `log phi(scores)`: minus infinity, with a gradient of 0, where `phi` counts as 0."""
    weights = activation.function(scores)
    is_zero = counts_as_zero(weights)
    return torch.where(is_zero, -torch.inf, torch.where(is_zero, 1.0, weights).log())


def flex_attention_with_log_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, **kwargs
) -> tuple[Tensor, None]:
    """Computes softmax, and every activation that is never negative, by PyTorch's FlexAttention.

    From scores `log phi(s)`, FlexAttention computes the mean of the values weighted with `phi`, and the logarithm of
    the sum of `phi`, which undoes the normaliser where a layer has another one (the idea of
    https://github.com/meta-pytorch/attention-gym). The mask is a `FlexMask` or a block mask.

    Raises `ValueError` without a mask, for what the CPU lacks, and if a block mask does not tell a needed count.
    """
    if attention_mask is None:
        raise ValueError(f"attn_implementation='flex_attention' (layer {module.layer_idx}) needs a block mask")
    block_mask, visible_count = attention_mask if isinstance(attention_mask, FlexMask) else (attention_mask, None)
    activation, normalization = module.activation, module.normalization
    _check_flex_attention_on_cpu(module, query)
    if activation.name == "softmax" and module.sink is None and score_bias is None:
        output, _ = flex_attention_forward(module, query, key, value, block_mask, scaling=scaling, **kwargs)
        return output, None
    needs_count = normalization == "length" or (normalization == "none" and activation.subtract_log_count)
    if needs_count and visible_count is None:
        raise ValueError(
            "attn_implementation='flex_attention' cannot count the keys of a BlockMask, which attention_activation="
            f"{activation.name!r} normalised by {normalization!r} needs; give a padding mask"
        )
    log_count = None
    if needs_count:
        visible_count = visible_count.expand(query.shape[0], -1).clamp(min=1).float()
        log_count = visible_count.log() if normalization == "none" else None
    if score_bias is not None:
        # Each sum as a float32 number and its rest, because only differences count
        query_bias, key_bias = ((bias.float(), (bias - bias.float()).float()) for bias in score_bias)

    def score_mod(score, batch, head, query_index, key_index):
        if score_bias is not None:
            large, small = (
                part[batch, head, query_index] - other[batch, head, key_index]
                for part, other in zip(query_bias, key_bias)
            )
            score = score + (large + small)
        if log_count is not None:
            score = score - log_count[batch, query_index]
        return score if activation.name == "softmax" else log_function(activation, score)

    needs_sum = normalization != "sum" or module.sink is not None
    result = compile_friendly_flex_attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scaling,
        training=module.training,
        enable_gqa=key.shape[1] != query.shape[1],
        **get_flex_attention_lse_kwargs(needs_sum),
    )
    if not needs_sum:
        return result.transpose(1, 2).contiguous(), None
    output, auxiliary = result
    log_sum = getattr(auxiliary, "lse", auxiliary)  # PyTorch 2.8 returns the tensor itself
    if activation.name == "softmax":
        sink = module.sink.float()[:, None] if isinstance(module.sink, Tensor) else module.sink
        factor = torch.sigmoid(log_sum - sink)  # sum / (sum + exp(sink))
    else:
        factor = log_sum.exp()
        factor = factor / visible_count[:, None] if normalization == "length" else factor
    return (output * factor[..., None]).to(query.dtype).transpose(1, 2).contiguous(), None


def _check_flex_attention_on_cpu(module, query):
    if query.device.type == "cpu" and (module.attention_sink is not None or module.normalization != "sum"):
        raise ValueError(
            "attn_implementation='flex_attention' cannot compute a sink, or another normaliser than 'sum', on the CPU "
            f"(layer {module.layer_idx}); use 'nlq' or 'eager'"
        )
