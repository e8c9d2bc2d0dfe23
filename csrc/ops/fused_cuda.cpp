#include "ops/fused_cuda.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mm.h>

#include <string>

namespace axonn::ops {
namespace {

constexpr auto kGather = "axonn::_fused_all_gather_matmul";
constexpr auto kSum = "axonn::_fused_matmul_sum";

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

at::Tensor gather(const Group& group, const at::Tensor& shard, const at::Tensor& other,
                  const std::string& arriving) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, c10::string_view,
                               c10::string_view, int64_t, double);
  static const auto op = find(kGather).typed<Signature>();
  return op.call(shard.contiguous(), other, arriving, group.name, group.size, timeout_seconds());
}

// The rows of a @ b, by their sum or each rank's share.
at::Tensor sum(const Group& group, const at::Tensor& a, const at::Tensor& b, bool everywhere) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, bool, c10::string_view, int64_t, double);
  static const auto op = find(kSum).typed<Signature>();
  // No kernel takes two transposes.
  const bool both = a.stride(1) != 1 && b.stride(1) != 1;
  return op.call(a, both ? b.contiguous() : b, everywhere, group.name, group.size,
                 timeout_seconds());
}

bool is_empty(const at::Tensor& a, const at::Tensor& b) { return a.numel() == 0 || b.numel() == 0; }

}  // namespace

bool has_fused_on_cuda() { return find(kGather).hasKernelForDispatchKey(c10::DispatchKey::CUDA); }

at::Tensor fused_all_gather_matmul(const Group& group, const at::Tensor& a_shard,
                                   const at::Tensor& b, int64_t gather_dim) {
  if (is_empty(a_shard, b)) return at::mm(c10d_all_gather(group, a_shard, gather_dim), b);
  return gather_dim == 0 ? gather(group, a_shard, b, "rows")
                         : gather(group, a_shard.t(), b, "inner_a");
}

at::Tensor fused_matmul_all_gather_rhs(const Group& group, const at::Tensor& a,
                                       const at::Tensor& b_shard, int64_t gather_dim) {
  if (is_empty(a, b_shard)) return at::mm(a, c10d_all_gather(group, b_shard, gather_dim));
  return gather_dim == 1 ? gather(group, b_shard.t(), a, "columns")
                         : gather(group, b_shard, a, "inner");
}

at::Tensor fused_matmul_reduce_scatter(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                       int64_t scatter_dim) {
  if (is_empty(a, b)) return c10d_reduce_scatter(group, at::mm(a, b), scatter_dim);
  // Columns are the rows of the transposed product.
  return scatter_dim == 0 ? sum(group, a, b, /*everywhere=*/false)
                          : sum(group, b.t(), a.t(), /*everywhere=*/false).t();
}

at::Tensor fused_matmul_all_reduce(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  if (is_empty(a, b)) return c10d_all_reduce(group, at::mm(a, b), /*maximum=*/false);
  // The rows are shared out to be added up; where ranks do not divide them, the columns are.
  const bool by_rows = a.size(0) % group.size == 0 || b.size(1) % group.size != 0;
  return by_rows ? sum(group, a, b, /*everywhere=*/true)
                 : sum(group, b.t(), a.t(), /*everywhere=*/true).t().contiguous();
}

}  // namespace axonn::ops
