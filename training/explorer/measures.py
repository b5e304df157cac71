"""The numbers of the explorer, each by one function.

`heads` counts the maps of a layer; `query` and `key` are tokens of one text, in order. Weights `w_ij` are 0 where a
query does not see a key, may be negative, and need not sum to 1. Shares are `p_ij = |w_ij| / sum_k |w_ik|`; they are
NaN in rows of zeros.
"""

from collections.abc import Sequence

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..observe import attention_layers
from ..run.evaluation import token_losses
from ..text import bar_options


# Limits of a batch: bytes of its logits, and tokens, which decide all other memory
_LOGITS_AT_ONCE = 2**28
_TOKENS_AT_ONCE = 2**13


@torch.no_grad()
def losses_of_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Computes the loss of each token after the first, in nats, `(batch, length - 1)` on the CPU.

    It is `-log p(token | tokens before it)`, and for an encoder `-log p(token | all other tokens)`, where this token
    alone is masked. `input_ids`, `(batch, length)`, is without padding.
    """
    input_ids = input_ids.to(model.device)
    if getattr(model.config, "is_causal", True):
        return token_losses(model(input_ids=input_ids, use_cache=False).logits, input_ids)[0].cpu()
    losses = torch.empty(len(input_ids), input_ids.shape[1] - 1)
    for index in range(1, input_ids.shape[1]):
        masked = input_ids.clone()
        masked[:, index] = model.config.mask_token_id
        logits = model(input_ids=masked).logits[:, index].float()
        losses[:, index - 1] = nn.functional.cross_entropy(logits, input_ids[:, index], reduction="none")
    return losses


def shares(weights: torch.Tensor) -> torch.Tensor:
    """Computes the shares `p_ij` of weights `(heads, query, key)`."""
    weights = weights.abs()
    return weights / weights.sum(dim=-1, keepdim=True)


def entropies(weights: torch.Tensor) -> torch.Tensor:
    """Computes `-sum_j p_ij log p_ij` in nats, `(heads, query)`."""
    return torch.special.entr(shares(weights)).sum(dim=-1)


def own_value_cosines(outputs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Computes `cos(y_i, v_i)` of two `(heads, query, head_dim)`, where `y_i = sum_j w_ij v_j` (arXiv 2603.09078).

    The cosine of a 0 is 0.
    """
    return nn.functional.cosine_similarity(outputs, values, dim=-1, eps=torch.finfo(values.dtype).tiny)


def effective_ranks(states: torch.Tensor) -> torch.Tensor:
    """Computes the effective rank (Roy and Vetterli 2007) of each head's queries, `(heads, query, head_dim)`.

    It is `exp(H)`, where `H` is the entropy of the singular values divided by their sum; NaN for a matrix of zeros.
    """
    values = torch.linalg.svdvals(states.double())
    return torch.special.entr(values / values.sum(dim=-1, keepdim=True)).sum(dim=-1).exp()


def previous_token_scores(weights: torch.Tensor) -> torch.Tensor:
    """Returns the mean of `p_i,i-1` over queries after the first; a row of zeros counts as 0 (arXiv 2209.11895)."""
    return shares(weights).diagonal(offset=-1, dim1=-2, dim2=-1).nan_to_num(nan=0.0).mean(dim=-1)


def induction_scores(weights: torch.Tensor, period: int) -> torch.Tensor:
    """Returns the mean of `p_i,i-period+1` over the second half of a text of `repeated_tokens` (arXiv 2209.11895).

    A row of zeros counts as 0.
    """
    return shares(weights).diagonal(offset=1 - period, dim1=-2, dim2=-1)[..., 1:].nan_to_num(nan=0.0).mean(dim=-1)


def repeated_tokens(vocab_size: int, special: Sequence[int], period: int) -> torch.Tensor:
    """Draws random tokens that are not special, and repeats them once: `(1, 2 * period)`."""
    allowed = torch.tensor(sorted(set(range(vocab_size)) - set(special)))
    generator = torch.Generator().manual_seed(0)
    tokens = allowed[torch.randint(len(allowed), (1, period), generator=generator)]
    return tokens.repeat(1, 2)


@torch.no_grad()
def ablations(model: PreTrainedModel, input_ids: torch.Tensor, heads: Sequence[int]) -> list[torch.Tensor]:
    """Computes what removing each head adds to the mean loss of `(1, length)` tokens: nats, `(heads,)` for each layer.

    The input of the output projection is set to 0 there.
    """
    whole = losses_of_tokens(model, input_ids).double().mean()
    length = input_ids.shape[1]
    rows_at_once = max(1, min(_LOGITS_AT_ONCE // (4 * length * model.config.vocab_size), _TOKENS_AT_ONCE // length))
    costs = []
    for layer, count in tqdm(
        zip(attention_layers(model), heads), "Removing heads", len(heads), **bar_options(), delay=10.0
    ):
        losses = []
        for removed in torch.arange(count).split(rows_at_once):

            def remove(_, inputs: tuple[torch.Tensor], removed=removed, count=count) -> tuple[torch.Tensor]:
                outputs = inputs[0].unflatten(-1, (count, -1)).clone()
                outputs[torch.arange(len(removed)), :, removed] = 0.0
                return (outputs.flatten(-2),)

            with layer.o_proj.register_forward_pre_hook(remove):
                losses.append(losses_of_tokens(model, input_ids.expand(len(removed), -1)))
        costs.append(torch.cat(losses).double().mean(dim=-1) - whole)
    return costs
