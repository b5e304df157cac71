"""The next-token loss on the CPU, a row or a few rows at a time.

PyTorch's cross-entropy writes three more tensors of the logits' size, `(tokens, vocabulary)`: the log-softmax, the gradient of
the chosen entries, and the gradient of the logits. Only the last is needed, and it is computed together with the loss. Working
through slices that fit in the cache, the others never reach memory; `docs/benchmarks.md` has what that gains. The C++ code goes
through a row at a time, with an exponential of its own.
"""

import ctypes

import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.import_utils import is_tracing

from .cpp_activations_nlq import FUNCTIONS
from .cpp_nlq import is_enabled, is_plain_call, load_library


SLICE_ELEMENTS = 2**18  # 1 MiB of float32

_SOURCE = (
    FUNCTIONS
    + r"""
#include <algorithm>

struct Call {
  int64_t rows, vocabulary, threads;
  const void* logits;
  const int64_t* targets;
  float *largest, *log_totals;
  const float* weights;
  void* result;
};

template <class T>
void forward(const Call& call) {
#pragma omp parallel for schedule(static) num_threads(call.threads)
  for (int64_t i = 0; i < call.rows; i++) {
    const T* row = static_cast<const T*>(call.logits) + i * call.vocabulary;
    float largest = -INFINITY, total = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < call.vocabulary; j++) largest = largest < load(row + j) ? load(row + j) : largest;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < call.vocabulary; j++) total += exp_negative(load(row + j) - largest);
    call.largest[i] = largest;
    call.log_totals[i] = std::log(total);
  }
}

template <class T>
void gradient(const Call& call) {
#pragma omp parallel for schedule(static) num_threads(call.threads)
  for (int64_t i = 0; i < call.rows; i++) {
    const T* row = static_cast<const T*>(call.logits) + i * call.vocabulary;
    T* result = static_cast<T*>(call.result) + i * call.vocabulary;
    const float largest = call.largest[i], log_total = call.log_totals[i], weight = call.weights[i];
#pragma omp simd
    for (int64_t j = 0; j < call.vocabulary; j++)
      store(result + j, weight * exp_negative(load(row + j) - largest - log_total));
    const int64_t target = call.targets[i];
    store(result + target, weight * (exp_negative(load(row + target) - largest - log_total) - 1));
  }
}

extern "C" {
void nlq_forward(const Call* call, bool is_half) { is_half ? forward<Half>(*call) : forward<float>(*call); }
void nlq_gradient(const Call* call, bool is_half) { is_half ? gradient<Half>(*call) : gradient<float>(*call); }
}
"""
)


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "threads")),
        *((name, ctypes.c_void_p) for name in ("logits", "targets", "largest", "log_totals", "weights", "result")),
    ]


def _run(function: str, logits: torch.Tensor, **tensors: torch.Tensor) -> None:
    pointers = {name: tensor.data_ptr() for name, tensor in {"logits": logits, **tensors}.items()}
    call = _Call(*logits.shape, torch.get_num_threads(), **pointers)
    getattr(load_library("loss", _SOURCE), function)(ctypes.byref(call), ctypes.c_bool(logits.dtype == torch.bfloat16))


def _runs_in_cpp(logits: torch.Tensor) -> bool:
    return (
        logits.dtype in (torch.float32, torch.bfloat16)
        and logits.numel() > 0
        and logits.is_contiguous()
        and is_plain_call(logits)
        and is_enabled()
        and load_library("loss", _SOURCE) is not None
    )


