// CUTLASS's own GEMMs, which are known to be right: whatever they get wrong is the machine's fault.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

namespace axonn::gpu_machine::testing {

// d = a @ b + c, each packed. a is [m, k] and b is [k, n], by rows or by columns; c and d are
// [m, n] by rows. All have the instance's type of elements; sums are in float32.
struct CutlassProblem {
  const void *a, *b, *c;
  void* d;
  int m, n, k;
  int num_ctas;     // of a persistent grid; stands for the number of SMs
  void* workspace;  // of kCutlassWorkspaceBytes, for instances that split sums
  bool overlaps;    // it may begin before the kernel in front of it ends
};
inline constexpr size_t kCutlassWorkspaceBytes = size_t{1} << 22;

struct CutlassGemm {
  const char* name;
  bool is_half;  // float16, or else bfloat16
  bool a_by_rows, b_by_rows;
  int alignment;  // elements that sizes along a and b are multiples of
  // Returns an error of CUDA, or cudaErrorInvalidValue where CUTLASS refuses the problem.
  cudaError_t (*run)(const CutlassProblem& problem, cudaStream_t stream);
};

// Of cutlass_daily.cu, and of the others that only `make emulate-slow` builds.
std::vector<CutlassGemm> daily_cutlass_gemms();
std::vector<CutlassGemm> cooperative_cutlass_gemms();
std::vector<CutlassGemm> pingpong_cutlass_gemms();
std::vector<CutlassGemm> stream_k_cutlass_gemms();
CutlassGemm copy_async_cutlass_gemm();

}  // namespace axonn::gpu_machine::testing
