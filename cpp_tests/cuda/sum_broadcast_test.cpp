#include "core/cuda/fused/sum_broadcast.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace axonn::kernels::cuda {
namespace {

constexpr int64_t kMiB = 1 << 20;

std::string why(SumBroadcast way, const SumBroadcastProblem& problem) {
  const char* text = why_no_sum_broadcast(way, problem);
  return text == nullptr ? "" : text;
}

TEST(SumBroadcast, CopiesAreAlwaysLegal) {
  for (const int64_t bytes : {0, 8, 16, 40}) {
    for (const bool multicast : {false, true}) {
      EXPECT_EQ(why(SumBroadcast::kCopyEngine, {4, bytes, multicast}), "");
    }
  }
}

TEST(SumBroadcast, StoresNeedWholeVectorsAndMulticastItsAddress) {
  EXPECT_EQ(why(SumBroadcast::kPeerStores, {4, 48, false}), "");
  EXPECT_EQ(why(SumBroadcast::kMulticast, {4, 48, true}), "");
  EXPECT_NE(why(SumBroadcast::kMulticast, {4, 48, false}).find("no multicast address"),
            std::string::npos);
  for (const SumBroadcast way : {SumBroadcast::kPeerStores, SumBroadcast::kMulticast}) {
    EXPECT_NE(why(way, {4, 40, true}).find("multiple of 16 bytes"), std::string::npos);
  }
}

TEST(SumBroadcast, WithoutAKernelThatStoresEverywhereSumsAreCopied) {
  const SumBroadcastProblem problem{4, 48, /*has_multicast=*/true, /*has_kernel=*/false};
  EXPECT_EQ(choose_sum_broadcast(problem), SumBroadcast::kCopyEngine);
  EXPECT_EQ(why(SumBroadcast::kCopyEngine, problem), "");
  for (const SumBroadcast way :
       {SumBroadcast::kPeerStores, SumBroadcast::kMulticast, SumBroadcast::kSwitch}) {
    EXPECT_NE(why(way, problem).find("only kernels for sm_90"), std::string::npos);
  }
}

TEST(SumBroadcast, MulticastIsTakenWhereItSavesSomething) {
  for (const int32_t ranks : {3, 4, 8}) {
    for (const int64_t bytes : {int64_t{16}, kMiB, 512 * kMiB}) {
      EXPECT_EQ(choose_sum_broadcast({ranks, bytes, true}), SumBroadcast::kMulticast);
      EXPECT_NE(choose_sum_broadcast({ranks, bytes, false}), SumBroadcast::kMulticast);
    }
  }
  // With two ranks, multicast would also return each rank's own rows, and save nothing.
  EXPECT_EQ(choose_sum_broadcast({2, 512 * kMiB, true}), SumBroadcast::kCopyEngine);
}

TEST(SumBroadcast, TheSwitchAddsOnlyWhereTheOrderDoesNotMatter) {
  for (const int32_t ranks : {2, 3, 8}) {
    SumBroadcastProblem problem{.num_ranks = ranks, .slot_bytes = kMiB, .has_multicast = true};
    EXPECT_EQ(why(SumBroadcast::kSwitch, problem), "");
    EXPECT_NE(choose_sum_broadcast(problem), SumBroadcast::kSwitch);
    problem.any_order = true;
    // With two ranks, the switch would move half as much again as copies do.
    EXPECT_EQ(choose_sum_broadcast(problem) == SumBroadcast::kSwitch, ranks > 2);
    problem.has_multicast = false;
    EXPECT_NE(why(SumBroadcast::kSwitch, problem).find("no multicast address"), std::string::npos);
    EXPECT_NE(choose_sum_broadcast(problem), SumBroadcast::kSwitch);
  }
}

// Asked before the memory exists, when only its multicast address is unknown.
TEST(SumBroadcast, TheSwitchMayAddWhereAMulticastAddressIsAllThatLacks) {
  const SumBroadcastProblem problem{
      .num_ranks = 3, .slot_bytes = kMiB, .has_multicast = false, .any_order = true};
  EXPECT_TRUE(may_add_in_switch(problem));
  const auto refused = [&](auto&& change) {
    SumBroadcastProblem other = problem;
    change(other);
    EXPECT_FALSE(may_add_in_switch(other));
  };
  refused([](auto& p) { p.num_ranks = 2; });
  refused([](auto& p) { p.slot_bytes += 8; });
  refused([](auto& p) { p.has_kernel = false; });
  refused([](auto& p) { p.any_order = false; });
}

TEST(SumBroadcast, FewBytesAreStoredAndManyCopied) {
  EXPECT_EQ(choose_sum_broadcast({2, kPeerStoreBytes, false}), SumBroadcast::kPeerStores);
  EXPECT_EQ(choose_sum_broadcast({2, kPeerStoreBytes + 16, false}), SumBroadcast::kCopyEngine);
  // The limit is on the bytes to all peers together.
  EXPECT_EQ(choose_sum_broadcast({5, kPeerStoreBytes / 4, false}), SumBroadcast::kPeerStores);
  EXPECT_EQ(choose_sum_broadcast({5, kPeerStoreBytes / 4 + 16, false}), SumBroadcast::kCopyEngine);
}

TEST(SumBroadcast, WhatIsChosenIsLegal) {
  for (int32_t ranks = 1; ranks <= kMaxPeers; ++ranks) {
    for (int64_t bytes = 0; bytes <= 4 * kMiB; bytes = bytes * 2 + 8) {
      for (const bool multicast : {false, true}) {
        const SumBroadcastProblem problem{ranks, bytes, multicast};
        EXPECT_EQ(why(choose_sum_broadcast(problem), problem), "") << ranks << " ranks, " << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace axonn::kernels::cuda
