// st.async and red.async: what they write to another CTA's memory, and what orders it.
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
    ".shared .align 8 .b64 barrier[2]; .shared .align 32 .b8 buffer[256];";
const std::string kAwait =
    "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra WAIT;\n";
const std::string kFence = "fence.mbarrier_init.release.cluster;\n";

// CTA 0 waits for `bytes` bytes from CTA 1, which runs `send`: %r5 is CTA 0's buffer, %r6 its
// mbarrier. The output is words 0 to 7 of the buffer, which start as 100.
Case message(const std::string& bytes, const std::string& send, const std::string& wait,
             const std::string& fence = kFence, uint32_t threads = 1) {
  Case result{R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mov.u32 %r3, %cluster_ctarank;
  mov.u32 %r4, %tid.x;
  setp.eq.u32 %p1, %r3, 0;
  setp.eq.u32 %p2, %r4, 0;
  @%p2 mbarrier.init.shared::cta.b64 [%r1], 1;
  @%p2 st.shared.v4.u32 [%r2], {100, 100, 100, 100};
  @%p2 st.shared.v4.u32 [%r2+16], {100, 100, 100, 100};
)" + fence + R"(
  @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], )" +
                  bytes + R"(;
  barrier.cluster.arrive;
  barrier.cluster.wait;
  @%p1 bra WAIT;
  mapa.shared::cluster.u32 %r5, %r2, 0;
  mapa.shared::cluster.u32 %r6, %r1, 0;
)" + send + R"(
  bra.uni END;
)" + wait + R"(
  @!%p2 bra END;
  ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r2];
  st.global.v4.u32 [%out], {%r7, %r8, %r9, %r10};
  ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r2+16];
  st.global.v4.u32 [%out+16], {%r7, %r8, %r9, %r10};
END:
)",
              kVariables,
              {2, 1, 1},
              {threads, 1, 1}};
  result.cluster = {2, 1, 1};
  return result;
}

std::vector<uint32_t> words(const Case& what, uint64_t seed) {
  const auto got = run(what, seed);
  return {got.begin(), got.begin() + 8};
}

const std::string kStore = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes";

TEST(AsyncStores, StoresOfEveryWidth) {
  const std::vector<std::tuple<std::string, std::string, std::vector<uint32_t>>> stores = {
      {"4", kStore + ".b32 [%r5+4], 7, [%r6];", {100, 7, 100, 100, 100, 100, 100, 100}},
      {"4",
       "mov.f32 %f1, 0f3F800000; " + kStore + ".f32 [%r5], %f1, [%r6];",
       {0x3F800000, 100, 100, 100, 100, 100, 100, 100}},
      {"8",
       "mov.u64 %d1, 0x500000006; " + kStore + ".u64 [%r5+8], %d1, [%r6];",
       {100, 100, 6, 5, 100, 100, 100, 100}},
      {"8", kStore + ".v2.s32 [%r5+8], {1, 2}, [%r6];", {100, 100, 1, 2, 100, 100, 100, 100}},
      {"16", kStore + ".v4.u32 [%r5+16], {1, 2, 3, 4}, [%r6];", {100, 100, 100, 100, 1, 2, 3, 4}},
      {"32",
       "mov.u64 %d1, 0x200000001; mov.u64 %d2, 0x400000003; " + kStore +
           ".v4.b64 [%r5], {%d1, %d2, %d1, %d2}, [%r6];",
       {1, 2, 3, 4, 1, 2, 3, 4}},
      // Two stores may happen in either order, but both have happened after the wait.
      {"8",
       kStore + ".b32 [%r5], 1, [%r6]; " + kStore + ".b32 [%r5+4], 2, [%r6];",
       {1, 2, 100, 100, 100, 100, 100, 100}},
  };
  for (const auto& [bytes, send, expected] : stores) {
    SCOPED_TRACE(send);
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      EXPECT_EQ(words(message(bytes, send, kAwait), seed), expected);
    }
  }
}

