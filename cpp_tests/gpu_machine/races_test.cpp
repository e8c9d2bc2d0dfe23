// Barriers, orders and scopes, and the races reported where one is missing.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu_machine/kernel_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::Case;
using testing::failures;
using testing::kLane;
using testing::kSeeds;
using testing::kThread;
using testing::run;

// -------------------------------------------------------------------------------

// Each thread writes a word, and then reads that of the thread 33 places further on.
std::string exchange_in_shared(const std::string& between) {
  return kThread + R"(
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, buffer;
  add.s32 %r4, %r3, %r2;
  st.shared.u32 [%r4], %r1;
)" + between +
         R"(
  add.s32 %r5, %r1, 33;
  rem.u32 %r5, %r5, 128;
  shl.b32 %r5, %r5, 2;
  add.s32 %r5, %r3, %r5;
  ld.shared.u32 %r6, [%r5];
  st.global.u32 [%d1], %r6;
)";
}
const std::string kBuffer = ".shared .align 4 .b8 buffer[512];";

TEST(Races, ABarrierOrdersSharedMemory) {
  const std::vector<std::string> barriers = {
      "bar.sync 0;", "barrier.sync.aligned 3;", "bar.sync 1, 128;", "barrier.sync 2;",
      "setp.lt.u32 %p1, %r1, 40; bar.red.popc.u32 %r7, 0, %p1; add.s32 %r7, %r7, -40;"};
  for (const std::string& barrier : barriers) {
    SCOPED_TRACE(barrier);
    const Case with{exchange_in_shared(barrier), kBuffer, {1, 1, 1}, {128, 1, 1}};
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const auto got = run(with, seed);
      for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(got[i], (i + 33) % 128);
    }
  }
}

TEST(Races, AMissingBarrierIsARaceOrAReadOfWhatIsNotWritten) {
  const Case without{exchange_in_shared(""), kBuffer, {1, 1, 1}, {128, 1, 1}};
  int races = 0, unwritten = 0;
  for (uint64_t seed = 0; seed < 5 * kSeeds; ++seed) {
    try {
      run(without, seed);
      ADD_FAILURE() << "seed " << seed << " noticed nothing";
    } catch (const MachineError& error) {
      (error.kind() == MachineError::Kind::kRace ? races : unwritten) += 1;
      EXPECT_NE(std::string(error.what()).find("shared"), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(races, 0);
  EXPECT_GT(unwritten, 0);
}

TEST(Races, ABarrierForFewerThreadsOrdersNotEnough) {
  // Half of the warps use one barrier, the other half use another.
  const Case two{exchange_in_shared("shr.u32 %r8, %r1, 6; barrier.sync %r8, 64;"),
                 kBuffer,
                 {1, 1, 1},
                 {128, 1, 1}};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_THROW(run(two, seed), MachineError);
}

// The first warp writes a word and raises a flag; the second waits for the flag, then reads.
std::string message(const std::string& raise, const std::string& wait) {
  return kThread + R"(
  setp.ge.u32 %p1, %r1, 32;
  @%p1 bra READER;
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra END;
  st.global.u32 [%out+4], 42;
  )" + raise +
         R"(
  bra.uni END;
READER:
  )" + wait +
         R"(
  setp.eq.u32 %p3, %r3, 0;
  @%p3 bra READER;
  ld.global.u32 %r4, [%out+4];
  st.global.u32 [%d1+128], %r4;
END:
)";
}

struct Message {
  std::string raise, wait;
  bool is_ordered;
};

TEST(Races, OrdersAndScopesDecideWhetherAMessageIsARace) {
  const std::string acquire = "ld.acquire.gpu.global.u32 %r3, [%out];";
  const std::string relaxed = "ld.relaxed.gpu.global.u32 %r3, [%out];";
  const std::string release = "st.release.gpu.global.u32 [%out], 1;";
  const std::vector<Message> messages = {
      {release, acquire, true},
      {"st.relaxed.gpu.global.u32 [%out], 1;", acquire, false},
      {release, relaxed, false},
      {"st.release.gpu.global.u32 [%out], 1;", relaxed + " fence.acq_rel.gpu;", true},
      {"fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%out], 1;", acquire, true},
      {"membar.gl; st.volatile.global.u32 [%out], 1;",
       "ld.volatile.global.u32 %r3, [%out]; membar.gl;", true},
      {"st.volatile.global.u32 [%out], 1;", "ld.volatile.global.u32 %r3, [%out];", false},
      {"atom.acq_rel.gpu.global.add.u32 %r5, [%out], 1;", acquire, true},
      {"atom.global.add.u32 %r5, [%out], 1;", acquire, false},
      {"red.release.gpu.global.add.u32 [%out], 1;", acquire, true},
      {release, "atom.acquire.gpu.global.or.b32 %r3, [%out], 0;", true},
      {"st.release.sys.global.u32 [%out], 1;", "ld.acquire.cta.global.u32 %r3, [%out];", true},
      {"st.global.u32 [%out], 1;", acquire, false},
      {release, "ld.global.u32 %r3, [%out];", false},
  };
  for (const Message& what : messages) {
    SCOPED_TRACE(what.raise + " / " + what.wait);
    const Case body{message(what.raise, what.wait), "", {1, 1, 1}, {64, 1, 1}};
    const int races = failures(body, MachineError::Kind::kRace, {"race", "out + "});
    EXPECT_EQ(races, what.is_ordered ? 0 : kSeeds);
    if (what.is_ordered) {
      EXPECT_EQ(run(body, 1)[64], 42u);
    }
  }
}

