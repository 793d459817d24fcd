// Of rows of logits: whether the first leads, and which it is; see row_choice.py.
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

using Logits = at::vec::Vectorized<float>;
constexpr int64_t AT_ONCE = Logits::size();

// Whether the largest chance of each row leads the next by theta.
extern "C" void leads_rows(
    const float* logits, const float* theta, bool* leads, int64_t rows, int64_t width, int64_t stride,
    int64_t theta_stride) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = logits + row * stride;
    // the largest and the next of each place of a vector; NaN stays
    Logits tops(none), nexts(none);
    int64_t i = 0;
    for (; i + AT_ONCE <= width; i += AT_ONCE) {
      const Logits values = Logits::loadu(own + i);
      nexts = at::vec::maximum(nexts, at::vec::minimum(tops, values));
      tops = at::vec::maximum(tops, values);
    }
    float both[2 * AT_ONCE], top = none, next = none;
    tops.store(both);
    nexts.store(both + AT_ONCE);
    bool broken = false;
    const auto take = [&](float value) {
      broken |= std::isnan(value);
      next = std::max(next, std::min(top, value));
      top = std::max(top, value);
    };
    std::for_each(both, both + 2 * AT_ONCE, take);
    std::for_each(own + i, own + width, take);
    Logits sums(0.0f);
    for (i = 0; i + AT_ONCE <= width; i += AT_ONCE) {
      sums = sums + (Logits::loadu(own + i) - Logits(top)).exp();
    }
    float total = at::vec::vec_reduce_all<float>([](Logits& a, Logits& b) { return a + b; }, sums);
    for (; i < width; ++i) {
      total += std::exp(own[i] - top);
    }
    // what is broken leads by nothing, as NaN compares
    leads[row] = !broken && 1.0f / total - std::exp(next - top) / total >= theta[row * theta_stride];
  }
}

// The first of the largest logits of each row; `broken` where that is not finite.
extern "C" void best_rows(
    const float* logits, int64_t* best, int64_t rows, int64_t width, int64_t stride, int64_t broken) {
  for (int64_t row = 0; row < rows; ++row) {
    const float *own = logits + row * stride, *end = own + width;
    // NaN stays
    Logits tops(-std::numeric_limits<float>::infinity());
    const float* at = own;
    for (; at + AT_ONCE <= end; at += AT_ONCE) {
      tops = at::vec::maximum(tops, Logits::loadu(at));
    }
    float each[AT_ONCE], top = -std::numeric_limits<float>::infinity();
    tops.store(each);
    bool is_number = true;
    const auto take = [&](float value) {
      is_number &= !std::isnan(value);
      top = std::max(top, value);
    };
    std::for_each(each, each + AT_ONCE, take);
    std::for_each(at, end, take);
    if (!is_number || !std::isfinite(top)) {
      best[row] = broken;
      continue;
    }
    for (at = own; at + AT_ONCE <= end && std::find(at, at + AT_ONCE, top) == at + AT_ONCE; at += AT_ONCE) {
    }
    best[row] = std::find(at, end, top) - own;
  }
}
