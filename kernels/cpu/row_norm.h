// RMS norm of rows, and what it is added to; see row_norm.py.
#pragma once
#include "vectors.h"

namespace {

void norm_rows(
    const float* hidden, const float* weight, const float* residual, float* output, int64_t rows, int64_t width,
    double epsilon) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = hidden + row * width;
    const float sum = dot(own, own, width);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + static_cast<float>(epsilon));
    float* out = output + row * width;
    if (residual == nullptr) {
      for (int64_t j = 0; j < width; ++j) {
        out[j] = weight[j] * (own[j] * scale);
      }
    } else {
      const float* base = residual + row * width;
      for (int64_t j = 0; j < width; ++j) {
        out[j] = base[j] + weight[j] * (own[j] * scale);
      }
    }
  }
}

}  // namespace

EXPORTED(void, norm_rows)(
    const float* hidden, const float* weight, const float* residual, float* output, int64_t rows, int64_t width,
    double epsilon) {
  norm_rows(hidden, weight, residual, output, rows, width, epsilon);
}
