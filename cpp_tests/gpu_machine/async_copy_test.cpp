// cp.async: what it copies, and how missing waits are reported.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu_machine/kernel_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::Case;
using testing::failures;
using testing::kSeeds;
using testing::kThread;
using testing::run;
using Kind = MachineError::Kind;

// Each thread copies 16 bytes into its part of `tiles`: %d4 is the source, %r4 the target. The
// source is the second half of the output; its word i is 1000 + i.
const std::string kSource = kThread + R"(
  mul.wide.u32 %d2, %r1, 16;
  add.s64 %d4, %out, %d2;
  add.s64 %d4, %d4, 2048;
  shl.b32 %r3, %r1, 2;
  add.u32 %r3, %r3, 1000;
  add.u32 %r5, %r3, 1;
  add.u32 %r6, %r3, 2;
  add.u32 %r7, %r3, 3;
  st.global.v4.u32 [%d4], {%r3, %r5, %r6, %r7};
  mov.u32 %r4, tiles;
  shl.b32 %r8, %r1, 4;
  add.u32 %r4, %r4, %r8;
  st.shared.v4.u32 [%r4], {%r8, %r8, %r8, %r8};
)";
const std::string kRead = R"(
  ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];
  add.s64 %d5, %out, %d2;
  st.global.v4.u32 [%d5], {%r10, %r11, %r12, %r13};
)";
const std::string kTiles = ".shared .align 16 .b8 tiles[2048];";

Case case_of(const std::string& body, uint32_t threads = 32) {
  return {body, kTiles, {1, 1, 1}, {threads, 1, 1}, 1024};
}

TEST(AsyncCopy, WaitedForCopiesArrive) {
  for (const char* copy :
       {"cp.async.cg.shared.global [%r4], [%d4], 16; cp.async.commit_group; "
        "cp.async.wait_group 0;",
        "cp.async.ca.shared.global.L2::128B [%r4], [%d4], 16; cp.async.wait_all;",
        "cp.async.ca.shared::cta.global [%r4], [%d4], 8; "
        "cp.async.ca.shared.global [%r4+8], [%d4+8], 4; "
        "cp.async.ca.shared.global [%r4+12], [%d4+12], 4, 4; cp.async.wait_all;",
        "setp.eq.u32 %p1, 0, 1; cp.async.cg.shared.global [%r4], [%d4], 16, %p1; "
        "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;"}) {
    SCOPED_TRACE(copy);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const auto got = run(case_of(kSource + copy + kRead), seed);
      for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(got[i], 1000 + i);
    }
  }
}

TEST(AsyncCopy, WhatIsNotReadIsZero) {
  // Lane l reads l % 17 bytes; the predicate leaves out the rest of the source.
  const std::string some = kSource +
                           "  rem.u32 %r9, %r1, 17;\n"
                           "  cp.async.cg.shared.global [%r4], [%d4], 16, %r9;\n"
                           "  cp.async.wait_all;\n" +
                           kRead;
  const auto got = run(case_of(some), 3);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t byte = 0; byte < 16; ++byte) {
      const uint32_t word = 1000 + 4 * lane + byte / 4;
      const uint32_t expected = byte < lane % 17 ? word >> (8 * (byte % 4)) & 255u : 0;
      EXPECT_EQ(got[4 * lane + byte / 4] >> (8 * (byte % 4)) & 255u, expected);
    }
  }
  // A source that is not read may be any address.
  const std::string nothing = kSource + R"(
  mov.u64 %d4, 0;
  cp.async.cg.shared.global [%r4], [%d4], 16, 0;
  setp.eq.u32 %p1, 0, 0;
  cp.async.cg.shared.global [%r4], [%d4], 16, %p1;
  cp.async.wait_all;
)" + kRead;
  // Both write zeros, but nothing orders them.
  EXPECT_EQ(failures(case_of(nothing), Kind::kRace, {"write after the write", "cp.async"}), kSeeds);
}

