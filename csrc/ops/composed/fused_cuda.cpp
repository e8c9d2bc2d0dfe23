#include "ops/composed/fused_cuda.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <cstdint>
#include <string>

#include "core/cuda/fused/fused_gemm.h"
#include "ops/composed/c10d_collectives.h"
#include "ops/composed/fused_settings.h"

namespace axonn::ops {
namespace {

constexpr auto kGather = "axonn::_fused_all_gather_matmul";
constexpr auto kSum = "axonn::_fused_matmul_sum";
constexpr auto kWhyNot = "axonn::_why_no_fused";

// The signature is checked against the registered kernels.
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

// Returns the kernels' name for what is gathered, or for a sum of rows.
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

// Returns whether a kernel can read the matrix where it lies, by rows; is_by_columns says the same
// of columns.
bool is_by_rows(const at::Tensor& t) {
  return t.stride(1) == 1 && t.stride(0) >= t.size(1) && is_aligned(t.stride(0), t) &&
         is_aligned(t.size(1), t) &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kernels::cuda::kLoadBytes == 0;
}
bool is_by_columns(const at::Tensor& t) { return is_by_rows(t.t()); }

at::Tensor copied_by_rows(const at::Tensor& t) {
  return t.clone(at::MemoryFormat::Contiguous);  // also when only its address is unsuitable
}
at::Tensor by_rows(const at::Tensor& t) { return is_by_rows(t) ? t : copied_by_rows(t); }

// Returns `a` itself if kernels can read it by rows or by columns, else a copy. It may be read by
// columns only if each of `parts` equal parts of its rows begins at an address that kernels can
// read.
at::Tensor left_operand(const at::Tensor& a, int64_t parts) {
  const bool columns_serve = is_aligned(a.size(0) / parts, a);
  if (is_by_rows(a) || (columns_serve && is_by_columns(a))) return a;
  const bool rows_serve = is_aligned(a.size(1), a);
  return rows_serve || !columns_serve ? copied_by_rows(a) : copied_by_rows(a.t()).t();
}

at::Tensor right_operand(const at::Tensor& b) { return is_by_columns(b) ? b : by_rows(b); }

at::Tensor gather(const Group& group, const at::Tensor& shard, const at::Tensor& other, Form form) {
  // What is gathered lies by rows. In these two forms it is read transposed, and no kernel reads
  // both operands transposed.
  const bool transposed = form == Form::kInnerA || form == Form::kColumns;
  const auto whole = transposed             ? by_rows(other)
                     : form == Form::kInner ? left_operand(other, /*parts=*/1)
                                            : right_operand(other);
  const auto settings = fused_settings();
  return gather_op().call(by_rows(shard.contiguous()), whole, name_of(form), "auto",
                          settings.nccl_sms, group.name, group.size, timeout_seconds(),
                          free_sms_on(shard.device().index()), settings.graphs_in_turn);
}

// Returns the sum of a @ b over ranks: the whole sum if `everywhere`, else each rank's share of the
// rows.
at::Tensor sum(const Group& group, const at::Tensor& a, const at::Tensor& b, bool everywhere,
               const char* sum_broadcast = "auto") {
  const auto left = left_operand(a, group.size);
  const auto right = is_by_rows(left) ? right_operand(b) : by_rows(b);
  return sum_op().call(left, right, everywhere, sum_broadcast, group.name, group.size,
                       timeout_seconds(), free_sms_on(a.device().index()),
                       fused_settings().graphs_in_turn);
}

// Returns whether ranks share out rows to add them up. If the group size does not divide the rows,
// they share out columns.
bool is_summed_by_rows(int64_t rows, int64_t columns, int64_t group_size) {
  return rows % group_size == 0 || columns % group_size != 0;
}

bool is_empty(const at::Tensor& a, const at::Tensor& b) { return a.numel() == 0 || b.numel() == 0; }

// Answers Python before it starts ranks, whatever the sizes of the products will be.
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

FusedProduct all_gather_product(at::IntArrayRef a_shard, at::IntArrayRef b, int64_t gather_dim,
                                int64_t group_size) {
  return gather_dim == 0 ? FusedProduct{Form::kRows, a_shard[0] * group_size, b[1], a_shard[1]}
                         : FusedProduct{Form::kInnerA, a_shard[0], b[1], a_shard[1] * group_size};
}

FusedProduct all_gather_rhs_product(at::IntArrayRef a, at::IntArrayRef b_shard, int64_t gather_dim,
                                    int64_t group_size) {
  return gather_dim == 1 ? FusedProduct{Form::kColumns, a[0], b_shard[1] * group_size, a[1]}
                         : FusedProduct{Form::kInner, a[0], b_shard[1], b_shard[0] * group_size};
}

FusedProduct reduce_scatter_product(at::IntArrayRef a, at::IntArrayRef b, int64_t scatter_dim) {
  // To share out columns, the rows of the transposed product are shared out.
  return scatter_dim == 0 ? FusedProduct{Form::kScatter, a[0], b[1], a[1]}
                          : FusedProduct{Form::kScatter, b[1], a[0], a[1]};
}

FusedProduct all_reduce_product(at::IntArrayRef a, at::IntArrayRef b, int64_t group_size) {
  return is_summed_by_rows(a[0], b[1], group_size) ? FusedProduct{Form::kTotal, a[0], b[1], a[1]}
                                                   : FusedProduct{Form::kTotal, b[1], a[0], a[1]};
}

std::string why_no_fused(c10::Device device, at::ScalarType dtype, const FusedProduct& product,
                         int64_t group_size) {
  using Ask = std::string(c10::Device, at::ScalarType, const std::string&, int64_t, int64_t,
                          int64_t, int64_t);
  // The module that has the kernels defines it.
  const auto ask = c10::Dispatcher::singleton().findSchema({kWhyNot, ""});
  if (!ask) return kNotBuilt;
  return ask->typed<Ask>().call(device, dtype, name_of(product.form), product.m, product.n,
                                product.k, group_size);
}

at::Tensor fused_all_gather_matmul(const Group& group, const at::Tensor& a_shard,
                                   const at::Tensor& b, int64_t gather_dim) {
  if (is_empty(a_shard, b)) return at::mm(c10d_all_gather(group, a_shard, gather_dim), b);
  return gather_dim == 0 ? gather(group, a_shard, b, Form::kRows)
                         : gather(group, a_shard.t(), b, Form::kInnerA);
}

at::Tensor fused_matmul_all_gather_rhs(const Group& group, const at::Tensor& a,
                                       const at::Tensor& b_shard, int64_t gather_dim) {
  if (is_empty(a, b_shard)) return at::mm(a, c10d_all_gather(group, b_shard, gather_dim));
  return gather_dim == 1 ? gather(group, b_shard.t(), a, Form::kColumns)
                         : gather(group, b_shard, a, Form::kInner);
}

at::Tensor fused_matmul_reduce_scatter(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                       int64_t scatter_dim) {
  if (is_empty(a, b)) return c10d_reduce_scatter(group, at::mm(a, b), scatter_dim);
  // To share out columns, the rows of the transposed product are shared out.
  return scatter_dim == 0 ? sum(group, a, b, /*everywhere=*/false)
                          : sum(group, b.t(), a.t(), /*everywhere=*/false).t().contiguous();
}

at::Tensor fused_matmul_all_reduce(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                   bool deterministic) {
  if (is_empty(a, b)) return c10d_all_reduce(group, at::mm(a, b), /*maximum=*/false);
  const char* sum_broadcast = deterministic ? "auto" : "any_order";
  return is_summed_by_rows(a.size(0), b.size(1), group.size)
             ? sum(group, a, b, /*everywhere=*/true, sum_broadcast)
             : sum(group, b.t(), a.t(), /*everywhere=*/true, sum_broadcast).t().contiguous();
}

}  // namespace axonn::ops
