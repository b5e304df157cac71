// The passes of attention in memory linear in the length, for the elementwise activations and softmax. One pass over a tile of
// scores does what takes PyTorch several.
//
// The matrices are multiplied by oneDNN's kernels for small matrices, which are in PyTorch and need AVX-512.
//
// Softmax is computed as FlashAttention does (Dao et al. 2022, arXiv 2205.14135). Forward keeps the largest score of each row so
// far, and scales its sums when a larger one comes. In backward the weights are `exp(s - l)`, where `l` is the logarithm of the
// row's sum of exponentials.
//
// Letters: a tile has `m` rows and `n` columns; `width` is head_dim. In forward a tile of scores is `(query, key)`, in backward it
// is `(key, query)`, so that weights and gradients can be multiplied as they are.

#include <ATen/native/CPUBlas.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "activations.h"
#include "operators.h"

namespace {

// Tiles begin and end at multiples of it
constexpr Index STEP = 64;
typedef uint32_t __attribute__((may_alias)) Pair;

struct Phi_softmax {  // its score is the distance to the largest one
  NLQ_INLINE static void both(float score, float& weight, float& slope) { weight = slope = exp_negative(score); }
};

struct Call {
  Index threads, batch, heads, key_value_heads, queries, keys, width, query_tile, key_tile;
  Index activation;   // its row of `ROWS`
  bool is_sum, is_softmax;
  double scaling;
  States query, key, value, bias, key_is_valid, first_key, last_key, visible;
  // For softmax, `inverse_normalizer` is the logarithm of the sum of exponentials
  States output, remainder, inverse_normalizer;
  States gradient, query_gradient, key_gradient, value_gradient;
};

// Each size of matrices has a kernel of its own, up to 200 KiB of code. So tiles begin and end at multiples of STEP, and have
// rows and columns of 0 after the last query or key. A tile itself is smaller than STEP in tests only
Index round_down(Index size) { return size / STEP * STEP; }
Index round_up(Index size, Index tile) { return std::min((size + STEP - 1) / STEP * STEP, tile); }
Index tiles(Index length, Index tile) { return (length + tile - 1) / tile; }

// Memory that is not initialised
template <class T>
class Buffer {
 public:
  explicit Buffer(Index size) : data(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 127) / 64 * 64))) {
    if (data == nullptr) std::abort();
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  T* const data;
};

// C (+)= A B. In bfloat16, B holds pairs of rows: (k / 2, n, 2)
#ifdef NLQ_PLAIN_PRODUCTS  // for tests on CPUs without AVX-512
float element(const float* b, Index row_b, Index row, Index column) { return b[row * row_b + column]; }
float element(const Half* b, Index row_b, Index row, Index column) {
  return load(b + (row / 2 * row_b + column) * 2 + row % 2);
}
template <class T>
void multiply(Index m, Index n, Index k, const T* a, Index row_a, const T* b, Index row_b, float* c, Index row_c, bool add) {
  for (Index i = 0; i < m; i++)
    for (Index j = 0; j < n; j++) {
      float sum = add ? c[i * row_c + j] : 0;
      for (Index place = 0; place < k; place++) sum += load(a + i * row_a + place) * element(b, row_b, place, j);
      c[i * row_c + j] = sum;
    }
}
void release(bool) {}
#else
void multiply(
    Index m, Index n, Index k, const float* a, Index row_a, const float* b, Index row_b, float* c, Index row_c, bool add) {
  at::native::cpublas::brgemm(m, n, k, row_a, row_b, row_c, add, a, b, c, false);
}
void multiply(
    Index m, Index n, Index k, const Half* a, Index row_a, const Half* b, Index row_b, float* c, Index row_c, bool add) {
  using Number = const at::BFloat16*;
  at::native::cpublas::brgemm(m, n, k, row_a, row_b, row_c, add, Number(a), Number(b), c, true);
}
void release(bool is_half) { at::native::cpublas::brgemm_release(is_half); }
#endif

template <class T>
void store_all(T* place, const float* numbers, Index size, float factor) {
#pragma omp simd
  for (Index i = 0; i < size; i++) store(place + i, numbers[i] * factor);
}

