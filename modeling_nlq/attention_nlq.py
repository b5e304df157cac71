"""The attention weights of every activation, and the backends `eager`, the reference, `nlq_rows` and `flex_attention`.

Shapes: batch, heads, query (positions of this call), key (cached positions plus those of this call), head_dim.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.flex_attention import (
    compile_friendly_flex_attention,
    flex_attention_forward,
    get_flex_attention_lse_kwargs,
)
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils.generic import maybe_autocast

from .activations_nlq import AttentionActivation, counts_as_zero, hide
from .masking_nlq import FlexMask, Visibility, read_mask, read_visible
from .ops_nlq import Operation
from .parts_base_nlq import AttentionCall, ScoreBias


# The squares of scores up to this power of 2, their sums, and quotients of these fit into float32.
LARGE_SCORE = 40
# Rows with larger sums of weights are computed again, from smaller queries (`keep_from_overflow`)
LARGEST_SUM = 2.0**96
ROWS = 256  # queries of a block of `nlq_rows`


def keep_from_overflow(
    query: torch.Tensor, key: torch.Tensor, scaling: float, activation: AttentionActivation, normalization: str
) -> torch.Tensor:
    """Divides the queries so that no sum of weights overflows, where this changes no weight.

    Under the normaliser `"sum"`, a factor that all scores of a query share cancels if the activation is homogeneous.
    Without the division, the square of a score of 1e20 overflows float32, although its share of the sum does not. The
    divisors are powers of 2, which are exact, and 1 where no score can be large.

    Args:
        query, key, scaling: as in `eager_attention_forward`.
        activation: a row of the table.
        normalization: `"sum"`, `"length"` or `"none"`.
    """
    if normalization != "sum" or not activation.is_homogeneous or not key.numel() or not scaling:
        return query
    largest_key = _largest_exponent(key, dim=(-2, -1)).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    largest_score = _largest_exponent(query, dim=(-1,)) + largest_key + math.log2(abs(scaling) * query.shape[-1])
    exponent = _exponent_above(largest_score)
    # In two steps, because float32 has no power of 2 below 2^-126
    half = (exponent / 2).ceil()
    return query * torch.pow(2.0, -half).to(query.dtype) * torch.pow(2.0, half - exponent).to(query.dtype)


def _largest_exponent(states: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """Returns the base-2 logarithm of the largest absolute number along `dim`, which is kept."""
    return torch.linalg.vector_norm(
        states.detach(), math.inf, dim=dim, keepdim=True, dtype=_at_least_float32(states)
    ).log2()


def _exponent_above(largest: torch.Tensor) -> torch.Tensor:
    """Returns the excess of logarithms over `LARGE_SCORE`, rounded up; 0 if there is none or they are not finite."""
    return (largest - LARGE_SCORE).clamp(min=0.0).ceil().nan_to_num(nan=0.0, posinf=0.0)


def _at_least_float32(states: torch.Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def attention_weights(
    scores: torch.Tensor,
    visible: torch.Tensor | None,
    visible_count: torch.Tensor | int,
    activation: AttentionActivation,
    normalization: str,
    sink: torch.Tensor | float | None = None,
    may_overflow: bool = False,
) -> torch.Tensor:
    """Computes the attention weights of any activation, in at least float32.

    Args:
        scores: `(batch, heads, query, key)`, already scaled.
        visible: booleans that broadcast to the scores; `None` if every query sees all keys.
        visible_count: `(batch or 1, 1 or heads, query)`, or one number for all queries.
        activation: a row of the table.
        normalization: `"sum"`, `"length"` or `"none"`.
        sink: `(heads,)` logits whose `exp` joins softmax's denominator, or one number for all heads, or `None`.
        may_overflow: whether sums of weights above `LARGEST_SUM` may make weights NaN, which is faster.

    Returns:
        Weights of the scores' shape. A query that sees no key, or whose normaliser is 0, gets weights 0. A sum counts
        as 0 below `zero_limit`.
    """
    scores = scores.to(_at_least_float32(scores))
    if activation.name == "softmax":
        scores = hide(scores, visible, torch.finfo(scores.dtype).min)
        if sink is not None:
            logits = sink.to(scores.dtype) if isinstance(sink, torch.Tensor) else scores.new_full((1,), sink)
            column = logits[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        return hide(weights if sink is None else weights[..., :-1], visible, 0.0)

    if activation.kind == "row":
        return activation.function(scores, visible)

    if activation.kind == "simplex":
        # -1e4 is too low to get weight, and can be summed up without overflow
        scores = scores - hide(scores, visible, -torch.inf).amax(dim=-1, keepdim=True).clamp(
            min=torch.finfo(scores.dtype).min
        )
        return hide(activation.function(hide(scores, visible, -1e4)), visible, 0.0)

    if isinstance(visible_count, torch.Tensor):
        count = visible_count.clamp(min=1).to(scores.dtype).unsqueeze(-1)
        log_count = count.log()
    else:
        count = max(visible_count, 1)
        log_count = math.log(count)
    scores = hide(scores, visible, 0.0)
    if activation.subtract_log_count and normalization == "none":
        scores = scores - log_count
    has_large_sums = normalization == "sum" and activation.is_homogeneous and scores.numel() > 0
    if has_large_sums and not may_overflow:
        scores = scores * torch.pow(2.0, -_exponent_above(_largest_exponent(scores, dim=(-1,))))
    weights = hide(activation.function(scores), visible, 0.0)
    if normalization == "sum":
        total = weights.sum(dim=-1, keepdim=True)
        if has_large_sums and may_overflow:
            total = total.masked_fill(total > LARGEST_SUM, torch.nan)
        is_zero = counts_as_zero(total)
        return weights.masked_fill(is_zero, 0.0) / total.masked_fill(is_zero, 1.0)
    return weights / count if normalization == "length" else weights


def one_query_by_pytorch(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    score_bias: ScoreBias | None = None,
) -> torch.Tensor:
    """Computes attention of a single query, as in decoding: its weights are one row, so all of them fit into memory.

    Where the sum of the weights is above `LARGEST_SUM`, the output is NaN (`tiled_nlq.attend_in_scale` calls this
    again).

    Args:
        module, attention_mask, scaling, score_bias: as in `eager_attention_forward`.
        query: `(batch, heads, 1, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`, which are not repeated for the heads that share them.

    Returns:
        The output `(batch, 1, heads, head_dim)`.
    """
    (batch, heads, _, head_dim), dtype = query.shape, query.dtype
    if dtype == torch.float16:  # too small for scores
        query, key, value = query.float(), key.float(), value.float()
    visible, visible_count = read_visible(attention_mask, query, key, module.is_causal)
    by_group = (batch, key.shape[1], heads // key.shape[1], head_dim)
    scores = torch.matmul(query.reshape(by_group), key.transpose(2, 3)).view(batch, heads, 1, key.shape[2])
    scores = scores.to(_at_least_float32(scores)) * scaling
    if score_bias is not None:
        scores = scores + score_bias.dense(scores.dtype)
    options = (module.activation, module.normalization, module.sink)
    weights = attention_weights(scores, visible, visible_count, *options, may_overflow=True)
    output = torch.matmul(weights.to(query.dtype).view(*by_group[:3], key.shape[2]), value)
    return output.view(batch, 1, heads, head_dim).to(dtype)


one_query_attention = Operation("one_query", one_query_by_pytorch)


def scores_and_weights(
    module: nn.Module,
    query: torch.Tensor,
    columns: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor | None,
    visible_count: torch.Tensor | int,
    scaling: float,
    score_bias: ScoreBias | None = None,
    call: AttentionCall | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes scores and weights with what the parts of the layer make of them, `(batch, heads, query, key)` each.

    Args:
        module, scaling, score_bias, call: as in `eager_attention_forward`.
        query: `(batch, heads, query, head_dim)`.
        columns: `(batch, heads, query, ...)`, what a part put after the columns of the queries.
        key: `(batch, heads, key, head_dim)`, repeated for the heads that share it.
        visible, visible_count: as in `attention_weights`.
    """
    changers, weighers = ((), ()) if call is None else map(call.layer.parts_with, ("change_scores", "change_weights"))
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    for part in changers:
        scores = part("change_scores", call, scores.to(_at_least_float32(scores)), visible)
    if score_bias is not None:
        scores = scores + score_bias.dense(_at_least_float32(scores))
    weights = attention_weights(scores, visible, visible_count, module.activation, module.normalization, module.sink)
    for part in weighers:
        weights = part("change_weights", call, weights, columns, key)
    return scores, weights


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    score_bias: ScoreBias | None = None,
    call: AttentionCall | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention for every activation, with the weights in memory. It is the reference for all other backends.

    Args:
        module: the attention layer. Its `activation`, `normalization` and `sink` define the weights.
        query: `(batch, heads, query, head_dim)`.
        key, value: `(batch, key_value_heads, key, head_dim)`.
        attention_mask: as in `read_mask`.
        scaling: factor of the scores.
        dropout: probability of dropping a weight.
        score_bias: a bias of the scores, after `scaling`.
        call: the call of the layer, if parts of it change scores or weights.

    Returns:
        The output `(batch, query, heads, head_dim)` and the weights `(batch, heads, query, key)`.
    """
    visible, visible_count = read_visible(attention_mask, query, key, module.is_causal)
    columns = query[..., key.shape[-1] :]  # of parts that change weights; usually there are none
    query = query[..., : key.shape[-1]]
    if score_bias is None and (call is None or not call.layer.parts_with("change_scores")):
        query = keep_from_overflow(query, key, scaling, module.activation, module.normalization)
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    _, weights = scores_and_weights(module, query, columns, key, visible, visible_count, scaling, score_bias, call)
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    output = torch.matmul(weights, value).transpose(1, 2).contiguous()
    return output, weights


def chunked_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, call=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Computes attention as `eager` does, for some queries at a time, in memory linear in the length; it returns no
    weights.

    The weights of a block of queries are computed, used and forgotten, and backward computes them again. In causal
    order the keys after the last query of a block are left out. The arguments are those of `eager_attention_forward`.
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
        # At most that many keys come before the first query, so no query of the block sees more
        last = end + keys - queries if isinstance(mask, Visibility) and module.is_causal else keys
        rows = mask.rows(start, end, last) if isinstance(mask, Visibility) else mask[:, :, start:end]
        if score_bias is not None:
            bias = ScoreBias(score_bias.query[..., start:end], score_bias.key[..., :last])
        inputs = (query[:, :, start:end], key[:, :, :last], value[:, :, :last], rows, scaling, dropout, bias, call)
        outputs.append(
            checkpoint(attend, *inputs, use_reentrant=False) if torch.is_grad_enabled() else attend(*inputs)
        )
    return torch.cat(outputs, dim=1), None


def in_full_precision(function: Callable) -> Callable:
    """Returns an attention function that computes half precision in float32, so that its output is not rounded."""

    def attend(module, query, key, value, attention_mask, **kwargs):
        dtype = _at_least_float32(query)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point():
            attention_mask = attention_mask.to(dtype)
        with maybe_autocast(query.device.type, enabled=False):
            return function(module, query.to(dtype), key.to(dtype), value.to(dtype), attention_mask, **kwargs)

    return attend


def log_function(activation: AttentionActivation, scores: torch.Tensor) -> torch.Tensor:
    """Returns `log phi(scores)`: minus infinity, with a gradient of 0, where `phi` counts as 0."""
    weights = activation.function(scores)
    is_zero = counts_as_zero(weights)
    return torch.where(is_zero, -torch.inf, torch.where(is_zero, 1.0, weights).log())


def flex_attention_with_log_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Computes softmax, and every activation that is never negative, by PyTorch's FlexAttention.

    FlexAttention normalises `exp` of its scores. From scores `log phi(s)` it computes the mean of the values weighted
    with `phi`, and the logarithm of the sum of `phi`. The latter undoes the normaliser where a layer has another one
    (the idea of https://github.com/meta-pytorch/attention-gym).

    Args:
        module, query, key, value, scaling, score_bias: as in `eager_attention_forward`.
        attention_mask: a `FlexMask`, or a block mask alone.
        dropout: must be 0.

    Returns:
        The output `(batch, query, heads, head_dim)`, and no weights.

    Raises:
        ValueError: without a mask; on the CPU, for gradients, for a sink and for another normaliser than `"sum"`; and
            for a caller's block mask if the number of visible keys is needed.
    """
    if attention_mask is None:
        raise ValueError(f"attn_implementation='flex_attention' (layer {module.layer_idx}) needs a block mask")
    mask = attention_mask if isinstance(attention_mask, FlexMask) else FlexMask(attention_mask)
    block_mask, visible_count = mask.block_mask, mask.visible_count
    activation, normalization = module.activation, module.normalization
    _check_flex_attention_on_cpu(module, query, key, value)
    if activation.name == "softmax" and module.sink is None and score_bias is None:
        output, _ = flex_attention_forward(module, query, key, value, block_mask, scaling=scaling, **kwargs)
        return output, None
    needs_count = normalization == "length" or (normalization == "none" and activation.subtract_log_count)
    if needs_count and visible_count is None:
        raise ValueError(
            "attn_implementation='flex_attention' cannot count the keys that a BlockMask shows, which "
            f"attention_activation={activation.name!r} normalised by {normalization!r} needs; give a padding mask"
        )
    log_count = None
    if needs_count:
        visible_count = visible_count.expand(query.shape[0], -1).clamp(min=1).float()
        log_count = visible_count.log() if normalization == "none" else None
    if score_bias is None:
        query = keep_from_overflow(query, key, scaling, activation, normalization)
    else:
        # Each sum as a float32 number and what it leaves, because only differences count
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
    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scaling, "training": module.training}
    options |= {"enable_gqa": key.shape[1] != query.shape[1], **get_flex_attention_lse_kwargs(needs_sum)}
    result = compile_friendly_flex_attention(query, key, value, **options)
    if not needs_sum:
        return result.transpose(1, 2).contiguous(), None
    output, auxiliary = result
    log_sum = getattr(auxiliary, "lse", auxiliary)  # PyTorch 2.8 returns the tensor itself
    if activation.name == "softmax":
        sink = module.sink.float()[:, None] if isinstance(module.sink, torch.Tensor) else module.sink
        factor = torch.sigmoid(log_sum - sink)  # sum / (sum + exp(sink))
    else:
        factor = log_sum.exp()
        factor = factor / visible_count[:, None] if normalization == "length" else factor
    return (output * factor[..., None]).to(query.dtype).transpose(1, 2).contiguous(), None


def _check_flex_attention_on_cpu(module: nn.Module, *inputs: torch.Tensor) -> None:
    """Raises `ValueError` for what FlexAttention lacks on the CPU: gradients, and the log-sum-exp of the compiled
    kernel.
    """
    if inputs[0].device.type != "cpu":
        return
    refused = None
    if module.attention_sink is not None or module.normalization != "sum":
        refused = "a sink, or another normaliser than 'sum',"
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        refused = "gradients"
    if refused is not None:
        raise ValueError(
            f"attn_implementation='flex_attention' cannot compute {refused} on the CPU (layer {module.layer_idx}); "
            "use 'nlq' or 'eager'"
        )
