// Rows times a weight as it is stored; see row_dot.py.
#pragma once
#include "vectors.h"

namespace {

// Rows and columns whose sums are kept in registers.
constexpr int64_t SIDE = 4;
constexpr int64_t SUMS = SIDE * SIDE;

// Sums over the numbers of sixteen vectors at once, each added up in the same order whatever the others are.
inline void sum_each(const Floats* vectors, float* sums) {
#if defined(__AVX512F__)
  // adding while transposing: 45 instructions, where sixteen sums by themselves take thrice as many
  __m512 pairs[8], fours[4], halves[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 one = (__m512)vectors[2 * i], other = (__m512)vectors[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(one, other), _mm512_unpackhi_ps(one, other));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d one = _mm512_castps_pd(pairs[2 * i]), other = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(one, other)), _mm512_castpd_ps(_mm512_unpackhi_pd(one, other)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512 one = fours[2 * i], other = fours[2 * i + 1];
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(one, other, 0x88), _mm512_shuffle_f32x4(one, other, 0xdd));
  }
  const __m512 low = _mm512_shuffle_f32x4(halves[0], halves[1], 0x88);
  _mm512_storeu_ps(sums, _mm512_add_ps(low, _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd)));
#else
  for (int64_t i = 0; i < SUMS; ++i) {
    sums[i] = sum_of<float>(vectors[i]);
  }
#endif
}

// Numbers that are read at once.
template <typename Element>
struct Read {
  using Some = Floats;
  static constexpr int64_t STEP = LANES<float>;

  static Some load_some(const Element* from) {
    return load(from);
  }

  static Floats add_products(Some one, Some other, Floats sums) {
    return multiply_add(one, other, sums);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Read<BFloat16> {
  using Some = __m512bh;
  static constexpr int64_t STEP = 2 * LANES<float>;

  static Some load_some(const BFloat16* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }

  static Floats add_products(Some one, Some other, Floats sums) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, one, other);
  }
};
#endif

// The last ones of a row, and zeros.
template <typename Element>
inline typename Read<Element>::Some load_last(const Element* from, int64_t count) {
  alignas(64) Element last[Read<Element>::STEP] = {};
  copy(from, count, last);
  return Read<Element>::load_some(last);
}

// Each sum is added up in the same order, whatever ROWS and COLUMNS are.
template <typename Element, int64_t ROWS, int64_t COLUMNS>
__attribute__((noinline)) void products(
    const Element* hidden, const Element* weight, Element* output, int64_t width, int64_t columns) {
  using Some = typename Read<Element>::Some;
  constexpr int64_t STEP = Read<Element>::STEP;
  Floats sums[SUMS];
#pragma GCC unroll 16
  for (int64_t k = 0; k < SUMS; ++k) {
    sums[k] = Floats{};
  }
  int64_t i = 0;
  for (; i + STEP <= width; i += STEP) {
    Some parts[COLUMNS];
#pragma GCC unroll 4
    for (int64_t c = 0; c < COLUMNS; ++c) {
      parts[c] = Read<Element>::load_some(weight + c * width + i);
      // the columns that come next
      __builtin_prefetch(weight + (c + COLUMNS) * width + i);
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < ROWS; ++r) {
      const Some own = Read<Element>::load_some(hidden + r * width + i);
#pragma GCC unroll 4
      for (int64_t c = 0; c < COLUMNS; ++c) {
        sums[r * COLUMNS + c] = Read<Element>::add_products(own, parts[c], sums[r * COLUMNS + c]);
      }
    }
  }
  if (i < width) {
    const int64_t left = width - i;
#pragma GCC unroll 4
    for (int64_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int64_t c = 0; c < COLUMNS; ++c) {
        Floats& sum = sums[r * COLUMNS + c];
        sum = Read<Element>::add_products(
            load_last(hidden + r * width + i, left), load_last(weight + c * width + i, left), sum);
      }
    }
  }
  float added[SUMS];
  sum_each(sums, added);
#pragma GCC unroll 4
  for (int64_t r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int64_t c = 0; c < COLUMNS; ++c) {
      output[r * columns + c] = narrow<Element>(added[r * COLUMNS + c]);
    }
  }
}

template <typename Element, int64_t COLUMNS>
inline void of_columns(
    const Element* hidden, const Element* weight, Element* output, int64_t rows, int64_t width, int64_t columns) {
  for (; rows >= SIDE; rows -= SIDE, hidden += SIDE * width, output += SIDE * columns) {
    products<Element, SIDE, COLUMNS>(hidden, weight, output, width, columns);
  }
  switch (rows) {
    case 3:
      return products<Element, 3, COLUMNS>(hidden, weight, output, width, columns);
    case 2:
      return products<Element, 2, COLUMNS>(hidden, weight, output, width, columns);
    case 1:
      return products<Element, 1, COLUMNS>(hidden, weight, output, width, columns);
  }
}

template <typename Element>
void row_dot(
    const Element* hidden, const Element* weight, Element* output, int64_t rows, int64_t width, int64_t columns,
    int64_t threads) {
  threads = least(threads, 1 + rows * width * columns / THREAD_WORK);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t block = 0; block < columns / SIDE; ++block) {
    of_columns<Element, SIDE>(
        hidden, weight + block * SIDE * width, output + block * SIDE, rows, width, columns);
  }
  for (int64_t c = columns / SIDE * SIDE; c < columns; ++c) {
    of_columns<Element, 1>(hidden, weight + c * width, output + c, rows, width, columns);
  }
}

}  // namespace

// `dtype` as `ELEMENTS` of row_attention.py counts them.
EXPORTED(void, row_dot)(
    int64_t dtype, const void* hidden, const void* weight, void* output, int64_t rows, int64_t width, int64_t columns,
    int64_t threads) {
  const auto take = [&](auto element) {
    using Element = decltype(element);
    row_dot(
        static_cast<const Element*>(hidden), static_cast<const Element*>(weight), static_cast<Element*>(output), rows,
        width, columns, threads);
  };
  return dtype == 2 ? take(BFloat16{}) : take(float{});
}
