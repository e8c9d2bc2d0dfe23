// The fused products on CUDA, as the ops call them: through the dispatcher, because the extension
// modules with the kernels need not be built.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ops/group/group.h"

namespace axonn::ops {

// Reasons why a call has no fused kernel: no kernels were built, or the group's ranks cannot reach
// each other's memory.
inline constexpr auto kNotBuilt = "it needs the CUDA parts of axonn_ext, which are not built";
inline constexpr auto kNeedsReach =
    "reduce-scatters and all-reduces need GPUs that reach each other's memory; across hosts only "
    "gathers can be fused, with AXONN_FUSED_NCCL_SMS";

// Returns whether the module of the fused ops is loaded.
bool has_fused_on_cuda();

// A product that a fused op computes, by its sizes on one rank. Only the sizes decide whether a
// kernel computes it, because operands in layouts that kernels cannot read are copied.
struct FusedProduct {
  enum class Form {
    kAny,      // any sizes: only requirements of all products are checked
    kRows,     // a's rows are gathered
    kColumns,  // b's columns are gathered
    kInner,    // b's rows are gathered
    kInnerA,   // a's columns are gathered
    kScatter,  // each rank gets its share of the sum's rows
    kTotal,    // each rank gets the whole sum
  };

  Form form = Form::kAny;
  int64_t m = 0, n = 0, k = 0;  // the whole product is a [m, k] @ b [k, n]
};

// Returns why algorithm="fused" cannot compute the product on a device with this many ranks, or an
// empty string if it can, provided that the ranks reach each other's memory. No rank is asked, and
// nothing is allocated.
std::string why_no_fused(c10::Device device, at::ScalarType dtype, const FusedProduct& product,
                         int64_t group_size);

// Returns a @ b, where the form says which operand is gathered. Operands may have any strides, but
// must not be empty. This function and the next one raise NotImplementedError for a product that no
// kernel computes.
at::Tensor fused_gather_matmul(const Group& group, const at::Tensor& a, const at::Tensor& b,
                               FusedProduct::Form form);

struct FusedSum {
  bool everywhere;            // each rank gets the whole sum; otherwise its share
  bool by_rows;               // whether ranks split the rows of the sum; otherwise its columns
  bool deterministic = true;  // false: bits may differ from call to call if that is faster
};

// Returns the sum of a @ b over ranks.
at::Tensor fused_matmul_sum(const Group& group, const at::Tensor& a, const at::Tensor& b,
                            const FusedSum& how);

}  // namespace axonn::ops
