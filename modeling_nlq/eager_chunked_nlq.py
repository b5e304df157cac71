"""`nlq_rows`: `eager` for some queries at a time, for weights that depend on their whole row.

The weights of a block of queries are computed, used and forgotten, and backward computes them again, so memory is linear in the
length. The keys after the last query of a block are left out.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .attention_nlq import eager_attention_forward
from .masking_nlq import Visibility, read_mask
from .parts_base_nlq import AttentionCall, ScoreBias


ROWS = 256  # queries of a block


def rows_attention_forward(
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
) -> tuple[torch.Tensor, None]:
    """Attention for every activation, in memory linear in the length.

    Args:
        module, query, key, value, attention_mask, scaling, dropout, score_bias, call: as in `eager_attention_forward`.

    Returns:
        The output `(batch, query, heads, head_dim)`, and no weights.
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries <= ROWS:
        inputs = (module, query, key, value, attention_mask, scaling, dropout, score_bias, call)
        return eager_attention_forward(*inputs)[0], None
    mask, _ = read_mask(attention_mask, query, key)

    def attend(*inputs):
        return eager_attention_forward(module, *inputs)[0]

    outputs = []
    for start in range(0, queries, ROWS):
        end = min(start + ROWS, queries)
        # At most that many keys come before the first query, so no query of the block sees more
        last = end + keys - queries if isinstance(mask, Visibility) else keys
        rows = mask.rows(start, end, last) if isinstance(mask, Visibility) else mask[:, :, start:end]
        bias = None
        if score_bias is not None:
            bias = ScoreBias(score_bias.query[..., start:end], score_bias.key[..., :last])
        inputs = (query[:, :, start:end], key[:, :, :last], value[:, :, :last], rows, scaling, dropout, bias, call)
        outputs.append(checkpoint(attend, *inputs, use_reentrant=False) if torch.is_grad_enabled() else attend(*inputs))
    return torch.cat(outputs, dim=1), None
