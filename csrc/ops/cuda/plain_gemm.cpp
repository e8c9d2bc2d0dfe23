// Offers the GEMM of sm_90, without any communication, as a way to compute a product for
// ops/tuning/product.h.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/cuda/fused_matmul.h"
#include "ops/cuda/gemm_backend.h"
#include "ops/tuning/product_kernels.h"

namespace axonn::ops::cuda {
namespace {

constexpr auto kOp = "_mm_fused_sm90";

bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool is_dense(const at::Tensor& t) { return t.is_contiguous() || t.t().is_contiguous(); }

bool takes(const at::Tensor& a, const at::Tensor& b) {
  const bool half = a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf;
  if (!half || !is_dense(a) || !is_dense(b)) return false;
  if (gemm_source(a.device()) != kernels::GemmSource::kCutlass) return false;
  const auto gemm = describe_product(kOp, a, b);
  return gemm_backend(kOp, a.device()).why_unsupported(gemm) == nullptr;
}

std::vector<std::string> candidates(const at::Tensor& a, const at::Tensor& b,
                                    const std::optional<at::Tensor>& /*bias*/) {
  // The only candidate is the config with the least modelled cost; its version is axonn_ext's.
  if (!takes(a, b)) return {};
  return {"1", ""};
}

std::vector<at::Tensor> mm_fused_sm90(const at::Tensor& a, const at::Tensor& b,
                                      const std::optional<at::Tensor>& bias,
                                      const std::string& tile) {
  if (!takes(a, b)) return {};
  const c10::cuda::CUDAGuard guard(a.device());
  auto gemm = describe_product(kOp, a, b);
  auto output = at::empty({a.size(0), b.size(1)}, a.options());
  const bool in_epilogue = bias && bias->is_contiguous() && is_aligned(*bias);
  gemm.d = output.mutable_data_ptr();
  gemm.bias = in_epilogue ? bias->const_data_ptr() : nullptr;
  launch_product(kOp, gemm, a.device(), tile);
  if (bias && !in_epilogue) output.add_(*bias);
  return {output};
}

static_assert(std::is_same_v<decltype(candidates), KernelCandidates>);
static_assert(std::is_same_v<decltype(mm_fused_sm90), KernelProduct>);

TORCH_LIBRARY_IMPL(axonn, CUDA, m) {
  m.impl("_mm_fused_sm90_candidates", &candidates);
  m.impl("_mm_fused_sm90", &mm_fused_sm90);
}

}  // namespace
}  // namespace axonn::ops::cuda
