// The fused ops on CUDA, as the composed ones call them (ops/fused_cuda.h).
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/cuda/fused_matmul.h"
#include "ops/cuda/gemm_backend.h"
#include "ops/cuda/symmetric_workspace.h"

namespace axonn::ops::cuda {
namespace {

using kernels::cuda::CallStreams;
using kernels::cuda::Peers;

at::Tensor all_gather_matmul(const at::Tensor& shard, const at::Tensor& other,
                             const std::string& arriving, const std::string& group_name,
                             int64_t group_size, double timeout_seconds) {
  constexpr auto kOp = "all_gather_matmul";
  (void)gemm_backend(kOp, shard.device());
  const auto [dim, is_a] = gathered_place(kOp, arriving);
  const auto residency = residency_of(kOp, group_name, group_size, shard.device(), timeout_seconds);
  const auto call = prepare_gather(kOp, shard, other, dim, is_a, group_size, residency);
  return with_workspace(kOp, group_name, shard.device(), call.workspace_bytes, timeout_seconds,
                        [&](const Peers& peers, const CallStreams& streams) {
                          return run(kOp, call, peers, streams, shard.options());
                        });
}

at::Tensor matmul_sum(const at::Tensor& a, const at::Tensor& b, bool everywhere,
                      const std::string& group_name, int64_t group_size, double timeout_seconds) {
  const char* op = everywhere ? "matmul_all_reduce" : "matmul_reduce_scatter";
  (void)gemm_backend(op, a.device());
  const auto residency = residency_of(op, group_name, group_size, a.device(), timeout_seconds);
  const auto call = prepare_sum(op, a, b, everywhere, group_size, residency);
  return with_workspace(op, group_name, a.device(), call.workspace_bytes, timeout_seconds,
                        [&](const Peers& peers, const CallStreams& streams) {
                          return run(op, call, peers, streams, a.options());
                        });
}

TORCH_LIBRARY_IMPL(axonn, CUDA, m) {
  m.impl("_fused_all_gather_matmul", &all_gather_matmul);
  m.impl("_fused_matmul_sum", &matmul_sum);
}

}  // namespace
}  // namespace axonn::ops::cuda
