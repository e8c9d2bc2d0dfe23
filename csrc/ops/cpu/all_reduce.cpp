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
  for (int64_t step = 0; step < sum.num_parts(); ++step) {
    const int64_t part = sum.own_last(step);
    const auto range = sum.rows(part);
    sum.slot(part).copy_(flat.narrow(0, range.begin, range.size()));
    sum.done(part);
  }
  return sum.finish().view(input.sizes());
}

}  // namespace axonn::ops::cpu
