// Tells from sizes, before any rank is asked, which products the fused kernels compute.
#include <c10/core/Device.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/cuda/fused/fused_calls.h"
#include "ops/checks.h"
#include "ops/cuda/fused_matmul.h"
#include "ops/cuda/gemm_backend.h"

namespace axonn::ops::cuda {
namespace {

using kernels::cuda::Arriving;
using kernels::cuda::FusedGemm;
using kernels::cuda::GemmBackend;

constexpr auto kOp = "_why_no_fused";

// The layouts that operands may have. The gathered operand is stored by rows, and the other one is
// copied if needed.
struct Layouts {
  std::vector<bool> a_transposed{false, true};
  std::vector<bool> b_transposed{false, true};
};

// Returns an empty string if a layout is supported, otherwise the reason given for the first layout
// that is tried.
std::string why_no_layout(const GemmBackend& backend, FusedGemm gemm, const Layouts& layouts) {
  std::string first;
  for (const bool a_transposed : layouts.a_transposed) {
    for (const bool b_transposed : layouts.b_transposed) {
      gemm.a_transposed = a_transposed;
      gemm.lda = a_transposed ? gemm.m : gemm.k;
      gemm.b_transposed = b_transposed;
      gemm.ldb = b_transposed ? gemm.k : gemm.n;
      const char* why = backend.why_unsupported(gemm);
      if (why == nullptr) return "";
      if (first.empty()) first = why;
    }
  }
  return first;
}

std::string why_no_product(const GemmBackend& backend, FusedGemm gemm, const std::string& form,
                           int64_t num_ranks) {
  Layouts layouts;
  if (form == "scatter" || form == "total") {
    gemm.departures.num_ranks = static_cast<int32_t>(num_ranks);
  } else {
    const auto place = gathered_place(kOp, form);
    const int64_t count = place.dim == Arriving::kRows      ? gemm.m
                          : place.dim == Arriving::kColumns ? gemm.n
                                                            : gemm.k;
    if (count % num_ranks != 0) return "ranks must share evenly what is gathered";
    gemm.arrivals.dim = place.dim;
    gemm.arrivals.plan = {count, num_ranks, kernels::cuda::chunks_per_shard(count / num_ranks)};
    auto& gathered = place.is_a ? layouts.a_transposed : layouts.b_transposed;
    gathered = {form == "inner_a" || form == "columns"};
  }
  return why_no_layout(backend, gemm, layouts);
}

// FusedProduct in ops/composed/fused_cuda.h lists the forms.
std::string why_no_fused(c10::Device device, at::ScalarType dtype, const std::string& form,
                         int64_t m, int64_t n, int64_t k, int64_t num_ranks) {
  if (auto why = why_no_gemm_backend(device); !why.empty()) return why;
  if (auto why = why_no_dtype(dtype); !why.empty()) return why;
  if (auto why = why_no_ranks(num_ranks); !why.empty()) return why;
  if (form == "any") return "";
  FusedGemm gemm{};
  gemm.dtype = gemm_dtype(dtype);
  gemm.m = m;
  gemm.n = gemm.ldd = n;
  gemm.k = k;
  return why_no_product(gemm_backend(kOp, device), gemm, form, num_ranks);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(axonn, m) {
  m.def(
      "_why_no_fused(Device device, ScalarType dtype, str form, int m, int n, int k, int "
      "num_ranks) -> str",
      &why_no_fused);
}

}  // namespace axonn::ops::cuda
