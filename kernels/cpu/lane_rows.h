// Rows of a pass on a CPU: which lanes they are, what ends their loop, why they stop, and what is fed back; see
// lane_rows.py.
#pragma once
#include "constants.h"
#include "path_fates.h"
#include "row_block.h"
#include "row_choice.h"
#include "row_norm.h"

struct StepState {
#define FIELD(type, name) type name;
  STEP_STATE(FIELD)
#undef FIELD
};

// Of the table: a stage that is none counts as idle.
static bool is_live(int64_t stage, int64_t idle) {
  return stage >= 0 && stage < idle;
}

static int64_t column_of(const StepState* step, int64_t column, int64_t row) {
  return step->columns[column * step->lanes + row];
}

// Live lanes by stage, those of one stage in their order, with their lines of the table and their states; how many.
static int64_t start(StepState* step) {
  const int64_t depth = step->depth, idle = 2 * depth;
  thread_local Scratch<int64_t> scratch;
  int64_t* starts = scratch.of(idle + 1);
  std::memset(starts, 0, (idle + 1) * sizeof(int64_t));
  for (int64_t lane = 0; lane < step->lanes; ++lane) {
    const int64_t stage = step->table[lane * TABLE_WIDTH + STAGE];
    if (is_live(stage, idle)) {
      ++starts[stage + 1];
    }
  }
  for (int64_t stage = 0; stage < idle; ++stage) {
    starts[stage + 1] += starts[stage];
  }
  step->count = starts[idle];
  step->decoding = starts[depth];
  step->entering = 0;
  for (int64_t lane = 0; lane < step->lanes; ++lane) {
    const int64_t* line = step->table + lane * TABLE_WIDTH;
    if (!is_live(line[STAGE], idle)) {
      continue;
    }
    const int64_t row = starts[line[STAGE]]++, plane = line[STAGE] % depth;
    copy(line, TABLE_WIDTH, step->lines + row * TABLE_WIDTH);
    const int64_t values[] = {lane, lane / depth, line[CACHE_POSITION], line[POSITION], plane, plane + 1};
    for (int64_t column = 0; column < COLUMNS; ++column) {
      step->columns[column * step->lanes + row] = values[column];
    }
    std::memcpy(step->previous + row * step->bytes, step->hidden + lane * step->bytes, step->bytes);
  }
  return step->count;
}

EXPORTED(int64_t, start_rows)(StepState* step) {
  return start(step);
}

// Puts states after a loop, `stride` bytes apart, into their lanes, and keeps them for statistics where paths are kept.
static void keep_states(StepState* step, const char* states, int64_t stride) {
  for (int64_t row = 0; row < step->count; ++row) {
    const char* own = states + row * stride;
    std::memcpy(step->hidden + column_of(step, LANE, row) * step->bytes, own, step->bytes);
    if (step->paths != nullptr) {
      const int64_t position = column_of(step, AT, row) % step->window;
      const int64_t at = column_of(step, SEQUENCE, row) * step->window + position;
      char* to = step->paths + (at * step->depth + column_of(step, PLANE, row)) * step->path_bytes;
      std::memcpy(to, own, step->path_bytes);
    }
  }
}

// Whether an exit that was given has come, of a token at a cache position of a sequence.
static bool has_come(const StepState* step, int64_t sequence, int64_t position, int64_t prompt, int64_t loops) {
  const int64_t count = step->given_count, at = (position - prompt) % count;
  return loops >= step->given[sequence * count + (at < 0 ? at + count : at)];
}