// The visible columns of a row of a tile: a range, and in it, if there are bytes, those that are not 0
struct Columns {
  Index first, last;
  const uint8_t* visible = nullptr;

  Columns(Index first, Index last, Index size)
      : first(std::clamp(first, Index(0), size)), last(std::clamp(last, this->first, size)) {}
};

// Computes the weights of one row of a tile, 0 for hidden columns and up to `end`, and returns their sum
template <class Phi, class T>
float weigh(const float* scores, T* weights, Columns columns, Index end, float scaling, float bias) {
  std::fill(weights, weights + columns.first, T(0));
  std::fill(weights + columns.last, weights + end, T(0));
  float total = 0;
  if (columns.visible == nullptr) {
#pragma omp simd reduction(+ : total)
    for (Index i = columns.first; i < columns.last; i++) {
      float weight, slope;
      Phi::both(scores[i] * scaling - bias, weight, slope);
      total += store(weights + i, weight);
    }
  } else {
#pragma omp simd reduction(+ : total)
    for (Index i = columns.first; i < columns.last; i++) {
      float weight, slope;
      Phi::both(scores[i] * scaling - bias, weight, slope);
      total += store(weights + i, columns.visible[i] ? weight : 0.0f);
    }
  }
  return total;
}

// Scales the scores of one row of a tile, and returns the largest that is visible, or -infinity. The scaled scores are stored,
// so that the largest is later subtracted from itself, not from a product that is rounded in another way
float scale_and_find_largest(float* scores, Columns columns, float scaling) {
  float largest = -INFINITY;
  if (columns.visible == nullptr) {
#pragma omp simd reduction(max : largest)
    for (Index i = columns.first; i < columns.last; i++) {
      scores[i] *= scaling;
      largest = largest < scores[i] ? scores[i] : largest;
    }
  } else {
#pragma omp simd reduction(max : largest)
    for (Index i = columns.first; i < columns.last; i++) {
      scores[i] *= scaling;
      const float score = columns.visible[i] ? scores[i] : -INFINITY;
      largest = largest < score ? score : largest;
    }
  }
  return largest;
}

// Computes the weights of one row of a transposed tile, and the gradient of its scores from that of its weights; 0 where hidden
template <class Phi, class T>
void differentiate(
    const float* scores, const float* weights_gradient, T* weights, T* scores_gradient, Columns columns, Index end,
    float scaling, const float* bias, const float* delta) {
  for (T* row : {weights, scores_gradient}) {
    std::fill(row, row + columns.first, T(0));
    std::fill(row + columns.last, row + end, T(0));
  }
  if (columns.visible == nullptr) {
#pragma omp simd
    for (Index i = columns.first; i < columns.last; i++) {
      float weight, slope;
      Phi::both(scores[i] * scaling - bias[i], weight, slope);
      const float gradient = slope * (weights_gradient[i] - delta[i]);
      store(weights + i, weight);
      store(scores_gradient + i, gradient);
    }
  } else {
#pragma omp simd
    for (Index i = columns.first; i < columns.last; i++) {
      float weight, slope;
      Phi::both(scores[i] * scaling - bias[i], weight, slope);
      const float gradient = slope * (weights_gradient[i] - delta[i]);
      store(weights + i, columns.visible[i] ? weight : 0.0f);
      store(scores_gradient + i, columns.visible[i] ? gradient : 0.0f);
    }
  }
}

template <class T>
struct Rows {
  Name name;
  float (*weigh)(const float*, T*, Columns, Index, float, float);
  void (*differentiate)(const float*, const float*, T*, T*, Columns, Index, float, const float*, const float*);
};
template <class T>
const Rows<T> ROWS[] = {
#define ROW(name) {#name, weigh<Phi_##name, T>, differentiate<Phi_##name, T>},
    FOR_EACH_ACTIVATION(ROW) ROW(softmax)
#undef ROW
};

// (rows, columns) -> (columns, row_out), with 0 after the rows
template <class T>
void transpose(const T* in, Index row_in, Index rows, Index columns, T* out, Index row_out) {
  constexpr Index BLOCK = 16;
  for (Index first = 0; first < columns; first += BLOCK)
    for (Index row = 0; row < rows; row++)
      for (Index column = first; column < std::min(first + BLOCK, columns); column++)
        out[column * row_out + row] = in[row * row_in + column];
  for (T* row = out; row < out + columns * row_out; row += row_out) std::fill(row + rows, row + row_out, T(0));
}

