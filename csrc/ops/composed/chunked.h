// The "chunked" algorithm: collective and matmul cut into a few chunks, so that c10d moves one
// while the library multiplies another. For any c10d group, on any number of hosts and devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/schedule/chunk_plan.h"
#include "ops/composed/c10d_collectives.h"

namespace axonn::ops {

// How `length` rows (or columns) of `moved`, which is one rank's part of what crosses ranks, are
// cut: a plan of one shard. The same on all ranks, so it depends on nothing that a rank has for
// itself, as its other operand; the model of core/schedule/chunk_plan.h, which weighs tiles, is
// therefore of no use here, and "auto" measures whether chunks pay.
comm::ChunkPlan plan_chunks(const at::Tensor& moved, int64_t length);

// out[i] = a[i] @ b[i] for every i. On a GPU in one launch, since small products leave SMs idle.
void multiply_blocks(at::Tensor out, const at::Tensor& a, const at::Tensor& b);

// The same matrix for each of several blocks; no copy.
inline at::Tensor for_each(const at::Tensor& matrix, int64_t num_blocks) {
  return matrix.unsqueeze(0).expand({num_blocks, -1, -1});
}

// The ranges of a plan that hold anything; the whole if none does.
std::vector<comm::Range> ranges_of(const comm::ChunkPlan& plan);

// A gather that feeds a matmul: while a chunk is multiplied, the next is on its way.
// start(range) -> Pending; multiply(range, gathered).
template <typename Start, typename Multiply>
void feed(const comm::ChunkPlan& plan, Start&& start, Multiply&& multiply) {
  const auto ranges = ranges_of(plan);
  auto next = start(ranges[0]);
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto current = std::move(next);
    if (i + 1 < ranges.size()) next = start(ranges[i + 1]);
    current.wait();
    multiply(ranges[i], current.output);
  }
}

// A matmul that is drained into a reduction: while a chunk is multiplied, the one before is summed.
// start(range) -> Pending, of the chunk's product; the sums are written to `store(range)`.
template <typename Start, typename Store>
void drain(const comm::ChunkPlan& plan, Start&& start, Store&& store) {
  const auto ranges = ranges_of(plan);
  std::vector<Pending> sums;
  for (const auto& range : ranges) sums.push_back(start(range));
  for (size_t i = 0; i < ranges.size(); ++i) {
    sums[i].wait();
    store(ranges[i]).copy_(sums[i].output);
  }
}

}  // namespace axonn::ops
