// Numbers in float32 and bfloat16, and functions of them without branches, which the compiler vectorises.
//
// A comparison with NaN is false, and what is not a number must stay so. Each polynomial has the smallest
// largest relative error of its degree (Remez exchange): log1p on [0, 1] 4.7e-9, tanh on [-1/2, 1/2] 1.3e-8.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Without it the compiler gives up inlining in a long file, and then does not vectorise the loop either
#define NLQ_INLINE [[gnu::always_inline]] inline

namespace {

NLQ_INLINE float from_bits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}
NLQ_INLINE uint32_t to_bits(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return bits;
}

using Half = uint16_t;  // the bits of a bfloat16

NLQ_INLINE float load(const float* place) { return *place; }
NLQ_INLINE float load(const Half* place) { return from_bits(uint32_t(*place) << 16); }
// Stores a number, rounded to the nearest (to even), and returns what was stored
NLQ_INLINE float store(float* place, float number) { return *place = number; }
NLQ_INLINE float store(Half* place, float number) {
  uint32_t bits = to_bits(number);
  bits = number != number ? 0x7fc00000u : (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  *place = Half(bits >> 16);
  return from_bits(bits);
}

// exp(x) for x <= 0; 0 where it is below the smallest normal number. By Cephes: x = n log(2) + r, and a polynomial in r
NLQ_INLINE float exp_negative(float x) {
  const float shifted = x * 1.442695041f + 12582912.0f;  // 1.5 2^23: the last bits of the sum are those of n
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float series = 1.3981999507e-3f + r * 1.9875691500e-4f;
  series = 8.3334519073e-3f + r * series;
  series = 4.1665795894e-2f + r * series;
  series = 1.6666665459e-1f + r * series;
  series = 5.0000001201e-1f + r * series;
  series = 1.0f + (r + r * r * series);
  const float power = series * from_bits((to_bits(shifted) << 23) + 0x3f800000u);
  return x < -87.3365f ? 0.0f : power;
}

// log(1 + x) / x for 0 <= x <= 1
NLQ_INLINE float log1p_ratio(float x) {
  float series = 0.01985146236f - x * 0.003244025177f;
  series = -0.05695953427f + x * series;
  series = 0.1060365489f + x * series;
  series = -0.1530559257f + x * series;
  series = 0.1967593926f + x * series;
  series = -0.2495413366f + x * series;
  series = 0.3332996242f + x * series;
  series = -0.4999990242f + x * series;
  return 0.9999999953f + x * series;
}

NLQ_INLINE float sigmoid(float score) {
  const float x = exp_negative(-std::fabs(score));
  return (score < 0 ? x : 1.0f) / (1.0f + x);
}

// tanh(s) / s for s^2 < 1/4
NLQ_INLINE float tanh_ratio(float square) {
  float series = -0.05298607529f + square * 0.01713500663f;
  series = 0.1332477932f + square * series;
  return 0.9999999869f + square * (-0.3333306939f + square * series);
}

}  // namespace
