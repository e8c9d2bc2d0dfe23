// The fused ops on CUDA as the composed ones see them: through the dispatcher, since their kernels
// are in extension modules that need not be built.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/group.h"

namespace axonn::ops {

// Whether their module is loaded. Whether a device has kernels, they say themselves.
bool has_fused_on_cuda();

// As the ops of the same names, which have checked the arguments. Shards are copied where they have
// gaps. NotImplementedError for what no kernel computes. Without an element, it is "sequential".
at::Tensor fused_all_gather_matmul(const Group& group, const at::Tensor& a_shard,
                                   const at::Tensor& b, int64_t gather_dim);
at::Tensor fused_matmul_all_gather_rhs(const Group& group, const at::Tensor& a,
                                       const at::Tensor& b_shard, int64_t gather_dim);
at::Tensor fused_matmul_reduce_scatter(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                       int64_t scatter_dim);
at::Tensor fused_matmul_all_reduce(const Group& group, const at::Tensor& a, const at::Tensor& b);

}  // namespace axonn::ops
