"""Rotary positions of a whole head or of a part of it (Su et al. 2021, arXiv 2104.09864)."""

import torch
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_part
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates queries and keys by their positions.

    Args:
        query, key: `(batch, heads, length, head_dim)`.
        cos, sin: `(batch or 1, length, rotated)`. The first `rotated` elements of each head are rotated.
    """
    rotation = rotate_whole if cos.shape[-1] == query.shape[-1] else rotate_part
    return rotation(query, key, cos, sin)