// `loop_end.observe` of all rows, given their states after the loop, `stride` bytes apart.
template <typename Element>
void watch(StepState* step, const char* states, int64_t stride) {
  const int64_t width = step->width;
  Element* differences = static_cast<Element*>(step->differences);
  for (int64_t row = 0; row < step->count; ++row) {
    const int64_t lane = column_of(step, LANE, row), sequence = column_of(step, SEQUENCE, row);
    const int64_t *own = step->settings + sequence * SETTINGS_WIDTH, loops = column_of(step, LOOPS, row);
    int32_t* counts = step->counts + lane * step->counts_width;
    const Watched token{differences + lane * KEPT * width, step->gram + lane * GRAM_SIZE, counts};
    const float threshold = step->thresholds[sequence * THRESHOLDS + OWN];
    const Watch rule{own[MODE], own[PATIENCE], threshold, step->noise, step->growth, step->spiral};
    const Element* now = reinterpret_cast<const Element*>(states + row * stride);
    const Element* before = reinterpret_cast<const Element*>(step->previous + row * step->bytes);
    const bool holds = watch_loop(token, now, before, width, rule);
    const bool diverged = own[BREAK_AFTER] > 0 && counts[DIVERGING] >= own[BREAK_AFTER];
    const bool gated = step->asks_gate && row < step->decoding && step->met[row];
    const bool met = (holds || gated) && loops >= least(own[MIN_LOOPS], own[LAST]);
    step->decided[row] = met ? MET : diverged ? DIVERGED : 0;
  }
}

// Why decoding rows stop, and the next stage of all; which rows are to be read.
static void stop(StepState* step, const bool* met) {
  const int64_t depth = step->depth;
  const bool verify = step->verify, prompts = step->prompts;
  int64_t reads = 0;
  for (int64_t row = 0; row < step->count; ++row) {
    const int64_t* line = step->lines + row * TABLE_WIDTH;
    int64_t* lane = step->table + column_of(step, LANE, row) * TABLE_WIDTH;
    const int64_t* own = step->settings + column_of(step, SEQUENCE, row) * SETTINGS_WIDTH;
    const int64_t loops = column_of(step, LOOPS, row);
    int64_t stage = line[STAGE] + 1;
    bool is_read = verify && own[VERIFY] > 0 && (own[REDRAFT] > 0 || loops == depth);
    if (row < step->decoding) {
      const bool last = loops >= own[LAST];
      int64_t code = last ? LAST_LOOP : 0;
      if (step->differences != nullptr && (step->decided[row] == MET || (step->decided[row] == DIVERGED && !last))) {
        code = step->decided[row];
      }
      if (met != nullptr && met[row] && loops >= own[MIN_LOOPS]) {
        code = MET;
      }
      if (step->given != nullptr) {
        const bool come = has_come(step, column_of(step, SEQUENCE, row), line[CACHE_POSITION], own[PROMPT], loops);
        code = come ? MET : last ? LAST_LOOP : 0;
      }
      if (verify && prompts && own[VERIFY] > 0 && line[CACHE_POSITION] < own[PROMPT]) {
        // read at loop T; before that it is only noted how the rule stood first
        int64_t flags = line[FLAGS];
        if (flags == 0) {
          flags = code == MET ? MET_FLAG : code == DIVERGED ? DIVERGED_FLAG : 0;
        }
        lane[FLAGS] = flags;
        code = loops < depth ? 0 : flags == MET_FLAG ? MET : LAST_LOOP;
      }
      step->codes[row] = code;
      is_read = code > 0;
      if (is_read) {
        const bool leaves = own[DROPS_AT_EXIT] > 0 && (line[CACHE_POSITION] >= own[PROMPT] || last);
        stage = leaves ? 2 * depth : stage + depth;
        if (leaves && step->drops && step->block != nullptr) {
          const Block& block = *static_cast<const Block*>(step->block);
          propagate(block, column_of(step, SEQUENCE, row), line[CACHE_POSITION], loops - 1, depth);
        }
      }
    }
    lane[STAGE] = stage;
    if (is_read) {
      step->which[reads++] = row;
    }
  }
  step->reads = reads;
}

// The gate's logit of a normed state, as exact as its numbers are.
template <typename Element>
float gate_logit(const StepState* step, const Element* state) {
  const int64_t width = step->width;
  float parts[SIDE_BY_SIDE] = {};
  float sum = step->gate_bias[0];
  int64_t i = 0;
  for (; i + SIDE_BY_SIDE <= width; i += SIDE_BY_SIDE) {
    for (int64_t j = 0; j < SIDE_BY_SIDE; ++j) {
      parts[j] += wide(state[i + j]) * step->gate_weight[i + j];
    }
  }
  for (; i < width; ++i) {
    sum += wide(state[i]) * step->gate_weight[i];
  }
  for (const float part : parts) {
    sum += part;
  }
  return wide(narrow<Element>(sum));
}

