// Cuts a range into parts, identically on every rank and independently of timing.
#pragma once

#include <cstdint>

#include "core/numeric/host_device.h"

namespace axonn::comm {

struct Range {
  int64_t begin;
  int64_t end;
  AXONN_HOST_DEVICE constexpr int64_t size() const { return end - begin; }
  friend AXONN_HOST_DEVICE constexpr bool operator==(const Range& a, const Range& b) {
    return a.begin == b.begin && a.end == b.end;
  }
};

AXONN_HOST_DEVICE constexpr int64_t ceil_div(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

// Returns part `index` of `count` elements cut into `parts`; sizes differ by at most one. Parts of
// unequal size are legal (all-reduce); gathers and scatters check for equal parts at the op
// boundary.
AXONN_HOST_DEVICE constexpr Range part_of(int64_t count, int64_t parts, int64_t index) {
  const int64_t quotient = count / parts;
  const int64_t remainder = count % parts;
  const int64_t begin = index * quotient + (index < remainder ? index : remainder);
  return {begin, begin + quotient + (index < remainder ? 1 : 0)};
}

// Returns the part that contains `position`, 0 .. count - 1: the inverse of part_of.
AXONN_HOST_DEVICE constexpr int64_t part_at(int64_t count, int64_t parts, int64_t position) {
  const int64_t quotient = count / parts;
  const int64_t remainder = count % parts;
  const int64_t in_larger_parts = remainder * (quotient + 1);
  if (position < in_larger_parts) return position / (quotient + 1);
  return remainder + (position - in_larger_parts) / quotient;
}

// Returns the rank visited at `step` by a consumer that starts with its own shard, which is already
// there.
AXONN_HOST_DEVICE constexpr int64_t own_first(int64_t rank, int64_t size, int64_t step) {
  return (rank + step) % size;
}

// Returns the rank visited at `step` by a producer that serves its peers first and itself last.
AXONN_HOST_DEVICE constexpr int64_t own_last(int64_t rank, int64_t size, int64_t step) {
  return (rank + 1 + step) % size;
}

}  // namespace axonn::comm
