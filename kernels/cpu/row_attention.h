// Writes K/V of the rows of a pass, then attends each row over the plane of its own loop; see row_attention.py.
#pragma once
#include "vectors.h"

namespace {

template <typename Element>
using RealOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// Heads of HEAD_DIM numbers, whole vectors, or of any number up to MOST_HEAD_DIM where that is 0.
constexpr int64_t MOST_HEAD_DIM = 512;

template <typename Element, int64_t HEAD_DIM>
struct Heads {
  using Real = RealOf<Element>;
  using Vec = Vector<Real>;
  static constexpr int64_t MOST = ((HEAD_DIM ? HEAD_DIM : MOST_HEAD_DIM) + LANES<Real> - 1) / LANES<Real>;
  static constexpr int64_t PADDED = MOST * LANES<Real>;

  // The numbers of a head; the rest of the last vector is 0.
  struct Head {
    Vec part[MOST];
  };

  int64_t given;

  int64_t head_dim() const {
    return HEAD_DIM ? HEAD_DIM : given;
  }

  int64_t parts() const {
    return HEAD_DIM ? MOST : (given + LANES<Real> - 1) / LANES<Real>;
  }

  Vec load_part(const Element* from, int64_t j) const {
    if constexpr (HEAD_DIM == 0) {
      const int64_t begin = j * LANES<Real>, count = head_dim() - begin;
      if (count < LANES<Real>) {
        Real last[LANES<Real>] = {};
        for (int64_t i = 0; i < count; ++i) {
          last[i] = wide(from[begin + i]);
        }
        return load(last);
      }
    }
    return load(from + j * LANES<Real>);
  }

  void load_head(const Element* from, Head& head) const {
    for (int64_t j = 0; j < parts(); ++j) {
      head.part[j] = load_part(from, j);
    }
  }

  // The product with a head whose parts `part_of` gives.
  template <typename Parts>
  Real product(const Head& one, const Parts& part_of) const {
    Vec products = one.part[0] * part_of(0);
    for (int64_t j = 1; j < parts(); ++j) {
      products = multiply_add(one.part[j], part_of(j), products);
    }
    return sum_of<Real>(products);
  }

  template <typename Parts>
  void add_weighted(Real weight, const Parts& part_of, Head& sums) const {
    const Vec factor = splat(weight);
    for (int64_t j = 0; j < parts(); ++j) {
      sums.part[j] = multiply_add(factor, part_of(j), sums.part[j]);
    }
  }

  void scale(Real factor, Head& head) const {
    for (int64_t j = 0; j < parts(); ++j) {
      head.part[j] = head.part[j] * splat(factor);
    }
  }

  void clear(Head& head) const {
    for (int64_t j = 0; j < parts(); ++j) {
      head.part[j] = Vec{};
    }
  }

