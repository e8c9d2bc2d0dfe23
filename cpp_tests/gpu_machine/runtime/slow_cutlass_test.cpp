// The rest of CUTLASS's own GEMMs that the machine is checked with, see cutlass_test.cpp.
#include "gpu_machine/runtime/cutlass_case.h"

namespace axonn::gpu_machine {
namespace {

void check_all(const std::vector<testing::CutlassGemm>& gemms) {
  for (const auto& gemm : gemms) testing::check_cutlass_gemm(gemm);
}

TEST(SlowCutlass, CooperativeGemmsAreExact) { check_all(testing::cooperative_cutlass_gemms()); }

TEST(SlowCutlass, PingpongGemmsAreExact) { check_all(testing::pingpong_cutlass_gemms()); }

TEST(SlowCutlass, StreamKGemmsAreExact) { check_all(testing::stream_k_cutlass_gemms()); }

}  // namespace
}  // namespace axonn::gpu_machine
