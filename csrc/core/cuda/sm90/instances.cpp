#include "core/cuda/sm90/instances.h"

#include "core/cuda/sm90/plans.h"
#include "core/cuda/sm90/sum_to_all.h"
#include "core/cuda/sm90/switch_sum.h"

namespace axonn::kernels::sm90 {
namespace {

bool matches(const Instance& instance, const cuda::FusedGemm& gemm, const LaunchConfig& config) {
  const LaunchConfig& built = instance.config;
  return instance.dtype == gemm.dtype && instance.a_transposed == gemm.a_transposed &&
         instance.b_transposed == gemm.b_transposed &&
         instance.departs == (gemm.departures.num_ranks > 0) && built.block_m == config.block_m &&
         built.block_n == config.block_n && built.block_k == config.block_k &&
         built.cluster_m == config.cluster_m && built.cluster_n == config.cluster_n &&
         built.schedule == config.schedule;
}

}  // namespace

const std::vector<Instance>& instances() {
  static const std::vector<Instance> all = [] {
    std::vector<Instance> result;
    for (const auto& part : {gemm_bf16_tn(), gemm_bf16_nn(), gemm_bf16_nt(), gemm_f16_tn(),
                             gemm_f16_nn(), gemm_f16_nt()}) {
      result.insert(result.end(), part.begin(), part.end());
    }
    return result;
  }();
  return all;
}

cudaError_t load() {
  for (const Instance& instance : instances()) {
    if (const cudaError_t error = instance.load(); error != cudaSuccess) return error;
  }
  const cudaError_t error = load_sum_to_all();
  return error != cudaSuccess ? error : load_switch_sum();
}

cudaError_t fused_gemm(const cuda::FusedGemm& gemm, const LaunchConfig& config,
                       cudaStream_t stream) {
  const bool has_result = gemm.departures.num_ranks > 0 || gemm.d != nullptr;
  if (why_unsupported(gemm) != nullptr || config.num_ctas < 1 || gemm.a == nullptr ||
      gemm.b == nullptr || !has_result) {
    return cudaErrorInvalidValue;
  }
  for (const Instance& instance : instances()) {
    if (matches(instance, gemm, config)) return instance.launch(gemm, config, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace axonn::kernels::sm90
