#include "ops/cuda/gemm_backend.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <optional>

#include "core/cuda/check.h"
#include "ops/checks.h"
#include "ops/cuda/triton_gemm.h"

namespace axonn::ops::cuda {
namespace {

using kernels::GemmSource;
using kernels::GemmSources;
using kernels::cuda::FusedGemm;
using kernels::cuda::GemmBackend;

int attribute(cudaDeviceAttr name, c10::Device device) {
  int value = 0;
  AXONN_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device.index()));
  return value;
}

// The module for the architecture registers this op; it may not be built.
std::optional<c10::OperatorHandle> find_cutlass() {
  return c10::Dispatcher::singleton().findSchema({"axonn::_gemm_backend_sm90", ""});
}

kernels::DeviceLimits limits_of(c10::Device device) {
  kernels::DeviceLimits limits = kernels::kSm90;
  limits.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
  return limits;
}

GemmSources sources_for(c10::Device device) {
  return {.major = attribute(cudaDevAttrComputeCapabilityMajor, device),
          .minor = attribute(cudaDevAttrComputeCapabilityMinor, device),
          .has_cutlass = find_cutlass().has_value(),
          .has_triton = has_triton_gemms()};
}

// The backends of devices whose kernels are loaded. Every call looks them up several times.
class LoadedBackends {
 public:
  const GemmBackend* find(c10::Device device) {
    const std::lock_guard lock(mutex_);
    const auto found = backends_.find(device.index());
    return found == backends_.end() ? nullptr : found->second;
  }

  const GemmBackend& load(const GemmBackend& backend, c10::Device device) {
    const std::lock_guard lock(mutex_);
    const c10::cuda::CUDAGuard guard(device);
    kernels::cuda::load_kernels(backend);
    backends_.insert_or_assign(device.index(), &backend);
    return backend;
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, const GemmBackend*> backends_;
};

LoadedBackends& loaded_backends() {
  static LoadedBackends backends;
  return backends;
}

}  // namespace

GemmSource gemm_source(c10::Device device) {
  return device.is_cuda() ? kernels::gemm_source(sources_for(device)) : GemmSource::kNone;
}

std::string why_no_gemm_backend(c10::Device device) {
  if (!device.is_cuda()) return "it is no CUDA device";
  if (loaded_backends().find(device) != nullptr) return "";
  return kernels::why_no_gemm_source(sources_for(device));
}

const GemmBackend& gemm_backend(const char* op, c10::Device device) {
  if (const auto* loaded = loaded_backends().find(device)) return *loaded;
  const std::string why = why_no_gemm_backend(device);
  TORCH_CHECK_NOT_IMPLEMENTED(why.empty(), op, ": no fused kernels for ", device, ": ", why,
                              "; use 'auto', 'chunked' or 'sequential'");
  if (gemm_source(device) == GemmSource::kTriton) {
    return loaded_backends().load(triton_gemms(), device);
  }
  const auto address = find_cutlass()->typed<int64_t()>().call();
  return loaded_backends().load(*reinterpret_cast<const GemmBackend*>(address), device);
}

kernels::LaunchConfig choose_config(const char* op, const FusedGemm& gemm, c10::Device device,
                                    const kernels::Residency& residency,
                                    const kernels::cuda::Traffic& traffic) {
  const auto limits = limits_of(device);
  if (gemm_backend(op, device).chooses_tiles) {
    kernels::LaunchConfig grid{};
    grid.num_ctas = max_ctas(grid, residency, limits);
    TORCH_CHECK_NOT_IMPLEMENTED(grid.num_ctas > 0, op, ": no SM is left for a product on ",
                                limits.num_sms, " SMs for ", residency.ranks_per_device, " ranks");
    return grid;
  }
  const auto config = kernels::cuda::choose_tile(gemm, traffic, residency, limits);
  TORCH_CHECK_NOT_IMPLEMENTED(config.has_value(), op, ": no kernel for a product of M=", gemm.m,
                              ", N=", gemm.n, ", K=", gemm.k, " on ", limits.num_sms, " SMs for ",
                              residency.ranks_per_device, " ranks");
  return *config;
}

std::vector<kernels::ModelledConfig> product_configs(const char* op, const FusedGemm& gemm,
                                                     c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(!gemm_backend(op, device).chooses_tiles, op, ": the kernels for ",
                              device, " (Triton) choose their tiles by themselves, so none can be ",
                              "asked for");
  return kernels::legal_configs(kernels::cuda::problem_of(gemm, {}, {}), {}, limits_of(device));
}

kernels::LaunchConfig config_of_tile(const char* op, const FusedGemm& gemm, c10::Device device,
                                     const std::string& tile) {
  std::string names;
  for (const auto& [config, us] : product_configs(op, gemm, device)) {
    if (config.tile() == tile) return config;
    names.append(names.empty() ? "" : ", ").append(config.tile());
  }
  TORCH_CHECK_VALUE(false, op, ": tile must be one of ", names, ", got '", tile, "'");
}

}  // namespace axonn::ops::cuda
