// What the launcher of the sm_90 GEMMs does if the driver refuses a TMA descriptor.
#include <cuda.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/cuda/sm90/instances.h"
#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine {
namespace {

#ifdef AXONN_HAS_CUTLASS

// Counts calls, and refuses the call with this number; -1 refuses none.
struct Driver {
  int refused = -1;
  int calls = 0;
};
Driver& driver() {
  static Driver one;
  return one;
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (driver().calls++ == driver().refused) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 1, sizeof *map);
  return CUDA_SUCCESS;
}

cudaError_t launch(const kernels::sm90::Instance& instance, int refused) {
  alignas(16) static char memory[16];  // no kernel runs that could access it
  kernels::cuda::FusedGemm gemm{};
  gemm.a = gemm.b = gemm.d = memory;
  gemm.m = gemm.n = gemm.k = 1024;
  gemm.lda = gemm.ldb = gemm.ldd = 1024;
  gemm.a_transposed = instance.a_transposed;
  gemm.b_transposed = instance.b_transposed;
  gemm.dtype = instance.dtype;
  if (instance.departs) {
    gemm.departures.num_ranks = 2;
    gemm.departures.slots[0] = gemm.departures.slots[1] = memory;
  }
  kernels::LaunchConfig config = instance.config;
  config.num_ctas = 132;
  driver() = {refused, 0};
  return instance.launch(gemm, config, nullptr);
}

TEST(Descriptors, AGemmIsNotLaunchedWithOneThatTheDriverRefused) {
  Runtime runtime;
  runtime.offer_entry_point("cuTensorMapEncodeTiled", reinterpret_cast<void*>(&encode));
  for (const auto& instance : kernels::sm90::instances()) {
    const int launches = runtime.calls_of("cudaLaunchKernelExC");
    runtime.fail("cudaLaunchKernelExC", cudaErrorLaunchFailure);  // no kernel may run
    EXPECT_EQ(launch(instance, -1), cudaErrorLaunchFailure);
    EXPECT_EQ(runtime.calls_of("cudaLaunchKernelExC"), launches + 1);
    const int descriptors = driver().calls;
    EXPECT_EQ(descriptors, 4);  // a, b, and either d and its addend or two destinations
    for (int refused = 0; refused < descriptors; ++refused) {
      EXPECT_EQ(launch(instance, refused), cudaErrorInvalidValue) << refused;
    }
    EXPECT_EQ(runtime.calls_of("cudaLaunchKernelExC"), launches + 1);
  }
}

#else

TEST(Descriptors, AGemmIsNotLaunchedWithOneThatTheDriverRefused) {
  GTEST_SKIP() << "CUTLASS was not there when the tests were built: make emulate installs it";
}

#endif

}  // namespace
}  // namespace axonn::gpu_machine
