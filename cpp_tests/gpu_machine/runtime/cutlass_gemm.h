// CUTLASS's own GEMMs, which are known to be correct: any error is the machine's.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

namespace axonn::gpu_machine::testing {

// d = a @ b + c, all packed. a is [m, k] and b is [k, n], by rows or by columns; c and d are [m, n]
// by rows. All have the instance's element type; sums are in float32.
struct CutlassProblem {
  const void *a, *b, *c;
  void* d;
  int m, n, k;
  int num_ctas;     // of a persistent grid; stands for the number of SMs
  void* workspace;  // of kCutlassWorkspaceBytes, for instances that split sums
  bool overlaps;    // may begin before the previous kernel ends
};
inline constexpr size_t kCutlassWorkspaceBytes = size_t{1} << 22;

struct CutlassGemm {
  const char* name;
  bool is_half;  // float16, otherwise bfloat16
  bool a_by_rows, b_by_rows;
  int alignment;  // sizes along a and b are multiples of this
  // Returns a CUDA error; cudaErrorInvalidValue if CUTLASS refuses the problem.
  cudaError_t (*run)(const CutlassProblem& problem, cudaStream_t stream);
};

// From cutlass_daily.cu, and from the other files, which only `make emulate-slow` builds.
std::vector<CutlassGemm> daily_cutlass_gemms();
std::vector<CutlassGemm> cooperative_cutlass_gemms();
std::vector<CutlassGemm> pingpong_cutlass_gemms();
std::vector<CutlassGemm> stream_k_cutlass_gemms();
CutlassGemm copy_async_cutlass_gemm();

}  // namespace axonn::gpu_machine::testing
