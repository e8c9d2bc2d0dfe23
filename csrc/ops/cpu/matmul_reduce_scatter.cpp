#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "ops/cpu/ops.h"
#include "ops/cpu/staging.h"

namespace axonn::ops::cpu {
namespace {

constexpr auto kOp = "matmul_reduce_scatter";

// The block that a peer owns is multiplied straight into the slot that it reads.
at::Tensor fused(const Group& group, const at::Tensor& a, const at::Tensor& b,
                 int64_t scatter_dim) {
  const int64_t length = (scatter_dim == 0 ? a.size(0) : b.size(1)) / group.size;
  const std::array<int64_t, 2> block{scatter_dim == 0 ? length : a.size(0),
                                     scatter_dim == 0 ? b.size(1) : length};
  const auto signature = comm::CallSignature::of(
      kOp, {scatter_dim, block[0], block[1], static_cast<int64_t>(a.scalar_type())});
  return staged_reduce_scatter(group, signature, block, a.options(),
                               [&](int64_t destination, at::Tensor slot) {
                                 const int64_t begin = destination * length;
                                 if (scatter_dim == 0) {
                                   at::mm_out(slot, a.narrow(0, begin, length), b);
                                 } else {
                                   at::mm_out(slot, a, b.narrow(1, begin, length));
                                 }
                               });
}

}  // namespace

at::Tensor matmul_reduce_scatter(const at::Tensor& a, const at::Tensor& b, int64_t scatter_dim,
                                 const std::string& group_name, int64_t group_size,
                                 const std::string& algorithm) {
  check_matmul(kOp, "a", a, "b", b);
  check_dim(kOp, "scatter_dim", scatter_dim, 2);
  check_inner(kOp, "a.size(1)", a.size(1), "b.size(0)", b.size(0));
  if (scatter_dim == 0) {
    check_divides(kOp, "a", 0, a.size(0), group_size);
  } else {
    check_divides(kOp, "b", 1, b.size(1), group_size);
  }
  check_algorithm(kOp, algorithm);
  if (group_size == 1) return at::mm(a, b);
  const auto group = resolve_group(kOp, group_name, group_size, algorithm);
  return group.fused() ? fused(group, a, b, scatter_dim)
                       : c10d_reduce_scatter(group, at::mm(a, b), scatter_dim);
}

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &matmul_reduce_scatter); }

}  // namespace axonn::ops::cpu
