// How a range is cut into parts: the same constants on every rank, never a matter of timing.
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

// Part `index` of `count` elements cut into `parts`; sizes differ by at most one. Parts of an
// uneven cut are legal (all-reduce); gathers and scatters ask for even ones at the op boundary.
AXONN_HOST_DEVICE constexpr Range part_of(int64_t count, int64_t parts, int64_t index) {
  const int64_t quotient = count / parts;
  const int64_t remainder = count % parts;
  const int64_t begin = index * quotient + (index < remainder ? index : remainder);
  return {begin, begin + quotient + (index < remainder ? 1 : 0)};
}

// The part that `position` of 0 .. count - 1 lies in: the inverse of part_of.
AXONN_HOST_DEVICE constexpr int64_t part_at(int64_t count, int64_t parts, int64_t position) {
  const int64_t quotient = count / parts;
  const int64_t remainder = count % parts;
  const int64_t in_larger_parts = remainder * (quotient + 1);
  if (position < in_larger_parts) return position / (quotient + 1);
  return remainder + (position - in_larger_parts) / quotient;
}

// Rank visited at `step` by a consumer that starts at its own shard, which is there already.
AXONN_HOST_DEVICE constexpr int64_t own_first(int64_t rank, int64_t size, int64_t step) {
  return (rank + step) % size;
}

// Rank visited at `step` by a producer that serves its peers first and itself last.
AXONN_HOST_DEVICE constexpr int64_t own_last(int64_t rank, int64_t size, int64_t step) {
  return (rank + 1 + step) % size;
}

}  // namespace axonn::comm
