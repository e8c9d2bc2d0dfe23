#include <torch/library.h>

#include "ops/checks.h"
#include "ops/cpu/fused.h"
#include "ops/cpu/ops.h"

namespace axonn::ops::cpu {

at::Tensor reduce_scatter(const at::Tensor& input, int64_t dim, const std::string& group_name,
                          int64_t group_size, const std::string& algorithm) {
  constexpr auto kOp = "reduce_scatter";
  check_group_size(kOp, group_size);
  check_dim(kOp, "dim", dim, input.dim());
  check_reducible(kOp, "input", input);
  check_divides(kOp, "input", dim, input.size(dim), group_size);
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return input.clone(at::MemoryFormat::Contiguous);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  if (!group.can_fuse()) return c10d_reduce_scatter(group, input, dim);

  const int64_t length = input.size(dim) / group_size;
  std::vector<int64_t> block = input.sizes().vec();
  block[dim] = length;
  constexpr auto how = Drain::kScatterRows;  // of a matrix with a rank's block in each row
  const int64_t columns = input.numel() / group_size;
  FusedCall call(group,
                 comm::CallSignature::of(kOp, {dim, input.numel(), shape_hash(input),
                                               static_cast<int64_t>(input.scalar_type())}),
                 Drained::bytes(group, group_size, columns, how, input.options()));
  Drained sum(call, group_size, columns, how, input.options());
  for (int64_t step = 0; step < sum.num_parts(); ++step) {
    const int64_t part = sum.own_last(step);
    sum.slot(part).view(block).copy_(input.narrow(dim, part * length, length));
    sum.done(part);
  }
  return sum.finish().view(block);
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl("reduce_scatter", &reduce_scatter); }

}  // namespace axonn::ops::cpu
