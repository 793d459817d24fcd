// Rows of a pass on a CPU: which lanes they are, why they stop, and what is fed back; see lane_rows.py.
// Columns, codes and flags are defined in front of this text.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

// Live lanes by stage, those of one stage in their order: `count` lines of the table, and the columns of `Rows`.
extern "C" void live_rows(
    const int64_t* table, int64_t lanes, int64_t depth, int64_t count, int64_t* lines, int64_t* columns) {
  const int64_t idle = 2 * depth;
  thread_local std::vector<int64_t> starts;
  starts.assign(idle + 1, 0);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t stage = table[lane * TABLE_WIDTH + STAGE];
    if (stage < idle) {
      ++starts[stage + 1];
    }
  }
  for (int64_t stage = 0; stage < idle; ++stage) {
    starts[stage + 1] += starts[stage];
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t* line = table + lane * TABLE_WIDTH;
    if (line[STAGE] >= idle) {
      continue;
    }
    const int64_t row = starts[line[STAGE]]++, plane = line[STAGE] % depth;
    if (row >= count) {
      continue;
    }
    std::copy(line, line + TABLE_WIDTH, lines + row * TABLE_WIDTH);
    const int64_t values[] = {lane, lane / depth, line[CACHE_POSITION], line[POSITION], plane, plane + 1};
    for (int64_t column = 0; column < COLUMNS; ++column) {
      columns[column * count + row] = values[column];
    }
  }
}

// Keeps states after a loop, `bytes` each and `stride` apart, by sequence, cache position in a ring, and plane.
extern "C" void keep_rows(
    const int64_t* columns, int64_t count, int64_t depth, const char* states, int64_t stride, int64_t bytes,
    char* paths, int64_t window) {
  for (int64_t row = 0; row < count; ++row) {
    const int64_t sequence = columns[count + row], position = columns[2 * count + row], plane = columns[4 * count + row];
    const int64_t at = (sequence * window + position % window) * depth + plane;
    std::memcpy(paths + at * bytes, states + row * stride, bytes);
  }
}

// Why each of the first `decoding` rows stops, and the next stage of all; how many rows are to be read, in `which`.
extern "C" int64_t stop_rows(
    const int64_t* lines, const int64_t* columns, int64_t count, int64_t decoding, int64_t depth,
    const int64_t* settings, const bool* met, const int64_t* decisions, const bool* given, bool verify, bool prompts,
    int64_t* table, int64_t* codes, int64_t* which) {
  int64_t reads = 0;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t* line = lines + row * TABLE_WIDTH;
    int64_t* lane = table + columns[row] * TABLE_WIDTH;
    const int64_t* own = settings + columns[count + row] * SETTINGS_WIDTH;
    const int64_t loops = columns[(COLUMNS - 1) * count + row];
    int64_t stage = line[STAGE] + 1;
    bool is_read = verify && own[VERIFY] > 0 && (own[REDRAFT] > 0 || loops == depth);
    if (row < decoding) {
      const bool last = loops >= own[LAST];
      int64_t code = last ? LAST_LOOP : 0;
      if (decisions != nullptr && (decisions[row] == MET || (decisions[row] == DIVERGED && !last))) {
        code = decisions[row];
      }
      if (met != nullptr && met[row] && loops >= own[MIN_LOOPS]) {
        code = MET;
      }
      if (given != nullptr) {
        code = given[row] ? MET : last ? LAST_LOOP : 0;
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
      codes[row] = code;
      is_read = code > 0;
      if (is_read) {
        const bool in_answer = line[CACHE_POSITION] >= own[PROMPT];
        stage = own[LEAVES] > 0 && (in_answer || last) ? 2 * depth : stage + depth;
      }
    }
    lane[STAGE] = stage;
    if (is_read) {
      which[reads++] = row;
    }
  }
  return reads;
}

// Which drafts stand, what is fed back and what is emitted, of `count` rows that were read of `rows`. Writes lines that
// say anything, and which of the rows they are about; a line `fed` for each token that enters. How many of both.
extern "C" void settle_rows(
    const int64_t* lines, const int64_t* columns, int64_t rows, const int64_t* codes, int64_t decoding, int64_t depth,
    const int64_t* which, const int64_t* token_ids, const bool* stands, const bool* ends, int64_t count,
    const int64_t* settings, const int64_t* eos, int64_t eos_count, bool verify, int64_t lanes, int64_t* table,
    int64_t* emitted, int64_t* kept, int64_t* fed, int64_t* counts) {
  const int64_t idle = 2 * depth;
  thread_local std::vector<int64_t> oldest;
  if (verify) {
    oldest.assign(lanes / depth, NO_LIMIT);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = which[i], sequence = columns[rows + row];
      if (row >= decoding && !stands[i]) {
        oldest[sequence] = std::min(oldest[sequence], lines[row * TABLE_WIDTH + CACHE_POSITION]);
      }
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
      int64_t* line = table + lane * TABLE_WIDTH;
      if (line[CACHE_POSITION] > oldest[lane / depth]) {
        line[STAGE] = idle;
      }
    }
  }
  int64_t said = 0, entering = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = which[i], lane = columns[row], sequence = columns[rows + row];
    const int64_t* line = lines + row * TABLE_WIDTH;
    const int64_t* own = settings + sequence * SETTINGS_WIDTH;
    const int64_t loops = columns[(COLUMNS - 1) * rows + row], token = token_ids[i], behind = line[CACHE_POSITION] + 1;
    const bool decodes = row < decoding, final = !verify || loops >= depth;
    const bool falls = !decodes && !stands[i];
    if (!decodes && !falls && !final) {
      // a draft that stands before loop T changes nothing
      continue;
    }
    const bool survives = !verify || line[CACHE_POSITION] <= oldest[sequence];
    bool over = behind >= own[LIMIT];
    for (int64_t k = 0; k < eos_count; ++k) {
      over |= eos[sequence * eos_count + k] == token;
    }
    if (ends != nullptr) {
      over = ends[i];
    }
    int64_t flags = line[FLAGS];
    if (decodes) {
      flags = codes[row] == MET ? MET_FLAG : codes[row] == DIVERGED ? DIVERGED_FLAG : 0;
    }
    const int64_t depth_read = decodes || falls ? loops : line[DEPTH];
    const bool enters = (decodes || falls) && survives;
    if (enters) {
      if (!final) {
        // a new draft is noted with the token that it was read from
        int64_t* noted = table + lane * TABLE_WIDTH;
        noted[DRAFT] = token;
        noted[DEPTH] = depth_read;
        noted[FLAGS] = flags;
      }
      const int64_t following = lane / depth * depth + (lane + 1) % depth;
      const int64_t entry[] = {over ? idle : 0, behind, line[POSITION] + 1, NO_DRAFT, 0, 0};
      std::copy(entry, entry + TABLE_WIDTH, table + following * TABLE_WIDTH);
      if (!over) {
        const int64_t next[] = {following, std::max<int64_t>(token, 0), line[POSITION] + 1};
        for (int64_t k = 0; k < 3; ++k) {
          fed[k * count + entering] = next[k];
        }
        ++entering;
      }
    }
    const bool emits = survives && (final || (decodes && own[VERIFY] == 0));
    const int64_t told[] = {emits, sequence, token, depth_read, behind, falls ? 0 : flags, over, !falls, enters};
    std::copy(told, told + 9, emitted + said * 9);
    kept[said++] = i;
  }
  counts[0] = said;
  counts[1] = entering;
}
