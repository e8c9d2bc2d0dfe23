#include "core/cuda/fused/workspace_size.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace axonn::kernels::cuda {
namespace {

constexpr int64_t kPage = kPageBytes, kFront = kFrontBytes;

TEST(WorkspaceSize, APowerOfTwoGetsItsOwnBytesBehindTheFront) {
  for (int64_t bytes = 2 * kPage; bytes <= int64_t{1} << 40; bytes *= 2) {
    EXPECT_EQ(memory_bytes(bytes, kFront, kPage), bytes + kFront);
  }
}

TEST(WorkspaceSize, WhatFitsAPageGetsAPage) {
  EXPECT_EQ(memory_bytes(1, kFront, kPage), kPage);
  EXPECT_EQ(memory_bytes(kPage - kFront, kFront, kPage), kPage);
  EXPECT_EQ(memory_bytes(kPage - kFront + 1, kFront, kPage), kPage + kFront);
}

// The memory holds the bytes asked for, and wastes at most an eighth of them or a page.
TEST(WorkspaceSize, NoMoreThanAnEighthIsUnused) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 10000; ++i) {
    const auto bytes = static_cast<int64_t>(1 + random() % (uint64_t{1} << (22 + random() % 16)));
    const int64_t workspace = memory_bytes(bytes, kFront, kPage) - kFront;
    ASSERT_GE(workspace, bytes);
    ASSERT_LT(workspace - bytes, std::max(bytes / kStepsPerDoubling + 1, kPage)) << bytes;
  }
}

// A size that grows one byte at a time causes few allocations; PinnedState has room for 256.
TEST(WorkspaceSize, GrowsFewTimes) {
  int memories = 0;
  for (int64_t bytes = 1; bytes <= int64_t{1} << 47; ++memories) {
    bytes = memory_bytes(bytes, kFront, kPage) - kFront + 1;
  }
  EXPECT_LE(memories, 256);
}

}  // namespace
}  // namespace axonn::kernels::cuda
