// CUTLASS's own GEMMs, unchanged: kernels that are right, which the machine must run to the right
// result and without an error.
#include "gpu_machine/runtime/cutlass_case.h"

namespace axonn::gpu_machine {
namespace {

TEST(Cutlass, DailyGemmsAreExact) {
#ifdef AXONN_HAS_CUTLASS
  for (const auto& gemm : testing::daily_cutlass_gemms()) testing::check_cutlass_gemm(gemm);
#else
  GTEST_SKIP() << "CUTLASS was not there when the tests were built: make emulate installs it";
#endif
}

}  // namespace
}  // namespace axonn::gpu_machine
