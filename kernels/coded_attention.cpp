// Attends rows over their own segment of a tail and over decoded earlier segments; see coded_attention.py. Stands
// behind row_attention.cpp, whose helpers it takes.

// Keys, or values, of one layer.
struct Coded {
  const ELEMENT* tail;          // [planes, tail_total, H_kv, HEAD_DIM]
  const uint8_t* codes;         // plane t from offsets[t] on, [positions, H_kv, HEAD_DIM bits / 8]
  const at::BFloat16* scales;   // [planes, positions, H_kv, HEAD_DIM / group]
};

struct Codec {
  const int64_t* bits;     // [planes]
  const int64_t* offsets;  // [planes]
  int64_t anchor;          // -1 for none
  int64_t group, positions, kv_heads;
};

// Levels of the codes in each byte: a load in place of shifts and masks.
template <int64_t BITS>
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

template <int64_t BITS, bool ADDS>
inline void decode_plane(const uint8_t* codes, const at::BFloat16* scales, int64_t group, Real* numbers) {
  static const Levels<BITS> levels;
  constexpr int64_t PER_BYTE = 8 / BITS;
  alignas(64) Real own[PADDED];
  for (int64_t i = 0; i < HEAD_DIM / PER_BYTE; ++i) {
    std::memcpy(own + i * PER_BYTE, levels.of_byte[codes[i]], sizeof(levels.of_byte[0]));
  }
  for (int64_t begin = 0; begin < HEAD_DIM; begin += group) {
    const Real scale = static_cast<Real>(static_cast<float>(scales[begin / group]));
    for (int64_t i = begin; i < begin + group; ++i) {
      numbers[i] = ADDS ? numbers[i] + scale * own[i] : scale * own[i];
    }
  }
}

template <bool ADDS>
inline void decode_stored(
    const Coded& from, const Codec& codec, int64_t plane, int64_t position, int64_t kv_head, Real* numbers) {
  const int64_t head = position * codec.kv_heads + kv_head;
  const uint8_t* codes = from.codes + codec.offsets[plane] + head * (HEAD_DIM * codec.bits[plane] / 8);
  const at::BFloat16* scales =
      from.scales + (plane * codec.positions * codec.kv_heads + head) * (HEAD_DIM / codec.group);
  if (codec.bits[plane] == 1) {
    decode_plane<1, ADDS>(codes, scales, codec.group, numbers);
  } else if (codec.bits[plane] == 2) {
    decode_plane<2, ADDS>(codes, scales, codec.group, numbers);
  } else if (codec.bits[plane] == 4) {
    decode_plane<4, ADDS>(codes, scales, codec.group, numbers);
  } else {
    decode_plane<8, ADDS>(codes, scales, codec.group, numbers);
  }
}

// Where the numbers that a row sees lie: `coded` of them in few bits, then those of the tail.
struct Seen {
  std::vector<int64_t> at;
  int64_t coded;
};

inline void find_seen(
    const Places& places, int64_t segment, int64_t sequence, int64_t last, int64_t plane, int64_t tail_total,
    Seen& seen) {
  const int64_t begin = last / segment * segment;
  seen.at.clear();
  seen.coded = 0;
  for (int64_t position = places.starts == nullptr ? 0 : std::min(places.starts[sequence], last); position <= last;
       ++position) {
    if (places.seen != nullptr && !places.seen[sequence * places.seen_width + position]) {
      continue;
    }
    const bool is_coded = position < begin;
    seen.coded += is_coded;
    seen.at.push_back(
        is_coded ? places.flat(sequence, position) : plane * tail_total + sequence * segment + position % segment);
  }
}

inline Head load_seen(
    const Coded& from, const Codec& codec, int64_t plane, int64_t kv_head, const Seen& seen, int64_t i) {
  if (i >= seen.coded) {
    return load_head(from.tail + (seen.at[i] * codec.kv_heads + kv_head) * HEAD_DIM);
  }
  alignas(64) Real numbers[PADDED] = {};
  decode_stored<false>(from, codec, plane, seen.at[i], kv_head, numbers);
  if (codec.anchor >= 0 && codec.anchor != plane) {
    decode_stored<true>(from, codec, codec.anchor, seen.at[i], kv_head, numbers);
  }
  Head head;
  for (int64_t j = 0; j < PARTS; ++j) {
    head.part[j] = Vec::loadu(numbers + j * LANES);
  }
  return head;
}

