// The ops, on any device, with the signatures of schema.cpp: checks, the choice of an algorithm,
// and what is composed of c10d's collectives and the library's matmul ("sequential", "chunked").
// What is fused is the backend's (fused_cpu.h, fused_cuda.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace axonn::ops {

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

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, bool save_input, bool save_weight,
    const std::string& algorithm);

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, bool x_is_full,
    bool weight_is_full, std::array<bool, 3> output_mask,
    const std::vector<std::string>& group_names, at::IntArrayRef group_sizes, bool sharded,
    int64_t gather_dim, int64_t scatter_dim, const std::string& algorithm);

std::tuple<at::Tensor, at::Tensor> local_rows(const at::Tensor& ids, int64_t first,
                                              int64_t num_rows, int64_t vocab_size,
                                              std::optional<int64_t> ignore_index, bool check,
                                              const std::string& label, int64_t rank);

}  // namespace axonn::ops
