#include "ops/cpu/fused.h"
#include "ops/fused_cpu.h"

namespace axonn::ops::cpu {

at::Tensor reduce_scatter(const Group& group, const comm::CallSignature& signature,
                          const at::Tensor& input, int64_t dim) {
  const int64_t length = input.size(dim) / group.size;
  std::vector<int64_t> block = input.sizes().vec();
  block[dim] = length;
  constexpr auto how = Drain::kScatterRows;  // of a matrix with one rank's block per row
  const int64_t columns = input.numel() / group.size;
  FusedCall call(group, signature,
                 Drained::bytes(group, group.size, columns, how, input.options()));
  Drained sum(call, group.size, columns, how, input.options());
  sum.produce([&](int64_t part) {
    sum.slot(part).view(block).copy_(input.narrow(dim, part * length, length));
  });
  return sum.finish().view(block);
}

}  // namespace axonn::ops::cpu
