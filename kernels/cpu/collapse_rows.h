// Certainty of logits, and repetition of texts updated id by id; see collapse_rows.py.
#pragma once
#include "constants.h"
#include "vectors.h"

namespace {

// Ids that are kept before the oldest are dropped.
constexpr int64_t ROOM = 4 * WINDOW;

// What is kept of a text; zeros before its first id.
struct Text {
  int64_t count;     // ids so far
  int64_t end;       // where the next one goes
  int64_t distinct;  // distinct ids in the window
  int64_t grams;     // distinct n-grams in the window
  int64_t observed;  // entropies in the mean
  double mean;
  double variance;
  int32_t matches[LAGS];  // by lag, from 1: ids of its span that equal the one so far back
  int32_t ids[ROOM];      // before the first one, numbers that are no ids and all different
};

inline bool holds(const int32_t* ids, int64_t count, int32_t id) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found |= ids[i] == id;
  }
  return found;
}

// Whether the n-gram at `gram` begins anywhere among so many places from `ids` on.
inline bool holds_gram(const int32_t* ids, int64_t count, const int32_t* gram) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t same = 1;
    for (int64_t k = 0; k < NGRAM; ++k) {
      same &= ids[i + k] == gram[k];
    }
    found |= same;
  }
  return found;
}

inline void add(Text& text, int32_t id) {
  if (text.count == 0) {
    for (int64_t i = 0; i < 2 * WINDOW; ++i) {
      text.ids[i] = static_cast<int32_t>(-1 - i);
    }
    text.end = 2 * WINDOW;
  }
  if (text.end == ROOM) {
    copy(text.ids + ROOM - 2 * WINDOW, 2 * WINDOW, text.ids);
    text.end = 2 * WINDOW;
  }
  text.ids[text.end++] = id;
  ++text.count;
  const int32_t* newest = text.ids + text.end - 1;
  for (int64_t lag = 1; lag <= LAGS; ++lag) {
    const int64_t span = most<int64_t>(lag, SHORTEST);
    // the pair that has just left the span
    text.matches[lag - 1] += (newest[0] == newest[-lag]) - (newest[-span] == newest[-span - lag]);
  }
  const int32_t* oldest = newest - (WINDOW - 1);
  const bool full = text.count > WINDOW;
  text.distinct += !holds(oldest, WINDOW - 1, id);
  // the id, and the n-gram, that have just left the window; either may be the last of its kind
  text.distinct -= full && !holds(oldest, WINDOW - 1, oldest[-1]);
  constexpr int64_t GRAMS = WINDOW - NGRAM + 1;
  text.grams += text.count >= NGRAM && !holds_gram(oldest, GRAMS - 1, newest - (NGRAM - 1));
  text.grams -= full && !holds_gram(oldest, GRAMS - 1, oldest - 1);
}

// Drop of an entropy against those before it, which it then joins.
inline double fold(Text& text, double entropy) {
  if (!std::isfinite(entropy)) {
    return 0.0;
  }
  const double step = entropy - text.mean;
  const double drop = text.observed >= WARM_UP ? -step / std::sqrt(most(text.variance, FLOOR)) : 0.0;
  if (text.observed) {
    text.variance = (1 - ALPHA) * (text.variance + ALPHA * step * step);
    text.mean += ALPHA * step;
  } else {
    text.mean = entropy;
  }
  ++text.observed;
  return drop;
}

// A part of the proximity: low, high and weight.
inline double part(const double* rule, double value) {
  return rule[2] * least(1.0, most(0.0, (value - rule[0]) / (rule[1] - rule[0])));
}

}  // namespace

EXPORTED(int64_t, text_bytes)() {
  return sizeof(Text);
}

