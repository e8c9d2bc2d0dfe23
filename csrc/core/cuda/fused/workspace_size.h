// How much memory a workspace gets. This is plain host code without CUDA headers, so that CPU tests
// cover it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/schedule/partition.h"

namespace axonn::kernels::cuda {

// Memory grows in steps of an eighth of its size. So at most an eighth is unused, and a workspace
// whose need rises gradually grows at most eight times before it has doubled.
inline constexpr int64_t kStepsPerDoubling = 8;

// Size of the flags and the rank's state at the start of a workspace, and of a device memory page.
inline constexpr int64_t kFrontBytes = 132096;
inline constexpr int64_t kPageBytes = int64_t{2} << 20;

// Returns the allocation size for `front_bytes` and a workspace of at least `bytes`. The front is
// not rounded together with the workspace, whose size is often a power of two. `page_bytes`, a
// power of two, is the smallest step.
constexpr int64_t memory_bytes(int64_t bytes, int64_t front_bytes, int64_t page_bytes) {
  if (bytes + front_bytes <= page_bytes) return page_bytes;
  const auto doubling = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
  const int64_t step = std::max(doubling / kStepsPerDoubling, page_bytes);
  return front_bytes + comm::ceil_div(bytes, step) * step;
}

}  // namespace axonn::kernels::cuda
