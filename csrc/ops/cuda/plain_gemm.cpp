// The GEMM of sm_90 without any communication: a way to compute a product, for ops/product.h.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "core/cuda/check.h"
#include "ops/cuda/fused_matmul.h"
#include "ops/cuda/gemm_backend.h"

namespace axonn::ops::cuda {
namespace {

constexpr auto kOp = "_gemm_sm90";

bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool is_dense(const at::Tensor& t) { return t.is_contiguous() || t.t().is_contiguous(); }

bool has_dtype(const at::Tensor& t) {
  return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
}

MatmulSum prepare(const at::Tensor& a, const at::Tensor& b) {
  return prepare_sum(kOp, a, b, /*everywhere=*/true, /*num_ranks=*/1, {});
}

bool takes(const at::Tensor& a, const at::Tensor& b) {
  if (!has_dtype(a) || a.numel() == 0 || b.numel() == 0) return false;
  if (!is_dense(a) || !is_dense(b) || !why_no_gemm_backend(a.device()).empty()) return false;
  auto gemm = prepare(a, b).gemm;
  gemm.d = const_cast<void*>(gemm.a);  // aligned as the result will be, if the call is legal at all
  return gemm_backend(kOp, a.device()).why_unsupported(gemm) == nullptr;
}

at::Tensor gemm_sm90(const at::Tensor& a, const at::Tensor& b,
                     const std::optional<at::Tensor>& bias) {
  const c10::cuda::CUDAGuard guard(a.device());
  auto call = prepare(a, b);
  auto output = at::empty({a.size(0), b.size(1)}, a.options());
  const bool in_epilogue = bias && bias->is_contiguous() && is_aligned(*bias);
  call.gemm.d = output.mutable_data_ptr();
  call.gemm.bias = in_epilogue ? bias->const_data_ptr() : nullptr;
  const auto& backend = gemm_backend(kOp, a.device());
  const char* why = backend.why_unsupported(call.gemm);
  TORCH_CHECK_NOT_IMPLEMENTED(why == nullptr, kOp, ": ", why);
  const auto stream = c10::cuda::getCurrentCUDAStream(a.device().index());
  AXONN_CUDA_CHECK(backend.launch(call.gemm, call.config, stream.stream()));
  if (bias && !in_epilogue) output.add_(*bias);
  return output;
}

TORCH_LIBRARY_IMPL(axonn, CUDA, m) {
  m.impl("_gemm_sm90", &gemm_sm90);
  m.impl("_gemm_sm90_takes", &takes);
}

}  // namespace
}  // namespace axonn::ops::cuda
