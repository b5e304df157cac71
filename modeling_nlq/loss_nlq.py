"""The next-token loss on the CPU, a few rows at a time.

PyTorch's cross-entropy writes three more tensors of the logits' size. Here the gradient is computed with the loss, in
slices that fit in the cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.import_utils import is_tracing

from .activations_nlq import at_least_float32
from .ops_nlq import OnceDifferentiable, Operation


SLICE_ELEMENTS = 2**18  # 1 MiB of float32
_NO_SECOND_DERIVATIVE = (
    "the loss of NLQ models on the CPU has no second derivative; set model.loss_function = "
    "transformers.loss.loss_utils.ForCausalLMLoss"
)


def loss_in_slices(logits: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the negative log-likelihood of each row `(tokens, vocabulary)`, and the gradient of their weighted sum.

    The latter is empty without `weights`.
    """
    dtype = at_least_float32(logits)
    rows = max(SLICE_ELEMENTS // logits.shape[-1], 1)
    losses = torch.empty_like(logits[:, 0], dtype=dtype)
    gradient = logits.new_empty(0) if weights is None else torch.empty_like(logits)
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        # `logsumexp` of the logits would lose digits where they are large
        distances = logits[part].to(dtype)
        distances = distances - distances.amax(dim=-1, keepdim=True)
        log_totals = torch.logsumexp(distances, dim=-1)
        losses[part] = log_totals - distances.gather(-1, targets[part, None]).squeeze(-1)
        if weights is not None:
            shares = (distances - log_totals[:, None]).exp_().mul_(weights[part, None])
            gradient[part] = shares.scatter_add_(1, targets[part, None], -weights[part, None])
    return losses, gradient


loss_and_gradient = Operation("loss", loss_in_slices)


class _Loss(torch.autograd.Function):
    """The sum of the counted rows' negative log-likelihoods, divided by a count.

    Keeps its gradient and not the logits, which a caller may overwrite before `backward`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits, anchor, targets, is_counted, count, has_backward) -> tuple[Tensor, Tensor]:
        # Without any label the loss is NaN and the gradient 0, as in PyTorch
        weights = torch.where(is_counted, 1.0 / count, 0.0) if has_backward else None
        losses, gradient = loss_and_gradient(logits, targets, weights)
        return losses.masked_fill(~is_counted, 0.0).sum() / count, gradient

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], inputs[1])

    @staticmethod
    def backward(ctx, gradient, _) -> tuple[Tensor | None, ...]:
        result, anchor = ctx.saved_tensors
        # A new tensor, because hooks may change it in place, and a retained graph is read again
        return result * OnceDifferentiable.apply(gradient, anchor, _NO_SECOND_DERIVATIVE), None, None, None, None, None


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """Returns Transformers' `ForCausalLMLoss`, in nats per token. On the CPU it has no second derivative.

    Args:
        logits: `(batch, length, vocabulary)`.
        labels: `(batch, length)` token ids; token `i` is predicted at `i - 1`.
        num_items_in_batch: what to divide the sum by; by default the number of labels that are not ignored.
        shift_labels: `(batch, length)` labels at the positions that predict them, instead of `labels`.
    """
    is_plain = logits.device.type == "cpu" and type(logits) is Tensor and not is_tracing(logits)
    # A gradient in float16 needs the scale of the loss
    if not is_plain or logits.dtype == torch.float16 or forward_ad.unpack_dual(logits).tangent is not None:
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if shift_labels.shape != logits.shape[:-1]:  # the C++ code trusts it
        raise ValueError(f"labels={tuple(shift_labels.shape)} must be (batch, length)={tuple(logits.shape[:-1])}")
    if logits.shape[-1] != vocab_size:
        raise ValueError(f"vocab_size={vocab_size} must be the number of logits of a token, {logits.shape[-1]}")
    targets, logits = shift_labels.reshape(-1), logits.reshape(-1, vocab_size)
    is_counted = targets != ignore_index
    count = is_counted.sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, dtype=at_least_float32(logits), device=logits.device)
    has_backward = torch.is_grad_enabled() and logits.requires_grad
    anchor = logits[:0].sum()
    loss, _ = _Loss.apply(logits, anchor, targets.masked_fill(~is_counted, 0), is_counted, count, has_backward)
    return loss