def _slices(logits: torch.Tensor) -> list[slice]:
    rows = max(SLICE_ELEMENTS // logits.shape[-1], 1)
    return [slice(start, start + rows) for start in range(0, max(logits.shape[0], 1), rows)]  # also for an empty batch


def negative_log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`logsumexp(logits) - logits[target]` of each row, in at least float32, and the two terms of the log-sum-exp.

    The terms are the largest logit and the logarithm of the other factor. Their sum would lose digits where logits are large.

    `(tokens, vocabulary)` and `(tokens,)` -> three times `(tokens,)`.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if _runs_in_cpp(logits):
        largest, log_totals = logits.new_empty(2, logits.shape[0], dtype=dtype)
        _run("nlq_forward", logits, largest=largest, log_totals=log_totals)
    else:
        largest = logits.amax(dim=-1).to(dtype)
        parts = (logits[part].to(dtype) - largest[part, None] for part in _slices(logits))
        log_totals = torch.cat([torch.logsumexp(part, dim=-1) for part in parts])
    return log_totals - (logits.gather(-1, targets[:, None]).squeeze(-1) - largest), largest, log_totals


def _gradient(
    logits: torch.Tensor, targets: torch.Tensor, largest: torch.Tensor, log_totals: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the weighted sum of the negative log-likelihoods, of the logits' shape and dtype."""
    result = torch.empty_like(logits)
    if _runs_in_cpp(logits):
        given = {"targets": targets.long().contiguous(), "weights": weights.contiguous(), "result": result}
        _run("nlq_gradient", logits, largest=largest, log_totals=log_totals, **given)
        return result
    for part in _slices(logits):
        rows = logits[part].to(largest.dtype) - largest[part, None] - log_totals[part, None]
        rows = rows.exp_().mul_(weights[part, None])
        rows.scatter_add_(1, targets[part, None], -weights[part, None])
        result[part] = rows
    return result


class _Loss(torch.autograd.Function):
    """The sum of the counted rows' negative log-likelihoods, divided by a count. It keeps its gradient instead of the logits.

    A caller may overwrite the logits before `backward`, also where PyTorch does not see it, such as through NumPy.
    """

    @staticmethod
    def forward(
        ctx, logits: torch.Tensor, targets: torch.Tensor, is_counted: torch.Tensor, count: torch.Tensor, has_backward: bool
    ) -> torch.Tensor:
        """`(tokens, vocabulary)`, `(tokens,)`, `(tokens,)` and a number -> a number."""
        losses, *terms = negative_log_likelihood(logits, targets)
        if has_backward:
            # Without any label the loss is NaN, and the gradient is 0, as PyTorch's
            ctx.save_for_backward(_gradient(logits, targets, *terms, torch.where(is_counted, 1.0 / count, 0.0)))
        return losses.masked_fill(~is_counted, 0.0).sum() / count

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the loss of NLQ models on the CPU has no second derivative; set model.loss_function = "
                "transformers.loss.loss_utils.ForCausalLMLoss, which has one"
            )
        (result,) = ctx.saved_tensors
        # Also where the factor is 1: hooks may change what they get in place, and a retained graph is read again
        return result * gradient, None, None, None, None


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Transformers' `ForCausalLMLoss`, by its own code except on the CPU, where nothing traces or transforms the call.

    Args:
        logits: `(batch, length, vocabulary)`.
        labels: `(batch, length)` token ids; place `i` is predicted at `i - 1`.
        vocab_size: size of the logits' last dimension.
        num_items_in_batch: what to divide the sum by; by default the number of labels that are not ignored.
        ignore_index: label without a loss.
        shift_labels: `(batch, length)` labels already in the place that predicts them, instead of `labels`.

    Returns:
        The mean negative log-likelihood, in nats per token.

    Raises:
        ValueError: if the labels' shape is not that of the logits without the vocabulary.
    """
    # A gradient in float16 needs a scaled loss, so it cannot be computed before the scale is known
    if is_tracing(logits) or not is_plain_call(logits) or logits.dtype == torch.float16:
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if shift_labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels={tuple(shift_labels.shape)} must be (batch, length)={tuple(logits.shape[:-1])}, as the logits"
        )
    targets, logits = shift_labels.reshape(-1), logits.reshape(-1, vocab_size)
    is_counted = targets != ignore_index
    count = is_counted.sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    has_backward = torch.is_grad_enabled() and logits.requires_grad
    return _Loss.apply(logits, targets.masked_fill(~is_counted, 0), is_counted, count, has_backward)
