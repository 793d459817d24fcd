// The layers of a block over few rows of a pass, in float32; see row_block.py.
#pragma once
#include "constants.h"
#include "row_attention.h"
#include "row_dot.h"
#include "row_norm.h"

namespace {

struct Block {
#define FIELD(type, name) type name;
  BLOCK(FIELD)
#undef FIELD
};

// What a layer is made of, and the planes of its K/V. There is no norm after attention and MLP where that is null.
struct Layer {
  const float *norm, *qkv, *out, *mlp_norm, *gate_up, *down;
  float *keys, *values;
  const float *norm_behind, *mlp_norm_behind;
};

// Rotary embedding of heads that lie one after the other; the first half of the sines has its sign turned.
inline void rotate(float* heads, int64_t count, int64_t head_dim, const float* cos, const float* sin) {
  const int64_t half = head_dim / 2;
  for (int64_t head = 0; head < count; ++head) {
    float* own = heads + head * head_dim;
    for (int64_t i = 0; i < half; ++i) {
      const float low = own[i], high = own[i + half];
      own[i] = low * cos[i] + high * sin[i];
      own[i + half] = high * cos[i + half] + low * sin[i + half];
    }
  }
}

// silu(gate) * up of rows that hold both, `[R, 2 F]`; the rows come to lie one after the other, `[R, F]`.
inline void gate(float* rows, int64_t count, int64_t inner) {
  for (int64_t row = 0; row < count; ++row) {
    const float* own = rows + row * 2 * inner;
    float* to = rows + row * inner;
    int64_t i = 0;
    for (; i + LANES<float> <= inner; i += LANES<float>) {
      const Floats x = load(own + i);
      store<float>(x / (exponential(-x) + 1.0f) * load(own + inner + i), to + i);
    }
    for (; i < inner; ++i) {
      to[i] = own[i] / (1.0f + std::exp(-own[i])) * own[inner + i];
    }
  }
}

// The residual with what attention or MLP gave, normed where there is a norm.
inline void add(float* hidden, const float* given, const float* norm, int64_t rows, int64_t width, double epsilon) {
  if (norm != nullptr) {
    norm_rows(given, norm, hidden, hidden, rows, width, epsilon);
    return;
  }
  for (int64_t i = 0; i < rows * width; ++i) {
    hidden[i] += given[i];
  }
}

inline Places places_of(const Block& block) {
  return {block.blocks, block.starts, block.seen, block.size, block.total, block.table_width, block.seen_width};
}

// Copies the K/V of a cache position from a plane to all deeper ones: readers there take its token's last.
inline void propagate(const Block& block, int64_t sequence, int64_t position, int64_t plane, int64_t planes) {
  const int64_t numbers = block.kv_heads * block.head_dim, at = places_of(block).flat(sequence, position);
  const Layer* layers = static_cast<const Layer*>(block.layers);
  for (const Layer* layer = layers; layer < layers + block.count; ++layer) {
    for (int64_t deeper = plane + 1; deeper < planes; ++deeper) {
      const int64_t from = (plane * block.total + at) * numbers, to = (deeper * block.total + at) * numbers;
      copy(layer->keys + from, numbers, layer->keys + to);
      copy(layer->values + from, numbers, layer->values + to);
    }
  }
}

}  // namespace

// False, and nothing is done, where a position is not in the `turns` lines of the tables.
static bool run_layers(
    const Block& block, float* hidden, const int64_t* rotary_positions, const int64_t* sequences,
    const int64_t* positions, const int64_t* planes, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    if (rotary_positions[row] < 0 || rotary_positions[row] >= block.turns) {
      return false;
    }
  }
  const int64_t head_dim = block.head_dim, width = block.width, inner = block.inner, threads = block.threads;
  const int64_t turned = block.heads + block.kv_heads, attended = block.heads * head_dim;
  const int64_t packed = (turned + block.kv_heads) * head_dim, narrow_width = most(width, attended);
  thread_local Scratch<float> scratch;
  float* normed = scratch.of(rows * (narrow_width + most(packed + attended, 2 * inner)));
  float *wide_rows = normed + rows * narrow_width, *heads_out = wide_rows + rows * packed;
  const Places places = places_of(block);
  Attention attention{nullptr,   nullptr,   wide_rows, wide_rows + attended, wide_rows + turned * head_dim,
                      heads_out, sequences, positions, planes,               places,
                      rows,      block.heads, block.kv_heads, head_dim,      packed,
                      packed,    block.scaling, threads};
  const Layer* layers = static_cast<const Layer*>(block.layers);
  for (const Layer* layer = layers; layer < layers + block.count; ++layer) {
    norm_rows(hidden, layer->norm, nullptr, normed, rows, width, block.epsilon);
    row_dot(normed, layer->qkv, wide_rows, rows, width, packed, threads);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = rotary_positions[row] * head_dim;
      rotate(wide_rows + row * packed, turned, head_dim, block.cos + at, block.sin + at);
    }
    attention.keys = layer->keys, attention.values = layer->values;
    attend_of<float>(attention);
    row_dot(heads_out, layer->out, normed, rows, attended, width, threads);
    add(hidden, normed, layer->norm_behind, rows, width, block.epsilon);
    norm_rows(hidden, layer->mlp_norm, nullptr, normed, rows, width, block.epsilon);
    row_dot(normed, layer->gate_up, wide_rows, rows, width, 2 * inner, threads);
    gate(wide_rows, rows, inner);
    row_dot(wide_rows, layer->down, normed, rows, inner, width, threads);
    add(hidden, normed, layer->mlp_norm_behind, rows, width, block.epsilon);
  }
  return true;
}

EXPORTED(bool, run_block)(
    const Block* block, float* hidden, const int64_t* rotary_positions, const int64_t* sequences,
    const int64_t* positions, const int64_t* planes, int64_t rows) {
  return run_layers(*block, hidden, rotary_positions, sequences, positions, planes, rows);
}