// The transpose (columns, row_out) of a matrix (rows, columns), as `multiply` takes B
void pack_transposed(const float* in, Index row_in, Index rows, Index columns, float* out, Index row_out) {
  transpose(in, row_in, rows, columns, out, row_out);
}
void pack_transposed(const Half* in, Index row_in, Index rows, Index columns, Half* out, Index row_out) {
  for (Index row = 0; row < row_out; row++)
    for (Index column = 0; column < columns; column += 2) {
      if (row < rows) std::memcpy(out + column * row_out + 2 * row, in + row * row_in + column, 4);
      else std::memset(out + column * row_out + 2 * row, 0, 4);
    }
}

// A copy (rows_out, columns) of a matrix (rows, columns), with rows of 0 in the end
template <class T>
void copy(const T* in, Index row_in, Index rows, Index columns, T* out, Index rows_out) {
  for (Index row = 0; row < rows; row++) std::copy(in + row * row_in, in + row * row_in + columns, out + row * columns);
  std::fill(out + rows * columns, out + rows_out * columns, T(0));
}

// The same as `multiply` takes B: pairs of rows of bfloat16 lie next to each other
void pack(const float* in, Index row_in, Index rows, Index columns, float* out, Index rows_out) {
  copy(in, row_in, rows, columns, out, rows_out);
}
void pack(const Half* in, Index row_in, Index rows, Index columns, Half* out, Index rows_out) {
  for (Index row = 0; row < rows; row += 2) {
    const Half* one = in + row * row_in;
    Pair* pairs = reinterpret_cast<Pair*>(out + row * columns);
    if (row + 1 < rows) {
#pragma omp simd
      for (Index column = 0; column < columns; column++) pairs[column] = one[column] | uint32_t(one[row_in + column]) << 16;
    } else {
      std::copy(one, one + columns, pairs);
    }
  }
  const Index packed = (rows + 1) / 2 * 2;
  std::fill(out + packed * columns, out + std::max(packed, rows_out) * columns, Half(0));
}

// Whether bytes hide some keys of a pair of tiles, and whether all
struct Hidden {
  bool some, all;
};

// What hides the keys of one batch row and head: a range for each query, and bytes
struct Mask {
  const Call& call;
  const uint8_t* key_is_valid = nullptr;
  const Index *first_key = nullptr, *last_key = nullptr;
  const uint8_t* visible = nullptr;
  Index row = 0;

  Mask(const Call& call, Index batch, Index head) : call(call) {
    if (call.key_is_valid.data) key_is_valid = at<uint8_t>(call.key_is_valid, batch, 0);
    if (call.first_key.data) first_key = at<Index>(call.first_key, batch, 0);
    if (call.last_key.data) last_key = at<Index>(call.last_key, batch, 0);
    if (call.visible.data) visible = at<uint8_t>(call.visible, batch, head), row = call.visible.strides[2];
  }

  Index first_key_of(Index query) const { return first_key ? std::min(first_key[query], call.keys) : 0; }
  Index last_key_of(Index query) const {
    return last_key ? std::min(last_key[query] + 1, call.keys) : call.keys;
  }
  Index first_query_of(Index key) const {
    return last_key ? std::lower_bound(last_key, last_key + call.queries, key) - last_key : 0;
  }
  Index last_query_of(Index key) const {
    return first_key ? std::upper_bound(first_key, first_key + call.queries, key) - first_key : call.queries;
  }

  Hidden hidden(Index query, Index queries, Index key, Index keys) const {
    Hidden hidden{false, key_is_valid || visible};
    const auto look = [&](const uint8_t* bytes) {
      if (std::memchr(bytes, 0, keys)) hidden.some = true;
      // Any byte but 0 is true, as in PyTorch
      uint8_t any = 0;
      for (Index i = 0; i < keys; i++) any |= bytes[i];
      if (any) hidden.all = false;
    };
    if (key_is_valid) look(key_is_valid + key);
    for (Index i = 0; visible && i < queries && !(hidden.some && !hidden.all); i++) look(visible + (query + i) * row + key);
    return hidden;
  }
};

