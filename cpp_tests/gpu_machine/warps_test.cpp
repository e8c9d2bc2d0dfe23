// The lanes of a warp: divergence, and exchanges between lanes. Tests are repeated with several
// seeds, because an adversary decides what runs next.
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
using testing::run;

TEST(Warps, LanesDivergeAndMeetAgain) {
  // Each lane runs its own number of iterations; after the loop, all vote.
  const Case loop{kLane + R"(
  mov.u32 %r2, 0;
  mov.u32 %r3, 0;
LOOP:
  setp.ge.u32 %p1, %r2, %r1;
  @%p1 bra DONE;
  add.s32 %r2, %r2, 1;
  add.s32 %r3, %r3, %r2;
  and.b32 %r4, %r2, 1;
  setp.eq.s32 %p2, %r4, 0;
  @%p2 bra LOOP;
  add.s32 %r3, %r3, 100;
  bra.uni LOOP;
DONE:
  vote.sync.ballot.b32 %r5, %p1, -1;
  popc.b32 %r5, %r5;
  mad.lo.s32 %r3, %r5, 10000, %r3;
  st.global.u32 [%d1], %r3;
)"};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(loop, seed);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(got[lane], 320000 + lane * (lane + 1) / 2 + 100 * ((lane + 1) / 2));
    }
  }
}

TEST(Warps, ALaneMayWaitForAnotherOfItsWarp) {
  // Lane 0 spins at a lower address until lane 1, at a higher one, has raised a flag.
  const Case spin{kLane + R"(
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra OTHERS;
SPIN:
  ld.acquire.gpu.global.u32 %r2, [%out];
  setp.eq.u32 %p2, %r2, 0;
  @%p2 bra SPIN;
  bra.uni END;
OTHERS:
  setp.ne.u32 %p3, %r1, 1;
  @%p3 bra END;
  st.release.gpu.global.u32 [%out], 7;
END:
  bar.warp.sync -1;
)"};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_EQ(run(spin, seed)[0], 7u);
}

TEST(Warps, LanesMeetAtDifferentInstructions) {
  const Case two{kLane + R"(
  setp.lt.u32 %p1, %r1, 16;
  @%p1 bra LOW;
  bar.warp.sync 0xFFFFFFFF;
  bra.uni END;
LOW:
  bar.warp.sync 0xFFFFFFFF;
END:
  st.global.u32 [%d1], 1;
)"};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_EQ(run(two, seed)[31], 1u);
}

struct Exchange {
  std::string instruction;  // sets %r3 from %r1 (lane) or %r2 (10 lane), and maybe %p1
  uint32_t (*expected)(uint32_t lane);
};

TEST(Warps, LanesExchangeValues) {
  const std::vector<Exchange> exchanges = {
      {"shfl.sync.bfly.b32 %r3, %r2, 5, 31, -1;", [](uint32_t i) { return 10 * (i ^ 5u); }},
      {"shfl.sync.idx.b32 %r3|%p1, %r2, 7, 31, -1;", [](uint32_t) { return 70u; }},
      {"shfl.sync.up.b32 %r3, %r2, 2, 0, -1;", [](uint32_t i) { return 10 * (i < 2 ? i : i - 2); }},
      {"shfl.sync.down.b32 %r3, %r2, 3, 31, -1;",
       [](uint32_t i) { return 10 * (i > 28 ? i : i + 3); }},
      {"shfl.sync.idx.b32 %r3, %r2, 1, 0x181F, -1;",  // segments of 8 lanes
       [](uint32_t i) { return 10 * (i / 8 * 8 + 1); }},
      {"shfl.sync.down.b32 %r3|%p1, %r2, 30, 31, -1; selp.b32 %r3, 1, 0, %p1;",
       [](uint32_t i) { return uint32_t{i < 2}; }},
      {"setp.gt.u32 %p1, %r1, 29; vote.sync.ballot.b32 %r3, %p1, -1;",
       [](uint32_t) { return 0xC0000000u; }},
      {"setp.gt.u32 %p1, %r1, 29; vote.sync.ballot.b32 %r3, !%p1, -1;",
       [](uint32_t) { return 0x3FFFFFFFu; }},
      {"setp.gt.u32 %p1, %r1, 29; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r3, 1, 0, %p2;",
       [](uint32_t) { return 1u; }},
      {"setp.gt.u32 %p1, %r1, 29; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r3, 1, 0, %p2;",
       [](uint32_t) { return 0u; }},
      {"setp.gt.u32 %p1, %r1, 99; vote.sync.uni.pred %p2, %p1, -1; selp.b32 %r3, 1, 0, %p2;",
       [](uint32_t) { return 1u; }},
      {"redux.sync.add.u32 %r3, %r1, -1;", [](uint32_t) { return 496u; }},
      {"redux.sync.max.s32 %r3, %r1, -1;", [](uint32_t) { return 31u; }},
      {"redux.sync.min.u32 %r3, %r1, -1;", [](uint32_t) { return 0u; }},
      {"redux.sync.or.b32 %r3, %r1, -1;", [](uint32_t) { return 31u; }},
      {"redux.sync.xor.b32 %r3, %r1, -1;", [](uint32_t) { return 0u; }},
      {"redux.sync.and.b32 %r3, %r1, -1;", [](uint32_t) { return 0u; }},
      {"and.b32 %r4, %r1, 3; match.any.sync.b32 %r3, %r4, -1;",
       [](uint32_t i) { return 0x11111111u << (i & 3u); }},
      {"match.all.sync.b32 %r3|%p1, 5, -1;", [](uint32_t) { return 0xFFFFFFFFu; }},
      {"match.all.sync.b32 %r3|%p1, %r1, -1;", [](uint32_t) { return 0u; }},
      {"elect.sync %r3|%p1, -1; selp.b32 %r3, 9, %r3, %p1;",
       [](uint32_t i) { return i == 0 ? 9u : 0u; }},
      {"activemask.b32 %r3;", [](uint32_t) { return 0xFFFFFFFFu; }},
      {"mov.u32 %r3, %lanemask_lt;", [](uint32_t i) { return (1u << i) - 1; }},
      {"mov.u32 %r3, %lanemask_ge;", [](uint32_t i) { return ~((1u << i) - 1); }},
      {"mov.u32 %r3, %ntid.x;", [](uint32_t) { return 32u; }},
  };
  for (const Exchange& exchange : exchanges) {
    SCOPED_TRACE(exchange.instruction);
    const auto got = run({kLane + "  mul.lo.u32 %r2, %r1, 10;\n  " + exchange.instruction +
                          "\n  st.global.u32 [%d1], %r3;\n"},
                         0);
    for (uint32_t i = 0; i < 32; ++i) EXPECT_EQ(got[i], exchange.expected(i)) << "lane " << i;
  }
}

TEST(Warps, ReadingALaneThatTakesNoPartIsAnError) {
  const Case half{kLane + R"(
  setp.gt.u32 %p1, %r1, 15;
  @%p1 bra END;
  shfl.sync.idx.b32 %r3, %r1, 20, 31, 0xFFFF;
END:
)"};
  EXPECT_EQ(failures(half, MachineError::Kind::kUndefined, {"reads lane 20", "shfl"}), kSeeds);
}

}  // namespace
}  // namespace axonn::gpu_machine
