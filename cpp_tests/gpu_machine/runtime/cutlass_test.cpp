// CUTLASS's own GEMMs, unchanged: correct kernels, which the machine must run to the correct result
// and without errors.
#include "gpu_machine/runtime/cutlass_case.h"

namespace axonn::gpu_machine {
namespace {

#ifdef AXONN_HAS_CUTLASS

TEST(Cutlass, DailyGemmsAreExact) {
  for (const auto& gemm : testing::daily_cutlass_gemms()) testing::check_cutlass_gemm(gemm);
}

// Each may begin before the previous one, whose result it adds to, has ended.
TEST(Cutlass, GemmsThatBeginEarlyWaitForWhatTheyRead) {
  for (const auto& gemm : testing::daily_cutlass_gemms()) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      testing::check_cutlass_gemm(gemm, {256, 128, 64, 4}, seed, 3);
    }
  }
}

#else

TEST(Cutlass, DailyGemmsAreExact) {
  GTEST_SKIP() << "CUTLASS was not there when the tests were built: make emulate installs it";
}

#endif

}  // namespace
}  // namespace axonn::gpu_machine