// The part of a tile that queries see, or that sees keys, between multiples of STEP
struct Part {
  Index first, size;
  Part(Index tile_first, Index tile, Index first_seen, Index last_seen)
      : first(tile_first + round_down(std::max(first_seen - tile_first, Index(0)))),
        size(tile_first + round_up(last_seen - tile_first, tile) - first) {}
};

template <class T>
void forward(const Call& call) {
  const Index width = call.width, m = call.query_tile, n = call.key_tile, group = call.heads / call.key_value_heads;
  const Index query_tiles = tiles(call.queries, m), key_tiles = tiles(call.keys, n), heads = call.batch * call.heads;
  const Index size = n * width, key_heads = call.batch * call.key_value_heads;
  const bool is_half = sizeof(T) == 2;
  const auto weigh_row = ROWS<T>[call.activation].weigh;
  // (batch, key_value_heads, key_tiles, ...): (width, n) of the keys, and (n, width) of the values
  Buffer<T> packed_keys(key_heads * key_tiles * size), packed_values(key_heads * key_tiles * size);
#pragma omp parallel num_threads(call.threads)
  {
#pragma omp for schedule(static)
    for (Index unit = 0; unit < key_heads * key_tiles; unit++) {
      const Index batch = unit / key_tiles / call.key_value_heads, head = unit / key_tiles % call.key_value_heads;
      const Index key = unit % key_tiles * n, keys = std::min(n, call.keys - key);
      const T *key_rows = at<T>(call.key, batch, head, key), *value_rows = at<T>(call.value, batch, head, key);
      pack_transposed(key_rows, call.key.strides[2], keys, width, packed_keys.data + unit * size, n);
      pack(value_rows, call.value.strides[2], keys, width, packed_values.data + unit * size, n);
    }

    Buffer<float> scores(m * n), sums(m * width), totals(m), biases(m);
    Buffer<T> query_rows(m * width), half_weights(is_half ? m * n : 0);
    T* weights = is_half ? half_weights.data : reinterpret_cast<T*>(scores.data);
    // The last queries see the most keys, and come first, so that no thread is left with much work
#pragma omp for schedule(dynamic)
    for (Index unit = 0; unit < heads * query_tiles; unit++) {
      const Index batch = unit % heads / call.heads, head = unit % heads % call.heads;
      const Index query = (query_tiles - 1 - unit / heads) * m, queries = std::min(m, call.queries - query);
      const Index packed = (batch * call.key_value_heads + head / group) * key_tiles * size;
      const Mask mask(call, batch, head);
      const Index rows = round_up(queries, m);
      const float* bias = at<float>(call.bias, batch, head, query);
      const float scaling = call.is_softmax ? 1 : call.scaling;
      // Of softmax, the largest score so far
      for (Index i = 0; i < queries; i++) biases.data[i] = call.is_softmax ? -INFINITY : bias[i];
      copy(at<T>(call.query, batch, head, query), call.query.strides[2], queries, width, query_rows.data, rows);
      std::fill(sums.data, sums.data + rows * width, 0.0f);
      std::fill(totals.data, totals.data + queries, 0.0f);

      const Index first_key = mask.first_key_of(query), last_key = mask.last_key_of(query + queries - 1);
      for (Index key = first_key / n * n; key < last_key; key += n) {
        const Part seen(key, n, first_key, last_key);
        const Index keys = std::min(seen.size, call.keys - seen.first);
        const Hidden hidden = mask.hidden(query, queries, seen.first, keys);
        if (hidden.all) continue;
        const T* key_columns = packed_keys.data + packed + key * width + (seen.first - key) * (is_half ? 2 : 1);
        multiply(rows, seen.size, width, query_rows.data, width, key_columns, n, scores.data, n, false);
        for (Index i = 0; i < queries; i++) {
          Columns columns(mask.first_key_of(query + i) - seen.first, mask.last_key_of(query + i) - seen.first, keys);
          if (hidden.some && mask.visible) columns.visible = mask.visible + (query + i) * mask.row + seen.first;
          if (hidden.some && mask.key_is_valid) columns.visible = mask.key_is_valid + seen.first;
          if (call.is_softmax) {
            const float of_tile = scale_and_find_largest(scores.data + i * n, columns, call.scaling);
            const float largest = std::max(biases.data[i], of_tile);
            if (largest > biases.data[i]) {
              const float factor = exp_negative(biases.data[i] - largest);
              totals.data[i] *= factor;
              for (Index column = 0; column < width; column++) sums.data[i * width + column] *= factor;
              biases.data[i] = largest;
            }
          }
          totals.data[i] += weigh_row(scores.data + i * n, weights + i * n, columns, seen.size, scaling, biases.data[i]);
        }
        const T* value_rows = packed_values.data + packed + seen.first * width;
        multiply(rows, width, seen.size, weights, n, value_rows, width, sums.data, width, true);
      }

      float* inverse = at<float>(call.inverse_normalizer, batch, head, query);
      for (Index i = 0; i < queries; i++) {
        const float total = totals.data[i];
        if (call.is_sum) inverse[i] = total < ZERO_LIMIT ? 0 : 1 / total;
        const float scale = inverse[i];
        if (call.is_softmax) inverse[i] = scale == 0 ? INFINITY : biases.data[i] + std::log(total);
        T* output = at<T>(call.output, batch, head, query + i);
        T* remainder = call.remainder.data ? at<T>(call.remainder, batch, head, query + i) : nullptr;
        for (Index column = 0; column < width; column++) {
          const float exact = sums.data[i * width + column] * scale, stored = store(output + column, exact);
          if (remainder) store(remainder + column, exact - stored);
        }
      }
    }
    release(is_half);
  }
}

