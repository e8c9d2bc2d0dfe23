#include "ops/fused_cuda.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mm.h>

#include <atomic>
#include <string>

#include "ops/fused_settings.h"

namespace axonn::ops {
namespace {

constexpr auto kGather = "axonn::_fused_all_gather_matmul";
constexpr auto kSum = "axonn::_fused_matmul_sum";

// Checked against the kernels that are registered.
const auto& gather_op() {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::string&,
                               const std::string&, int64_t, const std::string&, int64_t, double);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kGather, "").typed<Signature>();
  return op;
}

const auto& sum_op() {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, bool, const std::string&,
                               const std::string&, int64_t, double);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kSum, "").typed<Signature>();
  return op;
}

std::atomic<int64_t>& configured_nccl_sms() {
  static std::atomic<int64_t> sms = 0;
  return sms;
}

// Whether rows, or else columns, lie without gaps and without overlap.
bool is_by_rows(const at::Tensor& t) { return t.stride(1) == 1 && t.stride(0) >= t.size(1); }
bool is_by_columns(const at::Tensor& t) { return is_by_rows(t.t()); }

// A matrix that a kernel can read: itself, or a copy.
at::Tensor readable(const at::Tensor& t) {
  return is_by_rows(t) || is_by_columns(t) ? t : t.contiguous();
}

at::Tensor gather(const Group& group, const at::Tensor& shard, const at::Tensor& other,
                  const std::string& arriving) {
  // These come transposed, and no kernel takes two transposes.
  const bool transposed = arriving == "inner_a" || arriving == "columns";
  const auto whole = transposed && !is_by_rows(other) ? other.contiguous() : readable(other);
  return gather_op().call(shard.contiguous(), whole, arriving, "auto", fused_nccl_sms(), group.name,
                          group.size, timeout_seconds());
}

// The rows of a @ b, by their sum or each rank's share.
at::Tensor sum(const Group& group, const at::Tensor& a, const at::Tensor& b, bool everywhere) {
  const auto left = readable(a);
  const auto right = is_by_rows(left) || is_by_rows(b) ? readable(b) : b.contiguous();
  return sum_op().call(left, right, everywhere, "auto", group.name, group.size, timeout_seconds());
}

bool is_empty(const at::Tensor& a, const at::Tensor& b) { return a.numel() == 0 || b.numel() == 0; }

}  // namespace

void configure_fused_on_cuda(int64_t nccl_sms) { configured_nccl_sms() = nccl_sms; }

int64_t fused_nccl_sms() { return configured_nccl_sms(); }

bool has_fused_on_cuda() {
  return gather_op().hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         sum_op().hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

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
                          : sum(group, b.t(), a.t(), /*everywhere=*/false).t().contiguous();
}

at::Tensor fused_matmul_all_reduce(const Group& group, const at::Tensor& a, const at::Tensor& b) {
  if (is_empty(a, b)) return c10d_all_reduce(group, at::mm(a, b), /*maximum=*/false);
  // The rows are shared out to be added up; where ranks do not divide them, the columns are.
  const bool by_rows = a.size(0) % group.size == 0 || b.size(1) % group.size != 0;
  return by_rows ? sum(group, a, b, /*everywhere=*/true)
                 : sum(group, b.t(), a.t(), /*everywhere=*/true).t().contiguous();
}

}  // namespace axonn::ops
