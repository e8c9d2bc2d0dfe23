// mbarriers: their phases and counts, what they order, and their misuse.
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

const std::string kVariables =
    ".shared .align 8 .b64 barrier[4]; .shared .align 16 .b8 buffer[256];";

Case one_thread(const std::string& body) { return {body, kVariables, {1, 1, 1}, {1, 1, 1}}; }

// --- Phases and counts, worked out from the manual --------------------------------

TEST(MBarriers, PhasesEndWhenAllHaveArrivedAndAllBytesHaveCome) {
  const auto got = run(one_thread(R"(
  mov.u32 %r1, barrier;
  mbarrier.init.shared::cta.b64 [%r1], 3;
  mbarrier.arrive.shared::cta.b64 %d1, [%r1];
  mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %d1;
  selp.u32 %r2, 1, 0, %p1;
  mbarrier.pending_count.b64 %r3, %d1;
  mbarrier.arrive.noComplete.shared::cta.b64 %d2, [%r1], 1;
  mbarrier.pending_count.b64 %r4, %d2;
  mbarrier.arrive.expect_tx.shared::cta.b64 %d3, [%r1], 48;
  mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 0;
  selp.u32 %r5, 1, 0, %p1;
  mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r1], 16;
  mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 16;
  mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r1], 32;
  mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %d3;
  selp.u32 %r6, 1, 0, %p1;
  mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r1], 16;
  mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %d1;
  selp.u32 %r7, 1, 0, %p1;
  mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 1;
  selp.u32 %r8, 1, 0, %p1;
  st.global.v4.u32 [%out], {%r2, %r3, %r4, %r5};
  st.global.v2.u32 [%out+16], {%r6, %r7};
  st.global.u32 [%out+24], %r8;
)"),
                       1);
  // The first phase waits for 3 arrivals; a state tells how many were pending before its arrival.
  EXPECT_EQ(std::vector<uint32_t>(got.begin(), got.begin() + 7),
            (std::vector<uint32_t>{0, 3, 2, 0, 0, 1, 0}));
}

TEST(MBarriers, ADropCountsForAllPhasesToCome) {
  const auto got = run(one_thread(R"(
  mov.u32 %r1, barrier;
  mbarrier.init.shared.b64 [%r1], 3;
  mbarrier.arrive_drop.shared.b64 _, [%r1];
  mbarrier.arrive.shared.b64 _, [%r1], 2;
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;
  selp.u32 %r2, 1, 0, %p1;
  mbarrier.arrive.shared.b64 %d1, [%r1], 2;
  mbarrier.try_wait.shared::cta.b64 %p1, [%r1], %d1, 1000;
  selp.u32 %r3, 1, 0, %p1;
  mbarrier.inval.shared.b64 [%r1];
  st.shared.u64 [%r1], 7;
  ld.shared.u32 %r4, [%r1];
  st.global.v2.u32 [%out], {%r2, %r3};
  st.global.u32 [%out+8], %r4;
)"),
                       1);
  EXPECT_EQ(got[0], 1u);
  EXPECT_EQ(got[1], 1u);  // with two arrivals
  EXPECT_EQ(got[2], 7u);  // it is plain memory again
}

// --- What they order -----------------------------------------------------------------

// Warp 0 writes and arrives; warp 1 waits and reads.
Case message(const std::string& arrive, const std::string& wait) {
  return {R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mov.u32 %r3, %tid.x;
  setp.ne.u32 %p1, %r3, 0;
  @!%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
  bar.sync 0;
  setp.ge.u32 %p2, %r3, 32;
  @%p2 bra READER;
  @%p1 bra END;
  st.shared.u32 [%r2], 42;
  )" + arrive +
              R"(
  bra.uni END;
READER:
)" + wait + R"(
  ld.shared.u32 %r4, [%r2];
  st.global.u32 [%out], %r4;
END:
)",
          kVariables,
          {1, 1, 1},
          {64, 1, 1}};
}
std::string wait_by(const std::string& instruction) {
  return "WAIT: " + instruction + " @!%p3 bra WAIT;\n";
}
const std::string kWait = wait_by("mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;");

