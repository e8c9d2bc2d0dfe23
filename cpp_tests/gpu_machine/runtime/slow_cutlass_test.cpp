// The other CUTLASS GEMMs that the machine is checked with; see cutlass_test.cpp.
#include "gpu_machine/runtime/cutlass_case.h"

namespace axonn::gpu_machine {
namespace {

void check_all(const std::vector<testing::CutlassGemm>& gemms) {
  for (const auto& gemm : gemms) testing::check_cutlass_gemm(gemm);
}

TEST(SlowCutlass, CooperativeGemmsAreExact) { check_all(testing::cooperative_cutlass_gemms()); }

// wgmma reads through the async proxy what cp.async wrote through the generic one. PTX requires a
// fence.proxy.async there, which CUTLASS's kernel lacks; the machine reports that, and nothing else
// is wrong.
TEST(SlowCutlass, AGemmWithLoadsByCopyAsyncLacksAFence) {
  const testing::CutlassGemm gemm = testing::copy_async_cutlass_gemm();
  testing::check_cutlass_gemm(gemm, false);
  Runtime runtime;
  const testing::CutlassData data(gemm, {256, 128, 128, 4}, 1);
  (void)gemm.run(data.problem, nullptr);
  (void)cudaDeviceSynchronize();
  ASSERT_TRUE(runtime.failure());
  EXPECT_NE(std::string(runtime.failure()->what()).find("no fence.proxy.async orders this read"),
            std::string::npos)
      << runtime.failure()->what();
}

TEST(SlowCutlass, PingpongGemmsAreExact) { check_all(testing::pingpong_cutlass_gemms()); }

TEST(SlowCutlass, StreamKGemmsAreExact) { check_all(testing::stream_k_cutlass_gemms()); }

}  // namespace
}  // namespace axonn::gpu_machine
