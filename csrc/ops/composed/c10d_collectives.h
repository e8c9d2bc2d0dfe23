// The collectives of c10d, for what is not fused. Each waits for the agreement of its group first.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "ops/group/group.h"

namespace axonn::ops {

// A c10d collective under way. On a GPU it runs on a stream of c10d's, behind what the current
// stream has been given so far, and the host never waits.
struct Pending {
  at::Tensor output;  // to be read after wait()
  // The CPU returns when `output` is there. On a GPU the stream that is current then waits for it:
  // that must be the one that was current at the start, whose allocator may reuse the input next.
  std::function<void()> wait;
};

// c10d adds in the tensor's own dtype. So on the CPU sums of bfloat16 are made, and sent, in fp32;
// on a GPU they travel as they are, as users of NCCL expect. `output` has the dtype of the sum.

// Gathers the ranks' shards into [group size, ...]. Any strides.
Pending start_all_gather(const Group& group, const at::Tensor& shard);
// Sums [group size, ...] over ranks; this rank's block is left.
Pending start_reduce_scatter(const Group& group, const at::Tensor& stacked);
// Sums over ranks, likewise; may overwrite its input.
Pending start_all_reduce(const Group& group, const at::Tensor& input);

// [group size, ...] <-> the concatenation of the blocks along `dim`; no copy where dim is 0.
at::Tensor joined(const at::Tensor& stacked, int64_t dim);
at::Tensor stacked(const at::Tensor& whole, int64_t dim, int64_t num_blocks);

// c10d collectives, waited for. Tensors of any strides; results are contiguous.
at::Tensor c10d_all_gather(const Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor c10d_reduce_scatter(const Group& group, const at::Tensor& input, int64_t dim);
at::Tensor c10d_all_reduce(const Group& group, const at::Tensor& input, bool maximum);

}  // namespace axonn::ops
