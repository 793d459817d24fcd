// Products of few rows with a matrix, in float32; see row_matmul.py.
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>

namespace few {

using Numbers = at::vec::Vectorized<float>;
constexpr int64_t WIDE = Numbers::size();
// Multiplications that are worth a thread.
constexpr int64_t THREAD_WORK = 1 << 18;

// Outputs `first` to `first + OUTPUTS - 1` of ROWS rows: each number of the matrix is read once for all of them.
template <int OUTPUTS, int ROWS>
inline void tile(
    const float* weight, const float* input, float* output, int64_t width, int64_t input_stride, int64_t output_stride,
    int64_t first) {
  Numbers sums[OUTPUTS][ROWS];
  for (auto& line : sums) {
    for (auto& sum : line) {
      sum = Numbers(0.0f);
    }
  }
  const float* own = weight + first * width;
  int64_t i = 0;
  for (; i + WIDE <= width; i += WIDE) {
    Numbers rows[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      rows[r] = Numbers::loadu(input + r * input_stride + i);
    }
    for (int n = 0; n < OUTPUTS; ++n) {
      const Numbers numbers = Numbers::loadu(own + n * width + i);
      for (int r = 0; r < ROWS; ++r) {
        sums[n][r] = at::vec::fmadd(numbers, rows[r], sums[n][r]);
      }
    }
  }
  for (int n = 0; n < OUTPUTS; ++n) {
    for (int r = 0; r < ROWS; ++r) {
      float sum = at::vec::vec_reduce_all<float>([](Numbers& a, Numbers& b) { return a + b; }, sums[n][r]);
      for (int64_t j = i; j < width; ++j) {
        sum += own[n * width + j] * input[r * input_stride + j];
      }
      output[r * output_stride + first + n] = sum;
    }
  }
}

template <int ROWS>
inline void product(
    const float* weight, const float* input, float* output, int64_t width, int64_t outputs, int64_t input_stride,
    int64_t output_stride, int64_t threads) {
  constexpr int OUTPUTS = 4;
  const int64_t whole = outputs / OUTPUTS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < whole; ++n) {
    tile<OUTPUTS, ROWS>(weight, input, output, width, input_stride, output_stride, n * OUTPUTS);
  }
  for (int64_t n = whole * OUTPUTS; n < outputs; ++n) {
    tile<1, ROWS>(weight, input, output, width, input_stride, output_stride, n);
  }
}

// y = x w^T of any number of rows, up to four at a time. A row's sums are the same in any company.
inline void multiply(
    const float* weight, const float* input, float* output, int64_t rows, int64_t width, int64_t outputs,
    int64_t input_stride, int64_t threads) {
  threads = std::max<int64_t>(1, std::min(threads, rows * width * outputs / THREAD_WORK));
  for (int64_t row = 0; row < rows; row += 4) {
    const float* from = input + row * input_stride;
    float* to = output + row * outputs;
    switch (std::min<int64_t>(4, rows - row)) {
      case 1:
        product<1>(weight, from, to, width, outputs, input_stride, outputs, threads);
        break;
      case 2:
        product<2>(weight, from, to, width, outputs, input_stride, outputs, threads);
        break;
      case 3:
        product<3>(weight, from, to, width, outputs, input_stride, outputs, threads);
        break;
      default:
        product<4>(weight, from, to, width, outputs, input_stride, outputs, threads);
    }
  }
}

}  // namespace few

extern "C" void multiply_rows(
    const float* weight, const float* input, float* output, int64_t rows, int64_t width, int64_t outputs,
    int64_t input_stride, int64_t threads) {
  few::multiply(weight, input, output, rows, width, outputs, input_stride, threads);
}
