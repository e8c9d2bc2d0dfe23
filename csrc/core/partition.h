// How a range is cut into parts: the same constants on every rank, never a matter of timing.
#pragma once

#include <cstdint>

namespace axonn::comm {

struct Range {
  int64_t begin;
  int64_t end;
  constexpr int64_t size() const { return end - begin; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

// Part `index` of `count` elements cut into `parts`; sizes differ by at most one. Parts of an
// uneven cut are legal (all-reduce); gathers and scatters ask for even ones at the op boundary.
constexpr Range part_of(int64_t count, int64_t parts, int64_t index) {
  const int64_t quotient = count / parts;
  const int64_t remainder = count % parts;
  const int64_t begin = index * quotient + (index < remainder ? index : remainder);
  return {begin, begin + quotient + (index < remainder ? 1 : 0)};
}

// Rank visited at `step` by a consumer that starts at its own shard, which is there already.
constexpr int64_t own_first(int64_t rank, int64_t size, int64_t step) {
  return (rank + step) % size;
}

// Rank visited at `step` by a producer that serves its peers first and itself last.
constexpr int64_t own_last(int64_t rank, int64_t size, int64_t step) {
  return (rank + 1 + step) % size;
}

}  // namespace axonn::comm
