// The next-token loss of each row of logits, and the gradient of a weighted sum of them, in two visits of a row.

#include "numbers.h"
#include "operators.h"

namespace {

// `logsumexp(row) - row[target]` of each row
template <class T>
void compute(
    const T* logits, const int64_t* targets, const float* weights, float* losses, T* gradient, int64_t rows,
    int64_t vocabulary) {
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads())
  for (int64_t i = 0; i < rows; i++) {
    const T* row = logits + i * vocabulary;
    float largest = -INFINITY, total = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < vocabulary; j++) largest = largest < load(row + j) ? load(row + j) : largest;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < vocabulary; j++) total += exp_negative(load(row + j) - largest);
    const float log_total = std::log(total), distance = load(row + targets[i]) - largest;
    losses[i] = log_total - distance;
    if (gradient == nullptr) continue;
    T* result = gradient + i * vocabulary;
    const float weight = weights[i];
#pragma omp simd
    for (int64_t j = 0; j < vocabulary; j++)
      store(result + j, weight * exp_negative(load(row + j) - largest - log_total));
    store(result + targets[i], weight * (exp_negative(distance - log_total) - 1));
  }
}

// Logits (rows, vocabulary), targets (rows), and weights (rows) if the gradient is wanted -> losses (rows), and the gradient of
// their weighted sum, of the shape of the logits, or (0)
std::tuple<Tensor, Tensor> loss(Input logits, Input targets, OptionalInput weights) {
  const Tensor rows = logits.contiguous(), labels = targets.to(at::kLong).contiguous();
  const bool has_all = labels.numel() == rows.size(0) && (!weights || weights->numel() == rows.size(0));
  TORCH_CHECK_INDEX(has_all, "each of the ", rows.size(0), " rows of logits needs a target, and a weight");
  for (int64_t i = 0; i < labels.numel(); i++) {
    const int64_t label = labels.data_ptr<int64_t>()[i];
    TORCH_CHECK_INDEX(0 <= label && label < rows.size(1), "target ", label, " is out of bounds: 0 to ", rows.size(1) - 1);
  }
  const Tensor factors = weights ? weights->to(at::kFloat).contiguous() : Tensor();
  const Tensor losses = rows.new_empty({rows.size(0)}, at::kFloat);
  const Tensor gradient = rows.new_empty(weights ? rows.sizes() : at::IntArrayRef({0}));
  const auto run = [&](auto* data) {
    using T = std::remove_pointer_t<decltype(data)>;
    compute<T>(
        data, labels.data_ptr<int64_t>(), weights ? factors.data_ptr<float>() : nullptr, losses.data_ptr<float>(),
        weights ? static_cast<T*>(gradient.data_ptr()) : nullptr, rows.size(0), rows.size(1));
  };
  if (rows.scalar_type() == at::kBFloat16) run(static_cast<Half*>(rows.data_ptr()));
  else run(rows.data_ptr<float>());
  return {losses, gradient};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(NLQ_NAMESPACE, library) {
  NLQ_OPERATOR(loss, "(Tensor logits, Tensor targets, Tensor? weights) -> (Tensor, Tensor)");
}