TEST(MBarriers, AnArrivalReleasesAndAWaitAcquires) {
  const std::vector<std::pair<std::string, std::string>> right = {
      {"mbarrier.arrive.shared::cta.b64 _, [%r1];", kWait},
      {"mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1], 1;",
       wait_by("mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r1], 0;")},
      {"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16; "
       "mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r1], 16;",
       kWait},
      {"fence.acq_rel.cta; mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r1];", kWait},
      {"mbarrier.arrive.shared::cta.b64 _, [%r1];",
       wait_by("mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p3, [%r1], 0;") +
           "fence.acq_rel.cta;"},
  };
  for (const auto& [arrive, wait] : right) {
    SCOPED_TRACE(arrive + wait);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      EXPECT_EQ(run(message(arrive, wait), seed)[0], 42u);
    }
  }
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r1];", kWait},
      {"mbarrier.arrive.shared::cta.b64 _, [%r1];",
       wait_by("mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p3, [%r1], 0;")},
  };
  for (const auto& [arrive, wait] : wrong) {
    SCOPED_TRACE(arrive + wait);
    EXPECT_EQ(failures(message(arrive, wait), MachineError::Kind::kRace, {"race", "shared memory"}),
              kSeeds);
  }
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(message("mbarrier.arrive.shared::cta.b64 _, [%r1];", ""), seed), MachineError);
  }
  EXPECT_EQ(failures(message("", kWait), MachineError::Kind::kDeadlock,
                     {"mbarrier", "lacks 1 of 1 arrivals"}),
            kSeeds);
}

// Warp 0 fills two slots in turn and warp 1 empties them, for 12 rounds.
std::string ring(const std::string& wait_until_empty, const std::string& tell_empty) {
  return R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mov.u32 %r3, %tid.x;
  setp.ne.u32 %p1, %r3, 0;
  @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r1], 1;
  mbarrier.init.shared::cta.b64 [%r1+8], 1;
  mbarrier.init.shared::cta.b64 [%r1+16], 1;
  mbarrier.init.shared::cta.b64 [%r1+24], 1;
READY:
  bar.sync 0;
  mov.u32 %r4, 0;
  mov.u32 %r9, 0;
  and.b32 %r10, %r3, 31;
  setp.ne.u32 %p5, %r10, 0;
  @%p5 bra END;
  setp.ge.u32 %p2, %r3, 32;
LOOP:
  and.b32 %r5, %r4, 1;
  shl.b32 %r6, %r5, 3;
  add.s32 %r6, %r1, %r6;
  shl.b32 %r7, %r5, 2;
  add.s32 %r7, %r2, %r7;
  shr.u32 %r8, %r4, 1;
  and.b32 %r8, %r8, 1;
  @%p2 bra READ;
  xor.b32 %r8, %r8, 1;
)" + wait_until_empty +
         R"(
  st.shared.u32 [%r7], %r4;
  mbarrier.arrive.shared::cta.b64 _, [%r6];
  bra.uni NEXT;
READ:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r6], %r8;
  @!%p3 bra READ;
  ld.shared.u32 %r11, [%r7];
  mad.lo.u32 %r9, %r9, 3, %r11;
)" + tell_empty +
         R"(
NEXT:
  add.s32 %r4, %r4, 1;
  setp.lt.u32 %p4, %r4, 12;
  @%p4 bra LOOP;
  @%p2 st.global.u32 [%out], %r9;
END:
)";
}
const std::string kUntilEmpty =
    "EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r6+16], %r8; @!%p3 bra EMPTY;\n";
const std::string kTellEmpty = "mbarrier.arrive.shared::cta.b64 _, [%r6+16];\n";

TEST(MBarriers, ARingOfSlotsIsFilledAndEmptied) {
  uint32_t expected = 0;
  for (uint32_t i = 0; i < 12; ++i) expected = 3 * expected + i;
  const Case right{ring(kUntilEmpty, kTellEmpty), kVariables, {1, 1, 1}, {64, 1, 1}};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_EQ(run(right, seed)[0], expected);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run({ring("", kTellEmpty), kVariables, {1, 1, 1}, {64, 1, 1}}, seed),
                 MachineError);
  }
  EXPECT_EQ(failures({ring(kUntilEmpty, ""), kVariables, {1, 1, 1}, {64, 1, 1}},
                     MachineError::Kind::kDeadlock, {}),
            kSeeds);
}

// --- Other CTAs ------------------------------------------------------------------

// CTA 1 arrives at the barrier of CTA 0, which waits there.
Case remote(const std::string& after_init, const std::string& wait,
            const std::string& arrive = "mbarrier.arrive.release.cluster.shared::cluster") {
  Case result{R"(
  mov.u32 %r1, barrier;
  mov.u32 %r3, %cluster_ctarank;
  setp.eq.u32 %p1, %r3, 0;
  @!%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r1], 1;
READY:
)" + after_init + R"(
  @%p1 bra WAITER;
  st.global.u32 [%out], 9;
  mapa.shared::cluster.u32 %r5, %r1, 0;
  )" + arrive + R"(.b64 _, [%r5];
  bra.uni END;
WAITER:
)" + wait + R"(
END:
)",
              kVariables,
              {2, 1, 1},
              {1, 1, 1}};
  result.cluster = {2, 1, 1};
  return result;
}

