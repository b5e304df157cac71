"""A stand-in for the kernels of FlexAttention, which need a GPU."""

from types import SimpleNamespace

import torch


def dense_flex_attention(
    query, key, value, training=False, *, score_mod, block_mask, enable_gqa, scale, return_aux=None, return_lse=False
):
    """FlexAttention with the scores in memory, and with gradients."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = scale * query @ key.transpose(2, 3)
    places = torch.meshgrid(*[torch.arange(size) for size in scores.shape], indexing="ij")
    scores = torch.where(block_mask.mask_mod(*places), score_mod(scores, *places), -torch.inf)
    is_empty = (scores == -torch.inf).all(dim=-1)
    # As in PyTorch's kernels: a row of nothing gives 0, and minus infinity for the logarithm of its sum
    finite = torch.where(is_empty[..., None], 0.0, scores)
    log_sum = torch.where(is_empty, -torch.inf, finite.logsumexp(dim=-1))
    output = torch.where(is_empty[..., None], 0.0, finite.softmax(dim=-1)) @ value
    if return_lse:  # PyTorch 2.8
        return output, log_sum
    return output if return_aux is None else (output, SimpleNamespace(lse=log_sum))