// `certain` holds the entropies of all rows and then their margins, or is null; `out` one line for each statistic.
EXPORTED(void, collapse_rows)(
    Text* const* texts, const int64_t* ids, const float* certain, const double* rule, double* out, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    Text& text = *texts[row];
    add(text, static_cast<int32_t>(ids[row]));
    double best = 0;
    int64_t lag = 0;
    for (int64_t i = 1; i <= LAGS; ++i) {
      const int64_t span = most<int64_t>(i, SHORTEST);
      const double share = static_cast<double>(text.matches[i - 1]) / static_cast<double>(span);
      if (text.count >= span + i && share > best) {
        best = share;
        lag = i;
      }
    }
    const int64_t known = least<int64_t>(text.count, WINDOW), grams = most<int64_t>(1, known - NGRAM + 1);
    const int64_t echoes = most<int64_t>(0, known - NGRAM + 1) - text.grams;
    const double periodicity = static_cast<float>(best);
    const double echo = static_cast<float>(static_cast<double>(echoes) / static_cast<double>(grams));
    const double distinct = static_cast<float>(static_cast<double>(text.distinct) / static_cast<double>(known));
    const double weight =
        least(1.0, most(0.0, static_cast<double>(text.count - NGRAM + 1) / static_cast<double>(FULL_ECHO)));
    double repetition = 1 - part(rule, periodicity);
    repetition *= (1 - part(rule + 3, echo * weight)) * (1 - part(rule + 6, 1 - distinct));
    const double nothing = std::numeric_limits<double>::quiet_NaN();
    const double entropy = certain ? certain[row] : nothing, margin = certain ? certain[rows + row] : nothing;
    const double drop = fold(text, entropy);
    const double sure = part(rule + 9, drop) + part(rule + 12, std::isfinite(margin) ? margin : 0.0);
    const double unsure = part(rule + 9, 0.0) + part(rule + 12, 0.0);
    const double proximity = 1 - repetition * (1 - least(MOST_CERTAINTY, sure));
    const double alone = 1 - repetition * (1 - least(MOST_CERTAINTY, unsure));
    const double line[] = {
        entropy,      margin, static_cast<float>(drop), periodicity, static_cast<double>(lag), echo, distinct,
        static_cast<float>(proximity), alone};
    for (int64_t i = 0; i < 9; ++i) {
      out[i * rows + row] = line[i];
    }
  }
}

// Entropy and margin of rows of logits, `stride` numbers apart: softmax and its two largest in two sweeps.
EXPORTED(void, certainty_rows)(const float* logits, float* out, int64_t rows, int64_t width, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = logits + row * stride;
    const int64_t whole = width - width % LANES<float>;
    constexpr float none = -std::numeric_limits<float>::infinity();
    Floats first = splat(none), second = first;
    for (int64_t i = 0; i < whole; i += LANES<float>) {
      const Floats values = load(own + i);
      second = larger(second, smaller(first, values));
      first = larger(first, values);
    }
    float firsts[LANES<float>], seconds[LANES<float>];
    store<float>(first, firsts);
    store<float>(second, seconds);
    float top = none, next = none;
    const auto take = [&](float value) {
      // NaN is kept, as it makes the row's result
      next = std::isnan(value) ? value : most(next, least(top, value));
      top = std::isnan(value) || std::isnan(top) ? std::numeric_limits<float>::quiet_NaN() : most(top, value);
    };
    for (int64_t i = 0; i < LANES<float>; ++i) {
      take(firsts[i]);
      take(seconds[i]);
    }
    for (int64_t i = whole; i < width; ++i) {
      take(own[i]);
    }
    // sums of exp(l - top), and of (l - top) exp(l - top), which is 0 where l is -inf
    float total = 0, weighted = 0;
    if (whole) {
      Floats totals{}, sums{};
      for (int64_t i = 0; i < whole; i += LANES<float>) {
        const Floats lower = load(own + i) - splat(top), chances = exponential(lower);
        totals = totals + chances;
        sums = sums + larger(lower, splat(std::numeric_limits<float>::lowest())) * chances;
      }
      total = sum_of<float>(totals);
      weighted = sum_of<float>(sums);
    }
    for (int64_t i = whole; i < width; ++i) {
      const float lower = own[i] - top, chance = std::exp(lower);
      total += chance;
      weighted += most(lower, std::numeric_limits<float>::lowest()) * chance;
    }
    out[row] = std::log(total) - weighted / total;
    out[rows + row] = (1.0f - std::exp(next - top)) / total;
  }
}
