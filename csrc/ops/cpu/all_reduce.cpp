#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op,
                      const std::string& group_name, int64_t group_size,
                      const std::string& algorithm) {
  constexpr auto kOp = "all_reduce";
  check_reducible(kOp, "input", input);
  TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "max", kOp,
                    ": reduce_op must be 'sum' or 'max', got '", reduce_op, "'");
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  const bool maximum = reduce_op == "max";
  if (!group.fused()) return c10d_all_reduce(group, input, maximum);

  const auto flat = input.reshape({-1, 1});
  const auto signature = comm::CallSignature::of(
      kOp, {maximum, input.numel(), shape_hash(input), static_cast<int64_t>(input.scalar_type())});
  return staged_all_reduce(group, signature, flat.size(0), 1, input.options(),
                           maximum ? kernels::ReduceOp::kMax : kernels::ReduceOp::kSum,
                           [&](comm::Range rows, const at::Tensor& slot) {
                             slot.copy_(flat.narrow(0, rows.begin, rows.size()));
                           })
      .view(input.sizes());
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl("all_reduce", &all_reduce); }

}  // namespace axonn::ops::cpu
