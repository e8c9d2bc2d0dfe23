#include "ops/composed/fused_cuda.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <cstdint>
#include <string>

#include "core/cuda/fused/fused_gemm.h"
#include "ops/composed/fused_settings.h"

namespace axonn::ops {
namespace {

constexpr auto kGather = "axonn::_fused_all_gather_matmul";
constexpr auto kSum = "axonn::_fused_matmul_sum";
constexpr auto kWhyNot = "axonn::_why_no_fused";

// typed() checks this signature against the registered kernels.
const auto& gather_op() {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const std::string&, const std::string&,
                 int64_t, const std::string&, int64_t, double, int64_t, bool);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kGather, "").typed<Signature>();
  return op;
}

const auto& sum_op() {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, bool, const std::string&,
                               const std::string&, int64_t, double, int64_t, bool);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kSum, "").typed<Signature>();
  return op;
}

using Form = FusedProduct::Form;

// Returns the name that the kernels use for this form.
const char* name_of(Form form) {
  switch (form) {
    case Form::kAny:
      return "any";
    case Form::kRows:
      return "rows";
    case Form::kColumns:
      return "columns";
    case Form::kInner:
      return "inner";
    case Form::kInnerA:
      return "inner_a";
    case Form::kScatter:
      return "scatter";
    case Form::kTotal:
      return "total";
  }
  return "";
}

bool is_aligned(int64_t elements, const at::Tensor& t) {
  return elements * t.element_size() % kernels::cuda::kLoadBytes == 0;
}

// Returns whether a kernel can read the matrix in place, by rows; is_by_columns says the same for
// columns.
bool is_by_rows(const at::Tensor& t) {
  return t.stride(1) == 1 && t.stride(0) >= t.size(1) && is_aligned(t.stride(0), t) &&
         is_aligned(t.size(1), t) &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kernels::cuda::kLoadBytes == 0;
}
bool is_by_columns(const at::Tensor& t) { return is_by_rows(t.t()); }

at::Tensor copied_by_rows(const at::Tensor& t) {
  return t.clone(at::MemoryFormat::Contiguous);  // also if only its address is unsuitable
}
at::Tensor by_rows(const at::Tensor& t) { return is_by_rows(t) ? t : copied_by_rows(t); }

// Returns `a` itself if kernels can read it by rows or by columns, otherwise a copy. Reading by
// columns requires that each of `parts` equal parts of its rows begins at an address that kernels
// can load from.
at::Tensor left_operand(const at::Tensor& a, int64_t parts) {
  const bool columns_serve = is_aligned(a.size(0) / parts, a);
  if (is_by_rows(a) || (columns_serve && is_by_columns(a))) return a;
  const bool rows_serve = is_aligned(a.size(1), a);
  return rows_serve || !columns_serve ? copied_by_rows(a) : copied_by_rows(a.t()).t();
}

at::Tensor right_operand(const at::Tensor& b) { return is_by_columns(b) ? b : by_rows(b); }

// Answers Python before it starts ranks, when the sizes of the products are not known yet.
std::string why_no_fused_op(c10::Device device, at::ScalarType dtype, int64_t group_size,
                            bool across_hosts) {
  const auto why = why_no_fused(device, dtype, FusedProduct{}, group_size);
  return why.empty() && across_hosts ? kNeedsReach : why;
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CompositeExplicitAutograd, m) {
  m.impl("_why_no_fused_here", &why_no_fused_op);
}

bool has_fused_on_cuda() {
  return gather_op().hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         sum_op().hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

std::string why_no_fused(c10::Device device, at::ScalarType dtype, const FusedProduct& product,
                         int64_t group_size) {
  using Ask = std::string(c10::Device, at::ScalarType, const std::string&, int64_t, int64_t,
                          int64_t, int64_t);
  // The module with the kernels defines this op.
  const auto ask = c10::Dispatcher::singleton().findSchema({kWhyNot, ""});
  if (!ask) return kNotBuilt;
  return ask->typed<Ask>().call(device, dtype, name_of(product.form), product.m, product.n,
                                product.k, group_size);
}

at::Tensor fused_gather_matmul(const Group& group, const at::Tensor& a, const at::Tensor& b,
                               Form form) {
  const bool gathers_a = form == Form::kRows || form == Form::kInnerA;
  const auto& shard = gathers_a ? a : b;
  const auto& other = gathers_a ? b : a;
  // The gathered operand is stored by rows. These two forms read it transposed, and no kernel reads
  // both operands transposed.
  const bool transposed = form == Form::kInnerA || form == Form::kColumns;
  const auto whole = transposed             ? by_rows(other)
                     : form == Form::kInner ? left_operand(other, /*parts=*/1)
                                            : right_operand(other);
  const auto rows = by_rows((transposed ? shard.t() : shard).contiguous());
  const auto settings = fused_settings();
  return gather_op().call(rows, whole, name_of(form), "auto", settings.nccl_sms, group.name,
                          group.size, timeout_seconds(), free_sms_on(a.device().index()),
                          settings.graphs_in_turn);
}

at::Tensor fused_matmul_sum(const Group& group, const at::Tensor& a, const at::Tensor& b,
                            const FusedSum& how) {
  if (!how.by_rows) {  // splits the rows of the transposed product instead
    const FusedSum transposed{how.everywhere, /*by_rows=*/true, how.deterministic};
    return fused_matmul_sum(group, b.t(), a.t(), transposed).t().contiguous();
  }
  const auto left = left_operand(a, group.size);
  const auto right = is_by_rows(left) ? right_operand(b) : by_rows(b);
  return sum_op().call(left, right, how.everywhere, how.deterministic ? "auto" : "any_order",
                       group.name, group.size, timeout_seconds(), free_sms_on(a.device().index()),
                       fused_settings().graphs_in_turn);
}

}  // namespace axonn::ops
