#include "core/cuda/fused/tile_choice.h"

#include <gtest/gtest.h>

namespace axonn::kernels::cuda {
namespace {

constexpr Link kNoTime{.copy_gbps = 1e9, .chunk_us = 0, .store_gbps = 1e9};

int64_t columns(int64_t m, int64_t n, int64_t k, const Traffic& traffic, const Link& link) {
  FusedGemm gemm{};
  gemm.m = m;
  gemm.n = n;
  gemm.k = k;
  gemm.dtype = DataType::kBFloat16;
  const auto config = choose_tile(gemm, traffic, {.link = link}, kSm90);
  return config ? config->block_n : 0;
}

// In each of these tests, the largest tile is the fastest without a link, but not over the link.
TEST(ChooseTile, KnowsWhenRowsArrive) {
  const comm::ChunkPlan plan{2048, 8, 1};
  const auto tile = [&](const Link& link) {
    const Traffic traffic{.arriving = arriving_chunks(Arriving::kRows, plan, 2 * 4096, link)};
    return columns(2048, 1376, 4096, traffic, link);
  };
  EXPECT_EQ(tile(kNoTime), 256);
  EXPECT_EQ(tile(kNvlink), 128);
}

TEST(ChooseTile, KnowsWhenRowsLeave) {
  const auto tile = [](int64_t num_ranks, const Link& link) {
    return columns(2048, 4096, 1792, {.num_ranks = num_ranks}, link);
  };
  EXPECT_EQ(tile(8, kNoTime), 256);
  EXPECT_EQ(tile(8, kNvlink), 128);
  EXPECT_EQ(tile(1, kNvlink), 256) << "they stay";
}

TEST(ChooseTile, KnowsWhenTheSwitchAddsUp) {
  const auto tile = [](const Link& link) {
    return columns(8192, 4096, 1792, {.num_ranks = 8, .in_switch = true}, link);
  };
  EXPECT_EQ(tile(kNoTime), 256);
  EXPECT_EQ(tile(kNvlink), 128);
}

TEST(ChooseTile, NoneIsLegalForRowsThatTmaCannotLoad) { EXPECT_EQ(columns(8, 8, 3, {}, {}), 0); }

}  // namespace
}  // namespace axonn::kernels::cuda
