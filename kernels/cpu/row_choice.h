// Of rows of logits: whether the first leads, and which it is; see row_choice.py.
#pragma once
#include "vectors.h"

namespace {

// Whether the largest chance of each row leads the next by theta.
void margin_rows(
    const float* logits, const float* theta, bool* leads, int64_t rows, int64_t width, int64_t stride,
    int64_t theta_stride) {
  constexpr int64_t AT_ONCE = LANES<float>;
  constexpr float none = -std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = logits + row * stride;
    // the largest and the next of each place of a vector; NaN stays
    Floats tops = splat(none), nexts = tops;
    int64_t i = 0;
    for (; i + AT_ONCE <= width; i += AT_ONCE) {
      const Floats values = load(own + i);
      nexts = larger(nexts, smaller(tops, values));
      tops = larger(tops, values);
    }
    float both[2 * AT_ONCE], top = none, next = none;
    store<float>(tops, both);
    store<float>(nexts, both + AT_ONCE);
    bool broken = false;
    const auto take = [&](float value) {
      broken |= std::isnan(value);
      next = most(next, least(top, value));
      top = most(top, value);
    };
    for (const float value : both) {
      take(value);
    }
    for (; i < width; ++i) {
      take(own[i]);
    }
    Floats sums{};
    for (i = 0; i + AT_ONCE <= width; i += AT_ONCE) {
      sums = sums + exponential(load(own + i) - splat(top));
    }
    float total = sum_of<float>(sums);
    for (; i < width; ++i) {
      total += std::exp(own[i] - top);
    }
    // what is broken leads by nothing, as NaN compares
    leads[row] = !broken && 1.0f / total - std::exp(next - top) / total >= theta[row * theta_stride];
  }
}

// The first of the largest logits of each row; `broken` where that is not finite.
void argmax_rows(
    const float* logits, int64_t* best, int64_t rows, int64_t width, int64_t stride, int64_t broken) {
  constexpr int64_t AT_ONCE = LANES<float>;
  for (int64_t row = 0; row < rows; ++row) {
    const float *own = logits + row * stride, *end = own + width;
    // NaN stays
    Floats tops = splat(-std::numeric_limits<float>::infinity());
    const float* at = own;
    for (; at + AT_ONCE <= end; at += AT_ONCE) {
      tops = larger(tops, load(at));
    }
    float each[AT_ONCE], top = -std::numeric_limits<float>::infinity();
    store<float>(tops, each);
    bool is_number = true;
    const auto take = [&](float value) {
      is_number &= !std::isnan(value);
      top = most(top, value);
    };
    for (const float value : each) {
      take(value);
    }
    for (; at < end; ++at) {
      take(*at);
    }
    if (!is_number || !std::isfinite(top)) {
      best[row] = broken;
      continue;
    }
    for (at = own; at + AT_ONCE <= end; at += AT_ONCE) {
      int32_t found = 0;
      for (int64_t i = 0; i < AT_ONCE; ++i) {
        found |= at[i] == top;
      }
      if (found) {
        break;
      }
    }
    while (*at != top) {
      ++at;
    }
    best[row] = at - own;
  }
}

}  // namespace

EXPORTED(void, margin_rows)(
    const float* logits, const float* theta, bool* leads, int64_t rows, int64_t width, int64_t stride,
    int64_t theta_stride) {
  margin_rows(logits, theta, leads, rows, width, stride, theta_stride);
}

EXPORTED(void, argmax_rows)(
    const float* logits, int64_t* best, int64_t rows, int64_t width, int64_t stride, int64_t broken) {
  argmax_rows(logits, best, rows, width, stride, broken);
}