template <class T>
void backward(const Call& call) {
  const Index width = call.width, m = call.key_tile, n = call.query_tile, group = call.heads / call.key_value_heads;
  const Index query_tiles = tiles(call.queries, n), size = n * width, all = query_tiles * size;
  const bool is_half = sizeof(T) == 2;
  const auto differentiate_row = ROWS<T>[call.activation].differentiate;
  // Heads that share keys and values sum up their gradients one by one: (batch, heads, keys, width)
  const Index key_size = call.keys * width, shared = group > 1 ? call.batch * call.heads * key_size : 0;
  Buffer<float> shared_key_sums(shared), shared_value_sums(shared);
#pragma omp parallel num_threads(call.threads)
  {
    // Of all queries of a head, (query_tiles, ...): (width, n) where transposed, else (n, width)
    Buffer<T> transposed_queries(all), transposed_gradients(all), gradients(all), packed_queries(all);
    Buffer<float> query_sums(all), deltas(query_tiles * n);
    // Of a pair of tiles
    Buffer<float> scores(std::max(m, width) * n), weights_gradients(m * n), key_sums(m * width), value_sums(m * width);
    Buffer<T> half_weights(is_half ? m * n : 0), half_scores_gradients(is_half ? m * n : 0), pairs(is_half ? m * n : 0);
    Buffer<T> key_rows(m * width), value_rows(m * width), transposed_keys(m * width), scaled_gradients(size);
    Buffer<uint8_t> visible(call.visible.data ? m * n : 0);
    T* weights = is_half ? half_weights.data : reinterpret_cast<T*>(scores.data);
    T* scores_gradients = is_half ? half_scores_gradients.data : reinterpret_cast<T*>(weights_gradients.data);
#pragma omp for schedule(dynamic)
    for (Index unit = 0; unit < call.batch * call.heads; unit++) {
      const Index batch = unit / call.heads, head = unit % call.heads, key_value_head = head / group;
      const Mask mask(call, batch, head);
      std::fill(query_sums.data, query_sums.data + all, 0.0f);
      for (Index query = 0; query < call.queries; query += n) {
        const Index queries = std::min(n, call.queries - query), place = query * width;
        const T* query_rows = at<T>(call.query, batch, head, query);
        pack_transposed(query_rows, call.query.strides[2], queries, width, transposed_queries.data + place, n);
        pack(query_rows, call.query.strides[2], queries, width, packed_queries.data + place, n);
        T* scaled = scaled_gradients.data;
        const float* inverse = at<float>(call.inverse_normalizer, batch, head, query);
        for (Index i = 0; i < queries; i++) {
          const T* gradient = at<T>(call.gradient, batch, head, query + i);
          const T* output = at<T>(call.output, batch, head, query + i);
          const T* remainder = call.remainder.data ? at<T>(call.remainder, batch, head, query + i) : nullptr;
          const float scale = call.is_softmax ? 1 : inverse[i];
          float delta = 0;
#pragma omp simd reduction(+ : delta)
          for (Index column = 0; column < width; column++) {
            const float stored = store(scaled + i * width + column, load(gradient + column) * scale);
            delta += stored * (load(output + column) + (remainder ? load(remainder + column) : 0));
          }
          deltas.data[query + i] = call.is_sum ? delta : 0;
        }
        pack_transposed(scaled, width, queries, width, transposed_gradients.data + place, n);
        pack(scaled, width, queries, width, gradients.data + place, n);
      }

      for (Index key = 0; key < call.keys; key += m) {
        const Index tile_keys = std::min(m, call.keys - key);
        const T* keys_of_tile = at<T>(call.key, batch, key_value_head, key);
        transpose(keys_of_tile, call.key.strides[2], tile_keys, width, transposed_keys.data, m);
        copy(keys_of_tile, call.key.strides[2], tile_keys, width, key_rows.data, m);
        copy(at<T>(call.value, batch, key_value_head, key), call.value.strides[2], tile_keys, width, value_rows.data, m);
        std::fill(key_sums.data, key_sums.data + m * width, 0.0f);
        std::fill(value_sums.data, value_sums.data + m * width, 0.0f);

        const Index first_query = mask.first_query_of(key), last_query = mask.last_query_of(key + tile_keys - 1);
        for (Index query = first_query / n * n; query < last_query; query += n) {
          const Part seen(query, n, first_query, last_query);
          const Index queries = std::min(seen.size, call.queries - seen.first);
          const Index keys = std::min(tile_keys, mask.last_key_of(seen.first + queries - 1) - key), rows = round_up(keys, m);
          if (keys <= 0) continue;
          const Hidden hidden = mask.hidden(seen.first, queries, key, keys);
          if (hidden.all) continue;
          const bool is_masked = hidden.some && mask.visible;
          if (is_masked) transpose(mask.visible + seen.first * mask.row + key, mask.row, queries, keys, visible.data, n);

          const Index columns_at = query * width + (seen.first - query) * (is_half ? 2 : 1), rows_at = seen.first * width;
          const T *query_columns = transposed_queries.data + columns_at, *query_rows = packed_queries.data + rows_at;
          const T *gradient_columns = transposed_gradients.data + columns_at, *gradient_rows = gradients.data + rows_at;
          multiply(rows, seen.size, width, key_rows.data, width, query_columns, n, scores.data, n, false);
          multiply(rows, seen.size, width, value_rows.data, width, gradient_columns, n, weights_gradients.data, n, false);
          for (Index i = 0; i < keys; i++) {
            Columns columns(mask.first_query_of(key + i) - seen.first, mask.last_query_of(key + i) - seen.first, queries);
            if (mask.key_is_valid && !mask.key_is_valid[key + i]) columns = Columns(0, 0, queries);
            if (is_masked) columns.visible = visible.data + i * n;
            const Index row = i * n;
            differentiate_row(
                scores.data + row, weights_gradients.data + row, weights + row, scores_gradients + row, columns, seen.size,
                call.scaling, at<float>(call.bias, batch, head, seen.first), deltas.data + seen.first);
          }
          for (T* row : {weights, scores_gradients}) {
            std::fill(row + keys * n, row + rows * n, T(0));
          }
          multiply(rows, width, seen.size, weights, n, gradient_rows, width, value_sums.data, width, true);
          multiply(rows, width, seen.size, scores_gradients, n, query_rows, width, key_sums.data, width, true);
          const T* right = scores_gradients;
          if (is_half) pack(right, n, rows, n, pairs.data, rows), right = pairs.data;
          float* sums = query_sums.data + query * width + seen.first - query;
          multiply(width, seen.size, rows, transposed_keys.data, m, right, n, sums, n, true);
        }

        // Gradients are in one piece, so rows follow each other
        const Index place = unit * key_size + key * width, count = tile_keys * width;
        if (group > 1) {
          std::copy(key_sums.data, key_sums.data + count, shared_key_sums.data + place);
          std::copy(value_sums.data, value_sums.data + count, shared_value_sums.data + place);
        } else {
          store_all(at<T>(call.key_gradient, batch, head, key), key_sums.data, count, call.scaling);
          store_all(at<T>(call.value_gradient, batch, head, key), value_sums.data, count, 1);
        }
      }
      for (Index query = 0; query < call.queries; query += n) {
        const Index queries = std::min(n, call.queries - query);
        transpose(query_sums.data + query * width, n, width, queries, scores.data, width);
        store_all(at<T>(call.query_gradient, batch, head, query), scores.data, queries * width, call.scaling);
      }
    }
    release(is_half);

#pragma omp for schedule(static)
    for (Index unit = 0; unit < (group > 1 ? call.batch * call.key_value_heads : 0); unit++) {
      const Index batch = unit / call.key_value_heads, head = unit % call.key_value_heads;
      const Index place = unit * group * key_size;
      float *key_sum = shared_key_sums.data + place, *value_sum = shared_value_sums.data + place;
      for (Index other = key_size; other < group * key_size; other += key_size) {
#pragma omp simd
        for (Index i = 0; i < key_size; i++) key_sum[i] += key_sum[other + i], value_sum[i] += value_sum[other + i];
      }
      store_all(at<T>(call.key_gradient, batch, head), key_sum, key_size, call.scaling);
      store_all(at<T>(call.value_gradient, batch, head), value_sum, key_size, 1);
    }
  }
}