// `qexit` of decoding rows, given their normed states, `stride` bytes apart, or the gate's logits of them.
template <typename Element>
void ask_gate(StepState* step, const char* states, int64_t stride, const float* gate_logits) {
  for (int64_t row = 0; row < step->decoding; ++row) {
    const Element* state = reinterpret_cast<const Element*>(states + row * stride);
    const float logit = gate_logits ? gate_logits[row] : static_cast<float>(gate_logit(step, state));
    const float hazard = 1.0f / (1.0f + std::exp(-logit));
    float* kept = step->gate + column_of(step, LANE, row) * 2;
    const float survival = kept[SURVIVAL], cumulative = kept[CUMULATIVE] + hazard * survival;
    kept[SURVIVAL] = survival * (1.0f - hazard);
    kept[CUMULATIVE] = cumulative;
    step->met[row] = cumulative >= step->thresholds[column_of(step, SEQUENCE, row) * THRESHOLDS + Q];
  }
}

// The end of a loop, given normed states; rows stop, unless `margin` is a rule.
static void end(StepState* step, const char* states, int64_t stride, const float* gate_logits) {
  keep_states(step, states, stride);
  if (step->asks_gate) {
    const auto ask = [&](auto element) { ask_gate<decltype(element)>(step, states, stride, gate_logits); };
    of_element(step->element, ask);
  }
  if (step->differences != nullptr) {
    const auto take = [&](auto element) { watch<decltype(element)>(step, states, stride); };
    of_element(step->element, take);
  }
  if (!step->leads) {
    stop(step, step->asks_gate ? step->met : nullptr);
  }
}

// The end of a loop of the rows that `start_rows` took, given states after the block; normed here where it is known how.
// The gate's logits of decoding rows are given where its weights are not known.
EXPORTED(void, end_rows)(StepState* step, const void* raw, int64_t stride, const float* gate_logits) {
  const char* states = static_cast<const char*>(raw);
  if (step->norm != nullptr) {
    norm_rows(
        static_cast<const float*>(raw), step->norm, nullptr, reinterpret_cast<float*>(step->states), step->count,
        step->width, step->epsilon);
    states = step->states;
  }
  end(step, states, stride, gate_logits);
}

// `start_rows`, the block and `end_rows` in one. False where nothing but the first of them is done: too many rows, or a
// position that is not in the tables.
static bool loop(StepState* step) {
  start(step);
  float* states = reinterpret_cast<float*>(step->states);
  const int64_t *columns = step->columns, lanes = step->lanes;
  if (step->count > step->most_rows) {
    return false;
  }
  std::memcpy(states, step->previous, step->count * step->bytes);
  const bool ran = run_layers(
      *static_cast<const Block*>(step->block), states, columns + POSITION_OF * lanes, columns + SEQUENCE * lanes,
      columns + AT * lanes, columns + PLANE * lanes, step->count);
  if (ran) {
    norm_rows(states, step->norm, nullptr, states, step->count, step->width, step->epsilon);
    end(step, step->states, step->bytes, nullptr);
  }
  return ran;
}

EXPORTED(bool, loop_rows)(StepState* step) {
  return loop(step);
}

// `margin` of decoding rows, given their logits, beside what the gate has said; then rows stop.
static void lead(StepState* step, const float* logits, int64_t vocabulary, int64_t stride) {
  for (int64_t row = 0; row < step->decoding; ++row) {
    const float* theta = step->thresholds + column_of(step, SEQUENCE, row) * THRESHOLDS + THETA;
    bool leads = false;
    // a rule that is none is never met
    if (std::isfinite(*theta)) {
      margin_rows(logits + row * stride, theta, &leads, 1, vocabulary, 0, 0);
    }
    step->met[row] = leads || (step->asks_gate && step->met[row]);
  }
  stop(step, step->met);
}

EXPORTED(void, lead_rows)(StepState* step, const float* logits, int64_t vocabulary, int64_t stride) {
  lead(step, logits, vocabulary, stride);
}