  void write(const Head& head, Element* to) const {
    alignas(64) Real numbers[PADDED];
    for (int64_t j = 0; j < parts(); ++j) {
      store<Real>(head.part[j], numbers + j * LANES<Real>);
    }
    for (int64_t j = 0; j < head_dim(); ++j) {
      to[j] = narrow<Element>(numbers[j]);
    }
  }
};

// Softmax numerators of `count` scores in place; their sum.
template <typename Real>
inline Real exponentials(Real* scores, int64_t count) {
  Real largest = -std::numeric_limits<Real>::infinity();
  Vector<Real> tops = splat(largest), total{};
  int64_t i = 0;
  for (; i + LANES<Real> <= count; i += LANES<Real>) {
    tops = larger(tops, load(scores + i));
  }
  Real each[LANES<Real>];
  store<Real>(tops, each);
  const auto take = [&](Real score) {
    // NaN stays
    largest = score <= largest ? largest : score;
  };
  for (const Real score : each) {
    take(score);
  }
  for (; i < count; ++i) {
    take(scores[i]);
  }
  i = 0;
  for (; i + LANES<Real> <= count; i += LANES<Real>) {
    const Vector<Real> numerators = exponential(load(scores + i) - splat(largest));
    store<Real>(numerators, scores + i);
    total = total + numerators;
  }
  Real sum = sum_of<Real>(total);
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
  int64_t size, total, table_width, seen_width;

  int64_t flat(int64_t sequence, int64_t position) const {
    if (blocks == nullptr) {
      return sequence * size + position;
    }
    return blocks[sequence * table_width + position / size] * size + position % size;
  }

  // Where the numbers that a row sees begin, in positions from the first plane on; how many there are.
  int64_t of_row(int64_t sequence, int64_t last, int64_t plane, int64_t* found) const {
    int64_t position = starts == nullptr ? 0 : least(starts[sequence], last), count = 0;
    while (position <= last) {
      const int64_t end = blocks == nullptr ? last + 1 : least(last + 1, (position / size + 1) * size);
      const int64_t shift = flat(sequence, position) - position;
      for (; position < end; ++position) {
        if (seen != nullptr && !seen[sequence * seen_width + position]) {
          continue;
        }
        found[count++] = plane * total + shift + position;
      }
    }
    return count;
  }
};

// One head of a row: softmax over the positions of (q k) v.
template <typename Element, int64_t HEAD_DIM>
inline void attend(
    const Heads<Element, HEAD_DIM>& heads, const Element* query, const Element* keys, const Element* values,
    const int64_t* at, int64_t count, int64_t stride, RealOf<Element> scaling, RealOf<Element>* scores,
    Element* output) {
  typename Heads<Element, HEAD_DIM>::Head own, sums;
  heads.load_head(query, own);
  heads.scale(scaling, own);
  for (int64_t i = 0; i < count; ++i) {
    const Element* key = keys + at[i] * stride;
    scores[i] = heads.product(own, [&](int64_t j) { return heads.load_part(key, j); });
  }
  const RealOf<Element> share = 1 / exponentials(scores, count);
  heads.clear(sums);
  for (int64_t i = 0; i < count; ++i) {
    const Element* value = values + at[i] * stride;
    heads.add_weighted(scores[i], [&](int64_t j) { return heads.load_part(value, j); }, sums);
  }
  heads.scale(share, sums);
  heads.write(sums, output);
}

// Queries of rows lie `query_stride` numbers apart, and new keys and values `new_stride`; the output is contiguous.
struct Attention {
  void *keys, *values;
  const void *query, *new_keys, *new_values;
  void* output;
  const int64_t *sequences, *positions, *planes;
  Places places;
  int64_t rows, heads, kv_heads, head_dim, query_stride, new_stride;
  double scaling;
  int64_t threads;
};

template <typename Element, int64_t HEAD_DIM>
void attend_all(const Attention& all) {
  const Heads<Element, HEAD_DIM> kind{all.head_dim};
  const int64_t head_dim = kind.head_dim(), kv_heads = all.kv_heads, stride = kv_heads * head_dim;
  const int64_t group = all.heads / kv_heads;
  auto *keys = static_cast<Element*>(all.keys), *values = static_cast<Element*>(all.values);
  const auto* query = static_cast<const Element*>(all.query);
  auto* output = static_cast<Element*>(all.output);
  int64_t work = 0, longest = 0;
  for (int64_t row = 0; row < all.rows; ++row) {
    const int64_t position = all.positions[row];
    if (position < 0) {
      continue;
    }
    const int64_t at = (all.planes[row] * all.places.total + all.places.flat(all.sequences[row], position)) * stride;
    copy(static_cast<const Element*>(all.new_keys) + row * all.new_stride, stride, keys + at);
    copy(static_cast<const Element*>(all.new_values) + row * all.new_stride, stride, values + at);
    work += (position + 1) * all.heads * head_dim;
    longest = most(longest, position + 1);
  }
  const int64_t threads = most<int64_t>(1, least(all.threads, work / THREAD_WORK));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    thread_local Scratch<int64_t> found;
    thread_local Scratch<RealOf<Element>> kept;
    int64_t *at = found.of(longest), known = -1, count = 0;
    RealOf<Element>* scores = kept.of(longest);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < all.rows * kv_heads; ++task) {
      const int64_t row = task / kv_heads, kv_head = task % kv_heads;
      Element* own = output + (row * all.heads + kv_head * group) * head_dim;
      if (all.positions[row] < 0) {
        std::memset(static_cast<void*>(own), 0, group * head_dim * sizeof(Element));
        continue;
      }
      if (row != known) {
        count = all.places.of_row(all.sequences[row], all.positions[row], all.planes[row], at);
        known = row;
      }
      for (int64_t head = 0; head < group; ++head) {
        attend(
            kind, query + row * all.query_stride + (kv_head * group + head) * head_dim, keys + kv_head * head_dim,
            values + kv_head * head_dim, at, count, stride, static_cast<RealOf<Element>>(all.scaling), scores,
            own + head * head_dim);
      }
    }
  }
}

// Widths that a compiler has unrolled.
template <typename Element>
void attend_of(const Attention& all) {
  switch (all.head_dim) {
    case 32:
      return attend_all<Element, 32>(all);
    case 64:
      return attend_all<Element, 64>(all);
    case 128:
      return attend_all<Element, 128>(all);
  }
  attend_all<Element, 0>(all);
}

}  // namespace

// `dtype` as `ELEMENTS` of row_attention.py counts them.
EXPORTED(void, attend_rows)(
    int64_t dtype, void* keys, void* values, const void* query, const void* new_keys, const void* new_values,
    void* output, const int64_t* sequences, const int64_t* positions, const int64_t* planes, const int64_t* blocks,
    const int64_t* starts, const bool* seen, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
    int64_t size, int64_t total, int64_t table_width, int64_t seen_width, int64_t query_stride, int64_t new_stride,
    double scaling, int64_t threads) {
  const Places places{blocks, starts, seen, size, total, table_width, seen_width};
  const Attention all{keys, values, query, new_keys, new_values, output, sequences, positions, planes, places,
                      rows, heads, kv_heads, head_dim, query_stride, new_stride, scaling, threads};
  switch (dtype) {
    case 0:
      return attend_of<float>(all);
    case 1:
      return attend_all<double, 0>(all);
    case 2:
      return attend_of<BFloat16>(all);
    case 3:
      return attend_all<Half, 0>(all);
  }
}
