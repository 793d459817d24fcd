// Vectors of the width that this level of instructions has, and numbers of half width.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The name of an exported function at this level. Everything else lies in namespaces of this file's, and takes no
// template of the standard library that could be kept once for all levels: an older CPU must never run it.
#define JOINED(name, level) name##_##level
#define NAMED(name, level) JOINED(name, level)
#define EXPORTED(type, name) extern "C" __attribute__((visibility("default"))) type NAMED(name, LEVEL)

namespace {

#if defined(__AVX512F__)
constexpr int64_t VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int64_t VECTOR_BYTES = 32;
#else
constexpr int64_t VECTOR_BYTES = 16;
#endif

// Multiplications that are worth a thread.
constexpr int64_t THREAD_WORK = 1 << 17;
// Sums that are kept side by side, so that a compiler may take them at once.
constexpr int64_t SIDE_BY_SIDE = 16;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES / 2)));

template <typename Real>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = Floats;
};
template <>
struct VectorOf<double> {
  using Type = Doubles;
};
template <typename Real>
using Vector = typename VectorOf<Real>::Type;

template <typename Real>
constexpr int64_t LANES = VECTOR_BYTES / static_cast<int64_t>(sizeof(Real));

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

template <typename Number>
inline Number least(Number a, Number b) {
  return b < a ? b : a;
}

template <typename Number>
inline Number most(Number a, Number b) {
  return a < b ? b : a;
}

template <typename Number>
inline void copy(const Number* from, int64_t count, Number* to) {
  std::memcpy(to, from, count * sizeof(Number));
}

// Memory that grows; what it held is lost.
template <typename Number>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::free(data_);
  }

  Number* of(int64_t count) {
    if (count > room_) {
      std::free(data_);
      void* memory = nullptr;
      if (posix_memalign(&memory, 64, count * sizeof(Number)) != 0) {
        std::abort();
      }
      data_ = static_cast<Number*>(memory), room_ = count;
    }
    return data_;
  }

 private:
  Number* data_ = nullptr;
  int64_t room_ = 0;
};

inline uint32_t bits_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

inline float of_bits(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

inline float wide(float number) {
  return number;
}

inline double wide(double number) {
  return number;
}

inline float wide(BFloat16 number) {
  return of_bits(static_cast<uint32_t>(number.bits) << 16);
}

inline float wide(Half number) {
  const uint32_t sign = static_cast<uint32_t>(number.bits & 0x8000) << 16, rest = number.bits & 0x7fff;
  // a product with 2^112 shifts the exponent, also of numbers that are not normal
  const float scaled = of_bits(rest << 13) * of_bits(0x77800000);
  return of_bits(sign | (rest >= 0x7c00 ? 0x7f800000 | rest << 13 : bits_of(scaled)));
}

template <typename Element>
inline Element narrow(std::conditional_t<std::is_same_v<Element, double>, double, float> number) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    const uint32_t bits = bits_of(number);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return {static_cast<uint16_t>(is_nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  } else if constexpr (std::is_same_v<Element, Half>) {
    const uint32_t bits = bits_of(number), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x477ff000) {
      return {static_cast<uint16_t>(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00))};
    }
    if (rest < 0x38800000) {
      // adding 0.5 rounds at the last bit of a number that is not normal
      return {static_cast<uint16_t>(sign | (bits_of(of_bits(rest) + 0.5f) - 0x3f000000))};
    }
    return {static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13)};
  } else {
    return number;
  }
}

// Calls a function for a type of numbers, as `ELEMENTS` of row_attention.py counts them.
template <typename Function>
inline void of_element(int64_t dtype, const Function& function) {
  switch (dtype) {
    case 0:
      return function(float{});
    case 1:
      return function(double{});
    case 2:
      return function(BFloat16{});
    case 3:
      return function(Half{});
  }
}

template <typename Real>
inline Vector<Real> splat(Real number) {
  return number - Vector<Real>{};
}

template <typename Real>
inline Vector<Real> load(const Real* from) {
  Vector<Real> vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

inline Words load_words(const void* from) {
  // what a compiler makes of the last line takes twice as long
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  Shorts shorts;
  std::memcpy(&shorts, from, sizeof(shorts));
  return __builtin_convertvector(shorts, Words);
#endif
}

inline Floats load(const BFloat16* from) {
  return (Floats)(load_words(from) << 16);
}

inline Floats load(const Half* from) {
  const Words bits = load_words(from), sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
  const Floats scaled = (Floats)rest * splat(of_bits(0x77800000));
  const Words large = (Words)(rest >= (0x7c00u << 13));
  return (Floats)(sign | (large & (rest | 0x7f800000)) | (~large & (Words)scaled));
}

template <typename Real>
inline void store(Vector<Real> vector, Real* to) {
  std::memcpy(to, &vector, sizeof(vector));
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
  return a * b + c;
}

// The larger of each pair; NaN stays.
template <typename Reals>
inline Reals larger(Reals a, Reals b) {
  return ((a > b) | (a != a)) ? a : b;
}

// The smaller of each pair; NaN stays.
inline Floats smaller(Floats a, Floats b) {
  return ((a < b) | (a != a)) ? a : b;
}

template <typename Real>
inline Real sum_of(Vector<Real> vector) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Real, float>) {
    return _mm512_reduce_add_ps((__m512)vector);
  } else {
    return _mm512_reduce_add_pd((__m512d)vector);
  }
#else
  Real parts[LANES<Real>];
  store<Real>(vector, parts);
  for (int64_t half = LANES<Real> / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      parts[i] += parts[i + half];
    }
  }
  return parts[0];
#endif
}

// e^x with the constants of Cephes' expf: within two units of the last place, 0 under -87.3 and infinity from 88.4 on.
inline Floats exponential(Floats x) {
  const Floats lowest = splat(-87.3f), highest = splat(88.7f), rounding = splat(12582912.0f);
  Floats kept = x < lowest ? lowest : x;
  kept = kept > highest ? highest : kept;
  const Floats shifted = multiply_add(kept, splat(1.44269504f), rounding), whole = shifted - rounding;
  const Floats rest = multiply_add(whole, splat(2.12194440e-4f), multiply_add(whole, splat(-0.693359375f), kept));
  Floats series = multiply_add(splat(1.9875691500e-4f), rest, splat(1.3981999507e-3f));
  series = multiply_add(series, rest, splat(8.3334519073e-3f));
  series = multiply_add(series, rest, splat(4.1665795894e-2f));
  series = multiply_add(series, rest, splat(1.6666665459e-1f));
  series = multiply_add(series, rest, splat(5.0000001201e-1f));
  series = multiply_add(series, rest * rest, rest + 1.0f);
  const Floats power = (Floats)(((Words)shifted << 23) + 0x3f800000u);
  return x < lowest ? Floats{} : series * power;
}

inline Doubles exponential(Doubles x) {
  double numbers[LANES<double>];
  store<double>(x, numbers);
  for (auto& number : numbers) {
    number = std::exp(number);
  }
  return load(numbers);
}

inline float dot(const float* a, const float* b, int64_t width) {
  float parts[SIDE_BY_SIDE] = {};
  float sum = 0;
  int64_t i = 0;
  for (; i + SIDE_BY_SIDE <= width; i += SIDE_BY_SIDE) {
    for (int64_t j = 0; j < SIDE_BY_SIDE; ++j) {
      parts[j] += a[i + j] * b[i + j];
    }
  }
  for (; i < width; ++i) {
    sum += a[i] * b[i];
  }
  for (const float part : parts) {
    sum += part;
  }
  return sum;
}

}  // namespace
