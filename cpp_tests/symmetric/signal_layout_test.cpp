#include "core/symmetric/signal_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

#include "core/symmetric/epoch_flag.h"
#include "core/symmetric/protocol.h"
#include "core/symmetric/symmetric_group.h"

namespace axonn::comm {
namespace {

TEST(SignalLayout, EachChunkOfEachPhaseHasAFlagOfItsOwn) {
  for (int64_t phases = 1; phases <= 2; ++phases) {
    for (const int64_t shards : {1, 2, 3, 8}) {
      for (int64_t chunks = 1; chunks <= 4; ++chunks) {
        const SignalLayout layout{phases, shards, chunks};
        std::set<int64_t> flags;
        for (int64_t phase = 0; phase < phases; ++phase) {
          for (int64_t shard = 0; shard < shards; ++shard) {
            for (int64_t chunk = 0; chunk < chunks; ++chunk) {
              flags.insert(layout.flag(phase, {shard, chunk}));
            }
          }
        }
        EXPECT_EQ(static_cast<int64_t>(flags.size()), layout.num_flags());
        EXPECT_EQ(*flags.begin(), 0);
        EXPECT_EQ(*flags.rbegin(), layout.num_flags() - 1);
      }
    }
  }
}

TEST(SignalLayout, FitsThePadOfTheGroup) { EXPECT_EQ(kNumSignals, SymmetricGroup::kNumFlags); }

TEST(SignalLayout, FlagsLieOnLinesOfTheirOwn) {
  EXPECT_EQ(kSignalStride, kFlagAlignment);
  EXPECT_EQ(signal_offset_bytes(3) - signal_offset_bytes(2),
            static_cast<int64_t>(sizeof(EpochFlag)));
}

TEST(SignalLayout, HalvesAreAwaitedTwoEpochsBack) {
  EXPECT_EQ(epoch_to_await(7), Epoch{5});
  EXPECT_EQ(epoch_to_await(1), Epoch{0} - 1);  // epochs before the first wrap backward
}

}  // namespace
}  // namespace axonn::comm
