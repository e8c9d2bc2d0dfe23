// The collectives on their own: fused where the ranks share memory, else c10d's.
#include "ops/checks.h"
#include "ops/composed/ops.h"
#include "ops/cpu/kernels.h"
#include "ops/group.h"

namespace axonn::ops {

at::Tensor all_gather(const at::Tensor& shard, int64_t dim, const std::string& group_name,
                      int64_t group_size, const std::string& algorithm) {
  constexpr auto kOp = "all_gather";
  check_group_size(kOp, group_size);
  check_dim(kOp, "dim", dim, shard.dim());
  check_algorithm(kOp, algorithm, shard.device());
  if (group_size == 1) return shard.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm, shard.device());
  return group.can_fuse() ? cpu::all_gather(group, shard, dim) : c10d_all_gather(group, shard, dim);
}

at::Tensor reduce_scatter(const at::Tensor& input, int64_t dim, const std::string& group_name,
                          int64_t group_size, const std::string& algorithm) {
  constexpr auto kOp = "reduce_scatter";
  check_group_size(kOp, group_size);
  check_dim(kOp, "dim", dim, input.dim());
  check_reducible(kOp, "input", input);
  check_divides(kOp, "input", dim, input.size(dim), group_size);
  check_algorithm(kOp, algorithm, input.device());
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm, input.device());
  return group.can_fuse() ? cpu::reduce_scatter(group, input, dim)
                          : c10d_reduce_scatter(group, input, dim);
}

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op,
                      const std::string& group_name, int64_t group_size,
                      const std::string& algorithm) {
  constexpr auto kOp = "all_reduce";
  check_group_size(kOp, group_size);
  check_reducible(kOp, "input", input);
  TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "max", kOp,
                    ": reduce_op must be 'sum' or 'max', got '", reduce_op, "'");
  check_algorithm(kOp, algorithm, input.device());
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm, input.device());
  const bool maximum = reduce_op == "max";
  return group.can_fuse() ? cpu::all_reduce(group, input, maximum)
                          : c10d_all_reduce(group, input, maximum);
}

}  // namespace axonn::ops
