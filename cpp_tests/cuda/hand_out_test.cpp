#include "core/cuda/fused/hand_out.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace axonn::kernels::cuda {
namespace {

constexpr int64_t kMiB = 1 << 20;

std::string why(HandOut way, const HandOutProblem& problem) {
  const char* text = why_no_hand_out(way, problem);
  return text == nullptr ? "" : text;
}

TEST(HandOut, CopiesAreAlwaysLegal) {
  for (const int64_t bytes : {0, 8, 16, 40}) {
    for (const bool multicast : {false, true}) {
      EXPECT_EQ(why(HandOut::kCopyEngine, {4, bytes, multicast}), "");
    }
  }
}

TEST(HandOut, StoresNeedWholeVectorsAndMulticastItsAddress) {
  EXPECT_EQ(why(HandOut::kPeerStores, {4, 48, false}), "");
  EXPECT_EQ(why(HandOut::kMulticast, {4, 48, true}), "");
  EXPECT_NE(why(HandOut::kMulticast, {4, 48, false}).find("no multicast address"),
            std::string::npos);
  for (const HandOut way : {HandOut::kPeerStores, HandOut::kMulticast}) {
    EXPECT_NE(why(way, {4, 40, true}).find("multiple of 16 bytes"), std::string::npos);
  }
}

TEST(HandOut, MulticastIsTakenWhereItSavesSomething) {
  for (const int32_t ranks : {3, 4, 8}) {
    for (const int64_t bytes : {int64_t{16}, kMiB, 512 * kMiB}) {
      EXPECT_EQ(choose_hand_out({ranks, bytes, true}), HandOut::kMulticast);
      EXPECT_NE(choose_hand_out({ranks, bytes, false}), HandOut::kMulticast);
    }
  }
  // Two ranks would each get their own rows back, and send no less.
  EXPECT_EQ(choose_hand_out({2, 512 * kMiB, true}), HandOut::kCopyEngine);
}

TEST(HandOut, FewBytesAreStoredAndManyCopied) {
  EXPECT_EQ(choose_hand_out({2, kPeerStoreBytes, false}), HandOut::kPeerStores);
  EXPECT_EQ(choose_hand_out({2, kPeerStoreBytes + 16, false}), HandOut::kCopyEngine);
  // Of all peers together.
  EXPECT_EQ(choose_hand_out({5, kPeerStoreBytes / 4, false}), HandOut::kPeerStores);
  EXPECT_EQ(choose_hand_out({5, kPeerStoreBytes / 4 + 16, false}), HandOut::kCopyEngine);
}

TEST(HandOut, WhatIsChosenIsLegal) {
  for (int32_t ranks = 1; ranks <= kMaxPeers; ++ranks) {
    for (int64_t bytes = 0; bytes <= 4 * kMiB; bytes = bytes * 2 + 8) {
      for (const bool multicast : {false, true}) {
        const HandOutProblem problem{ranks, bytes, multicast};
        EXPECT_EQ(why(choose_hand_out(problem), problem), "") << ranks << " ranks, " << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace axonn::kernels::cuda
