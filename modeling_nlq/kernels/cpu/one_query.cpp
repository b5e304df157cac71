// Elementwise attention of a single query, as in decoding: one visit of the keys and one of the values.

#include "activations.h"
#include "operators.h"

namespace {

float dot(const float* x, const float* y, int64_t width) {
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
float weigh(float* scores, const uint8_t* visible, int64_t keys, float bias) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < keys; j++) {
    float weight, slope;
    Phi::both(scores[j] - bias, weight, slope);
    scores[j] = weight;
    total += weight;
  }
  if (visible == nullptr) return total;
  total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < keys; j++) total += scores[j] = visible[j] ? scores[j] : 0.0f;
  return total;
}

using Weigh = float (*)(float*, const uint8_t*, int64_t, float);
struct Row {
  std::string_view name;
  Weigh weigh;
};
const Row ROWS[] = {
#define ROW(name) {#name, weigh<Phi_##name>},
    FOR_EACH_ACTIVATION(ROW)
#undef ROW
};

struct Call {
  const float *query, *key, *value;
  float* output;
  const uint8_t* visible;  // null if all keys are visible
  const int64_t* count;    // null if each query sees all keys
  // Steps from one batch, head or key to the next, in elements
  at::IntArrayRef query_steps, key_steps, value_steps, visible_steps, count_steps;
  int64_t heads, group, keys, width;
  Weigh weigh;
  bool is_sum, is_length, subtracts_log_count;
  double scaling;
};

// 16 N columns of the output, whose sums stay in registers
template <int N>
void mix(const std::vector<float>& weights, const float* value, int64_t step, float* output) {
  vec sums[N] = {};
  for (const float weight : weights) {
    for (int n = 0; n < N; n++) sums[n] += weight * *(const vec*)(value + 16 * n);
    value += step;
  }
  for (int n = 0; n < N; n++) *(vec*)(output + 16 * n) = sums[n];
}

void attend(const Call& call, int64_t batch, int64_t head) {
  const float* query = call.query + batch * call.query_steps[0] + head * call.query_steps[1];
  const float* key = call.key + batch * call.key_steps[0] + head / call.group * call.key_steps[1];
  const float* value = call.value + batch * call.value_steps[0] + head / call.group * call.value_steps[1];
  const uint8_t* visible = call.visible ? call.visible + batch * call.visible_steps[0] + head * call.visible_steps[1] : nullptr;
  float* output = call.output + (batch * call.heads + head) * call.width;
  const int64_t seen = call.count ? call.count[batch * call.count_steps[0] + head * call.count_steps[1]] : call.keys;
  const float count = std::max<int64_t>(seen, 1);
  std::vector<float> weights(call.keys);
  for (int64_t j = 0; j < call.keys; j++)
    weights[j] = dot(query, key + j * call.key_steps[2], call.width) * float(call.scaling);
  const float bias = call.subtracts_log_count ? std::log(count) : 0.0f;
  const float total = call.weigh(weights.data(), visible, call.keys, bias);
  const float scale = call.is_sum ? (total < ZERO_LIMIT ? 0.0f : 1.0f / total) : call.is_length ? 1.0f / count : 1.0f;

  for (float& weight : weights) weight *= scale;
  int64_t i = 0;
  for (; i + 64 <= call.width; i += 64) mix<4>(weights, value + i, call.value_steps[2], output + i);
  for (; i + 16 <= call.width; i += 16) mix<1>(weights, value + i, call.value_steps[2], output + i);
  for (; i < call.width; i++) {
    output[i] = 0;
    for (int64_t j = 0; j < call.keys; j++) output[i] += weights[j] * value[j * call.value_steps[2] + i];
  }
}

// The output (batch, 1, heads, head_dim)
at::Tensor one_query(
    Input query, Input key, Input value, OptionalInput visible, OptionalInput count, std::string_view activation,
    std::string_view normalization, bool subtracts_log_count, double scaling) {
  const int64_t batch = query.size(0), heads = query.size(1), keys = key.size(2), width = query.size(3);
  const at::Tensor queries = with_rows(query), all_keys = with_rows(key), values = with_rows(value);
  const at::Tensor output = query.new_empty({batch, 1, heads, width});
  at::Tensor seen, counts;
  if (visible) seen = visible->contiguous().expand({batch, heads, 1, keys});
  if (count) counts = count->to(at::kLong).expand({batch, heads, 1});
  const Call call{
      queries.data_ptr<float>(), all_keys.data_ptr<float>(), values.data_ptr<float>(), output.data_ptr<float>(),
      visible ? static_cast<const uint8_t*>(seen.data_ptr()) : nullptr, count ? counts.data_ptr<int64_t>() : nullptr,
      queries.strides(), all_keys.strides(), values.strides(),
      visible ? seen.strides() : at::IntArrayRef(), count ? counts.strides() : at::IntArrayRef(),
      heads, heads / key.size(1), keys, width, ROWS[find_activation(ROWS, activation)].weigh,
      normalization == "sum", normalization == "length", subtracts_log_count, scaling};
  const int64_t rows = batch * heads;
#pragma omp parallel for num_threads(at::get_num_threads()) if (rows * keys > 512)
  for (int64_t i = 0; i < rows; i++) attend(call, i / heads, i % heads);
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(NLQ_NAMESPACE, library) {
  NLQ_OPERATOR(
      one_query,
      "(Tensor query, Tensor key, Tensor value, Tensor? visible, Tensor? count, str activation, str normalization, "
      "bool subtracts_log_count, float scaling) -> Tensor");
}
