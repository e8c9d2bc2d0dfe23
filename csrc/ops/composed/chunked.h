// The "chunked" algorithm cuts the collective and the product into a few chunks, so that c10d moves
// one chunk while the library multiplies another. It works for any c10d group, on any number of
// hosts and devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/schedule/chunk_plan.h"
#include "ops/composed/c10d_collectives.h"

namespace axonn::ops {

// Returns a plan of one shard that cuts `length` rows (or columns) of `moved`, this rank's part of
// the data that crosses ranks. The plan must be the same on all ranks, so it depends on nothing
// that may differ between them, such as the other operand. The model of core/schedule/chunk_plan.h
// weighs tiles and is of no use here; "auto" measures whether chunks pay.
comm::ChunkPlan plan_chunks(const at::Tensor& moved, int64_t length);

// Sets out[i] = a[i] @ b[i] for every i. On a GPU this is one launch, because small products leave
// SMs idle.
void multiply_blocks(at::Tensor out, const at::Tensor& a, const at::Tensor& b);

// Returns one tensor that shows the same matrix `num_blocks` times, without a copy.
inline at::Tensor for_each(const at::Tensor& matrix, int64_t num_blocks) {
  return matrix.unsqueeze(0).expand({num_blocks, -1, -1});
}

// Returns the non-empty ranges of a plan, or the whole range if all are empty.
std::vector<comm::Range> ranges_of(const comm::ChunkPlan& plan);

// Runs a gather that feeds a product: while one chunk is multiplied, the next is being gathered.
// The callbacks are start(range) -> Pending and multiply(range, gathered).
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

// Runs a product that is drained into a reduction: while one chunk is multiplied, the previous one
// is summed. start(range) multiplies a chunk and returns its sum as a Pending; the sums are copied
// into `store(range)`.
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
