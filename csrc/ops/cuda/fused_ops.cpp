// The fused ops on CUDA, which the composed ops call (ops/composed/fused_cuda.h).
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/cuda/call_fused.h"
#include "ops/cuda/fused_matmul.h"
#include "ops/cuda/gemm_backend.h"

namespace axonn::ops::cuda {
namespace {

// Wraps a prepared product as the call that a workspace runs.
template <typename Product>
PreparedCall prepared(const char* op, const Product& product, const at::TensorOptions& options) {
  return {product.workspace_bytes,
          [=](const CallPlace& place) { return run(op, product, place, options); }};
}

at::Tensor all_gather_matmul(const at::Tensor& shard, const at::Tensor& other,
                             const std::string& arriving, const std::string& transport,
                             int64_t nccl_sms, const std::string& group_name, int64_t group_size,
                             double timeout_seconds, int64_t free_sms, bool graphs_in_turn) {
  constexpr auto kOp = "all_gather_matmul";
  const auto place = gathered_place(kOp, arriving);
  (void)gemm_backend(kOp, shard.device());  // raises before ranks meet
  return call_fused(
      kOp,
      {group_name, group_size, shard.device(), timeout_seconds, transport, nccl_sms, free_sms,
       graphs_in_turn},
      [&](const kernels::Residency& residency) {
        return prepared(
            kOp, prepare_gather(kOp, shard, other, place.dim, place.is_a, group_size, residency),
            shard.options());
      });
}

at::Tensor matmul_sum(const at::Tensor& a, const at::Tensor& b, bool everywhere,
                      const std::string& sum_broadcast, const std::string& group_name,
                      int64_t group_size, double timeout_seconds, int64_t free_sms,
                      bool graphs_in_turn) {
  const char* op = everywhere ? "matmul_all_reduce" : "matmul_reduce_scatter";
  const auto way = named_sum_broadcast(op, sum_broadcast);
  (void)gemm_backend(op, a.device());  // raises before ranks meet
  // Rows that leave are stored in peers' memory, so the transport is the copy engine's.
  return call_fused(op,
                    {group_name, group_size, a.device(), timeout_seconds, "copy_engine", 0,
                     free_sms, graphs_in_turn},
                    [&](const kernels::Residency& residency) {
                      return prepared(op,
                                      prepare_sum(op, a, b, everywhere, way, group_size, residency),
                                      a.options());
                    });
}

TORCH_LIBRARY_IMPL(axonn, CUDA, m) {
  m.impl("_fused_all_gather_matmul", &all_gather_matmul);
  m.impl("_fused_matmul_sum", &matmul_sum);
}

}  // namespace
}  // namespace axonn::ops::cuda
