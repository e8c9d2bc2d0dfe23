// The "fused" algorithm on the CPU, through shared memory. ops/cpu defines these functions and
// ops/composed calls them; neither includes the other. `signature` is what the ranks of each group
// must agree on.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "ops/group/group.h"
#include "ops/linear_axes.h"

namespace axonn::ops::cpu {

at::Tensor all_gather(const Group& group, const comm::CallSignature& signature,
                      const at::Tensor& shard, int64_t dim);
at::Tensor reduce_scatter(const Group& group, const comm::CallSignature& signature,
                          const at::Tensor& input, int64_t dim);
at::Tensor all_reduce(const Group& group, const comm::CallSignature& signature,
                      const at::Tensor& input, bool maximum);

// Returns a @ b, where a or b is gathered along `dim`.
at::Tensor gather_matmul(const Group& group, const comm::CallSignature& signature,
                         const at::Tensor& a, const at::Tensor& b, bool gathers_a, int64_t dim);
// Returns the sum of a @ b over ranks: this rank's block along `scatter_dim`, or all of it.
at::Tensor matmul_sum(const Group& group, const comm::CallSignature& signature, const at::Tensor& a,
                      const at::Tensor& b, std::optional<int64_t> scatter_dim);

// The bias is not added here. Groups of one rank need no shared memory.
LinearOutput linear_forward(const LinearAxes& axes, const comm::CallSignature& signature,
                            const at::Tensor& x, const at::Tensor& weight, bool save_input,
                            bool save_weight);
LinearGradients linear_backward(const LinearAxes& axes, const comm::CallSignature& signature,
                                const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                bool x_is_full, bool weight_is_full,
                                const std::array<bool, 3>& mask);

}  // namespace axonn::ops::cpu
