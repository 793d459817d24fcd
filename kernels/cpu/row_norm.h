// RMS norm of rows, and what it is added to; see row_norm.py.
#pragma once
#include "vectors.h"

namespace {

void norm_rows(
    const float* hidden, const float* weight, const float* residual, float* output, int64_t rows, int64_t width,
    double epsilon) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = hidden + row * width;
    float parts[SIDE_BY_SIDE] = {};
    float sum = 0;
    int64_t i = 0;
    for (; i + SIDE_BY_SIDE <= width; i += SIDE_BY_SIDE) {
      for (int64_t j = 0; j < SIDE_BY_SIDE; ++j) {
        parts[j] += own[i + j] * own[i + j];
      }
    }
    for (; i < width; ++i) {
      sum += own[i] * own[i];
    }
    for (const float part : parts) {
      sum += part;
    }
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
