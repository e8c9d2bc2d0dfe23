// The ops without their checks, for callers that have checked the operands and resolved the groups,
// which have several ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/algorithm.h"
#include "ops/group/group.h"

namespace axonn::ops {

// These run the whole op: its ranks agree on the call, then run it with the algorithm that was
// asked for.
at::Tensor all_gather_in(Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor all_reduce_in(Group& group, const at::Tensor& input, bool maximum);
at::Tensor all_gather_matmul_in(Group& group, const at::Tensor& a_shard, const at::Tensor& b,
                                int64_t gather_dim, AskedAlgorithm asked);
at::Tensor matmul_all_gather_rhs_in(Group& group, const at::Tensor& a, const at::Tensor& b_shard,
                                    int64_t gather_dim, AskedAlgorithm asked);
at::Tensor matmul_reduce_scatter_in(Group& group, const at::Tensor& a, const at::Tensor& b,
                                    int64_t scatter_dim, AskedAlgorithm asked);
at::Tensor matmul_all_reduce_in(Group& group, const at::Tensor& a, const at::Tensor& b,
                                AskedAlgorithm asked, bool deterministic);

// These run one algorithm ("fused" is CUDA's) in a group whose agreement the caller has made.
at::Tensor all_gather_matmul_by(const Group& group, const at::Tensor& a_shard, const at::Tensor& b,
                                int64_t gather_dim, Algorithm how);
at::Tensor matmul_all_gather_rhs_by(const Group& group, const at::Tensor& a,
                                    const at::Tensor& b_shard, int64_t gather_dim, Algorithm how);
at::Tensor matmul_reduce_scatter_by(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                    int64_t scatter_dim, Algorithm how);
at::Tensor matmul_all_reduce_by(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                Algorithm how, bool deterministic);

}  // namespace axonn::ops
