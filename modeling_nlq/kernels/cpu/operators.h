// What the files of operators share: PyTorch's headers, checks and copies of their tensors, and the definition of an operator.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

// Defines a function of this file as an operator, without a derivative of its own
#define NLQ_OPERATOR(name, schema)                                                                              \
  library.def(#name schema, {at::Tag::pt2_compliant_tag});                                                      \
  library.impl(#name, c10::DispatchKey::CPU, TORCH_FN(name));                                                   \
  library.impl(#name, c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback())

namespace {

using at::Tensor;
using Input = const Tensor&;
using Name = std::string_view;
using OptionalInput = const std::optional<Tensor>&;
using Index = int64_t;
typedef float vec __attribute__((vector_size(64), aligned(4)));

// Sums of weights below it count as 0, as in `attention_nlq.zero_limit`
constexpr float ZERO_LIMIT = FLT_MIN / FLT_EPSILON;

// A tensor with the axes batch, heads, length and, if there is one, head_dim, whose stride is 1
struct States {
  char* data = nullptr;
  Index strides[4] = {};

  States() = default;
  explicit States(Input tensor) : data(static_cast<char*>(tensor.data_ptr())) {
    for (Index axis = 0; axis < tensor.dim(); axis++) strides[axis] = tensor.stride(axis);
  }
};

template <class T>
T* at(const States& tensor, Index batch, Index head, Index place = 0) {
  return reinterpret_cast<T*>(tensor.data) + batch * tensor.strides[0] + head * tensor.strides[1] + place * tensor.strides[2];
}

// The tensor with rows in one piece
[[maybe_unused]] Tensor with_rows(Input tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// The index of an activation among rows that begin with its name
template <class Rows>
int64_t find_activation(const Rows& rows, Name activation) {
  const auto is_it = [&](const auto& row) { return row.name == activation; };
  const auto row = std::find_if(std::begin(rows), std::end(rows), is_it);
  TORCH_CHECK(row != std::end(rows), "activation=", activation, " has no C++ code");
  return row - std::begin(rows);
}

}  // namespace
