// cp.async.mbarrier.arrive: what it counts, and what it orders.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu_machine/kernel_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::Case;
using testing::failures;
using testing::kSeeds;
using testing::run;

const std::string kVariables = ".shared .align 8 .b64 barrier; .shared .align 16 .b8 buffer[1024];";
const std::string kAwait =
    "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra WAIT;\n";

// Each of 64 threads copies one word, and then reads the word of the thread 32 places on, which is
// in the other warp. The words come out 64 words further on.
Case exchange(const std::string& count, const std::string& arrive, const std::string& wait) {
  return {R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mov.u32 %r3, %tid.x;
  setp.eq.u32 %p1, %r3, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r1], )" +
              count + R"(;
  mul.wide.u32 %d1, %r3, 4;
  add.s64 %d1, %out, %d1;
  add.s32 %r4, %r3, 700;
  st.global.u32 [%d1], %r4;
  shl.b32 %r5, %r3, 2;
  add.s32 %r5, %r2, %r5;
  bar.sync 0;
  cp.async.ca.shared.global [%r5], [%d1], 4;
)" + arrive + wait +
              R"(
  xor.b32 %r6, %r3, 32;
  shl.b32 %r6, %r6, 2;
  add.s32 %r6, %r2, %r6;
  ld.shared.u32 %r7, [%r6];
  st.global.u32 [%d1+256], %r7;
)",
          kVariables,
          {1, 1, 1},
          {64, 1, 1}};
}

TEST(CopyArrivals, CopiesAreSeenBehindTheWait) {
  const std::vector<std::pair<std::string, std::string>> right = {
      {"64", "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n"},
      // Without noinc the phase waits for one more arrival, which comes by itself.
      {"64",
       "cp.async.mbarrier.arrive.shared::cta.b64 [%r1]; mbarrier.arrive.shared.b64 _, [%r1];\n"},
      // Copies that the thread itself has already waited for count as well.
      {"64", "cp.async.wait_all; cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n"},
      // So do the copies of an earlier arrival.
      {"128",
       "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]; nanosleep.u32 30000;\n"
       "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n"},
  };
  for (const auto& [count, arrive] : right) {
    SCOPED_TRACE(arrive);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const auto got = run(exchange(count, arrive, kAwait), seed);
      for (uint32_t i = 0; i < 64; ++i) EXPECT_EQ(got[64 + i], 700 + (i ^ 32));
    }
  }
}

TEST(CopyArrivals, WhatIsLeftOutIsFound) {
  const std::string arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    // A plain arrival of the thread does not wait for its copies; and without a wait, nothing waits
    // for them.
    EXPECT_THROW(run(exchange("64", "mbarrier.arrive.shared.b64 _, [%r1];\n", kAwait), seed),
                 MachineError);
    EXPECT_THROW(run(exchange("64", arrive, "WAIT:\n"), seed), MachineError);
  }
  // One arrival too few; and arrivals without noinc, which do not lower the count.
  EXPECT_EQ(failures(exchange("65", arrive, kAwait), MachineError::Kind::kDeadlock,
                     {"lacks 1 of 65 arrivals"}),
            kSeeds);
  EXPECT_EQ(failures(exchange("64", "cp.async.mbarrier.arrive.shared.b64 [%r1];\n", kAwait),
                     MachineError::Kind::kDeadlock, {"lacks 64 of 64 arrivals"}),
            kSeeds);
}

TEST(CopyArrivals, TheyDoNotReleaseWhatTheThreadWrote) {
  // Warp 0 writes a word after its copy; warp 1 reads that word once the copy has arrived.
  const auto body = [](const std::string& arrive) {
    return Case{R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mov.u32 %r3, %tid.x;
  setp.eq.u32 %p1, %r3, 0;
  setp.eq.u32 %p2, %r3, 32;
  @%p1 st.global.u32 [%out], 5;
  @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
  bar.sync 0;
  @%p2 bra WAIT;
  @!%p1 bra END;
  cp.async.ca.shared.global [%r2], [%out], 4;
  st.shared.u32 [%r2+8], 6;
)" + arrive + "bra.uni END;\n" +
                    kAwait + R"(
  ld.shared.u32 %r4, [%r2+8];
  st.global.u32 [%out+4], %r4;
END:
)",
                kVariables,
                {1, 1, 1},
                {64, 1, 1}};
  };
  EXPECT_EQ(failures(body("cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n"),
                     MachineError::Kind::kRace, {"read after the write"}),
            kSeeds);
  const std::string both =
      "cp.async.mbarrier.arrive.shared.b64 [%r1]; mbarrier.arrive.shared.b64 _, [%r1];\n";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_EQ(run(body(both), seed)[1], 6u);
}

TEST(CopyArrivals, MisuseIsAnError) {
  const auto one = [](const std::string& body) {
    return Case{"mov.u32 %r1, barrier;\n" + body, kVariables, {1, 1, 1}, {1, 1, 1}};
  };
  EXPECT_EQ(failures(one("cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"),
                     MachineError::Kind::kUndefined, {"no mbarrier"}),
            kSeeds);
  // The CTA must not leave before the arrival.
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(one("mbarrier.init.shared.b64 [%r1], 1; "
                         "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"),
                     seed),
                 MachineError);
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
