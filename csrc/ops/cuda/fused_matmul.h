// The fused calls on tensors: from the operands and the mapped memory of peers, they make the work
// that a rank enqueues. Operands are bfloat16 or float16; sums are accumulated in fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/cuda/fused/fused_calls.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/data_type.h"
#include "ops/cuda/workspace.h"

namespace axonn::ops::cuda {

// Returns why there are no fused kernels for a dtype, or for a number of ranks; an empty string if
// there are.
std::string why_no_dtype(at::ScalarType dtype);
std::string why_no_ranks(int64_t num_ranks);
kernels::DataType gemm_dtype(at::ScalarType dtype);  // only for dtypes that have kernels

// Looks up by name which operand is gathered, and which dimension of the product its rows form:
// "rows" (of a), "columns" (of b, rows of b.t()), "inner" (rows of b) or "inner_a" (rows of a.t()).
// Raises ValueError for other names.
struct GatheredPlace {
  kernels::cuda::Arriving dim;
  bool is_a;
};
GatheredPlace gathered_place(const char* op, const std::string& name);

// How the sums of an all-reduce are broadcast, or added up in the switch.
struct AskedSumBroadcast {
  std::optional<kernels::cuda::SumBroadcast> way;  // none: the best one is chosen
  bool any_order = false;  // with none: also ways whose bits may differ from call to call
};

// Returns the choice that a name stands for: "copy_engine", "peer_stores", "multicast", "switch";
// or "auto" and "any_order", which choose later. Raises ValueError for other names.
AskedSumBroadcast named_sum_broadcast(const char* op, const std::string& name);

// A product a [M, K] @ b [K, N], one operand of which is gathered. That operand is stored by rows,
// and `shard` holds this rank's rows.
struct GatherMatmul {
  kernels::cuda::FusedGemm gemm;
  kernels::cuda::Arriving arriving;
  kernels::cuda::GatheredRows rows;
  kernels::LaunchConfig config;
  int64_t workspace_bytes;
};

// arriving                shard                          other
// kRows                   [M / W, K]: rows of a          b
// kColumns                [N / W, K]: rows of b.t()      a
// kInner                  [K / W, N]: rows of b          a
// kInner, shard_is_a      [K / W, M]: rows of a.t()      b
//
// `shard` has no gaps; `other` is contiguous by rows or by columns. Raises ValueError for other
// strides, NotImplementedError if no kernel computes it. Both tensors must outlive the call.
GatherMatmul prepare_gather(const char* op, const at::Tensor& shard, const at::Tensor& other,
                            kernels::cuda::Arriving arriving, bool shard_is_a, int64_t num_ranks,
                            const kernels::Residency& residency);

// A GEMM whose result is summed over ranks. a [M, K] and b [K, N] are each contiguous by rows or by
// columns; W divides M.
struct MatmulSum {
  kernels::cuda::FusedGemm gemm;
  kernels::LaunchConfig config;
  bool everywhere;  // each rank gets the whole sum; otherwise its share of the rows
  AskedSumBroadcast sum_broadcast;
  int64_t workspace_bytes;
};

MatmulSum prepare_sum(const char* op, const at::Tensor& a, const at::Tensor& b, bool everywhere,
                      const AskedSumBroadcast& sum_broadcast, int64_t num_ranks,
                      const kernels::Residency& residency);

// Describes a [M, K] @ b [K, N] without communication: sets operands, sizes and dtype. Raises as
// prepare_sum does, except if no kernel computes the product.
kernels::cuda::FusedGemm describe_product(const char* op, const at::Tensor& a, const at::Tensor& b);

// Enqueues a product on the current stream, on the named tile (config_of_tile) or, if the name is
// empty, on the one with the least modelled time. Raises NotImplementedError if no kernel computes
// the product, or if the kernels are Triton's, which are all fused with a collective.
void launch_product(const char* op, const kernels::cuda::FusedGemm& gemm, c10::Device device,
                    const std::string& tile = "");

// These enqueue the call. The result is allocated on the current stream, which must be the compute
// stream or be waited for by it. The workspaces must have the required number of bytes.
at::Tensor run(const char* op, const GatherMatmul& call, const CallPlace& place,
               const at::TensorOptions& options);
at::Tensor run(const char* op, const MatmulSum& call, const CallPlace& place,
               const at::TensorOptions& options);

}  // namespace axonn::ops::cuda
