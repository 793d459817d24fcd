// Which level of instructions this CPU has, and what is said of all levels.
#include <cstdint>

#include "constants.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The best of the levels that are in this library.
EXPORTED const char* best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (wide && __builtin_cpu_supports("avx512bf16")) {
    return "avx512_bf16";
  }
  if (wide) {
    return "avx512";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return "avx2";
  }
#endif
  return "plain";
}

// A line for each constant: its name and its value.
EXPORTED const char* constants() {
#define LINE(name, value) #name " " #value "\n"
  return ALL_CONSTANTS(LINE);
}

// A line for each field of the step, or of a block: its type and its name.
#define FIELD(type, name) #type " " #name "\n"
EXPORTED const char* step_fields() {
  return STEP_STATE(FIELD);
}

EXPORTED const char* block_fields() {
  return BLOCK(FIELD);
}

// A hash of the sources.
EXPORTED const char* sources() {
  return SOURCES;
}
