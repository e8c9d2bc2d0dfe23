// What the fused CPU ops share: tensors over symmetric memory, and the two reductions through
// staging slots. The ops differ in who produces a slot: a copy or a matmul.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <vector>

#include "core/partition.h"
#include "core/reduce.h"
#include "core/symmetric_group.h"
#include "ops/checks.h"
#include "ops/group.h"

namespace axonn::ops::cpu {

// A tensor over memory that the group owns; valid while the call lasts.
inline at::Tensor shared_tensor(const std::byte* data, at::IntArrayRef sizes,
                                const at::TensorOptions& options) {
  return at::from_blob(const_cast<std::byte*>(data), sizes, options);
}

// Stands for all sizes of a tensor in a signature (FNV-1a).
inline int64_t shape_hash(const at::Tensor& t) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const int64_t size : t.sizes()) hash = (hash ^ static_cast<uint64_t>(size)) * 0x100000001B3u;
  return static_cast<int64_t>(hash >> 32);
}

// Slots start on lines of their own, so that no two ranks' data share one.
inline int64_t slot_bytes(int64_t numel, const at::TensorOptions& options) {
  const int64_t bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  return (bytes + comm::kFlagAlignment - 1) / comm::kFlagAlignment * comm::kFlagAlignment;
}

// destination[i] = sum (or maximum) over sources, in their order, on all threads of this rank.
inline void reduce_parallel(std::byte* destination, const std::vector<const std::byte*>& sources,
                            int64_t count, c10::ScalarType type, kernels::ReduceOp op) {
  constexpr int64_t kGrain = 32768;  // below this a thread costs more than it adds
  const auto dtype = data_type(type);
  at::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t offset = begin * kernels::size_of(dtype);
    std::vector<const void*> shifted;
    for (const auto* source : sources) shifted.push_back(source + offset);
    kernels::reduce_slots(destination + offset, shifted.data(),
                          static_cast<int64_t>(shifted.size()), end - begin, dtype, op);
  });
}

// This rank's block of the sum over ranks. Calls `produce(rank, slot)` for every destination rank,
// peers first: it writes what this rank adds to that rank's block. Slots carry the tensor's dtype;
// sums are made in rank order in fp32 (fp64 for fp64).
template <typename Produce>
at::Tensor staged_reduce_scatter(const Group& group, const comm::CallSignature& signature,
                                 at::IntArrayRef block_sizes, const at::TensorOptions& options,
                                 Produce&& produce) {
  auto output = at::empty(block_sizes, options);
  const int64_t stride = slot_bytes(output.numel(), options);
  comm::Call call(*group.shared, signature, stride * group.size);
  for (int64_t step = 0; step < group.size; ++step) {
    const int64_t destination = comm::own_last(group.rank, group.size, step);
    produce(destination,
            shared_tensor(call.workspace() + destination * stride, block_sizes, options));
    call.signal(destination);
  }
  std::vector<const std::byte*> sources;
  for (int64_t source = 0; source < group.size; ++source) {
    call.wait(source, group.rank);
    sources.push_back(call.workspace_of(source) + group.rank * stride);
  }
  reduce_parallel(static_cast<std::byte*>(output.mutable_data_ptr()), sources, output.numel(),
                  output.scalar_type(), kernels::ReduceOp::kSum);
  return output;
}

// The sum (or maximum) over ranks of a [rows, columns] matrix, on every rank. Calls
// `produce(rows, slot)` for ranges of rows. Each rank reduces one range and all read the results;
// small ones are reduced whole by every rank, which saves a round of signals. Same order of
// additions either way, so the same bits on every rank.
template <typename Produce>
at::Tensor staged_all_reduce(const Group& group, const comm::CallSignature& signature, int64_t rows,
                             int64_t columns, const at::TensorOptions& options,
                             kernels::ReduceOp op, Produce&& produce) {
  constexpr int64_t kSmallBytes = 32 << 10;  // a guess until it is tuned: fits L1, one page fault
  auto output = at::empty({rows, columns}, options);
  const auto itemsize = static_cast<int64_t>(output.element_size());
  const int64_t row_bytes = columns * itemsize;
  const int64_t num_parts = rows * row_bytes <= kSmallBytes ? 1 : group.size;
  const int64_t staged_bytes = slot_bytes(output.numel(), options);
  comm::Call call(*group.shared, signature, 2 * staged_bytes);
  auto* result = static_cast<std::byte*>(output.mutable_data_ptr());

  for (int64_t step = 0; step < num_parts; ++step) {
    const int64_t part = num_parts == 1 ? 0 : comm::own_last(group.rank, group.size, step);
    const auto range = comm::part_of(rows, num_parts, part);
    produce(range, shared_tensor(call.workspace() + range.begin * row_bytes,
                                 {range.size(), columns}, options));
    call.signal(part);
  }
  const auto reduce_part = [&](int64_t part, std::byte* destination) {
    const auto range = comm::part_of(rows, num_parts, part);
    std::vector<const std::byte*> sources;
    for (int64_t source = 0; source < group.size; ++source) {
      call.wait(source, part);
      sources.push_back(call.workspace_of(source) + range.begin * row_bytes);
    }
    reduce_parallel(destination + range.begin * row_bytes, sources, range.size() * columns,
                    output.scalar_type(), op);
  };
  if (num_parts == 1) {
    reduce_part(0, result);
    return output;
  }
  const int64_t done = num_parts;  // the flag after those of the parts
  reduce_part(group.rank, call.workspace() + staged_bytes);
  call.signal(done);
  for (int64_t step = 0; step < group.size; ++step) {
    const int64_t peer = comm::own_first(group.rank, group.size, step);
    call.wait(peer, done);
    const auto range = comm::part_of(rows, num_parts, peer);
    const std::byte* source = call.workspace_of(peer) + staged_bytes + range.begin * row_bytes;
    std::copy_n(source, range.size() * row_bytes, result + range.begin * row_bytes);
  }
  return output;
}

}  // namespace axonn::ops::cpu
