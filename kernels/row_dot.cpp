// Rows times a weight as it is stored; see row_dot.py. ELEMENT and BFLOAT16, 0 or 1, are defined in front of this text,
// which stands behind that of row_sums.cpp.
#include <algorithm>

using Vec = at::vec::Vectorized<float>;
// Rows and columns whose sums are kept in registers.
constexpr int64_t SIDE = 4;
// Multiplications that are worth a thread.
constexpr int64_t THREAD_WORK = 1 << 17;

// STEP numbers that are read at once.
#if BFLOAT16 && defined(__AVX512BF16__)
using Some = __m512bh;
constexpr int64_t STEP = 32;
inline Some load(const ELEMENT* from) {
  return (__m512bh)_mm512_loadu_si512(from);
}
inline Vec add_products(Some one, Some other, Vec sums) {
  return Vec(_mm512_dpbf16_ps(sums, one, other));
}
#else
using Some = Vec;
constexpr int64_t STEP = Vec::size();
inline Some load(const ELEMENT* from) {
#if BFLOAT16
  Vec wide;
  at::vec::load_fp32_from_bf16(from, wide);
  return wide;
#else
  return Vec::loadu(from);
#endif
}
inline Vec add_products(Some one, Some other, Vec sums) {
  return at::vec::fmadd(one, other, sums);
}
#endif

// The last ones of a row, and zeros.
inline Some load_last(const ELEMENT* from, int64_t count) {
  alignas(64) ELEMENT last[STEP];
  for (int64_t i = 0; i < STEP; ++i) {
    last[i] = i < count ? from[i] : ELEMENT(0);
  }
  return load(last);
}

// Each sum is added up in the same order, whatever ROWS and COLUMNS are.
template <int64_t ROWS, int64_t COLUMNS>
__attribute__((noinline)) void products(
    const ELEMENT* hidden, const ELEMENT* weight, ELEMENT* output, int64_t width, int64_t columns) {
  Vec sums[SUMS];
#pragma GCC unroll 16
  for (int64_t k = 0; k < SUMS; ++k) {
    sums[k] = Vec(0);
  }
  int64_t i = 0;
  for (; i + STEP <= width; i += STEP) {
    Some parts[COLUMNS];
#pragma GCC unroll 4
    for (int64_t c = 0; c < COLUMNS; ++c) {
      parts[c] = load(weight + c * width + i);
      // the columns that come next
      __builtin_prefetch(weight + (c + COLUMNS) * width + i);
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < ROWS; ++r) {
      const Some own = load(hidden + r * width + i);
#pragma GCC unroll 4
      for (int64_t c = 0; c < COLUMNS; ++c) {
        sums[r * COLUMNS + c] = add_products(own, parts[c], sums[r * COLUMNS + c]);
      }
    }
  }
  if (i < width) {
    const int64_t left = width - i;
#pragma GCC unroll 4
    for (int64_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int64_t c = 0; c < COLUMNS; ++c) {
        Vec& sum = sums[r * COLUMNS + c];
        sum = add_products(load_last(hidden + r * width + i, left), load_last(weight + c * width + i, left), sum);
      }
    }
  }
  float added[SUMS];
  sum_each<float>(sums, added);
#pragma GCC unroll 4
  for (int64_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int64_t c = 0; c < COLUMNS; ++c) {
      output[r * columns + c] = static_cast<ELEMENT>(added[r * COLUMNS + c]);
    }
  }
}

template <int64_t COLUMNS>
inline void of_columns(
    const ELEMENT* hidden, const ELEMENT* weight, ELEMENT* output, int64_t rows, int64_t width, int64_t columns) {
  for (; rows >= SIDE; rows -= SIDE, hidden += SIDE * width, output += SIDE * columns) {
    products<SIDE, COLUMNS>(hidden, weight, output, width, columns);
  }
  switch (rows) {
    case 3:
      return products<3, COLUMNS>(hidden, weight, output, width, columns);
    case 2:
      return products<2, COLUMNS>(hidden, weight, output, width, columns);
    case 1:
      return products<1, COLUMNS>(hidden, weight, output, width, columns);
  }
}

extern "C" void row_dot(
    const ELEMENT* hidden, const ELEMENT* weight, ELEMENT* output, int64_t rows, int64_t width, int64_t columns,
    int64_t threads) {
  threads = std::min(threads, 1 + rows * width * columns / THREAD_WORK);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t block = 0; block < columns / SIDE; ++block) {
    of_columns<SIDE>(
        hidden, weight + block * SIDE * width, output + block * SIDE, rows, width, columns);
  }
  for (int64_t c = columns / SIDE * SIDE; c < columns; ++c) {
    of_columns<1>(hidden, weight + c * width, output + c, rows, width, columns);
  }
}
