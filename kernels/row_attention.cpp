// Writes K/V of the rows of a pass, then attends each row over the plane of its own loop; see row_attention.py.
// ELEMENT and HEAD_DIM are defined in front of this text.
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

// What sums are kept in.
using Real = std::conditional_t<std::is_same_v<ELEMENT, double>, double, float>;
using Vec = at::vec::Vectorized<Real>;
constexpr int64_t LANES = Vec::size();
constexpr int64_t PARTS = (HEAD_DIM + LANES - 1) / LANES;
constexpr int64_t PADDED = PARTS * LANES;
// Multiplications that are worth a thread.
constexpr int64_t THREAD_WORK = 1 << 17;

// HEAD_DIM numbers; the rest of the last vector is 0.
struct Head {
  Vec part[PARTS];
};

template <typename Number>
inline Vec load_whole(const Number* from) {
  if constexpr (std::is_same_v<Number, Real>) {
    return Vec::loadu(from);
  } else {
    Vec wide;
    if constexpr (std::is_same_v<Number, at::BFloat16>) {
      at::vec::load_fp32_from_bf16(from, wide);
    } else {
      at::vec::load_fp32_from_fp16(from, wide);
    }
    return wide;
  }
}

inline Head load_head(const ELEMENT* from) {
  Head head;
  for (int64_t i = 0; i < HEAD_DIM / LANES; ++i) {
    head.part[i] = load_whole(from + i * LANES);
  }
  if constexpr (HEAD_DIM % LANES != 0) {
    alignas(64) Real last[LANES] = {};
    for (int64_t i = 0; i < HEAD_DIM % LANES; ++i) {
      last[i] = static_cast<Real>(from[(PARTS - 1) * LANES + i]);
    }
    head.part[PARTS - 1] = Vec::loadu(last);
  }
  return head;
}

inline Real sum_of(const Vec& values) {
  return at::vec::vec_reduce_all<Real>([](Vec& a, Vec& b) { return a + b; }, values);
}

// Softmax numerators of `count` scores in place; their sum.
inline Real exponentials(Real* scores, int64_t count) {
  Real largest = -std::numeric_limits<Real>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    // NaN stays
    largest = scores[i] <= largest ? largest : scores[i];
  }
  Vec total(0);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vec numerators = (Vec::loadu(scores + i) - Vec(largest)).exp();
    numerators.store(scores + i);
    total = total + numerators;
  }
  Real sum = sum_of(total);
  for (; i < count; ++i) {
    scores[i] = std::exp(scores[i] - largest);
    sum += scores[i];
  }
  return sum;
}

struct Places {
  const int64_t* blocks;  // [S, table_width], or null: block s is all of sequence s
  const int64_t* starts;  // [S], or null
  const bool* seen;       // [S, seen_width], or null
  const int32_t* exits;   // [S, exits_width], or null
  int64_t size, total, table_width, seen_width, exits_width;

  int64_t flat(int64_t sequence, int64_t position) const {
    if (blocks == nullptr) {
      return sequence * size + position;
    }
    return blocks[sequence * table_width + position / size] * size + position % size;
  }

  // Where the numbers that a row sees begin, in positions from the first plane on.
  void of_row(int64_t sequence, int64_t last, int64_t plane, std::vector<int64_t>& found) const {
    found.clear();
    int64_t position = starts == nullptr ? 0 : std::min(starts[sequence], last);
    while (position <= last) {
      const int64_t end = blocks == nullptr ? last + 1 : std::min(last + 1, (position / size + 1) * size);
      const int64_t shift = flat(sequence, position) - position;
      for (; position < end; ++position) {
        if (seen != nullptr && !seen[sequence * seen_width + position]) {
          continue;
        }
        const int64_t own =
            exits == nullptr ? plane : std::min<int64_t>(plane, exits[sequence * exits_width + position]);
        found.push_back(own * total + shift + position);
      }
    }
  }
};

// One head of a row: softmax over the positions of (q k) v.
inline void attend(
    const ELEMENT* query, const ELEMENT* keys, const ELEMENT* values, const std::vector<int64_t>& at, int64_t stride,
    Real scaling, Real* scores, ELEMENT* output) {
  const int64_t count = static_cast<int64_t>(at.size());
  Head own = load_head(query);
  for (auto& part : own.part) {
    part = part * Vec(scaling);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Head key = load_head(keys + at[i] * stride);
    Vec products = own.part[0] * key.part[0];
    for (int64_t j = 1; j < PARTS; ++j) {
      products = at::vec::fmadd(own.part[j], key.part[j], products);
    }
    scores[i] = sum_of(products);
  }
  const Vec share(1 / exponentials(scores, count));
  Head sums;
  for (auto& part : sums.part) {
    part = Vec(0);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Head value = load_head(values + at[i] * stride);
    const Vec weight(scores[i]);
    for (int64_t j = 0; j < PARTS; ++j) {
      sums.part[j] = at::vec::fmadd(weight, value.part[j], sums.part[j]);
    }
  }
  alignas(64) Real wide[PADDED];
  for (int64_t j = 0; j < PARTS; ++j) {
    (sums.part[j] * share).store(wide + j * LANES);
  }
  for (int64_t j = 0; j < HEAD_DIM; ++j) {
    output[j] = static_cast<ELEMENT>(wide[j]);
  }
}

// Queries of rows lie `query_stride` numbers apart, and new keys and values `new_stride`; the output is contiguous.
extern "C" void attend_rows(
    ELEMENT* keys, ELEMENT* values, const ELEMENT* query, const ELEMENT* new_keys, const ELEMENT* new_values,
    ELEMENT* output, const int64_t* sequences, const int64_t* positions, const int64_t* planes, const int64_t* blocks,
    const int64_t* starts, const bool* seen, const int32_t* exits, int64_t rows, int64_t heads, int64_t kv_heads,
    int64_t size, int64_t total, int64_t table_width, int64_t seen_width, int64_t exits_width, int64_t query_stride,
    int64_t new_stride, double scaling, int64_t threads) {
  const Places places{blocks, starts, seen, exits, size, total, table_width, seen_width, exits_width};
  const int64_t stride = kv_heads * HEAD_DIM, group = heads / kv_heads;
  int64_t work = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (positions[row] < 0) {
      continue;
    }
    const int64_t at = (planes[row] * total + places.flat(sequences[row], positions[row])) * stride;
    std::memcpy(keys + at, new_keys + row * new_stride, stride * sizeof(ELEMENT));
    std::memcpy(values + at, new_values + row * new_stride, stride * sizeof(ELEMENT));
    work += (positions[row] + 1) * heads * HEAD_DIM;
  }
  threads = std::max<int64_t>(1, std::min(threads, work / THREAD_WORK));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<int64_t> at;
    std::vector<Real> scores;
    int64_t known = -1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < rows * kv_heads; ++task) {
      const int64_t row = task / kv_heads, kv_head = task % kv_heads;
      ELEMENT* own = output + (row * heads + kv_head * group) * HEAD_DIM;
      if (positions[row] < 0) {
        std::fill(own, own + group * HEAD_DIM, static_cast<ELEMENT>(0));
        continue;
      }
      if (row != known) {
        places.of_row(sequences[row], positions[row], planes[row], at);
        scores.resize(at.size());
        known = row;
      }
      for (int64_t head = 0; head < group; ++head) {
        attend(
            query + row * query_stride + (kv_head * group + head) * HEAD_DIM, keys + kv_head * HEAD_DIM,
            values + kv_head * HEAD_DIM, at, stride, static_cast<Real>(scaling), scores.data(), own + head * HEAD_DIM);
      }
    }
  }
}