TEST(AsyncStores, ReductionsOfEveryKind) {
  const std::vector<std::tuple<std::string, std::string, uint32_t>> reductions = {
      {"add.u32", "7", 107},
      {"add.s32", "-200", 0xFFFFFF9C},
      {"min.u32", "7", 7},
      {"min.s32", "-7", 0xFFFFFFF9},
      {"max.u32", "0xFFFFFFF9", 0xFFFFFFF9},
      {"max.s32", "-7", 100},
      {"inc.u32", "100", 0},
      {"inc.u32", "101", 101},
      {"dec.u32", "50", 50},
      {"dec.u32", "200", 99},
      {"and.b32", "6", 100 & 6},
      {"or.b32", "3", 103},
      {"xor.b32", "5", 100 ^ 5},
  };
  const std::string red = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.";
  for (const auto& [name, operand, expected] : reductions) {
    SCOPED_TRACE(name + " " + operand);
    const std::string send =
        "mov.b32 %r11, " + operand + "; " + red + name + " [%r5+4], %r11, [%r6];";
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      EXPECT_EQ(words(message("4", send, kAwait), seed)[1], expected);
    }
  }
  const std::string wide = "mov.u64 %d1, 0xFFFFFFFF; " + red + "add.u64 [%r5], %d1, [%r6];";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    // 100 2^32 + 100, and 2^32 - 1
    EXPECT_EQ(words(message("8", wide, kAwait), seed),
              (std::vector<uint32_t>{99, 101, 100, 100, 100, 100, 100, 100}));
    // 64 threads in two warps add one each.
    EXPECT_EQ(words(message("256", red + "add.u32 [%r5], 1, [%r6];", kAwait, kFence, 64), seed)[0],
              164u);
  }
}

TEST(AsyncStores, WhatIsLeftOutIsFound) {
  const std::string store = kStore + ".b32 [%r5], 7, [%r6];";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(message("4", store, "WAIT:\n"), seed), MachineError);  // no wait
    EXPECT_THROW(run(message("8", store, kAwait), seed), MachineError);     // bytes that never come
    // Two stores to one word.
    EXPECT_THROW(run(message("8", store + kStore + ".b32 [%r5], 8, [%r6];", kAwait), seed),
                 MachineError);
    // An earlier write of the sender is passed on by a store that follows it in the program, and
    // not by one that precedes it.
    const std::string read = kAwait + "ld.global.u32 %r12, [%out+64];\n";
    EXPECT_THROW(run(message("4", store + "st.global.u32 [%out+64], 3;", read), seed),
                 MachineError);
    EXPECT_NO_THROW(run(message("4", "st.global.u32 [%out+64], 3;" + store, read), seed));
  }
}

TEST(AsyncStores, MisuseIsAnError) {
  const std::string own = kStore + ".b32 [%r5], 7, [%r1];";  // the sender's own mbarrier
  EXPECT_EQ(failures(message("4", own, kAwait), MachineError::Kind::kUndefined,
                     {"another CTA's shared memory"}),
            kSeeds);
  EXPECT_EQ(failures(message("8", kStore + ".v2.b32 [%r5+4], {1, 2}, [%r6];", kAwait),
                     MachineError::Kind::kMemory, {"misaligned"}),
            kSeeds);
  EXPECT_EQ(failures(message("4", kStore + ".b32 [%r5], 7, [%r6+8];", kAwait),
                     MachineError::Kind::kUndefined, {"no mbarrier"}),
            kSeeds);
  for (const std::string& unknown :
       {std::string("st.async.mmio.release.sys.global.b32 [%out], %r1;"),
        std::string("st.async.weak.shared::cluster.b32 [%r5], 7, [%r6];"),
        kStore + ".b16 [%r5], %h1, [%r6];",
        std::string("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
                    ".inc.s32 [%r5], 7, [%r6];"),
        std::string("red.async.relaxed.gpu.global.add.u32 [%out], 7;")}) {
    EXPECT_THROW(run(message("4", unknown, kAwait), 0), ParseError) << unknown;
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
