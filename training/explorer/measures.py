"""The numbers of the explorer, each by one function.

Shapes: `heads` are the maps of a layer; `query` and `key` are the tokens of one text, in order. Weights are 0 where a
query does not see a key. They may be negative, and their rows need not sum to 1. `p_ij = |w_ij| / sum_k |w_ik|` are
the shares of a row.
"""

from collections.abc import Sequence

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..observe import attention_layers
from ..run.evaluation import token_losses
from ..text import bar_options


# What a batch may take: its logits in bytes, and its tokens, for everything else grows with them
_LOGITS_AT_ONCE = 2**28
_TOKENS_AT_ONCE = 2**13


def losses_of_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Computes the loss of each token after the first, in nats: `-log p(token | tokens before it)`; of an encoder
    `-log p(token | all other tokens)`, with this token alone masked.

    Takes any language model and `(batch, length)` tokens without padding, and returns `(batch, length - 1)`, on the
    CPU.
    """
    input_ids, losses = input_ids.to(model.device), []
    with torch.no_grad():
        if getattr(model.config, "is_causal", True):
            return token_losses(model(input_ids=input_ids, use_cache=False).logits, input_ids)[0].cpu()
        for place in range(1, input_ids.shape[1]):
            masked = input_ids.clone()
            masked[:, place] = model.config.mask_token_id
            logits = model(input_ids=masked).logits[:, place]
            losses.append(nn.functional.cross_entropy(logits.float(), input_ids[:, place], reduction="none"))
    return torch.stack(losses, dim=1).cpu() if losses else torch.empty(len(input_ids), 0)


def shares(weights: torch.Tensor) -> torch.Tensor:
    """Computes `p_ij` of weights `(heads, query, key)`; NaN in rows of zeros, which have none."""
    weights = weights.abs()
    return weights / weights.sum(dim=-1, keepdim=True)


def entropies(weights: torch.Tensor) -> torch.Tensor:
    """Computes `-sum_j p_ij log p_ij` in nats, `(heads, query)`; NaN in rows of zeros.

    It is that of the shares, so it is defined for weights that are negative or sum to another number. Its largest
    value is the logarithm of the number of keys.
    """
    return torch.special.entr(shares(weights)).sum(dim=-1)


def own_value_cosines(outputs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Computes `cos(y_i, v_i)`, `(heads, query)`, between a head's output and the token's own value (arXiv
    2603.09078).

    Args:
        outputs: `(heads, query, head_dim)`, `y_i = sum_j w_ij v_j`, before gates and the output projection.
        values: `(heads, query, head_dim)`, as they are attended, repeated for the heads that share them. Where one of
            the two is 0, the cosine is 0.
    """
    return nn.functional.cosine_similarity(outputs, values, dim=-1, eps=torch.finfo(values.dtype).tiny)


def effective_ranks(states: torch.Tensor) -> torch.Tensor:
    """Computes the effective rank of each head's matrix of queries, `(heads, query, head_dim)` (Roy and Vetterli
    2007).

    It is `exp(H)`, with the entropy `H` of the singular values divided by their sum: `(heads,)`, between 1 and the
    smaller side of the matrix; NaN for a matrix of zeros.
    """
    values = torch.linalg.svdvals(states.double())
    return torch.special.entr(values / values.sum(dim=-1, keepdim=True)).sum(dim=-1).exp()


def largest_scores(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Returns each head's largest visible score before the activation, `(heads,)`, of `(heads, query, key)`."""
    return scores.masked_fill(~visible, -torch.inf).flatten(1).amax(dim=-1)


def previous_token_scores(weights: torch.Tensor) -> torch.Tensor:
    """Returns the mean of `p_i,i-1` over all queries after the first, `(heads,)` (Olsson et al. 2022, arXiv
    2209.11895).

    A row of zeros counts as 0.
    """
    return shares(weights).diagonal(offset=-1, dim1=-2, dim2=-1).nan_to_num(nan=0.0).mean(dim=-1)


def induction_scores(weights: torch.Tensor, period: int) -> torch.Tensor:
    """Returns how much a head attends to what followed the same token before (Olsson et al. 2022, arXiv 2209.11895).

    It is the mean of `p_i,i-period+1`, `(heads,)`, over the queries of the second part of a text that consists of
    `period` random tokens, twice. A row of zeros counts as 0.
    """
    return shares(weights).diagonal(offset=1 - period, dim1=-2, dim2=-1)[..., 1:].nan_to_num(nan=0.0).mean(dim=-1)


def repeated_tokens(vocab_size: int, special: Sequence[int], period: int, seed: int = 0) -> torch.Tensor:
    """Draws random tokens without special ones, and repeats them once: `(1, 2 * period)`."""
    allowed = torch.tensor(sorted(set(range(vocab_size)) - set(special)))
    generator = torch.Generator().manual_seed(seed)
    tokens = allowed[torch.randint(len(allowed), (1, period), generator=generator)]
    return tokens.repeat(1, 2)


@torch.no_grad()
def ablations(model: PreTrainedModel, input_ids: torch.Tensor, heads: Sequence[int]) -> list[torch.Tensor]:
    """Computes what it costs to remove a head: the mean loss with the head's output set to 0, minus the mean loss.

    The output is set to 0 before the output projection, after gates and whatever else a layer does to it.

    Args:
        model: a language model with NLQ attention layers.
        input_ids: `(1, length)`.
        heads: of each layer, into how many equal parts the input of its output projection is cut.

    Returns:
        For each layer `(heads,)`, in nats per token; positive where the head lowers the loss.
    """
    whole = losses_of_tokens(model, input_ids).double().mean()
    length = input_ids.shape[1]
    rows_at_once = max(1, min(_LOGITS_AT_ONCE // (4 * length * model.config.vocab_size), _TOKENS_AT_ONCE // length))
    found = []
    for layer, count in tqdm(zip(attention_layers(model), heads), "Removing heads", len(heads), **bar_options()):
        losses = []
        for removed in torch.arange(count).split(rows_at_once):

            def remove(
                module: nn.Module, inputs: tuple[torch.Tensor], removed=removed, count=count
            ) -> tuple[torch.Tensor]:
                parts = inputs[0].unflatten(-1, (count, -1)).clone()
                parts[torch.arange(len(removed)), :, removed] = 0.0
                return (parts.flatten(-2),)

            with layer.o_proj.register_forward_pre_hook(remove):
                losses.append(losses_of_tokens(model, input_ids.expand(len(removed), -1)))
        found.append(torch.cat(losses).double().mean(dim=-1) - whole)
    return found
