#include <torch/library.h>

#include "ops/checks.h"
#include "ops/cpu/fused.h"
#include "ops/cpu/ops.h"

namespace axonn::ops::cpu {

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op,
                      const std::string& group_name, int64_t group_size,
                      const std::string& algorithm) {
  constexpr auto kOp = "all_reduce";
  check_group_size(kOp, group_size);
  check_reducible(kOp, "input", input);
  TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "max", kOp,
                    ": reduce_op must be 'sum' or 'max', got '", reduce_op, "'");
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  const bool maximum = reduce_op == "max";
  if (!group.can_fuse()) return c10d_all_reduce(group, input, maximum);

  const auto flat = input.reshape({-1, 1});
  constexpr auto how = Drain::kAllReduce;
  FusedCall call(group,
                 comm::CallSignature::of(kOp, {maximum, input.numel(), shape_hash(input),
                                               static_cast<int64_t>(input.scalar_type())}),
                 Drained::bytes(group, input.numel(), 1, how, input.options()));
  Drained sum(call, input.numel(), 1, how, input.options(),
              maximum ? kernels::ReduceOp::kMax : kernels::ReduceOp::kSum);
  for (int64_t step = 0; step < sum.num_parts(); ++step) {
    const int64_t part = sum.own_last(step);
    const auto range = sum.rows(part);
    sum.slot(part).copy_(flat.narrow(0, range.begin, range.size()));
    sum.done(part);
  }
  return sum.finish().view(input.sizes());
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl("all_reduce", &all_reduce); }

}  // namespace axonn::ops::cpu