TEST(Races, ScopeOfACtaDoesNotReachAnother) {
  // CTA 0 raises a flag and CTA 1 reads it: the scope must cover the device.
  const auto body = [](const std::string& scope) {
    return R"(
  mov.u32 %r1, %ctaid.x;
  setp.eq.u32 %p1, %r1, 1;
  @%p1 bra READER;
  st.release.)" +
           scope + R"(.global.u32 [%out], 1;
  bra.uni END;
READER:
  ld.acquire.)" +
           scope + R"(.global.u32 %r3, [%out];
  setp.eq.u32 %p3, %r3, 0;
  @%p3 bra READER;
END:
)";
  };
  EXPECT_EQ(failures({body("gpu"), "", {2, 1, 1}, {1, 1, 1}}, MachineError::Kind::kRace, {}), 0);
  EXPECT_EQ(
      failures({body("cta"), "", {2, 1, 1}, {1, 1, 1}}, MachineError::Kind::kRace, {"another CTA"}),
      kSeeds);
}

// Lanes are separate threads: one sees what another did, or has learned, only after they meet.
TEST(Races, LanesOfAWarpMeetAtBarriers) {
  const auto exchange = [](const std::string& meet) {
    return kLane + R"(
  setp.eq.u32 %p1, %r1, 0;
  @%p1 st.global.u32 [%out], 7;
  )" + meet +
           R"(
  ld.global.u32 %r2, [%out];
  st.global.u32 [%d1+128], %r2;
)";
  };
  for (const std::string meet : {"bar.warp.sync -1;", "bar.sync 0;"}) {
    EXPECT_EQ(failures({exchange(meet)}, MachineError::Kind::kRace, {}), 0) << meet;
    EXPECT_EQ(run({exchange(meet)}, 1)[63], 7u);
  }
  // A shuffle does not order memory.
  for (const std::string meet : {"", "shfl.sync.idx.b32 %r3, %r1, 0, 31, -1;"}) {
    EXPECT_EQ(failures({exchange(meet)}, MachineError::Kind::kRace, {"the same CTA", "lane 1"}),
              kSeeds)
        << meet;
  }
}

TEST(Races, ALaneLearnsForOthersOnceTheyMeet) {
  // A CTA writes a word and raises a flag. Lane 0 of another waits for it; lane 1 reads the word.
  const auto message = [](const std::string& meet) {
    return kLane + R"(
  mov.u32 %r2, %ctaid.x;
  setp.eq.u32 %p1, %r2, 1;
  @%p1 bra READER;
  setp.eq.u32 %p2, %r1, 0;
  @%p2 st.global.u32 [%out], 7;
  @%p2 st.release.gpu.global.u32 [%out+4], 1;
  bra.uni END;
READER:
  setp.ne.u32 %p2, %r1, 0;
  @%p2 bra SEEN;
WAIT:
  ld.acquire.gpu.global.u32 %r3, [%out+4];
  setp.eq.u32 %p3, %r3, 0;
  @%p3 bra WAIT;
SEEN:
  )" + meet +
           R"(
  setp.eq.u32 %p4, %r1, 1;
  @%p4 ld.global.u32 %r4, [%out];
END:
)";
  };
  EXPECT_EQ(failures({message("bar.warp.sync -1;"), "", {2, 1, 1}}, MachineError::Kind::kRace, {}),
            0);
  EXPECT_EQ(failures({message(""), "", {2, 1, 1}}, MachineError::Kind::kRace, {}), kSeeds);
}

TEST(Races, AtomicsOfAllLanesCount) {
  const Case sums{R"(
  mov.u32 %r1, %tid.x;
  red.global.add.u32 [%out], 1;
  atom.global.inc.u32 %r2, [%out+4], 99;
  atom.global.max.s32 %r3, [%out+8], %r1;
  atom.global.or.b32 %r4, [%out+12], %r1;
  atom.global.cas.b32 %r5, [%out+16], 0, 5;
  atom.global.add.f32 %f1, [%out+20], 0f3F800000;
  atom.global.exch.b32 %r6, [%out+24], 3;
  atom.global.min.u32 %r7, [%out+28], 0;
  atom.global.add.noftz.bf16x2 %r8, [%out+32], 0x3F803F80;
  atom.global.dec.u32 %r9, [%out+36], 7;
)",
                  "",
                  {3, 1, 1},
                  {64, 1, 1}};
  const auto got = run(sums, 3);
  EXPECT_EQ(got[0], 192u);
  EXPECT_EQ(got[1], 92u);  // 192 - 100
  EXPECT_EQ(got[2], 63u);
  EXPECT_EQ(got[3], 63u);
  EXPECT_EQ(got[4], 5u);
  EXPECT_EQ(got[5], 0x43400000u);  // 192 as a float
  EXPECT_EQ(got[6], 3u);
  EXPECT_EQ(got[7], 0u);
  EXPECT_EQ(got[8], 0x43404340u);  // 192 as bfloat16, twice
  EXPECT_EQ(got[9], 0u);           // from 0 to 7 and down again, 24 times
}

}  // namespace
}  // namespace axonn::gpu_machine
