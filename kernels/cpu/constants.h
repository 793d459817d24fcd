// What is written in Python as well, where a test compares the two.
#pragma once

// sigma0.kernels.exit_state, gram and loop_end
#define FATE_CONSTANTS(X) \
  X(KEPT, 4) X(NO_FATE, 0) X(CONTRACT, 1) X(SPIRAL, 2) X(DIVERGE, 3) \
  X(CONVERGE, 2) X(ACCEL, 3) X(ACCEL_STEPS, 4) X(STREAK, 1) X(DIVERGING, 2) X(FATE_HISTORY, 3) X(FATE_BITS, 2) \
  X(FATE_HISTORY_MASK, 1073741823) X(GRAM_SIZE, 10) X(SHRINK, 0.9) \
  X(PARALLEL, 0.01) X(MAX_RESIDUAL, 0.5) X(TINY, 1e-37) X(MAX_QUOTIENT, 1e30)
// sigma0.kernels.collapse
#define TEXT_CONSTANTS(X) \
  X(WINDOW, 128) X(LAGS, 64) X(SHORTEST, 27) X(NGRAM, 4) X(WARM_UP, 8) \
  X(FULL_ECHO, 37) X(ALPHA, 0.15) X(FLOOR, 0.05) X(MOST_CERTAINTY, 0.5)
// sigma0.decode.step and lanes: columns, their numbers, and values in them
#define LANE_CONSTANTS(X) \
  X(STAGE, 0) X(CACHE_POSITION, 1) X(POSITION, 2) X(DRAFT, 3) X(DEPTH, 4) X(FLAGS, 5) X(TABLE_WIDTH, 6) \
  X(NO_DRAFT, -1) X(MET_FLAG, 1) X(DIVERGED_FLAG, 2) \
  X(LAST, 0) X(MIN_LOOPS, 1) X(DROPS_AT_EXIT, 2) X(VERIFY, 3) X(REDRAFT, 4) X(LIMIT, 5) X(PROMPT, 6) \
  X(MODE, 7) X(PATIENCE, 8) X(BREAK_AFTER, 9) X(SETTINGS_WIDTH, 11) \
  X(NO_LIMIT, 4611686018427387904) X(OWN, 0) X(Q, 1) X(THETA, 2) X(THRESHOLDS, 3) \
  X(MET, 1) X(LAST_LOOP, 2) X(DIVERGED, 3) X(SURVIVAL, 0) X(CUMULATIVE, 1)
// sigma0.kernels.lane_rows
#define ROW_CONSTANTS(X) \
  X(LANE, 0) X(SEQUENCE, 1) X(AT, 2) X(POSITION_OF, 3) X(PLANE, 4) X(LOOPS, 5) X(COLUMNS, 6) X(LINE_WIDTH, 9) \
  X(FINISHED, 0)
#define ALL_CONSTANTS(X) FATE_CONSTANTS(X) TEXT_CONSTANTS(X) LANE_CONSTANTS(X) ROW_CONSTANTS(X)

// The layers of a block, their K/V and where it lies, in this order.
#define BLOCK(X) \
  X(int64_t, count) X(int64_t, width) X(int64_t, head_dim) X(int64_t, heads) X(int64_t, kv_heads) X(int64_t, inner) \
  X(int64_t, size) X(int64_t, total) X(int64_t, table_width) X(int64_t, seen_width) \
  X(int64_t, turns) X(int64_t, threads) X(double, epsilon) X(double, scaling) X(void*, layers) X(float*, cos) \
  X(float*, sin) X(int64_t*, blocks) X(int64_t*, starts) X(bool*, seen)
// The memory that a step's step are in, in this order.
#define STEP_STATE(X) \
  X(int64_t, lanes) X(int64_t, depth) X(int64_t, bytes) X(int64_t, width) X(int64_t, path_bytes) X(int64_t, window) \
  X(int64_t, eos_count) X(int64_t, embeddings) X(int64_t, counts_width) X(int64_t, count) X(int64_t, decoding) \
  X(int64_t, entering) X(int64_t, verify) X(int64_t, prompts) X(int64_t, asks_gate) X(int64_t, given_count) \
  X(int64_t, most_rows) X(int64_t, leads) X(int64_t, whole) X(int64_t, drops) X(int64_t, reads) X(int64_t, vocabulary) \
  X(int64_t, element) X(double, epsilon) X(double, noise) X(double, growth) X(double, spiral) X(void*, block) \
  X(void*, differences) X(float*, gram) X(int64_t*, decided) X(int64_t*, given) X(float*, head) X(float*, logits) \
  X(int64_t*, table) X(int64_t*, settings) X(int64_t*, eos) X(int64_t*, lines) X(int64_t*, columns) \
  X(int64_t*, codes) X(int64_t*, which) X(int64_t*, token_ids) X(int64_t*, emitted) X(int64_t*, kept) \
  X(int64_t*, fed) X(float*, thresholds) X(float*, gate) X(float*, norm) X(float*, gate_weight) \
  X(float*, gate_bias) X(float*, embedding) X(char*, hidden) X(char*, paths) X(char*, previous) X(char*, states) \
  X(int32_t*, counts) X(bool*, met) X(bool*, stands)

namespace {

#define DEFINED(name, value) [[maybe_unused]] constexpr auto name = value;
ALL_CONSTANTS(DEFINED)
#undef DEFINED

}  // namespace
