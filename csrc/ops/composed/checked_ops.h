// The ops without their checks, for those who have made them: of operands that were checked, in
// groups of several ranks that were resolved.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/algorithm.h"
#include "ops/group/group.h"

namespace axonn::ops {

// The whole op: its ranks agree on the call, then make it as they were asked to.
at::Tensor all_gather_in(Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor all_gather_matmul_in(Group& group, const at::Tensor& a_shard, const at::Tensor& b,
                                int64_t gather_dim, AskedAlgorithm asked);
at::Tensor matmul_all_gather_rhs_in(Group& group, const at::Tensor& a, const at::Tensor& b_shard,
                                    int64_t gather_dim, AskedAlgorithm asked);
at::Tensor matmul_reduce_scatter_in(Group& group, const at::Tensor& a, const at::Tensor& b,
                                    int64_t scatter_dim, AskedAlgorithm asked);
at::Tensor matmul_all_reduce_in(Group& group, const at::Tensor& a, const at::Tensor& b,
                                AskedAlgorithm asked);

// By one algorithm ("fused" is CUDA's), in a group whose agreement is the caller's.
at::Tensor all_gather_matmul_by(const Group& group, const at::Tensor& a_shard, const at::Tensor& b,
                                int64_t gather_dim, Algorithm how);
at::Tensor matmul_all_gather_rhs_by(const Group& group, const at::Tensor& a,
                                    const at::Tensor& b_shard, int64_t gather_dim, Algorithm how);
at::Tensor matmul_reduce_scatter_by(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                    int64_t scatter_dim, Algorithm how);
at::Tensor matmul_all_reduce_by(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                Algorithm how);

}  // namespace axonn::ops
