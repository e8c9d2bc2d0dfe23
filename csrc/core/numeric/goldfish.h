// Which targets Goldfish loss leaves out: about one in k, chosen by a hash of the tokens before it.
// docs/memorization.md writes the hash down, so that others can compute it: change neither alone.
// This is C++17, because CUDA kernels share it.
//
// Source: Hans et al., "Be like a Goldfish, Don't Memorize!", arXiv:2406.10209, section 3.1.
#pragma once

#include <cstdint>
#include <limits>

#include "core/numeric/host_device.h"

namespace axonn::kernels {

struct GoldfishRule {
  int64_t h;              // tokens that are hashed
  uint64_t last_dropped;  // a target whose hash is at most this is dropped
  bool with_target;       // the last token that is hashed is the target, not the one before it

  // A 64-bit hash times k is below 2^64 for one hash in k.
  static GoldfishRule of(int64_t k, int64_t h, bool with_target) {
    return {h, std::numeric_limits<uint64_t>::max() / static_cast<uint64_t>(k), with_target};
  }
};

// Rows of tokens, one after the other. All tokens of a row but the first are targets.
struct GoldfishRows {
  const int64_t* ids;        // [rows, length]
  const int64_t* documents;  // [rows, length]: another number begins another document; may be null
  int64_t rows;
  int64_t length;

  AXONN_HOST_DEVICE int64_t targets_per_row() const { return length > 0 ? length - 1 : 0; }
  AXONN_HOST_DEVICE int64_t num_targets() const { return rows * targets_per_row(); }
};

// Sets out[i] to target i, counted over all rows, or to ignore_index if it is dropped, for
// i = begin .. end - 1.
void goldfish_labels(const GoldfishRows& rows, const GoldfishRule& rule, int64_t ignore_index,
                     int64_t begin, int64_t end, int64_t* out);

// --- What host and device share ----------------------------------------------------------------

// The last step of SplitMix64: a bijection of 64 bits.
AXONN_HOST_DEVICE inline uint64_t mix_bits(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

// Every token changes all bits of what follows, whatever the tokens are: zeros and repeated tokens
// are as good as any.
AXONN_HOST_DEVICE inline uint64_t goldfish_hash(const int64_t* ids, int64_t count) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;  // 2^64 over the golden ratio
  uint64_t state = 0;
  for (int64_t i = 0; i < count; ++i) {
    state = mix_bits(state + static_cast<uint64_t>(ids[i]) + kGolden);
  }
  return state;
}

// Whether the token at `place` of a row is dropped as a target. The first h tokens of a row, and of
// a document, are kept.
AXONN_HOST_DEVICE inline bool goldfish_drops(const int64_t* ids, const int64_t* documents,
                                             int64_t place, const GoldfishRule& rule) {
  if (place < rule.h) return false;
  const int64_t first = place - rule.h;
  if (documents != nullptr) {
    for (int64_t i = first; i < place; ++i) {
      if (documents[i] != documents[place]) return false;
    }
  }
  return goldfish_hash(ids + first + (rule.with_target ? 1 : 0), rule.h) <= rule.last_dropped;
}

}  // namespace axonn::kernels
