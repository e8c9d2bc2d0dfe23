// Where the fused GEMMs for a GPU come from. This is plain host code without CUDA headers, so that
// CPU tests cover it.
#pragma once

#include <cstdint>
#include <string>

namespace axonn::kernels {

enum class GemmSource : int32_t {
  kNone,
  kCutlass,  // axonn_ext._cuda_sm90, only for sm_90
  kTriton,   // axonn_ext.kernels.triton, for sm_80 and later
};

// The GPU's compute capability, and the sources that this process has.
struct GemmSources {
  int major;
  int minor;
  bool has_cutlass;  // axonn_ext._cuda_sm90 is built
  bool has_triton;   // triton is installed
};

constexpr GemmSource gemm_source(const GemmSources& sources) {
  if (sources.has_cutlass && sources.major == 9 && sources.minor == 0) return GemmSource::kCutlass;
  return sources.has_triton && sources.major >= 8 ? GemmSource::kTriton : GemmSource::kNone;
}

constexpr const char* name_of(GemmSource source) {
  return source == GemmSource::kCutlass ? "cutlass" : source == GemmSource::kTriton ? "triton" : "";
}

// Returns why there are no fused GEMMs; an empty string if there are some.
inline std::string why_no_gemm_source(const GemmSources& sources) {
  if (gemm_source(sources) != GemmSource::kNone) return "";
  const std::string gpu = "sm_" + std::to_string(sources.major) + std::to_string(sources.minor);
  if (sources.major < 8) return "fused kernels exist from sm_80 on, and it is of " + gpu;
  const bool either = sources.major == 9 && sources.minor == 0;
  return "fused kernels for " + gpu + " need triton, which is not installed" +
         (either ? ", or axonn_ext._cuda_sm90 (CUTLASS), which is not built" : "");
}

}  // namespace axonn::kernels