// The arguments of both passes. `kept` holds tensors as long as the call
struct Arguments {
  Call call{};
  std::vector<Tensor> kept;

  States keep(Input tensor) { return States(kept.emplace_back(tensor)); }

  Arguments(
      Input query, Input key, Input value, OptionalInput last_key, OptionalInput key_is_valid, OptionalInput first_key,
      OptionalInput visible, Name activation, Name normalization, double scaling, Index query_tile,
      Index key_tile) {
    call.threads = at::get_num_threads();
    call.batch = query.size(0), call.heads = query.size(1), call.queries = query.size(2), call.width = query.size(3);
    call.key_value_heads = key.size(1), call.keys = key.size(2);
    call.query_tile = std::min(query_tile, std::max((call.queries + STEP - 1) / STEP * STEP, STEP));
    call.key_tile = std::min(key_tile, std::max((call.keys + STEP - 1) / STEP * STEP, STEP));
    call.activation = find_activation(ROWS<float>, activation);
    call.is_sum = normalization == "sum", call.is_softmax = activation == "softmax";
    call.scaling = scaling;
    call.query = keep(with_rows(query)), call.key = keep(with_rows(key)), call.value = keep(with_rows(value));
    if (key_is_valid) call.key_is_valid = keep(key_is_valid->contiguous().expand({call.batch, call.keys}));
    if (first_key) call.first_key = keep(first_key->to(at::kLong).contiguous().expand({call.batch, call.queries}));
    if (last_key) call.last_key = keep(last_key->to(at::kLong).contiguous().expand({call.batch, call.queries}));
    if (visible) call.visible = keep(with_rows(*visible).expand({call.batch, call.heads, call.queries, call.keys}));
  }
};

