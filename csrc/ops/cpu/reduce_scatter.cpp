#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {

at::Tensor reduce_scatter(const at::Tensor& input, int64_t dim, const std::string& group_name,
                          int64_t group_size, const std::string& algorithm) {
  constexpr auto kOp = "reduce_scatter";
  check_dim(kOp, "dim", dim, input.dim());
  check_reducible(kOp, "input", input);
  check_divides(kOp, "input", dim, input.size(dim), group_size);
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  if (!group.fused()) return c10d_reduce_scatter(group, input, dim);

  const int64_t length = input.size(dim) / group_size;
  std::vector<int64_t> block = input.sizes().vec();
  block[dim] = length;
  const auto signature = comm::CallSignature::of(
      kOp, {dim, input.numel(), shape_hash(input), static_cast<int64_t>(input.scalar_type())});
  return staged_reduce_scatter(group, signature, block, input.options(),
                               [&](int64_t destination, const at::Tensor& slot) {
                                 slot.copy_(input.narrow(dim, destination * length, length));
                               });
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl("reduce_scatter", &reduce_scatter); }

}  // namespace axonn::ops::cpu
