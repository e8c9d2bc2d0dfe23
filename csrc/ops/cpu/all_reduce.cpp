#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

at::Tensor all_reduce(const Group& group, const comm::CallSignature& signature,
                      const at::Tensor& input, bool maximum) {
  const auto flat = input.reshape({-1, 1});
  constexpr auto how = Drain::kAllReduce;
  FusedCall call(group, signature, Drained::bytes(group, input.numel(), 1, how, input.options()));
  Drained sum(call, input.numel(), 1, how, input.options(),
              maximum ? kernels::ReduceOp::kMax : kernels::ReduceOp::kSum);
  sum.produce([&](int64_t part) {
    const auto range = sum.rows(part);
    sum.slot(part).copy_(flat.narrow(0, range.begin, range.size()));
  });
  return sum.finish().view(input.sizes());
}

}  // namespace axonn::ops::cpu
