"""The next-token loss on the CPU, a row or a few rows at a time.

PyTorch's cross-entropy writes three more tensors of the logits' size, `(tokens, vocabulary)`: the log-softmax, the gradient of
the chosen entries, and the gradient of the logits. Only the last is needed. Working through slices that fit in the cache, the
others never reach memory; `docs/benchmarks.md` has what that gains. The C++ code goes through a row at a time, with an
exponential of its own.
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
  float* log_normalizers;
  const float* gradient;
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
    call.log_normalizers[i] = std::isinf(largest) ? largest : largest + std::log(total);
  }
}

template <class T>
void backward(const Call& call) {
#pragma omp parallel for schedule(static) num_threads(call.threads)
  for (int64_t i = 0; i < call.rows; i++) {
    const T* row = static_cast<const T*>(call.logits) + i * call.vocabulary;
    T* result = static_cast<T*>(call.result) + i * call.vocabulary;
    const float log_normalizer = call.log_normalizers[i], gradient = call.gradient[i];
#pragma omp simd
    for (int64_t j = 0; j < call.vocabulary; j++) store(result + j, gradient * exp_negative(load(row + j) - log_normalizer));
    const int64_t target = call.targets[i];
    store(result + target, gradient * (exp_negative(load(row + target) - log_normalizer) - 1));
  }
}

extern "C" {
void nlq_forward(const Call* call, bool is_half) { is_half ? forward<Half>(*call) : forward<float>(*call); }
void nlq_backward(const Call* call, bool is_half) { is_half ? backward<Half>(*call) : backward<float>(*call); }
}
"""
)


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "threads")),
        *((name, ctypes.c_void_p) for name in ("logits", "targets", "log_normalizers", "gradient", "result")),
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


class _NegativeLogLikelihood(torch.autograd.Function):
    """`logsumexp(logits) - logits[target]` of each row, in at least float32, and the log-sum-exp itself, without gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(tokens, vocabulary)` and `(tokens,)` -> twice `(tokens,)`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if _runs_in_cpp(logits):
            _run("nlq_forward", logits, log_normalizers=(log_normalizers := logits.new_empty(logits.shape[0], dtype=dtype)))
        else:
            log_normalizers = torch.cat([torch.logsumexp(logits[part].to(dtype), dim=-1) for part in _slices(logits)])
        return log_normalizers - logits.gather(-1, targets[:, None]).squeeze(-1), log_normalizers

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, _) -> tuple[torch.Tensor, None]:
        logits, targets, log_normalizers = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted: nothing in place
            result = torch.softmax(logits.to(log_normalizers.dtype), dim=-1) * gradient[:, None]
            return result.scatter_add(1, targets[:, None], -gradient[:, None]).to(logits.dtype), None
        result = torch.empty_like(logits)
        if _runs_in_cpp(logits):
            given = {"targets": targets.long().contiguous(), "gradient": gradient.to(log_normalizers.dtype).contiguous()}
            _run("nlq_backward", logits, log_normalizers=log_normalizers, result=result, **given)
            return result, None
        for part in _slices(logits):
            rows = (logits[part].to(log_normalizers.dtype) - log_normalizers[part, None]).exp_().mul_(gradient[part, None])
            rows.scatter_add_(1, targets[part, None], -gradient[part, None])
            result[part] = rows
        return result, None


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """Transformers' `ForCausalLMLoss`, by its own code except on an eager CPU.

    Args:
        logits: `(batch, length, vocabulary)`.
        labels: `(batch, length)` token ids; place `i` is predicted at `i - 1`.
        vocab_size: size of the logits' last dimension.
        num_items_in_batch: what to divide the sum by; by default the number of labels that are not ignored.
        ignore_index: label without a loss.
        shift_labels: `(batch, length)` labels already in the place that predicts them, instead of `labels`.

    Returns:
        The mean negative log-likelihood, in nats per token.
    """
    if logits.device.type != "cpu" or is_tracing(logits):
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1)
    is_counted = targets != ignore_index
    losses, _ = _NegativeLogLikelihood.apply(logits.reshape(-1, vocab_size), targets.masked_fill(~is_counted, 0))
    total = losses.masked_fill(~is_counted, 0.0).sum()
    return total / (is_counted.sum() if num_items_in_batch is None else num_items_in_batch)