// Every head that shares a K/V head: what is decoded is decoded once for them all.
inline void attend_coded(
    const ELEMENT* query, const Coded& keys, const Coded& values, const Codec& codec, int64_t plane, int64_t kv_head,
    const Seen& seen, int64_t group, Real scaling, std::vector<Real>& scores, std::vector<Head>& heads,
    ELEMENT* output) {
  const int64_t count = static_cast<int64_t>(seen.at.size());
  scores.resize(group * count);
  heads.resize(2 * group);
  Head *queries = heads.data(), *sums = heads.data() + group;
  for (int64_t head = 0; head < group; ++head) {
    queries[head] = load_head(query + head * HEAD_DIM);
    for (int64_t j = 0; j < PARTS; ++j) {
      queries[head].part[j] = queries[head].part[j] * Vec(scaling);
      sums[head].part[j] = Vec(0);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Head key = load_seen(keys, codec, plane, kv_head, seen, i);
    for (int64_t head = 0; head < group; ++head) {
      Vec products = queries[head].part[0] * key.part[0];
      for (int64_t j = 1; j < PARTS; ++j) {
        products = at::vec::fmadd(queries[head].part[j], key.part[j], products);
      }
      scores[head * count + i] = sum_of(products);
    }
  }
  for (int64_t head = 0; head < group; ++head) {
    const Vec share(1 / exponentials(scores.data() + head * count, count));
    for (int64_t j = 0; j < PARTS; ++j) {
      queries[head].part[j] = share;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Head value = load_seen(values, codec, plane, kv_head, seen, i);
    for (int64_t head = 0; head < group; ++head) {
      const Vec weight(scores[head * count + i]);
      for (int64_t j = 0; j < PARTS; ++j) {
        sums[head].part[j] = at::vec::fmadd(weight, value.part[j], sums[head].part[j]);
      }
    }
  }
  alignas(64) Real wide[PADDED];
  for (int64_t head = 0; head < group; ++head) {
    for (int64_t j = 0; j < PARTS; ++j) {
      (sums[head].part[j] * queries[head].part[j]).store(wide + j * LANES);
    }
    for (int64_t j = 0; j < HEAD_DIM; ++j) {
      output[head * HEAD_DIM + j] = static_cast<ELEMENT>(wide[j]);
    }
  }
}

extern "C" void attend_coded_rows(
    const ELEMENT* tail_keys, const uint8_t* key_codes, const at::BFloat16* key_scales, const ELEMENT* tail_values,
    const uint8_t* value_codes, const at::BFloat16* value_scales, const ELEMENT* query, ELEMENT* output,
    const int64_t* bits, const int64_t* offsets, const int64_t* sequences, const int64_t* cache_positions,
    const int64_t* planes, const int64_t* blocks, const int64_t* starts, const bool* seen_positions, int64_t anchor,
    int64_t group, int64_t positions, int64_t rows, int64_t heads, int64_t kv_heads, int64_t segment, int64_t size,
    int64_t tail_total, int64_t table_width, int64_t seen_width, double scaling, int64_t threads) {
  const Places places{blocks, starts, seen_positions, nullptr, size, 0, table_width, seen_width, 0};
  const Codec codec{bits, offsets, anchor, group, positions, kv_heads};
  const Coded keys{tail_keys, key_codes, key_scales}, values{tail_values, value_codes, value_scales};
  const int64_t shared = heads / kv_heads;
  int64_t work = 0;
  for (int64_t row = 0; row < rows; ++row) {
    work += (cache_positions[row] + 1) * heads * HEAD_DIM;
  }
  threads = std::max<int64_t>(1, std::min(threads, work / THREAD_WORK));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Seen seen;
    std::vector<Real> scores;
    std::vector<Head> workspace;
    int64_t known = -1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < rows * kv_heads; ++task) {
      const int64_t row = task / kv_heads, kv_head = task % kv_heads, last = cache_positions[row];
      ELEMENT* own = output + (row * heads + kv_head * shared) * HEAD_DIM;
      if (last < 0) {
        std::fill(own, own + shared * HEAD_DIM, static_cast<ELEMENT>(0));
        continue;
      }
      if (row != known) {
        find_seen(places, segment, sequences[row], last, planes[row], tail_total, seen);
        known = row;
      }
      attend_coded(
          query + (row * heads + kv_head * shared) * HEAD_DIM, keys, values, codec, planes[row], kv_head, seen, shared,
          static_cast<Real>(scaling), scores, workspace, own);
    }
  }
}