TEST(AsyncCopy, LanesHaveGroupsOfTheirOwn) {
  // The even lanes commit twice, so only they have waited for the copy.
  const std::string body = kSource + R"(
  cp.async.cg.shared.global [%r4], [%d4], 16;
  cp.async.commit_group;
  and.b32 %r9, %r1, 1;
  setp.eq.u32 %p1, %r9, 0;
  @%p1 cp.async.commit_group;
  cp.async.wait_group 1;
  @%p1 ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];
  cp.async.wait_all;
)";
  // The machine has one clock per warp: if some lanes have waited, the whole warp knows.
  for (uint64_t seed = 0; seed < kSeeds; ++seed) run(case_of(body), seed);
}

TEST(AsyncCopy, AReadBeforeTheWaitIsReported) {
  const std::string copy = "  cp.async.cg.shared.global [%r4], [%d4], 16;\n";
  const std::vector<std::string> without = {
      copy + kRead + "cp.async.wait_all;",  // no wait at all
      copy + "cp.async.commit_group; cp.async.wait_group 1;" + kRead + "cp.async.wait_all;",
      copy + "cp.async.wait_group 0;" + kRead + "cp.async.wait_all;",  // not committed
      copy + "bar.sync 0;" + kRead + "cp.async.wait_all;",             // a barrier is no wait
  };
  for (const std::string& body : without) {
    SCOPED_TRACE(body);
    EXPECT_EQ(failures(case_of(kSource + body), Kind::kRace, {"race", "shared memory"}), kSeeds);
  }
}

TEST(AsyncCopy, AnOverwrittenSourceIsReported) {
  const std::string copy = "  cp.async.cg.shared.global [%r4], [%d4], 16;\n";
  const std::string overwrite = "  st.global.u32 [%d4+4], 7;\n";
  EXPECT_EQ(
      failures(case_of(kSource + copy + overwrite + "cp.async.wait_all;"), Kind::kRace, {"out + "}),
      kSeeds);
  EXPECT_EQ(failures(case_of(kSource + copy + "cp.async.wait_all;" + overwrite), Kind::kRace, {}),
            0);
}

TEST(AsyncCopy, ItsOwnThreadsWaitAndABarrierTellOthers) {
  // Each thread reads the part of the thread 33 places further on.
  const auto body = [](const std::string& wait) {
    return kSource + "  cp.async.cg.shared.global [%r4], [%d4], 16;\n" + wait + R"(
  add.u32 %r14, %r1, 33;
  and.b32 %r14, %r14, 127;
  mov.u32 %r4, tiles;
  shl.b32 %r8, %r14, 4;
  add.u32 %r4, %r4, %r8;
)" + kRead;
  };
  const std::string wait = "cp.async.wait_all;", barrier = "bar.sync 0;";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(case_of(body(wait + barrier), 128), seed);
    for (uint32_t i = 0; i < 512; ++i) EXPECT_EQ(got[i], 1000 + (i + 4 * 33) % 512);
    EXPECT_THROW(run(case_of(body(wait), 128), seed), MachineError);
    EXPECT_THROW(run(case_of(body(barrier + wait), 128), seed), MachineError);
  }
}

TEST(AsyncCopy, MistakesAreReported) {
  EXPECT_EQ(failures(case_of(kSource + "  cp.async.cg.shared.global [%r4+8], [%d4], 16;\n"),
                     Kind::kMemory, {"misaligned", "cp.async"}),
            kSeeds);
  EXPECT_EQ(failures(case_of(kSource + "  cp.async.ca.shared.global [%r4], [%d4+8192], 4;\n"),
                     Kind::kMemory, {"outside memory"}),
            kSeeds);
  EXPECT_EQ(failures(case_of(kSource + "  cp.async.ca.shared.global [%r4], [%d4], 4, 5;\n"),
                     Kind::kUndefined, {"reads 5 bytes"}),
            kSeeds);
  for (const char* unknown :
       {"cp.async.cg.shared.global [%r4], [%d4], 8;", "cp.async.cg.global.shared [%d4], [%r4], 16;",
        "cp.async.ca.shared.global [%r4], [%d4], 12;", "cp.async.wait_group %r4;"}) {
    Machine machine;
    EXPECT_THROW(machine.load(testing::kernel_of(unknown)), ParseError) << unknown;
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
