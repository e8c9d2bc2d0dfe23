// The collectives of c10d, for everything that is not fused. Each first waits for the agreement of
// its group.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "ops/group/group.h"

namespace axonn::ops {

// A c10d collective under way. On a GPU it runs on one of c10d's streams, after the work enqueued
// so far on the current stream, and the host never waits.
struct Pending {
  at::Tensor output;  // valid after wait()
  // On the CPU, returns when `output` is complete. On a GPU, makes the current stream wait for
  // `output`. This must be the stream that was current at the start, because its allocator may
  // reuse the input next.
  std::function<void()> wait;
};

// c10d adds in the tensor's own dtype. So on the CPU, bfloat16 and float16 tensors are sent and
// added as fp32; on a GPU they are sent and added in their own dtype, as users of NCCL expect.
// `output` has the dtype of the sum.

// Gathers the ranks' shards, of any strides, into [group size, ...].
Pending start_all_gather(const Group& group, const at::Tensor& shard);
// Sums [group size, ...] over ranks and keeps this rank's block.
Pending start_reduce_scatter(const Group& group, const at::Tensor& stacked);
// Sums over ranks and keeps the whole sum; may overwrite its input.
Pending start_all_reduce(const Group& group, const at::Tensor& input);

// These convert between [group size, ...] and the concatenation of the blocks along `dim`. They
// make no copy if dim is 0.
at::Tensor joined(const at::Tensor& stacked, int64_t dim);
at::Tensor stacked(const at::Tensor& whole, int64_t dim, int64_t num_blocks);

// These run a c10d collective and wait for it. Tensors may have any strides; results are
// contiguous.
at::Tensor c10d_all_gather(const Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor c10d_reduce_scatter(const Group& group, const at::Tensor& input, int64_t dim);
at::Tensor c10d_all_reduce(const Group& group, const at::Tensor& input, bool maximum);

}  // namespace axonn::ops
