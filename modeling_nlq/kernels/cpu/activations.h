// The elementwise attention activations: `both` sets a weight `phi(score)` and a slope `phi'(score)`, in float32. If a caller
// ignores one of the two, the compiler removes its computation.
#pragma once

#include "numbers.h"

#define FOR_EACH_ACTIVATION(X) X(identity) X(relu) X(relu_squared) X(sigmoid) X(softplus) X(squared) X(tanh)

namespace {

struct Phi_identity {
  NLQ_INLINE static void both(float score, float& weight, float& slope) {
    weight = score;
    slope = 1;
  }
};

struct Phi_relu {
  NLQ_INLINE static void both(float score, float& weight, float& slope) {
    weight = score < 0 ? 0 : score;
    slope = score > 0 ? 1 : 0;
  }
};

struct Phi_relu_squared {
  NLQ_INLINE static void both(float score, float& weight, float& slope) {
    float positive = score < 0 ? 0 : score;
    weight = positive * positive;
    slope = 2 * positive;
  }
};

struct Phi_sigmoid {
  NLQ_INLINE static void both(float score, float& weight, float& slope) {
    weight = sigmoid(score);
    slope = weight - weight * weight;
  }
};

struct Phi_softplus {
  NLQ_INLINE static void both(float score, float& weight, float& slope) {
    float x = exp_negative(-std::fabs(score)), positive = score < 0 ? 0 : score;
    weight = positive + x * log1p_ratio(x);
    slope = (score < 0 ? x : 1) / (1 + x);
  }
};

struct Phi_squared {
  NLQ_INLINE static void both(float score, float& weight, float& slope) {
    weight = score * score;
    slope = 2 * score;
  }
};

// By x = exp(-2 |s|), and near 0, where 1 - x cancels, by a polynomial in s^2
struct Phi_tanh {
  NLQ_INLINE static void both(float score, float& weight, float& slope) {
    float x = exp_negative(-2 * std::fabs(score)), reciprocal = 1 / (1 + x), square = score * score;
    float far = std::copysign((1 - x) * reciprocal, score);
    weight = square < 0.25f ? score * tanh_ratio(square) : far;
    slope = 4 * x * reciprocal * reciprocal;
  }
};

}  // namespace