TEST(MBarriers, ArrivalsAtAnotherCta) {
  const std::string init = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed;";
  const std::string both = init + " barrier.cluster.wait;\n";
  const std::string wait =
      wait_by("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1], 0;") +
      "ld.global.u32 %r6, [%out]; st.global.u32 [%out+4], %r6;";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(run(remote(both, wait), seed)[1], 9u);
  }
  EXPECT_EQ(failures(remote("barrier.cluster.arrive.relaxed; barrier.cluster.wait;\n", wait),
                     MachineError::Kind::kRace, {"initialization"}),
            kSeeds);
  // Without a scope, both sides reach the cluster; with .cta on either side, they do not.
  const std::string read = "ld.global.u32 %r6, [%out]; st.global.u32 [%out+4], %r6;";
  const std::string wait_without =
      wait_by("mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0;") + read;
  const std::string wait_in_cta =
      wait_by("mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r1], 0;") + read;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(run(remote(both, wait_without, "mbarrier.arrive.shared::cluster"), seed)[1], 9u);
  }
  EXPECT_EQ(
      failures(remote(both, wait_in_cta), MachineError::Kind::kRace, {"read after the write"}),
      kSeeds);
  EXPECT_EQ(failures(remote(both, wait, "mbarrier.arrive.release.cta.shared::cluster"),
                     MachineError::Kind::kRace, {"read after the write"}),
            kSeeds);
  // CTA 0 leaves, or has left, without waiting for the arrival.
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(remote(both, ""), seed), MachineError) << "seed " << seed;
  }
}

// --- Misuse ----------------------------------------------------------------------

TEST(MBarriers, MisuseIsAnError) {
  const std::string init = "mov.u32 %r1, barrier; mbarrier.init.shared::cta.b64 [%r1], 2;\n";
  const std::vector<std::pair<std::string, std::string>> undefined = {
      {"mov.u32 %r1, barrier; mbarrier.arrive.shared::cta.b64 _, [%r1];", "there is no mbarrier"},
      {"mov.u32 %r1, barrier; mbarrier.init.shared::cta.b64 [%r1], 0;", "1 to 1048575"},
      {init + "mbarrier.init.shared::cta.b64 [%r1], 2;", "not invalidated"},
      {init + "mbarrier.arrive.shared::cta.b64 _, [%r1], 3;", "arrives 3 times"},
      {init + "mbarrier.arrive.noComplete.shared::cta.b64 _, [%r1], 2;", ".noComplete"},
      {init + "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 2;", "0 or 1"},
      {init + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1048576;", "1048575 bytes"},
      {init + "mbarrier.inval.shared.b64 [%r1]; mbarrier.arrive.shared.b64 _, [%r1];",
       "there is no mbarrier"},
      {init + "mbarrier.arrive.shared.b64 %d1, [%r1]; mbarrier.arrive.shared.b64 _, [%r1]; "
              "mbarrier.arrive.shared.b64 _, [%r1], 2; mbarrier.test_wait.shared.b64 %p1, [%r1], "
              "%d1;",
       "waits for phase 0"},
  };
  for (const auto& [body, named] : undefined) {
    SCOPED_TRACE(body);
    EXPECT_EQ(failures(one_thread(body), MachineError::Kind::kUndefined, {named}), kSeeds);
  }
  EXPECT_EQ(failures(one_thread(init + "st.shared.u32 [%r1+4], 5;"), MachineError::Kind::kMemory,
                     {"writes over an mbarrier"}),
            kSeeds);
  EXPECT_EQ(failures(one_thread(init + "ld.shared.u32 %r2, [%r1];"), MachineError::Kind::kMemory,
                     {"reads bytes of an mbarrier"}),
            kSeeds);
  EXPECT_EQ(failures({"mov.u32 %r1, barrier; mov.u32 %r3, %tid.x; setp.eq.u32 %p1, %r3, 0;\n"
                      "@%p1 mbarrier.init.shared::cta.b64 [%r1], 2; setp.eq.u32 %p2, %r3, 32;\n"
                      "AGAIN: nanosleep.u32 200000; @%p2 mbarrier.arrive.shared.b64 _, [%r1];\n",
                      kVariables,
                      {1, 1, 1},
                      {64, 1, 1}},
                     MachineError::Kind::kRace, {"initialization"}) > 0,
            true);
}

}  // namespace
}  // namespace axonn::gpu_machine