bool is_half(Input tensor) { return tensor.scalar_type() == at::kBFloat16; }

// The output (batch, query, heads, head_dim); the remainder that rounding removes from it, of the same shape, or (0) where
// backward needs none; and what backward needs of the normaliser, (batch, heads, query). `bias` is subtracted from the scores, and
// `inverse_count` is 1 / Z, both (batch or 1, heads or 1, query); under "sum", Z is the sum of the weights
std::tuple<Tensor, Tensor, Tensor> attention(
    Input query, Input key, Input value, OptionalInput bias, OptionalInput inverse_count, OptionalInput last_key,
    OptionalInput key_is_valid, OptionalInput first_key, OptionalInput visible, Name activation,
    Name normalization, double scaling, Index query_tile, Index key_tile) {
  Arguments arguments(
      query, key, value, last_key, key_is_valid, first_key, visible, activation, normalization, scaling, query_tile, key_tile);
  Call& call = arguments.call;
  const std::array<Index, 3> rows = {call.batch, call.heads, call.queries};
  const Tensor output = query.new_empty({call.batch, call.queries, call.heads, call.width});
  const bool has_remainder = call.is_sum && is_half(query);
  const Tensor remainder = query.new_empty(has_remainder ? output.sizes() : at::IntArrayRef({0}));
  const Tensor normalizer = query.new_ones(rows, at::kFloat);
  if (inverse_count) normalizer.copy_(*inverse_count);
  const Tensor subtracted = bias ? bias->to(at::kFloat) : normalizer.new_zeros({1, 1, call.queries});
  call.bias = arguments.keep(subtracted.contiguous().expand(rows));
  call.output = arguments.keep(output.transpose(1, 2));
  if (has_remainder) call.remainder = arguments.keep(remainder.transpose(1, 2));
  call.inverse_normalizer = States(normalizer);
  is_half(query) ? forward<Half>(call) : forward<float>(call);
  return {output, remainder, normalizer};
}