// Which drafts stand, what is fed back and what is emitted, of `count` rows that were read. Writes lines that say
// anything, and which of the rows they are about; a line `fed` for each token that enters, and their embeddings where
// their weight is known. How many lines; nothing is done and -1 is told where there is no such row, and -2 where an id
// has no embedding.
static int64_t settle(
    StepState* step, const int64_t* which, const int64_t* token_ids, const bool* stands, const bool* ends, int64_t count) {
  const int64_t depth = step->depth, idle = 2 * depth;
  const bool verify = step->verify;
  for (int64_t i = 0; i < count; ++i) {
    if (which[i] < 0 || which[i] >= step->count) {
      return -1;
    }
    if (step->embedding != nullptr && token_ids[i] >= step->embeddings) {
      return -2;
    }
  }
  thread_local Scratch<int64_t> scratch;
  int64_t* oldest = scratch.of(step->lanes / depth);
  if (verify) {
    for (int64_t sequence = 0; sequence < step->lanes / depth; ++sequence) {
      oldest[sequence] = NO_LIMIT;
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = which[i], sequence = column_of(step, SEQUENCE, row);
      if (row >= step->decoding && !stands[i]) {
        oldest[sequence] = least(oldest[sequence], step->lines[row * TABLE_WIDTH + CACHE_POSITION]);
      }
    }
    for (int64_t lane = 0; lane < step->lanes; ++lane) {
      int64_t* line = step->table + lane * TABLE_WIDTH;
      if (line[CACHE_POSITION] > oldest[lane / depth]) {
        line[STAGE] = idle;
      }
    }
  }
  int64_t said = 0, entering = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = which[i];
    const int64_t lane = column_of(step, LANE, row), sequence = column_of(step, SEQUENCE, row);
    const int64_t* line = step->lines + row * TABLE_WIDTH;
    const int64_t* own = step->settings + sequence * SETTINGS_WIDTH;
    const int64_t loops = column_of(step, LOOPS, row), token = token_ids[i], behind = line[CACHE_POSITION] + 1;
    const bool decodes = row < step->decoding, final = !verify || loops >= depth;
    const bool falls = !decodes && !stands[i];
    if (!decodes && !falls && !final) {
      // a draft that stands before loop T changes nothing
      continue;
    }
    const bool survives = !verify || line[CACHE_POSITION] <= oldest[sequence];
    bool over = behind >= own[LIMIT];
    for (int64_t k = 0; k < step->eos_count; ++k) {
      over |= step->eos[sequence * step->eos_count + k] == token;
    }
    if (ends != nullptr) {
      over = ends[i];
    }
    int64_t flags = line[FLAGS];
    if (decodes) {
      flags = step->codes[row] == MET ? MET_FLAG : step->codes[row] == DIVERGED ? DIVERGED_FLAG : 0;
    }
    const int64_t depth_read = decodes || falls ? loops : line[DEPTH];
    const bool enters = (decodes || falls) && survives;
    if (enters) {
      if (!final) {
        // a new draft is noted with the token that it was read from
        int64_t* noted = step->table + lane * TABLE_WIDTH;
        noted[DRAFT] = token;
        noted[DEPTH] = depth_read;
        noted[FLAGS] = flags;
      }
      const int64_t following = lane / depth * depth + (lane + 1) % depth;
      const int64_t entry[] = {over ? idle : 0, behind, line[POSITION] + 1, NO_DRAFT, 0, 0};
      copy(entry, TABLE_WIDTH, step->table + following * TABLE_WIDTH);
      if (!over) {
        const int64_t id = most<int64_t>(token, 0);
        if (step->embedding != nullptr) {
          std::memcpy(step->hidden + following * step->bytes, step->embedding + id * step->width, step->bytes);
        }
        step->gate[following * 2 + SURVIVAL] = 1.0f;
        step->gate[following * 2 + CUMULATIVE] = 0.0f;
        if (step->counts != nullptr) {
          std::memset(step->counts + following * step->counts_width, 0, step->counts_width * sizeof(int32_t));
        }
        const int64_t next[] = {following, id, line[POSITION] + 1};
        for (int64_t k = 0; k < 3; ++k) {
          step->fed[k * step->lanes + entering] = next[k];
        }
        ++entering;
      }
    }
    const bool emits = survives && (final || (decodes && own[VERIFY] == 0));
    const int64_t told[] = {emits, sequence, token, depth_read, behind, falls ? 0 : flags, over, !falls, enters};
    copy(told, LINE_WIDTH, step->emitted + said * LINE_WIDTH);
    step->kept[said++] = i;
  }
  step->entering = entering;
  return said;
}

