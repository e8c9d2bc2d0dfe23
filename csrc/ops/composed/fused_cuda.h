// The fused ops on CUDA as the composed ones see them: through the dispatcher, since their kernels
// are in extension modules that need not be built.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ops/group/group.h"

namespace axonn::ops {

// Why a call has no fused kernel: none was built, or the group's ranks are too far apart.
inline constexpr auto kNotBuilt = "it needs the CUDA parts of axonn_ext, which are not built";
inline constexpr auto kNeedsReach =
    "reduce-scatters and all-reduces need GPUs that reach each other's memory; across hosts only "
    "gathers can be fused, with AXONN_FUSED_NCCL_SMS";

// Whether their module is loaded.
bool has_fused_on_cuda();

// A product that one of them computes, by its sizes on one rank, which alone decide whether a
// kernel does: operands that lie otherwise than kernels read them are copied.
struct FusedProduct {
  enum class Form {
    kAny,      // of any sizes: only what all products need is asked for
    kRows,     // a's rows are gathered
    kColumns,  // b's columns are
    kInner,    // b's rows are
    kInnerA,   // a's columns are
    kScatter,  // each rank gets its share of the sum's rows
    kTotal,    // each rank gets the whole sum
  };

  Form form = Form::kAny;
  int64_t m = 0, n = 0, k = 0;  // a [m, k] @ b [k, n], whole
};

// The products of the ops below, of which a rank holds these sizes of a and b.
FusedProduct all_gather_product(at::IntArrayRef a_shard, at::IntArrayRef b, int64_t gather_dim,
                                int64_t group_size);
FusedProduct all_gather_rhs_product(at::IntArrayRef a, at::IntArrayRef b_shard, int64_t gather_dim,
                                    int64_t group_size);
FusedProduct reduce_scatter_product(at::IntArrayRef a, at::IntArrayRef b, int64_t scatter_dim);
FusedProduct all_reduce_product(at::IntArrayRef a, at::IntArrayRef b, int64_t group_size);

// Why algorithm="fused" cannot compute it on a device, between so many ranks; empty: it can, if the
// ranks reach each other. No rank is asked, and nothing is allocated.
std::string why_no_fused(c10::Device device, at::ScalarType dtype, const FusedProduct& product,
                         int64_t group_size);

// As the ops of the same names, which have checked the arguments. NotImplementedError for what no
// kernel computes. Without an element, it is "sequential".
at::Tensor fused_all_gather_matmul(const Group& group, const at::Tensor& a_shard,
                                   const at::Tensor& b, int64_t gather_dim);
at::Tensor fused_matmul_all_gather_rhs(const Group& group, const at::Tensor& a,
                                       const at::Tensor& b_shard, int64_t gather_dim);
at::Tensor fused_matmul_reduce_scatter(const Group& group, const at::Tensor& a, const at::Tensor& b,
                                       int64_t scatter_dim);
at::Tensor fused_matmul_all_reduce(const Group& group, const at::Tensor& a, const at::Tensor& b);

}  // namespace axonn::ops
