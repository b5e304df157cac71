// Elementwise attention of a single query, as in decoding: one visit of the keys and one of the values.

#include "activations.h"
#include "operators.h"

namespace {

float dot(const float* x, const float* y, Index width) {
  vec sums = {};
  Index i = 0;
  for (; i + 16 <= width; i += 16) sums += *(const vec*)(x + i) * *(const vec*)(y + i);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int lane = 0; lane < 16; lane++) total += sums[lane];
  for (; i < width; i++) total += x[i] * y[i];
  return total;
}

// The weights of one head, before they are normalised, and their sum
template <class Phi>
float weigh(float* scores, const uint8_t* visible, Index keys, float bias) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (Index j = 0; j < keys; j++) {
    float weight, slope;
    Phi::both(scores[j] - bias, weight, slope);
    scores[j] = weight;
    total += weight;
  }
  if (visible == nullptr) return total;
  total = 0;
#pragma omp simd reduction(+ : total)
  for (Index j = 0; j < keys; j++) total += scores[j] = visible[j] ? scores[j] : 0.0f;
  return total;
}

using Weigh = float (*)(float*, const uint8_t*, Index, float);
struct Row {
  Name name;
  Weigh weigh;
};
const Row ROWS[] = {
#define ROW(name) {#name, weigh<Phi_##name>},
    FOR_EACH_ACTIVATION(ROW)
#undef ROW
};

struct Call {
  States query, key, value;
  States visible, count;  // without data if each query sees all keys
  float* output;
  Index heads, group, keys, width;
  Weigh weigh;
  bool is_sum, is_length, subtracts_log_count;
  double scaling;
};

// 16 N columns of the output, whose sums stay in registers
template <int N>
void mix(const std::vector<float>& weights, const float* value, Index step, float* output) {
  vec sums[N] = {};
  for (const float weight : weights) {
    for (int n = 0; n < N; n++) sums[n] += weight * *(const vec*)(value + 16 * n);
    value += step;
  }
  for (int n = 0; n < N; n++) *(vec*)(output + 16 * n) = sums[n];
}

void attend(const Call& call, Index batch, Index head) {
  const Index group = head / call.group, key_step = call.key.strides[2], value_step = call.value.strides[2];
  const float *query = at<float>(call.query, batch, head), *key = at<float>(call.key, batch, group);
  const float* value = at<float>(call.value, batch, group);
  const uint8_t* visible = call.visible.data ? at<uint8_t>(call.visible, batch, head) : nullptr;
  float* output = call.output + (batch * call.heads + head) * call.width;
  const Index seen = call.count.data ? *at<Index>(call.count, batch, head) : call.keys;
  const float count = std::max<Index>(seen, 1);
  std::vector<float> weights(call.keys);
  for (Index j = 0; j < call.keys; j++)
    weights[j] = dot(query, key + j * key_step, call.width) * float(call.scaling);
  const float bias = call.subtracts_log_count ? std::log(count) : 0.0f;
  const float total = call.weigh(weights.data(), visible, call.keys, bias);
  const float scale = call.is_sum ? (total < ZERO_LIMIT ? 0.0f : 1.0f / total) : call.is_length ? 1.0f / count : 1.0f;

  for (float& weight : weights) weight *= scale;
  Index i = 0;
  for (; i + 64 <= call.width; i += 64) mix<4>(weights, value + i, value_step, output + i);
  for (; i + 16 <= call.width; i += 16) mix<1>(weights, value + i, value_step, output + i);
  for (; i < call.width; i++) {
    output[i] = 0;
    for (Index j = 0; j < call.keys; j++) output[i] += weights[j] * value[j * value_step + i];
  }
}

// The output (batch, 1, heads, head_dim)
Tensor one_query(
    Input query, Input key, Input value, OptionalInput visible, OptionalInput count, Name activation,
    Name normalization, bool subtracts_log_count, double scaling) {
  const Index batch = query.size(0), heads = query.size(1), keys = key.size(2), width = query.size(3);
  const Tensor queries = with_rows(query), all_keys = with_rows(key), values = with_rows(value);
  const Tensor output = query.new_empty({batch, 1, heads, width});
  Tensor seen, counts;
  if (visible) seen = visible->contiguous().expand({batch, heads, 1, keys});
  if (count) counts = count->to(at::kLong).expand({batch, heads, 1});
  const Call call{
      States(queries), States(all_keys), States(values), visible ? States(seen) : States(), count ? States(counts) : States(),
      output.data_ptr<float>(), heads, heads / key.size(1), keys, width, ROWS[find_activation(ROWS, activation)].weigh,
      normalization == "sum", normalization == "length", subtracts_log_count, scaling};
  const Index rows = batch * heads;
#pragma omp parallel for num_threads(at::get_num_threads()) if (rows * keys > 512)
  for (Index i = 0; i < rows; i++) attend(call, i / heads, i % heads);
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(NLQ_NAMESPACE, library) {
  NLQ_OPERATOR(
      one_query,
      "(Tensor query, Tensor key, Tensor value, Tensor? visible, Tensor? count, str activation, str normalization, "
      "bool subtracts_log_count, float scaling) -> Tensor");
}
