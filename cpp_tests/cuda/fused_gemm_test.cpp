#include "core/cuda/fused/fused_gemm.h"

#include <gtest/gtest.h>

namespace axonn::kernels::cuda {
namespace {

constexpr Link kLink{.copy_gbps = 100, .chunk_us = 2, .store_gbps = 50};

TEST(ArrivingChunks, AreThoseOfThePlan) {
  const comm::ChunkPlan plan{8192, 4, 2};
  const auto rows = arriving_chunks(Arriving::kRows, plan, 1000, kLink);
  EXPECT_EQ(rows.count, 8);
  EXPECT_EQ(rows.own, 2);
  EXPECT_NEAR(rows.each_us, 1024 * 1000 / 100e3 + 2, 1e-9);
  EXPECT_FALSE(rows.columns);
  EXPECT_TRUE(arriving_chunks(Arriving::kColumns, plan, 1000, kLink).columns);
  EXPECT_EQ(arriving_chunks(Arriving::kInner, plan, 1000, kLink).count, 0);
  EXPECT_EQ(arriving_chunks(Arriving::kNothing, plan, 1000, kLink).count, 0);
}

TEST(LeavingRows, AreThoseOfTheOtherRanks) {
  EXPECT_EQ(leaving_rows(1, kLink).share, 0);
  EXPECT_EQ(leaving_rows(8, kLink).share, 0.875);
  EXPECT_EQ(leaving_rows(8, kLink).gbps, 50);
}

}  // namespace
}  // namespace axonn::kernels::cuda
