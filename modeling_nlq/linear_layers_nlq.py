"""Linear layers, and their product with a few rows on the CPU, as in decoding.

The product of a few rows takes as long as reading the weights. PyTorch's BLAS reads them with one thread, and slowly on
processors that it has no kernels for. The C++ code below reads them in order, with all threads.
"""

import ctypes
import functools

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .cpp_nlq import is_enabled, is_plain_call, load_library


MOST_ROWS = 8

# A tile of outputs is `outputs` x `rows` sums of 16 products each, which stay in registers. A single row takes one output at a
# time, so that the weights are read in the order of their addresses.
_SOURCE = """
typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int lanes __attribute__((vector_size(64)));

static inline float sum(vec v) {
    v += __builtin_shuffle(v, lanes{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, lanes{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    return (v[0] + v[1]) + (v[2] + v[3]);
}

template <int outputs, int rows>
static inline void tile(const float* x, const float* w, const float* bias, float* y, long size, long width) {
    vec sums[outputs][rows] = {};
    long k = 0;
    for (; k + 16 <= width; k += 16)
        for (int i = 0; i < outputs; i++) {
            if (rows > 1) __builtin_prefetch(w + i * width + k + 2048);  // the products hide what reading takes
            vec weights = *(const vec*)(w + i * width + k);
            for (int row = 0; row < rows; row++) sums[i][row] += weights * *(const vec*)(x + row * width + k);
        }
    for (int i = 0; i < outputs; i++)
        for (int row = 0; row < rows; row++) {
            float total = sum(sums[i][row]);
            for (long rest = k; rest < width; rest++) total += w[i * width + rest] * x[row * width + rest];
            y[row * size + i] = bias ? total + bias[i] : total;
        }
}

template <int outputs, int rows>
static void product(const float* x, const float* w, const float* bias, float* y, long size, long width, int threads) {
    #pragma omp parallel for schedule(static) num_threads(threads) if (size * width > 16384)
    for (long i = 0; i < (size + outputs - 1) / outputs; i++) {
        long n = i * outputs;
        if (n + outputs <= size) {
            tile<outputs, rows>(x, w + n * width, bias ? bias + n : bias, y + n, size, width);
        } else {
            for (; n < size; n++) tile<1, rows>(x, w + n * width, bias ? bias + n : bias, y + n, size, width);
        }
    }
}

// y = x w^T + bias: x (rows, width), w (size, width), y (rows, size)
extern "C" void linear(const float* x, const float* w, const float* bias, float* y,
                       long rows, long size, long width, int threads) {
    switch (rows) {
        case 1: return product<1, 1>(x, w, bias, y, size, width, threads);
        case 2: return product<4, 2>(x, w, bias, y, size, width, threads);
        case 3: return product<4, 3>(x, w, bias, y, size, width, threads);
        case 4: return product<4, 4>(x, w, bias, y, size, width, threads);
        case 5: return product<2, 5>(x, w, bias, y, size, width, threads);
        case 6: return product<2, 6>(x, w, bias, y, size, width, threads);
        case 7: return product<2, 7>(x, w, bias, y, size, width, threads);
        case 8: return product<2, 8>(x, w, bias, y, size, width, threads);
    }
}
"""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library("linear", _SOURCE)
    if library is not None:
        library.linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
        library.linear.restype = None
    return library


def apply_linear(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Calls a linear layer, `(..., input)` -> `(..., output)`, or computes the same faster where nobody can tell.

    A layer that is not a plain `nn.Linear` in float32 on the CPU, that has hooks, or whose output may be differentiated, is
    just called.
    """
    # Quantized and adapted layers have other classes, and Accelerate replaces `forward`
    if torch.is_grad_enabled() or not states.is_cpu or type(module) is not nn.Linear:
        return module(states)
    if module._forward_hooks or module._forward_pre_hooks:
        return module(states)
    weight, bias = module.weight, module.bias
    tensors = (states, weight) if bias is None else (states, weight, bias)
    if not is_plain_call(*tensors) or any(tensor.dtype != torch.float32 for tensor in tensors):
        return module(states)
    if "forward" in module.__dict__ or _has_any_global_hook() or torch.is_autocast_enabled("cpu"):
        return module(states)
    size, width = module.out_features, module.in_features
    # DeepSpeed keeps weights elsewhere
    is_regular = states.shape[-1] == width and weight.shape == (size, width) and weight.is_contiguous()
    if bias is not None:
        is_regular = is_regular and bias.shape == (size,) and bias.is_contiguous()
    rows = states.numel() // max(width, 1)
    if not 0 < rows <= MOST_ROWS or not is_regular or not is_enabled() or (library := _library()) is None:
        return module(states)
    states = states.contiguous()
    output = states.new_empty(*states.shape[:-1], size)
    library.linear(
        states.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        rows,
        size,
        width,
        torch.get_num_threads(),
    )
    return output
