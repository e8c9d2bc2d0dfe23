// Multicast addresses, which name the same bytes on all devices of a team: the effects of multimem
// instructions, worked out by hand.
#include <algorithm>

#include "gpu_machine/multimem_case.h"

namespace axonn::gpu_machine::testing {
namespace {

// --- What they do ------------------------------------------------------------------

TEST(Multimem, StoresReachAllDevices) {
  for (uint64_t seed = 0; seed < kTeamSeeds; ++seed) {
    Team team(seed);
    team.launch(0, R"(
  mov.b64 %d1, 0x200000001;
  mov.b32 %r1, 7;
  mov.b32 %r2, 8;
  mov.f32 %f1, 0f3F800000;
  mov.f32 %f2, 0f40000000;
  mov.b16 %h1, 3;
  mov.b16 %h2, 4;
  multimem.st.weak.global.b32 [%d12], %r1;
  multimem.st.relaxed.sys.global.u64 [%d12+8], %d1;
  multimem.st.release.gpu.global.v4.f32 [%d12+16], {%f1, %f2, %f2, %f1};
  multimem.st.v2.f16x2 [%d12+32], {%r1, %r2};
  multimem.st.v2.bf16 [%d12+4], {%h1, %h2};
)");
    team.run();
    for (size_t device = 0; device < 2; ++device) {
      EXPECT_EQ(team.words(device, 0, 10),
                (Words{7, 0x40003, 1, 2, 0x3F800000, 0x40000000, 0x40000000, 0x3F800000, 7, 8}));
    }
  }
}

// The words of both devices, the instruction, and the expected words.
struct Reduced {
  Words first, second;
  std::string type, operands;
  Words expected;
};

TEST(Multimem, LoadsJoinWhatAllDevicesHave) {
  const std::vector<Reduced> cases = {
      {{10}, {0xFFFFFFFF}, "add.u32", "%r1", {9}},
      {{10}, {0xFFFFFFFF}, "min.u32", "%r1", {10}},
      {{10}, {0xFFFFFFFF}, "min.s32", "%r1", {0xFFFFFFFF}},
      {{10}, {0xFFFFFFFF}, "max.s32", "%r1", {10}},
      {{12}, {10}, "and.b32", "%r1", {8}},
      {{12}, {10}, "or.b32", "%r1", {14}},
      {{12}, {10}, "xor.b32", "%r1", {6}},
      {{0xFFFFFFFF, 1}, {2, 3}, "add.u64", "%d1", {1, 5}},
      {{5, 0x80000000}, {6, 1}, "max.s64", "%d1", {6, 1}},
      // 1.5 + 2.25, alone and in a vector of four
      {{0x3FC00000}, {0x40100000}, "add.f32", "%f1", {0x40700000}},
      {{0x3FC00000, 0, 0x3F800000, 0xBF800000},
       {0x40100000, 0x3F800000, 0x3F800000, 0x3F800000},
       "add.v4.f32",
       "{%f1, %f2, %f3, %f4}",
       {0x40700000, 0x3F800000, 0x40000000, 0}},
      // doubles: 1 + 2
      {{0, 0x3FF00000}, {0, 0x40000000}, "add.f64", "%e1", {0, 0x40080000}},
      // bfloat16: 1 + 2^-8 is 1 with ties to even; 2 and 3 give 5
      {{0x3F804000}, {0x3B804040}, "add.v2.bf16", "{%h1, %h2}", {0x3F8040A0}},
      {{0x3C004000}, {0x40003C00}, "min.f16x2", "%r1", {0x3C003C00}},
      {{0x3C004000, 0x3C004000},
       {0x40003C00, 0x3C004000},
       "max.v2.f16x2",
       "{%r1, %r2}",
       {0x40004000, 0x3C004000}},
      {{0x3C004000, 0x3C004000},
       {0x40003C00, 0x3C004000},
       "add.acc::f32.v4.f16",
       "{%h1, %h2, %h3, %h4}",
       {0x42004200, 0x40004400}},
  };
  for (const Reduced& what : cases) {
    SCOPED_TRACE(what.type);
    const bool is_vector = what.operands[0] == '{';
    const size_t dot = what.type.rfind('.');
    const std::string element = what.type.substr(dot);
    const std::string vector = !is_vector ? ""
                               : std::count(what.operands.begin(), what.operands.end(), ',') == 1
                                   ? ".v2"
                                   : ".v4";
    const std::string bits = element.ends_with("64")                   ? ".b64"
                             : element == ".f16" || element == ".bf16" ? ".b16"
                                                                       : ".b32";
    for (uint64_t seed = 0; seed < kTeamSeeds; ++seed) {
      Team team(seed);
      team.fill(0, what.first);
      team.fill(1, what.second);
      team.launch(1, "multimem.ld_reduce.weak.global." + what.type + " " + what.operands +
                         ", [%d12];\nst.global" + vector + bits + " [%d14], " + what.operands +
                         ";\n");
      team.run();
      EXPECT_EQ(team.result(what.expected.size()), what.expected);
    }
  }
}

TEST(Multimem, ReductionsJoinOnAllDevices) {
  const std::vector<Reduced> cases = {
      {{10}, {20}, "add.u32", "mov.b32 %r1, 5;", {15, 25}},
      {{10}, {20}, "max.s32", "mov.b32 %r1, 15;", {15, 20}},
      {{10}, {20}, "xor.b32", "mov.b32 %r1, 3;", {9, 23}},
      {{0x3F800000}, {0x40000000}, "add.f32", "mov.b32 %r1, 0x3F800000;", {0x40000000, 0x40400000}},
      {{0x3C003C00},
       {0x40004000},
       "add.f16x2",
       "mov.b32 %r1, 0x3C004000;",
       {0x40004200, 0x42004400}},
  };
  for (const Reduced& what : cases) {
    SCOPED_TRACE(what.type);
    const std::string value = what.type.ends_with("f32") ? "%f1" : "%r1";
    for (uint64_t seed = 0; seed < kTeamSeeds; ++seed) {
      Team team(seed);
      team.fill(0, what.first);
      team.fill(1, what.second);
      team.launch(0, what.operands + "mov.b32 %f1, %r1;\nmultimem.red.relaxed.gpu.global." +
                         what.type + " [%d12], " + value + ";\n");
      team.run();
      EXPECT_EQ(team.words(0, 0, 1)[0], what.expected[0]);
      EXPECT_EQ(team.words(1, 0, 1)[0], what.expected[1]);
    }
  }
  for (uint64_t seed = 0; seed < kTeamSeeds; ++seed) {  // 64 threads per device add one
    Team team(seed);
    team.fill(0, {100});
    team.fill(1, {200});
    for (const int device : {0, 1}) {
      team.launch(device, "multimem.red.relaxed.sys.global.add.u32 [%d12], 1;\n", 64);
    }
    team.run();
    EXPECT_EQ(team.words(0, 0, 1)[0], 228u);
    EXPECT_EQ(team.words(1, 0, 1)[0], 328u);
  }
}

// --- Misuse ------------------------------------------------------------------------

TEST(Multimem, MisuseIsAnError) {
  EXPECT_EQ(failures({{0, "ld.global.u32 %r1, [%d12];"}}, "multimem instructions alone"),
            kTeamSeeds);
  EXPECT_EQ(failures({{0, "mov.b32 %r1, 1; multimem.st.b32 [%d10], %r1;"}}, "multicast address"),
            kTeamSeeds);
  EXPECT_EQ(failures({{0, "mov.b32 %r1, 1; multimem.st.b32 [%d12+2], %r1;"}}, "misaligned"),
            kTeamSeeds);
  EXPECT_EQ(failures({{0, "mov.b64 %d1, 1; multimem.st.b64 [%d12+256], %d1;"}}, "outside memory"),
            kTeamSeeds);
  Team team(0);
  for (const char* unknown :
       {"multimem.ld_reduce.global.add.s64 %d1, [%d12];", "multimem.ld_reduce.min.f32 %f1, [%d12];",
        "multimem.st.f16 [%d12], %h1;", "multimem.st.v2.u32 [%d12], {%r1, %r2};",
        "multimem.red.weak.add.u32 [%d12], %r1;", "multimem.red.max.f16x2 [%d12], %r1;",
        "multimem.ld_reduce.add.acc::f32.f32 %f1, [%d12];",
        "multimem.ld_reduce.release.gpu.add.u32 %r1, [%d12];",
        "multimem.st.shared.b32 [%d12], %r1;",
        "multimem.ld_reduce.add.acc::f16.v4.e4m3x4 "
        "{%r1, %r2, %r3, %r4}, [%d12];"}) {
    EXPECT_THROW(team.launch(0, unknown), ParseError) << unknown;
  }
}

}  // namespace
}  // namespace axonn::gpu_machine::testing
