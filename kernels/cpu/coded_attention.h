// Attends rows over their own segment of a tail and over decoded earlier segments; see coded_attention.py.
#pragma once
#include "row_attention.h"

namespace {

// Keys, or values, of one layer.
template <typename Element>
struct Coded {
  const Element* tail;      // [planes, tail_total, H_kv, d]
  const uint8_t* codes;     // plane t from offsets[t] on, [positions, H_kv, d bits / 8]
  const BFloat16* scales;   // [planes, positions, H_kv, d / group]
};

struct Codec {
  const int64_t* bits;     // [planes]
  const int64_t* offsets;  // [planes]
  int64_t anchor;          // -1 for none
  int64_t group, positions, kv_heads;
};

// Levels of the codes in each byte: a load in place of shifts and masks.
template <typename Real, int64_t BITS>
struct Levels {
  Real of_byte[256][8 / BITS];
  Levels() {
    for (int64_t byte = 0; byte < 256; ++byte) {
      for (int64_t i = 0; i < 8 / BITS; ++i) {
        const int64_t code = (byte >> (i * BITS)) & ((1 << BITS) - 1);
        of_byte[byte][i] = static_cast<Real>(code) - static_cast<Real>(1 << (BITS - 1)) + static_cast<Real>(0.5);
      }
    }
  }
};

template <typename Kind, int64_t BITS, bool ADDS>
inline void decode_plane(
    const Kind& kind, const uint8_t* codes, const BFloat16* scales, int64_t group, typename Kind::Real* numbers) {
  using Real = typename Kind::Real;
  static const Levels<Real, BITS> levels;
  constexpr int64_t PER_BYTE = 8 / BITS;
  alignas(64) Real own[Kind::PADDED];
  for (int64_t i = 0; i < kind.head_dim() / PER_BYTE; ++i) {
    copy(levels.of_byte[codes[i]], PER_BYTE, own + i * PER_BYTE);
  }
  for (int64_t begin = 0; begin < kind.head_dim(); begin += group) {
    const Real scale = wide(scales[begin / group]);
    for (int64_t i = begin; i < begin + group; ++i) {
      numbers[i] = ADDS ? numbers[i] + scale * own[i] : scale * own[i];
    }
  }
}

template <bool ADDS, typename Kind, typename Element>
inline void decode_stored(
    const Kind& kind, const Coded<Element>& from, const Codec& codec, int64_t plane, int64_t position, int64_t kv_head,
    typename Kind::Real* numbers) {
  const int64_t head = position * codec.kv_heads + kv_head, head_dim = kind.head_dim();
  const uint8_t* codes = from.codes + codec.offsets[plane] + head * (head_dim * codec.bits[plane] / 8);
  const BFloat16* scales = from.scales + (plane * codec.positions * codec.kv_heads + head) * (head_dim / codec.group);
  switch (codec.bits[plane]) {
    case 1:
      return decode_plane<Kind, 1, ADDS>(kind, codes, scales, codec.group, numbers);
    case 2:
      return decode_plane<Kind, 2, ADDS>(kind, codes, scales, codec.group, numbers);
    case 4:
      return decode_plane<Kind, 4, ADDS>(kind, codes, scales, codec.group, numbers);
  }
  decode_plane<Kind, 8, ADDS>(kind, codes, scales, codec.group, numbers);
}

// Where the numbers that a row sees lie: `coded` of them in few bits, then those of the tail.
struct Seen {
  int64_t* at;
  int64_t count, coded;
};

inline void find_seen(
    const Places& places, int64_t segment, int64_t sequence, int64_t last, int64_t plane, int64_t tail_total,
    Seen& seen) {
  const int64_t begin = last / segment * segment;
  seen.count = seen.coded = 0;
  for (int64_t position = places.starts == nullptr ? 0 : least(places.starts[sequence], last); position <= last;
       ++position) {
    if (places.seen != nullptr && !places.seen[sequence * places.seen_width + position]) {
      continue;
    }
    const bool is_coded = position < begin;
    seen.coded += is_coded;
    seen.at[seen.count++] =
        is_coded ? places.flat(sequence, position) : plane * tail_total + sequence * segment + position % segment;
  }
}

template <typename Kind, typename Element>
inline void load_seen(
    const Kind& kind, const Coded<Element>& from, const Codec& codec, int64_t plane, int64_t kv_head, const Seen& seen,
    int64_t i, typename Kind::Head& head) {
  if (i >= seen.coded) {
    kind.load_head(from.tail + (seen.at[i] * codec.kv_heads + kv_head) * kind.head_dim(), head);
    return;
  }
  alignas(64) typename Kind::Real numbers[Kind::PADDED] = {};
  decode_stored<false>(kind, from, codec, plane, seen.at[i], kv_head, numbers);
  if (codec.anchor >= 0 && codec.anchor != plane) {
    decode_stored<true>(kind, from, codec, codec.anchor, seen.at[i], kv_head, numbers);
  }
  for (int64_t j = 0; j < kind.parts(); ++j) {
    head.part[j] = load(numbers + j * LANES<typename Kind::Real>);
  }
}

// Every head that shares a K/V head: what is decoded is decoded once for them all. `heads` has room for 2 `group`.
template <typename Kind, typename Element>
inline void attend_coded(
    const Kind& kind, const Element* query, const Coded<Element>& keys, const Coded<Element>& values,
    const Codec& codec, int64_t plane, int64_t kv_head, const Seen& seen, int64_t group, typename Kind::Real scaling,
    typename Kind::Real* scores, typename Kind::Head* heads, Element* output) {
  typename Kind::Head *queries = heads, *sums = heads + group, other;
  const auto part_of = [&](int64_t j) { return other.part[j]; };
  for (int64_t head = 0; head < group; ++head) {
    kind.load_head(query + head * kind.head_dim(), queries[head]);
    kind.scale(scaling, queries[head]);
    kind.clear(sums[head]);
  }
  for (int64_t i = 0; i < seen.count; ++i) {
    load_seen(kind, keys, codec, plane, kv_head, seen, i, other);
    for (int64_t head = 0; head < group; ++head) {
      scores[head * seen.count + i] = kind.product(queries[head], part_of);
    }
  }
  for (int64_t head = 0; head < group; ++head) {
    const typename Kind::Real share = 1 / exponentials(scores + head * seen.count, seen.count);
    for (int64_t i = 0; i < seen.count; ++i) {
      scores[head * seen.count + i] *= share;
    }
  }
  for (int64_t i = 0; i < seen.count; ++i) {
    load_seen(kind, values, codec, plane, kv_head, seen, i, other);
    for (int64_t head = 0; head < group; ++head) {
      kind.add_weighted(scores[head * seen.count + i], part_of, sums[head]);
    }
  }
  for (int64_t head = 0; head < group; ++head) {
    kind.write(sums[head], output + head * kind.head_dim());
  }
}

struct CodedAttention {
  const void *tail_keys, *tail_values;
  const uint8_t *key_codes, *value_codes;
  const BFloat16 *key_scales, *value_scales;
  const void* query;
  void* output;
  const int64_t *sequences, *positions, *planes;
  Places places;
  Codec codec;
  int64_t rows, heads, head_dim, segment, tail_total;
  double scaling;
  int64_t threads;
};

template <typename Element>
void attend_all_coded(const CodedAttention& all) {
  using Kind = Heads<Element, 0>;
  const Kind kind{all.head_dim};
  const int64_t kv_heads = all.codec.kv_heads, shared = all.heads / kv_heads;
  const Coded<Element> keys{static_cast<const Element*>(all.tail_keys), all.key_codes, all.key_scales};
  const Coded<Element> values{static_cast<const Element*>(all.tail_values), all.value_codes, all.value_scales};
  int64_t work = 0, longest = 0;
  for (int64_t row = 0; row < all.rows; ++row) {
    work += (all.positions[row] + 1) * all.heads * all.head_dim;
    longest = most(longest, all.positions[row] + 1);
  }
  const int64_t threads = most<int64_t>(1, least(all.threads, work / THREAD_WORK));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch<int64_t> at;
    Scratch<typename Kind::Real> scores;
    Scratch<typename Kind::Head> workspace;
    Seen seen{at.of(longest), 0, 0};
    auto *own_scores = scores.of(shared * longest);
    auto* heads = workspace.of(2 * shared);
    int64_t known = -1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < all.rows * kv_heads; ++task) {
      const int64_t row = task / kv_heads, kv_head = task % kv_heads, last = all.positions[row];
      const int64_t begin = (row * all.heads + kv_head * shared) * all.head_dim;
      Element* own = static_cast<Element*>(all.output) + begin;
      if (last < 0) {
        std::memset(static_cast<void*>(own), 0, shared * all.head_dim * sizeof(Element));
        continue;
      }
      if (row != known) {
        find_seen(all.places, all.segment, all.sequences[row], last, all.planes[row], all.tail_total, seen);
        known = row;
      }
      attend_coded(
          kind, static_cast<const Element*>(all.query) + begin, keys, values, all.codec, all.planes[row], kv_head, seen,
          shared, static_cast<typename Kind::Real>(all.scaling), own_scores, heads, own);
    }
  }
}

}  // namespace

// `dtype` as `ELEMENTS` of row_attention.py counts them.
EXPORTED(void, attend_coded_rows)(
    int64_t dtype, const void* tail_keys, const uint8_t* key_codes, const void* key_scales, const void* tail_values,
    const uint8_t* value_codes, const void* value_scales, const void* query, void* output, const int64_t* bits,
    const int64_t* offsets, const int64_t* sequences, const int64_t* positions, const int64_t* planes,
    const int64_t* blocks, const int64_t* starts, const bool* seen, int64_t anchor, int64_t group, int64_t coded,
    int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t segment, int64_t size, int64_t tail_total,
    int64_t table_width, int64_t seen_width, double scaling, int64_t threads) {
  const Places places{blocks, starts, seen, size, 0, table_width, seen_width};
  const CodedAttention all{
      tail_keys, tail_values, key_codes, value_codes, static_cast<const BFloat16*>(key_scales),
      static_cast<const BFloat16*>(value_scales), query, output, sequences, positions, planes, places,
      {bits, offsets, anchor, group, coded, kv_heads}, rows, heads, head_dim, segment, tail_total, scaling, threads};
  of_element(dtype, [&](auto element) { attend_all_coded<decltype(element)>(all); });
}
