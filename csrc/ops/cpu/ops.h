// The CPU kernels, with the signatures of schema.cpp, for those that are built from others.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace axonn::ops::cpu {

at::Tensor all_gather(const at::Tensor& shard, int64_t dim, const std::string& group_name,
                      int64_t group_size, const std::string& algorithm);

at::Tensor reduce_scatter(const at::Tensor& input, int64_t dim, const std::string& group_name,
                          int64_t group_size, const std::string& algorithm);

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op,
                      const std::string& group_name, int64_t group_size,
                      const std::string& algorithm);

at::Tensor all_gather_matmul(const at::Tensor& a_shard, const at::Tensor& b, int64_t gather_dim,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm);

at::Tensor matmul_all_gather_rhs(const at::Tensor& a, const at::Tensor& b_shard, int64_t gather_dim,
                                 const std::string& group_name, int64_t group_size,
                                 const std::string& algorithm);

at::Tensor matmul_reduce_scatter(const at::Tensor& a, const at::Tensor& b, int64_t scatter_dim,
                                 const std::string& group_name, int64_t group_size,
                                 const std::string& algorithm);

at::Tensor matmul_all_reduce(const at::Tensor& a, const at::Tensor& b,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm);

}  // namespace axonn::ops::cpu
