// The "chunked" algorithm: collective and matmul cut into a few chunks, so that c10d moves one
// while the library multiplies another. For any c10d group, on any number of hosts.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "core/partition.h"
#include "ops/group.h"

namespace axonn::ops::cpu {

// Into how many chunks `length` rows (or columns) of `bytes` in all are cut: the same on all ranks,
// whose shards are equal. Below about 256 KiB a chunk costs more in messages than it hides.
inline int64_t num_chunks(int64_t length, int64_t bytes) {
  constexpr int64_t kMaxChunks = 4;
  constexpr int64_t kMinChunkBytes = 256 << 10;
  return std::clamp<int64_t>(std::min(length, bytes / kMinChunkBytes), 1, kMaxChunks);
}

inline int64_t bytes_of(const at::Tensor& t) {
  return t.numel() * static_cast<int64_t>(t.element_size());
}

// A gather that feeds a matmul: while chunk i is multiplied, chunk i + 1 is on its way.
// start(range) -> Pending; multiply(range, gathered).
template <typename Start, typename Multiply>
void feed(int64_t length, int64_t chunks, Start&& start, Multiply&& multiply) {
  auto next = start(comm::part_of(length, chunks, 0));
  for (int64_t i = 0; i < chunks; ++i) {
    const auto current = std::move(next);
    if (i + 1 < chunks) next = start(comm::part_of(length, chunks, i + 1));
    current.wait();
    multiply(comm::part_of(length, chunks, i), current.output);
  }
}

// A matmul that is drained into a reduction: while chunk i + 1 is multiplied, chunk i is summed.
// multiply(range) -> the product's chunk, stacked by rank; the sums are written to `store(range)`.
template <typename Multiply, typename Store>
void drain(const Group& group, int64_t length, int64_t chunks, Multiply&& multiply, Store&& store) {
  std::vector<Pending> sums;
  for (int64_t i = 0; i < chunks; ++i) {
    sums.push_back(start_reduce_scatter(group, multiply(comm::part_of(length, chunks, i))));
  }
  for (int64_t i = 0; i < chunks; ++i) {
    sums[i].wait();
    store(comm::part_of(length, chunks, i)).copy_(sums[i].output);
  }
}

}  // namespace axonn::ops::cpu
