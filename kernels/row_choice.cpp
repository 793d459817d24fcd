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
    float top = none, next = none;
    bool broken = false;
    for (int64_t i = 0; i < width; ++i) {
      const float value = own[i];
      broken |= std::isnan(value);
      next = std::max(next, std::min(top, value));
      top = std::max(top, value);
    }
    Logits sums(0.0f);
    int64_t i = 0;
    for (; i + AT_ONCE <= width; i += AT_ONCE) {
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
    const float* own = logits + row * stride;
    float top = own[0];
    bool is_number = !std::isnan(top);
    for (int64_t i = 1; i < width; ++i) {
      is_number &= !std::isnan(own[i]);
      top = std::max(top, own[i]);
    }
    best[row] = is_number && std::isfinite(top) ? std::find(own, own + width, top) - own : broken;
  }
}
