// Functions that kernels call, and local memory.
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

// Sets table[i] = 10 lane + i in local memory; returns table[i], or 7 beyond the table.
const std::string kFunctions = R"(
.func (.param .b32 result) pick(.param .b32 pick_0, .param .b32 pick_1)
{
  .local .align 16 .b8 depot[32];
  .reg .b32 %r<8>;
  .reg .b64 %SPL;
  .reg .b64 %d<4>;
  .reg .pred %p<2>;
  mov.u64 %SPL, depot;
  ld.param.u32 %r1, [pick_0];
  ld.param.u32 %r2, [pick_1];
  setp.gt.u32 %p1, %r2, 7;
  @%p1 bra BEYOND;
  mov.u32 %r3, 0;
  mul.lo.u32 %r4, %r1, 10;
LOOP:
  mul.wide.u32 %d1, %r3, 4;
  add.u64 %d2, %SPL, %d1;
  add.u32 %r5, %r4, %r3;
  st.local.u32 [%d2], %r5;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p1, %r3, 8;
  @%p1 bra LOOP;
  mul.wide.u32 %d1, %r2, 4;
  cvta.local.u64 %d3, %SPL;
  add.u64 %d2, %d3, %d1;
  ld.u32 %r6, [%d2];
  st.param.b32 [result+0], %r6;
  ret;
BEYOND:
  st.param.b32 [result+0], 7;
  ret;
}
.func (.param .align 8 .b8 pair[16]) twice(.param .b32 twice_0)
{
  .reg .b32 %r<8>;
  ld.param.u32 %r1, [twice_0];
  {
  .param .b32 param0;
  st.param.b32 [param0+0], %r1;
  .param .b32 param1;
  st.param.b32 [param1+0], 2;
  .param .b32 retval0;
  call.uni (retval0), pick, (param0, param1);
  ld.param.b32 %r2, [retval0+0];
  }
  {
  .param .b32 param0;
  st.param.b32 [param0+0], %r1;
  .param .b32 param1;
  st.param.b32 [param1+0], %r1;
  .param .b32 retval0;
  call.uni (retval0), pick, (param0, param1);
  ld.param.b32 %r3, [retval0+0];
  }
  st.param.v2.b32 [pair+8], {%r2, %r3};
  ret;
}
.func again() { call.uni again; ret; }
.extern .func missing();
)";

const std::string kCallTwice = R"(
  {
  .param .b32 param0;
  st.param.b32 [param0+0], %r1;
  .param .align 8 .b8 retval0[16];
  call.uni (retval0), twice, (param0);
  ld.param.v2.b32 {%r5, %r6}, [retval0+8];
  }
)";

TEST(Calls, FunctionsReturnValuesFromLocalMemory) {
  const Case body{kLane + "  mov.u32 %r5, 1;\n  mov.u32 %r6, 2;\n" + kCallTwice + R"(
  st.global.u32 [%d1], %r5;
  st.global.u32 [%d1+128], %r6;
)",
                  kFunctions};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(body, seed);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(got[lane], 10 * lane + 2);
      EXPECT_EQ(got[32 + lane], lane < 8 ? 11 * lane : 7);
    }
  }
}

TEST(Calls, OnlyLanesOfTheGuardCall) {
  const Case body{kLane + R"(
  .param .b32 retval0;
  .param .b32 param0;
  .param .b32 param1;
  st.param.b32 [retval0], 99;
  st.param.b32 [param0], %r1;
  st.param.b32 [param1], 3;
  setp.lt.u32 %p1, %r1, 5;
  @%p1 call (retval0), pick, (param0, param1);
  ld.param.b32 %r5, [retval0];
  st.global.u32 [%d1], %r5;
)",
                  kFunctions};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(body, seed);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(got[lane], lane < 5 ? 10 * lane + 3 : 99);
    }
  }
}

TEST(Calls, WhatIsNotKnownIsRefused) {
  const std::string declarations = "  .param .b32 word;\n  .param .b64 wide;\n";
  for (const char* call : {"call.uni again;", "call.uni missing;", "call.uni nowhere;",
                           "call (word), pick, (word);", "call (word), pick, (word, wide);",
                           "call (word), pick, (word, %r1);", "call pick, (word, word);"}) {
    Machine machine;
    EXPECT_THROW(machine.load(testing::kernel_of(declarations + call, kFunctions)), ParseError)
        << call;
  }
}

TEST(Calls, ParametersHaveAddresses) {
  // As a 64-bit address, and as its lower 32 bits, as Triton takes addresses of descriptors.
  const auto got = run({kLane + R"(
  mov.b64 %d2, test_param_0;
  cvta.param.u64 %d3, %d2;
  ld.u64 %d4, [%d3];
  mov.b32 %r2, test_param_0;
  cvt.u64.u32 %d2, %r2;
  cvta.param.u64 %d3, %d2;
  ld.u64 %d5, [%d3];
  st.global.u32 [%d4], 5;
  st.global.u32 [%d5+4], 6;
)"},
                       0);
  EXPECT_EQ(got[0], 5u);
  EXPECT_EQ(got[1], 6u);
}

TEST(Calls, LocalMemoryIsChecked) {
  using Kind = MachineError::Kind;
  const std::string local = kLane + R"(
  .local .align 8 .b8 mine[24];
  mov.u64 %d2, mine;
)";
  EXPECT_EQ(failures({local + "  ld.local.u32 %r2, [%d2];\n"}, Kind::kMemory,
                     {"nobody has written", "local memory"}),
            kSeeds);
  EXPECT_EQ(failures({local + "  st.local.u32 [%d2+32], %r1;\n"}, Kind::kMemory, {"outside"}),
            kSeeds);
  EXPECT_EQ(failures({local + "  st.local.u32 [%d2+-4], %r1;\n"}, Kind::kMemory, {"outside"}),
            kSeeds);
  EXPECT_EQ(failures({local + "  st.local.u32 [%d2+2], %r1;\n"}, Kind::kMemory, {"misaligned"}),
            kSeeds);
  // The machine rounds each lane's local memory up to whole vectors of 32 bytes.
  const auto got = run({local + R"(
  st.local.u32 [%d2+20], %r1;
  ld.local.u32 %r2, [%d2+20];
  st.global.u32 [%d1], %r2;
)"},
                       0);
  for (uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(got[lane], lane);
}

}  // namespace
}  // namespace axonn::gpu_machine
