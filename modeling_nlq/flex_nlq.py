"""The backend `flex_attention`: PyTorch's FlexAttention for softmax and every activation that is never negative."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.integrations.flex_attention import (
    compile_friendly_flex_attention,
    flex_attention_forward,
    get_flex_attention_lse_kwargs,
)
from transformers.masking_utils import BlockMask

from .activations_nlq import AttentionActivation, counts_as_zero
from .masking_nlq import LayerArgument


def log_function(activation: AttentionActivation, scores: torch.Tensor) -> torch.Tensor:
    """Returns `log phi(scores)`: minus infinity, with a gradient of 0, where `phi` counts as 0."""
    weights = activation.function(scores)
    is_zero = counts_as_zero(weights)
    return torch.where(is_zero, -torch.inf, torch.where(is_zero, 1.0, weights).log())


@dataclass
class FlexMask(LayerArgument):
    """The mask of `flex_attention`.

    Attributes:
        block_mask: Transformers' block mask.
        visible_count: `(batch or 1, query)`, the number of keys that each query sees, or `None` if it is not known.
    """

    block_mask: BlockMask | None
    visible_count: torch.Tensor | None = None


def flex_attention_with_log_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, score_bias=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Computes softmax, and every activation that is never negative, by PyTorch's FlexAttention.

    FlexAttention normalises `exp` of its scores. From scores `log phi(s)` it computes the mean of the values weighted
    with `phi`, and the logarithm of the sum of `phi`. The latter undoes the normaliser where a layer has another one
    (the idea of https://github.com/meta-pytorch/attention-gym).

    The arguments are those of `eager_attention_forward`, but the mask is a `FlexMask`, or a block mask alone. It
    returns the output and no weights.

    Raises:
        ValueError: without a mask; for what FlexAttention lacks on the CPU; and for a caller's block mask if the
            number of visible keys is needed.
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
    if score_bias is not None:
        # Each bias as the sum of two float32 numbers, so that differences of large biases are exact
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
        enable_gqa=key.shape[1] != query.shape[1],
        training=module.training,
        **get_flex_attention_lse_kwargs(needs_sum),
    )
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
    """Raises `ValueError` for what FlexAttention lacks on the CPU: gradients and the log-sum-exp."""
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
