// Fates of tokens out of the states after their last loops; see path_fates.py.
#pragma once
#include "constants.h"
#include "row_attention.h"

namespace {

// `gram.fate_of_row`: G_ij of the last four differences in `g`, 0 the newest; of those that do not exist, zero.
inline int fate_of(const double g[KEPT][KEPT], int64_t count, double norm, double noise, double growth, double spiral) {
  if (count < 2) {
    return NO_FATE;
  }
  const double g00 = g[0][0], g01 = g[0][1], g02 = g[0][2], g11 = g[1][1], g12 = g[1][2], g13 = g[1][3];
  const double g22 = g[2][2], g23 = g[2][3], g33 = g[3][3];
  const double size = std::sqrt(g00), longest = std::sqrt(most(most(g11, g22), g33));
  const double both = std::sqrt(g00) * std::sqrt(g11);
  if (size <= noise * norm) {
    return CONTRACT;
  }
  const auto angle = [](double cosine) { return std::acos(least(1.0, most(-1.0, cosine))); };
  const double grown = longest > 0 ? size / (longest + TINY) : 0.0;
  bool spirals = grown >= 1 || (both > 0 && angle(g01 / (both + TINY)) >= spiral);
  const bool diverges = grown >= 1 + growth;
  if (diverges || count < 3) {
    return diverges ? DIVERGE : spirals ? SPIRAL : CONTRACT;
  }
  const double two = count < KEPT ? 0.0 : 1.0;
  const double p11 = g11 + two * g22, p12 = g12 + two * g23, p22 = g22 + two * g33;
  double r1 = g01 + two * g12, r2 = g02 + two * g13;
  const double determinant = p11 * p22 - p12 * p12;
  double a, b, whole;
  if (g11 * g22 - g12 * g12 < PARALLEL * g11 * g22 || determinant <= 0) {
    r1 = g01;
    whole = g00;
    a = g01 / (g11 + TINY);
    b = 0.0;
  } else {
    whole = g00 + two * g11;
    a = (r1 * p22 - r2 * p12) / determinant;
    b = (r2 * p11 - r1 * p12) / determinant;
  }
  const bool fits =
      g11 > 0 && whole > 0 && most(0.0, whole - a * r1 - b * r2) <= MAX_RESIDUAL * MAX_RESIDUAL * whole;
  if (!fits) {
    return spirals ? SPIRAL : CONTRACT;
  }
  const double discriminant = a * a + 4 * b;
  double radius;
  if (discriminant < 0) {
    radius = std::sqrt(-b);
    spirals = spirals || angle(a / (2 * radius + TINY)) >= spiral;
  } else {
    radius = (std::abs(a) + std::sqrt(discriminant)) / 2;
  }
  return radius >= 1 + growth ? DIVERGE : spirals ? SPIRAL : CONTRACT;
}

// What is kept of a token between its loops, as `exit_state.ExitState` has it.
struct Watched {
  void* differences;
  float* gram;
  int32_t* counts;
};

// How a rule over differences reads them, of one row.
struct Watch {
  int64_t mode, patience;
  float threshold;
  double noise, growth, spiral;
};

// `loop_end.observe` of a row after its loop: takes the newest difference in, and whether the rule holds.
template <typename Element>
bool watch_loop(const Watched& token, const Element* now, const Element* before, int64_t width, const Watch& rule) {
  thread_local Scratch<float> scratch;
  float *state = scratch.of((KEPT + 1) * width), *differences = state + width;
  const auto widened = [&](const Element* from, float* to) {
    for (int64_t i = 0; i < width; ++i) {
      to[i] = static_cast<float>(wide(from[i]));
    }
  };
  Element* ring = static_cast<Element*>(token.differences);
  int32_t* counts = token.counts;
  const int64_t count = counts[FINISHED], loops = count + 1, kept = least<int64_t>(count, KEPT);
  Element* newest = ring + loops % KEPT * width;
  for (int64_t i = 0; i < width; ++i) {
    newest[i] = count > 0 ? narrow<Element>(wide(now[i]) - wide(before[i])) : Element{};
  }
  double gram[KEPT][KEPT] = {};
  const auto place = [](int64_t i, int64_t j) { return i * KEPT - i * (i - 1) / 2 + j - i; };
  for (int64_t i = 0; i < kept; ++i) {
    widened(ring + (loops - i) % KEPT * width, differences + i * width);
    gram[0][i] = dot(differences, differences + i * width, width);
    for (int64_t j = i; i > 0 && j < kept; ++j) {
      gram[i][j] = token.gram[place(i - 1, j - 1)];
    }
  }
  for (int64_t i = 0; i < KEPT; ++i) {
    for (int64_t j = i; j < KEPT; ++j) {
      token.gram[place(i, j)] = static_cast<float>(gram[i][j]);
    }
  }
  widened(now, state);
  const double norm = std::sqrt(dot(state, state, width));
  const int fate = fate_of(gram, count, norm, rule.noise, rule.growth, rule.spiral);
  if (count > 0) {
    widened(before, state);
  }
  const double length = count > 0 ? std::sqrt(dot(state, state, width)) : 0.0;
  const double size = std::sqrt(gram[0][0]), older = std::sqrt(gram[1][1]);
  const auto over = [](double number, double by) { return static_cast<float>(least(number / (by + TINY), MAX_QUOTIENT)); };
  const double bend = std::sqrt(most(0.0, gram[0][0] - 2 * gram[0][1] + gram[1][1]));
  const float bent = older > 0 ? over(bend, rule.mode == ACCEL_STEPS ? size + older : length) : 0.0f;
  const bool close = loops >= 3 && bent < rule.threshold;
  const bool shrinks = rule.mode == ACCEL_STEPS || (rule.mode == ACCEL && size <= SHRINK * older);
  counts[STREAK] = close && shrinks ? counts[STREAK] * (count > 0) + 1 : 0;
  counts[DIVERGING] = fate == DIVERGE ? counts[DIVERGING] * (count > 0) + 1 : 0;
  const int32_t history = count > 0 ? counts[FATE_HISTORY] : 0;
  counts[FATE_HISTORY] = ((history << FATE_BITS) & FATE_HISTORY_MASK) | fate;
  counts[FINISHED] = static_cast<int32_t>(loops);
  if (rule.mode == CONVERGE) {
    return loops >= 2 && over(size, length) < rule.threshold;
  }
  return (rule.mode == ACCEL || rule.mode == ACCEL_STEPS) && counts[STREAK] >= rule.patience;
}

template <typename Element>
void path_fates(
    const Element* paths, const int64_t* places, const int64_t* loops, int64_t* fates, int64_t count, int64_t total,
    int64_t width, int64_t running, double noise, double growth, double spiral) {
  const int64_t kept = running + KEPT - 1;
  Scratch<float> numbers;
  Scratch<double> sums;
  float *differences = numbers.of((kept + 1) * width), *state = differences + kept * width;
  double *gram = sums.of(kept * kept + running), *norms = gram + kept * kept;
  for (int64_t row = 0; row < count; ++row) {
    const Element* last = paths + (places[row] * total + loops[row] - 1) * width;
    // newest first; the first loop has no difference
    const int64_t known = least(kept, loops[row] - 1);
    std::memset(gram, 0, kept * kept * sizeof(double));
    for (int64_t back = 0; back < known; ++back) {
      const Element *newer = last - back * width, *older = newer - width;
      float* difference = differences + back * width;
      for (int64_t i = 0; i < width; ++i) {
        difference[i] = static_cast<float>(wide(narrow<Element>(wide(newer[i]) - wide(older[i]))));
      }
    }
    for (int64_t back = 0; back < least(running, loops[row]); ++back) {
      for (int64_t i = 0; i < width; ++i) {
        state[i] = static_cast<float>(wide(last[i - back * width]));
      }
      norms[back] = std::sqrt(dot(state, state, width));
    }
    for (int64_t i = 0; i < known; ++i) {
      for (int64_t j = i; j < least<int64_t>(known, i + KEPT); ++j) {
        gram[i * kept + j] = dot(differences + i * width, differences + j * width, width);
      }
    }
    int64_t mildest = std::numeric_limits<int64_t>::max();
    for (int64_t back = 0; back < running; ++back) {
      double own[KEPT][KEPT];
      for (int64_t i = 0; i < KEPT; ++i) {
        for (int64_t j = i; j < KEPT; ++j) {
          own[i][j] = gram[(back + i) * kept + back + j];
        }
      }
      const int fate = fate_of(own, loops[row] - 1 - back, norms[back], noise, growth, spiral);
      mildest = least<int64_t>(mildest, fate);
    }
    fates[row] = mildest;
  }
}

}  // namespace

// `dtype` as `ELEMENTS` of row_attention.py counts them.
EXPORTED(void, path_fates)(
    int64_t dtype, const void* paths, const int64_t* places, const int64_t* loops, int64_t* fates, int64_t count,
    int64_t total, int64_t width, int64_t running, double noise, double growth, double spiral) {
  const auto take = [&](auto element) {
    path_fates(
        static_cast<const decltype(element)*>(paths), places, loops, fates, count, total, width, running, noise, growth,
        spiral);
  };
  of_element(dtype, take);
}
