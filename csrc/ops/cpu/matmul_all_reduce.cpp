#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {

at::Tensor matmul_all_reduce(const at::Tensor& a, const at::Tensor& b,
                             const std::string& group_name, int64_t group_size,
                             const std::string& algorithm) {
  constexpr auto kOp = "matmul_all_reduce";
  check_matmul(kOp, "a", a, "b", b);
  check_inner(kOp, "a.size(1)", a.size(1), "b.size(0)", b.size(0));
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return at::mm(a, b);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  if (!group.fused()) return c10d_all_reduce(group, at::mm(a, b), /*maximum=*/false);

  const auto signature =
      comm::CallSignature::of(kOp, {a.size(0), b.size(1), static_cast<int64_t>(a.scalar_type())});
  return staged_all_reduce(group, signature, a.size(0), b.size(1), a.options(),
                           kernels::ReduceOp::kSum, [&](comm::Range rows, at::Tensor slot) {
                             at::mm_out(slot, a.narrow(0, rows.begin, rows.size()), b);
                           });
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl("matmul_all_reduce", &matmul_all_reduce); }

}  // namespace axonn::ops::cpu
