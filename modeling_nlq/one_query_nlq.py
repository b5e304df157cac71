"""Elementwise attention of a single query on the CPU in C++, as in decoding: one visit of the keys and one of the values."""

import ctypes
import functools
import struct

import torch
from torch import nn

from .attention_nlq import LARGE_SCORE, zero_limit
from .cpp_activations_nlq import CPP_BODIES, activation_types
from .cpp_nlq import is_enabled, is_plain_call, load_library
from .masking_nlq import Visibility, read_visible


_SOURCE = (
    activation_types(CPP_BODIES)
    + r"""
#include <algorithm>
#include <vector>

typedef float vec __attribute__((vector_size(64), aligned(4)));

struct Call {
  const float *query, *key, *value;
  float* output;
  const uint8_t* visible;  // null if all keys are visible
  const int64_t* count;    // null if each query sees all keys
  // Steps from one batch, head or key to the next, in elements
  int64_t query_steps[2], key_steps[3], value_steps[3], visible_steps[2], count_steps[2];
  int64_t batch, heads, group, keys, width, activation, threads, is_sum, is_length, subtracts_log_count, is_homogeneous;
  double scaling;
};

static float dot(const float* x, const float* y, int64_t width) {
  vec sums = {};
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) sums += *(const vec*)(x + i) * *(const vec*)(y + i);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int lane = 0; lane < 16; lane++) total += sums[lane];
  for (; i < width; i++) total += x[i] * y[i];
  return total;
}

// The weights of one head, before they are normalised, and their sum
template <class Phi>
static float weigh(float* scores, const uint8_t* visible, int64_t keys, float factor, float bias) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < keys; j++) {
    float weight, slope;
    Phi::both(scores[j] * factor - bias, weight, slope);
    scores[j] = weight;
    total += weight;
  }
  if (visible == nullptr) return total;
  total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < keys; j++) total += scores[j] = visible[j] ? scores[j] : 0.0f;
  return total;
}

static float (*const WEIGH[])(float*, const uint8_t*, long, float, float) = {WEIGH_OF_BODIES};

// Returns false if the scores are too large for float32
static bool attend(const Call& call, int64_t batch, int64_t head) {
  const float* query = call.query + batch * call.query_steps[0] + head * call.query_steps[1];
  const float* key = call.key + batch * call.key_steps[0] + head / call.group * call.key_steps[1];
  const float* value = call.value + batch * call.value_steps[0] + head / call.group * call.value_steps[1];
  const uint8_t* visible = call.visible ? call.visible + batch * call.visible_steps[0] + head * call.visible_steps[1] : nullptr;
  const int64_t seen = call.count ? call.count[batch * call.count_steps[0] + head * call.count_steps[1]] : call.keys;
  const float count = std::max<int64_t>(seen, 1);
  std::vector<float> weights(call.keys);
  for (int64_t j = 0; j < call.keys; j++)
    weights[j] = dot(query, key + j * call.key_steps[2], call.width) * float(call.scaling);

  float factor = 1;
  if (call.is_sum && call.is_homogeneous) {
    float largest = 0, zero = 0;
#pragma omp simd reduction(max : largest) reduction(+ : zero)
    for (int64_t j = 0; j < call.keys; j++) {
      const float score = visible == nullptr || visible[j] ? std::fabs(weights[j]) : 0.0f;
      largest = largest < score ? score : largest;
      zero += score - score;  // NaN if the score is not finite
    }
    if (zero != 0) return false;
    factor = std::ldexp(1.0f, -int(std::max(0.0f, std::ceil(std::log2(largest) - float(LARGE_SCORE)))));
  }
  const float bias = call.subtracts_log_count ? std::log(count) : 0.0f;
  const float total = WEIGH[call.activation](weights.data(), visible, call.keys, factor, bias);
  const float scale = call.is_sum ? (total < float(ZERO_LIMIT) ? 0.0f : 1.0f / total) : call.is_length ? 1.0f / count : 1.0f;

  float* output = call.output + (batch * call.heads + head) * call.width;
  std::fill(output, output + call.width, 0.0f);
  for (int64_t j = 0; j < call.keys; j++) {
    const float weight = weights[j] * scale;
    const float* row = value + j * call.value_steps[2];
#pragma omp simd
    for (int64_t i = 0; i < call.width; i++) output[i] += weight * row[i];
  }
  return true;
}

extern "C" int one_query(const Call* call) {
  int is_right = 1;
  const int64_t rows = call->batch * call->heads;
#pragma omp parallel for num_threads(call->threads) reduction(&& : is_right) if (rows * call->keys > 512)
  for (int64_t i = 0; i < rows; i++) is_right = is_right && attend(*call, i / call->heads, i % call->heads);
  return is_right;
}
"""
).replace("WEIGH_OF_BODIES", ", ".join(f"weigh<Phi_{name}>" for name in CPP_BODIES))
_NUMBERS = {name: number for number, name in enumerate(CPP_BODIES)}
_CALL = struct.Struct("=29qd")
_CONSTANTS = {"LARGE_SCORE": float(LARGE_SCORE), "ZERO_LIMIT": zero_limit(torch.float32)}


@functools.cache
def _library() -> ctypes.CDLL | None:
    source = functools.reduce(lambda text, item: text.replace(item[0], repr(item[1])), _CONSTANTS.items(), _SOURCE)
    return load_library("one_query", source)


def one_query_in_cpp(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | torch.Tensor | None,
    scaling: float,
) -> torch.Tensor | None:
    """Computes what `one_query_attention` computes, from the same arguments, or returns `None` where it cannot.

    It computes built-in activations in float32 where nothing is differentiated or traced, and refuses scores that are too large
    for float32.
    """
    activation, normalization = module.activation, module.normalization
    states = (query, key, value)
    if activation.name not in CPP_BODIES or torch.is_grad_enabled() or not is_plain_call(*states):
        return None
    if any(tensor.dtype != torch.float32 or tensor.stride(-1) != 1 for tensor in states) or not key.shape[2]:
        return None
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return None
    if not is_enabled() or (library := _library()) is None:
        return None
    visible, count = read_visible(attention_mask, query, key)
    (batch, heads, _, width), (_, key_value_heads, keys, _) = query.shape, key.shape
    visible_steps = count_steps = (0, 0)
    if visible is not None:
        visible = visible.contiguous().expand(batch, heads, 1, keys)
        visible_steps = visible.stride()[:2]
    if isinstance(count, torch.Tensor):
        count = count.long().expand(batch, heads, 1)
        count_steps = count.stride()[:2]
    elif count != keys:
        count = torch.tensor(count)
    output = query.new_empty(batch, 1, heads, width)
    numbers = (
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), output.data_ptr()),
        *(0 if visible is None else visible.data_ptr(), count.data_ptr() if isinstance(count, torch.Tensor) else 0),
        *(*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], *visible_steps, *count_steps),
        *(batch, heads, heads // key_value_heads, keys, width, _NUMBERS[activation.name], torch.get_num_threads()),
        *(normalization == "sum", normalization == "length"),
        activation.subtract_log_count and normalization == "none",
        activation.is_homogeneous,
    )
    is_right = library.one_query(_CALL.pack(*numbers, scaling))
    return output if is_right else None
