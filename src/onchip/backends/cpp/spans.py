"""A small C++ function that hashes pieces of memory: have a model's weights been written?"""

from __future__ import annotations

import ctypes

from onchip.backends.cpp.compiler import build

# Eight chains of (h ^ word) * odd, folded: each step is a bijection of h and of the word, so a
# change of one word always changes the hash; other changes are missed once in 2^64. Eight, so
# that the multiplier is never waited for (8 bytes a cycle, more than memory gives to one core).
SOURCE = """\
#include <cstdint>
#include <cstring>

struct Span { const unsigned char* start; uint64_t bytes; uint64_t hash; };
struct Request { Span* spans; int64_t samples, first, count, store; };

static inline uint64_t mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 32);
}

static uint64_t hash(const unsigned char* p, uint64_t bytes) {
  if (bytes <= 8) {
    uint64_t word = 0;
    memcpy(&word, p, bytes);
    return word;
  }
  uint64_t lanes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  for (; bytes >= 64; bytes -= 64, p += 64) {
    uint64_t words[8];
    memcpy(words, p, 64);
    for (int i = 0; i < 8; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  uint64_t h = 0;
  for (; bytes; ) {
    uint64_t word = 0, n = bytes < 8 ? bytes : 8;
    memcpy(&word, p, n);
    h = mix(h, word);
    p += n;
    bytes -= n;
  }
  for (uint64_t lane : lanes) h = mix(h, lane);
  return h;
}

static int check(Span& s, bool store) {
  const uint64_t now = hash(s.start, s.bytes);
  if (now == s.hash) return 0;
  if (store) s.hash = now;
  return 1;
}

extern "C" int kernel(const Request* r) {
  int changed = 0;
  for (int64_t i = 0; i < r->samples; ++i) changed |= check(r->spans[i], r->store);
  if (changed && !r->store) return 1;
  Span* blocks = r->spans + r->first;
  #pragma omp parallel for reduction(|:changed) schedule(static) if (r->count > 32)
  for (int64_t i = 0; i < r->count; ++i) changed |= check(blocks[i], r->store);
  return changed;
}
"""


def span_checker() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """`function(address of five int64)`: 1 if memory differs from what was stored, else 0.

    The five: the address of a table of (start, bytes, hash); how many rows from its beginning
    are looked at; the first and the number of further rows; whether to store the hashes found.
    Raises CompilerError without a compiler, CacheError if the cache can't be written.
    """
    return build(SOURCE).function