// The gradients of query, key and value, given that of the output and the results of `attention`
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    Input gradient, Input query, Input key, Input value, Input output, Input remainder, Input normalizer, OptionalInput bias,
    OptionalInput last_key, OptionalInput key_is_valid, OptionalInput first_key, OptionalInput visible,
    Name activation, Name normalization, double scaling, Index query_tile, Index key_tile) {
  Arguments arguments(
      query, key, value, last_key, key_is_valid, first_key, visible, activation, normalization, scaling, query_tile, key_tile);
  Call& call = arguments.call;
  const Tensor results[] = {
      query.new_empty(query.sizes()), key.new_empty(key.sizes()), value.new_empty(value.sizes())};
  const Tensor row_numbers = normalizer.contiguous();
  call.inverse_normalizer = arguments.keep(row_numbers);
  Tensor subtracted = row_numbers;
  if (!call.is_softmax) subtracted = bias ? bias->to(at::kFloat) : row_numbers.new_zeros({1, 1, call.queries});
  call.bias = arguments.keep(subtracted.contiguous().expand({call.batch, call.heads, call.queries}));
  call.output = arguments.keep(with_rows(output).transpose(1, 2));
  if (remainder.numel()) call.remainder = arguments.keep(with_rows(remainder).transpose(1, 2));
  call.gradient = arguments.keep(with_rows(gradient).to(query.scalar_type()).transpose(1, 2));
  call.query_gradient = States(results[0]), call.key_gradient = States(results[1]), call.value_gradient = States(results[2]);
  is_half(query) ? backward<Half>(call) : backward<float>(call);
  return {results[0], results[1], results[2]};
}

// Whether the CPU has kernels that multiply small matrices: 2 2 = 4
template <class T>
float square(const T (&two)[2]) {
  float result[64] = {};
  multiply(1, 1, 2, two, 2, two, 1, result, 1, false);
  release(sizeof(T) == 2);
  return result[0];
}
bool can_multiply(bool is_half) {
  try {
    return (is_half ? square<Half>({0x4000, 0}) : square<float>({2, 0})) == 4;
  } catch (...) {
    return false;
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(NLQ_NAMESPACE, library) {
  NLQ_OPERATOR(
      attention,
      "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? inverse_count, Tensor? last_key, "
      "Tensor? key_is_valid, Tensor? first_key, Tensor? visible, str activation, str normalization, float scaling, "
      "int query_tile, int key_tile) -> (Tensor, Tensor, Tensor)");
  NLQ_OPERATOR(
      attention_backward,
      "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, Tensor remainder, Tensor normalizer, "
      "Tensor? bias, Tensor? last_key, Tensor? key_is_valid, Tensor? first_key, Tensor? visible, str activation, "
      "str normalization, float scaling, int query_tile, int key_tile) -> (Tensor, Tensor, Tensor)");
  library.def("can_multiply(bool is_half) -> bool", can_multiply);
}
