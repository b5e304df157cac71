// The product of a linear layer with a few rows, as in decoding. It takes as long as reading the weights, which PyTorch's BLAS
// does with one thread, and slowly on processors that it has no kernels for. This reads them in order, with all threads.

#include "operators.h"

namespace {

typedef int lanes __attribute__((vector_size(64)));

inline float sum(vec v) {
  v += __builtin_shuffle(v, lanes{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, lanes{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  return (v[0] + v[1]) + (v[2] + v[3]);
}

template <int outputs, int rows>
inline void tile(const float* x, const float* w, const float* bias, float* y, int64_t size, int64_t width) {
  vec sums[outputs][rows] = {};
  int64_t k = 0;
  for (; k + 16 <= width; k += 16)
    for (int i = 0; i < outputs; i++) {
      if (rows > 1) __builtin_prefetch(w + i * width + k + 2048);  // the products hide what reading takes
      vec weights = *(const vec*)(w + i * width + k);
      for (int row = 0; row < rows; row++) sums[i][row] += weights * *(const vec*)(x + row * width + k);
    }
  for (int i = 0; i < outputs; i++)
    for (int row = 0; row < rows; row++) {
      float total = sum(sums[i][row]);
      for (int64_t rest = k; rest < width; rest++) total += w[i * width + rest] * x[row * width + rest];
      y[row * size + i] = bias ? total + bias[i] : total;
    }
}

template <int outputs, int rows>
void product(const float* x, const float* w, const float* bias, float* y, int64_t size, int64_t width, int threads) {
  #pragma omp parallel for schedule(static) num_threads(threads) if (size * width > 16384)
  for (int64_t i = 0; i < (size + outputs - 1) / outputs; i++) {
    int64_t n = i * outputs;
    if (n + outputs <= size) {
      tile<outputs, rows>(x, w + n * width, bias ? bias + n : bias, y + n, size, width);
    } else {
      for (; n < size; n++) tile<1, rows>(x, w + n * width, bias ? bias + n : bias, y + n, size, width);
    }
  }
}

// x (..., width), w (size, width), bias (size) -> x w^T + bias, for up to 8 rows of x
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const Optional& bias) {
  using Product = void (*)(const float*, const float*, const float*, float*, int64_t, int64_t, int);
  constexpr Product PRODUCTS[] = {product<1, 1>, product<4, 2>, product<4, 3>, product<4, 4>,
                                  product<2, 5>, product<2, 6>, product<2, 7>, product<2, 8>};
  const at::Tensor rows = x.contiguous(), weights = w.contiguous(), biases = bias ? bias->contiguous() : at::Tensor();
  const int64_t size = w.size(0), width = w.size(1), count = width ? x.numel() / width : 0;
  auto shape = x.sizes().vec();
  shape.back() = size;
  const at::Tensor y = x.new_empty(shape);
  PRODUCTS[count - 1](
      rows.data_ptr<float>(), weights.data_ptr<float>(), bias ? biases.data_ptr<float>() : nullptr, y.data_ptr<float>(), size,
      width, at::get_num_threads());
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(NLQ_NAMESPACE, library) {
  NLQ_OPERATOR(linear, "(Tensor x, Tensor w, Tensor? bias) -> Tensor");
}