EXPORTED(int64_t, commit_rows)(
    StepState* step, const int64_t* which, const int64_t* token_ids, const bool* stands, const bool* ends, int64_t count) {
  return settle(step, which, token_ids, stands, ends, count);
}

// Takes the likeliest ids of the rows that were to be read, and settles them; logits are those of these, or of all.
static int64_t commit_greedy(
    StepState* step, const float* logits, int64_t vocabulary, int64_t stride, bool of_all, int64_t broken) {
  for (int64_t i = 0; i < step->reads; ++i) {
    const int64_t row = step->which[i];
    argmax_rows(logits + (of_all ? row : i) * stride, step->token_ids + i, 1, vocabulary, 0, broken);
    step->stands[i] = step->token_ids[i] == step->lines[row * TABLE_WIDTH + DRAFT];
  }
  return settle(step, step->which, step->token_ids, step->stands, nullptr, step->reads);
}

EXPORTED(int64_t, commit_greedy)(
    StepState* step, const float* logits, int64_t vocabulary, int64_t stride, bool of_all, int64_t broken) {
  return commit_greedy(step, logits, vocabulary, stride, of_all, broken);
}

// A whole step, with the likeliest ids: `loop_rows`, the head of the rows that a rule or a reading needs, `lead_rows` and
// `commit_greedy`. -3 where nothing but `start_rows` is done, as `loop_rows` has it.
EXPORTED(int64_t, step_rows)(StepState* step, int64_t threads, int64_t broken) {
  if (!loop(step)) {
    return -3;
  }
  const int64_t width = step->width, vocabulary = step->vocabulary;
  const float* states = reinterpret_cast<const float*>(step->states);
  bool of_all = false;
  if (step->leads) {
    const int64_t count = step->whole ? step->count : step->decoding;
    row_dot(states, step->head, step->logits, count, width, vocabulary, threads);
    lead(step, step->logits, vocabulary, vocabulary);
    of_all = step->whole || !step->verify;
  }
  if (!of_all && step->reads > 0) {
    thread_local Scratch<float> scratch;
    float* some = scratch.of(step->reads * width);
    for (int64_t i = 0; i < step->reads; ++i) {
      copy(states + step->which[i] * width, width, some + i * width);
    }
    row_dot(some, step->head, step->logits, step->reads, width, vocabulary, threads);
  }
  return step->reads > 0 ? commit_greedy(step, step->logits, vocabulary, vocabulary, of_all, broken) : 0;
}

// How many lanes are live.
EXPORTED(int64_t, live_lanes)(const int64_t* table, int64_t lanes, int64_t depth) {
  int64_t live = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    live += is_live(table[lane * TABLE_WIDTH + STAGE], 2 * depth);
  }
  return live;
}

// Counts the live rows of new tokens of each sequence in the coming pass, and the passes with any; sequence and cache
// position of each token for which it is the last one, in `left`. How many those are; and one more than the largest
// cache position of a live row.
EXPORTED(int64_t, count_rows)(
    const int64_t* table, int64_t sequences, int64_t depth, const int64_t* prompts, int64_t* passes, int64_t* rows,
    int64_t* left, int64_t* longest) {
  int64_t leaving = 0;
  *longest = 0;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    int64_t live = 0;
    const int64_t* line = table + sequence * depth * TABLE_WIDTH;
    for (int64_t lane = 0; lane < depth; ++lane, line += TABLE_WIDTH) {
      if (!is_live(line[STAGE], 2 * depth)) {
        continue;
      }
      live += line[CACHE_POSITION] >= prompts[sequence];
      *longest = most(*longest, line[CACHE_POSITION] + 1);
      if (line[STAGE] == depth - 1 || line[STAGE] == 2 * depth - 1) {
        left[2 * leaving] = sequence;
        left[2 * leaving++ + 1] = line[CACHE_POSITION];
      }
    }
    passes[sequence] += live > 0;
    rows[sequence] += live;
  }
  return leaving;
}
