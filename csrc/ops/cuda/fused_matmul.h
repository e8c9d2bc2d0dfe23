// The fused calls on tensors: from operands to what a rank enqueues, given what it has mapped of
// its peers. bfloat16 and float16; sums are accumulated in fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "core/cuda/fused/fused_calls.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/data_type.h"
#include "ops/cuda/workspace.h"

namespace axonn::ops::cuda {

// Why there are no fused kernels for a dtype, or between so many ranks; empty: there are.
std::string why_no_dtype(at::ScalarType dtype);
std::string why_no_ranks(int64_t num_ranks);
kernels::DataType gemm_dtype(at::ScalarType dtype);  // of one that there are kernels for

// Which operand is gathered, and which dimension of the product its rows are, by name: "rows" (of
// a), "columns" (of b, rows of b.t()), "inner" (rows of b), "inner_a" (rows of a.t()). Raises
// ValueError for others.
struct GatheredPlace {
  kernels::cuda::Arriving dim;
  bool is_a;
};
GatheredPlace gathered_place(const char* op, const std::string& name);

// How sums are handed out, by name: "copy_engine", "peer_stores", "multicast", or "auto": none.
// Raises ValueError for others.
std::optional<kernels::cuda::HandOut> named_hand_out(const char* op, const std::string& name);

// a [M, K] @ b [K, N] of which one operand is gathered: it lies in rows, this rank's in `shard`.
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
// strides, NotImplementedError for what no kernel computes. Both tensors must outlive the call.
GatherMatmul prepare_gather(const char* op, const at::Tensor& shard, const at::Tensor& other,
                            kernels::cuda::Arriving arriving, bool shard_is_a, int64_t num_ranks,
                            const kernels::Residency& residency);

// A GEMM whose result is added up over ranks. a [M, K], b [K, N], each contiguous by rows or by
// columns; W divides M.
struct MatmulSum {
  kernels::cuda::FusedGemm gemm;
  kernels::LaunchConfig config;
  bool everywhere;  // each rank gets the whole sum; otherwise its share of the rows
  std::optional<kernels::cuda::HandOut> hand_out;  // none: the one that is chosen
  int64_t workspace_bytes;
};

MatmulSum prepare_sum(const char* op, const at::Tensor& a, const at::Tensor& b, bool everywhere,
                      std::optional<kernels::cuda::HandOut> hand_out, int64_t num_ranks,
                      const kernels::Residency& residency);

// a [M, K] @ b [K, N] with nothing arriving and nothing leaving: operands, sizes and dtype are set.
// Raises as prepare_sum, but for what no kernel computes.
kernels::cuda::FusedGemm describe_product(const char* op, const at::Tensor& a, const at::Tensor& b);

// Enqueues a product on the current stream; what no kernel computes raises NotImplementedError.
void launch_product(const char* op, const kernels::cuda::FusedGemm& gemm, c10::Device device);

// Enqueue the call. The result is allocated on the current stream, which must be the compute stream
// or waited for by it. The workspaces must have the bytes that were asked for.
at::Tensor run(const char* op, const GatherMatmul& call, const CallPlace& place,
               const at::TensorOptions& options);
at::Tensor run(const char* op, const MatmulSum& call, const CallPlace& place,
               const at::TensorOptions& options);

}  // namespace axonn::ops::cuda
