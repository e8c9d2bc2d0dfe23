// The Python module axonn_ext._cuda_sm90: the GEMMs for sm_90, which _cuda calls. Importing it
// registers them and needs no driver.
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "core/cuda/fused/fused_calls.h"
#include "core/cuda/sm90/instances.h"
#include "core/cuda/sm90/plans.h"
#include "core/cuda/sm90/sum_to_all.h"
#include "core/cuda/sm90/switch_sum.h"

namespace axonn::ops::cuda_sm90 {
namespace {

using kernels::cuda::GemmBackend;

// Modules do not see each other's symbols, so the functions are passed as an address.
int64_t gemm_backend() {
  static constexpr GemmBackend kBackend{&kernels::sm90::why_unsupported, &kernels::sm90::fused_gemm,
                                        &kernels::sm90::sum_to_all, &kernels::sm90::sum_in_switch,
                                        &kernels::sm90::load};
  return reinterpret_cast<int64_t>(&kBackend);
}

// Returns one dict per instance that was built.
pybind11::list instances() {
  pybind11::list result;
  for (const auto& instance : kernels::sm90::instances()) {
    pybind11::dict item;
    item["dtype"] = kernels::name_of(instance.dtype);
    item["a_transposed"] = instance.a_transposed;
    item["b_transposed"] = instance.b_transposed;
    item["departs"] = instance.departs;
    item["block"] = pybind11::make_tuple(instance.config.block_m, instance.config.block_n,
                                         instance.config.block_k);
    item["cluster"] = pybind11::make_tuple(instance.config.cluster_m, instance.config.cluster_n);
    item["num_stages"] = instance.config.num_stages;
    result.append(item);
  }
  return result;
}

TORCH_LIBRARY_FRAGMENT(axonn, m) { m.def("_gemm_backend_sm90() -> int", &gemm_backend); }

}  // namespace
}  // namespace axonn::ops::cuda_sm90

PYBIND11_MODULE(_cuda_sm90, m) { m.def("instances", &axonn::ops::cuda_sm90::instances); }
