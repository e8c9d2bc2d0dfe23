// What the machine refuses and reports: deadlocks, bad accesses, unknown PTX, bad launches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
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

TEST(Faults, DeadlocksNameWhoWaitsForWhat) {
  // The second warp skips the barrier and exits, but the barrier expects 64 threads by number.
  const std::string half = "setp.ge.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 0, 64;\nEND:\n";
  EXPECT_EQ(failures({kThread + half, "", {1, 1, 1}, {64, 1, 1}}, MachineError::Kind::kDeadlock,
                     {"barrier 0", "warp 0", "bar.sync"}),
            kSeeds);
  // Half of a warp cannot pass a barrier of the whole CTA while the other half waits elsewhere.
  const std::string lanes =
      "setp.ge.u32 %p1, %r1, 16; @%p1 bra HIGH; bar.sync 0; bra.uni END;\nHIGH: bar.sync "
      "1;\nEND:\n";
  EXPECT_EQ(failures({kThread + lanes, "", {1, 1, 1}, {32, 1, 1}}, MachineError::Kind::kDeadlock,
                     {"lanes wait for each other", "lanes 0-15", "lanes 16-31"}),
            kSeeds);
  const std::string flag =
      "SPIN: ld.acquire.gpu.global.u32 %r3, [%out+16]; setp.eq.u32 %p1, %r3, 0; @%p1 bra SPIN;\n";
  EXPECT_EQ(failures({flag}, MachineError::Kind::kDeadlock, {"out + 16", "ld.acquire"}), kSeeds);
}

struct Fault {
  std::string body;
  std::vector<std::string> names;
  bool is_written = true;
};

TEST(Faults, FaultsOfMemoryNameTheLane) {
  const std::vector<Fault> faults = {
      {"st.global.u32 [%d1+900], %r1;",
       {"outside", "lane 31", "out of 1024 bytes", "CTA (0, 0, 0)"}},
      {"ld.global.u32 %r2, [%d1+-4];", {"outside", "lane 0", "PTX line"}},
      {"ld.global.u32 %r2, [4096];", {"no allocation"}},
      {"ld.shared.u32 %r2, [0];", {"shared memory"}},
      {"ld.global.u64 %d2, [%out+4];", {"misaligned", "multiple of 8"}},
      {"ld.global.v2.u64 {%d2, %d3}, [%out+8];", {"misaligned", "multiple of 16"}},
      {"ld.global.u32 %r2, [%d1];", {"nobody has written", "out + 0"}, false},
      {"st.global.u32 [table], 1;", {"read-only"}},
  };
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.body);
    EXPECT_EQ(failures({kLane + fault.body,
                        ".const .align 4 .u32 table[2] = {1, 2};",
                        {1, 1, 1},
                        {32, 1, 1},
                        256,
                        fault.is_written},
                       MachineError::Kind::kMemory, fault.names),
              kSeeds);
  }
}

TEST(Faults, FreedMemoryIsOutside) {
  Machine machine;
  machine.load(testing::kernel_of("  ld.global.u32 %r1, [%out];\n"));
  const uint64_t out = machine.put(std::vector<uint32_t>(4, 0), "out");
  machine.memory().free(out);
  machine.launch(machine.new_stream(0), machine.kernel("test"), {1, 1, 1}, {32, 1, 1}, out);
  EXPECT_THROW(machine.run(), MachineError);
}

TEST(Faults, DynamicSharedMemoryHasTheSizeOfTheLaunch) {
  const std::string body = R"(
  mov.u32 %r1, dynamic;
  st.shared.u32 [%r1+60], 5;
  ld.shared.u32 %r2, [%r1+60];
  st.global.u32 [%out], %r2;
)";
  for (const uint64_t bytes : {64, 60}) {
    Machine machine;
    machine.load(testing::kernel_of(body,
                                    ".extern .shared .align 16 .b8 dynamic[];\n"
                                    ".shared .align 4 .u32 fixed;"));
    const uint64_t out = machine.put(std::vector<uint32_t>{0}, "out");
    std::vector<std::byte> arg(8);
    std::memcpy(arg.data(), &out, 8);
    // The fixed variable takes 4 bytes, and alignment another 12.
    machine.enqueue(machine.new_stream(0), machine.kernel("test"), {1, 1, 1}, {1, 1, 1}, {arg},
                    bytes);
    if (bytes == 64) {
      machine.run();
      EXPECT_EQ(machine.get<uint32_t>(out, 1)[0], 5u);
    } else {
      EXPECT_THROW(machine.run(), MachineError);
    }
  }
}

TEST(Faults, VectorsAndConstantsAreLoaded) {
  const auto got = run({R"(
  mov.u32 %r9, %laneid;
  setp.ne.u32 %p1, %r9, 0;
  @%p1 bra END;
  ld.const.v2.u32 {%r1, %r2}, [table+8];
  ld.const.s8 %r3, [bytes+1];
  ld.const.u8 %r4, [bytes+1];
  st.global.v4.u32 [%out], {%r1, %r2, %r3, %r4};
  cvta.shared.u64 %d5, 1024;
  st.u32 [%d5], 77;
  ld.shared.u32 %r5, [word];
  st.global.u32 [%out+16], %r5;
END:
)",
                        ".const .align 8 .u32 table[4] = {1, 2, 3, 4};\n"
                        ".const .align 1 .s8 bytes[2] = {1, -2};\n"
                        ".shared .align 4 .u32 word;"},
                       0);
  EXPECT_EQ(got[0], 3u);
  EXPECT_EQ(got[1], 4u);
  EXPECT_EQ(got[2], 0xFFFFFFFEu);
  EXPECT_EQ(got[3], 0xFEu);
  EXPECT_EQ(got[4], 77u);
}

TEST(Faults, SleepMovesVirtualTimeAndTrapEnds) {
  const auto got = run({R"(
  mov.u64 %d1, %globaltimer;
  add.s64 %d2, %d1, 50000000;
SLEEP:
  nanosleep.u32 1000000;
  mov.u64 %d3, %globaltimer;
  setp.lt.u64 %p1, %d3, %d2;
  @%p1 bra SLEEP;
  mov.u32 %r9, %laneid;
  setp.eq.u32 %p2, %r9, 0;
  @%p2 st.global.u32 [%out], 1;
)"},
                       5);
  EXPECT_EQ(got[0], 1u);
  EXPECT_EQ(failures({"trap;"}, MachineError::Kind::kTrap, {"trap", "kernel test"}), kSeeds);
}

TEST(Parser, SaysWhatItDoesNotKnow) {
  const std::vector<std::pair<std::string, std::string>> bodies = {
      {"frobnicate.u32 %r1, %r2;", "frobnicate"},
      {"add.weird.s32 %r1, %r2, %r3;", "'.weird'"},
      {"add.s32 %r1, %r2;", "an operand is missing"},
      {"neg.s32 %r1, %r2, %r3;", "more operands"},
      {"sqrt.rn.f32 %f1;", "an operand is missing"},
      {"add.s32 %r1, %r2, %d3;", "'%d3' has 64 bits, expected 32"},
      {"add.s32 %r1, %r2, %nothing;", "%nothing"},
      {"bra NOWHERE;", "NOWHERE"},
      {"add.s32 %r1, %r2, 0fXYZ;", "'0fXYZ' is not a number"},
      {"ld.global.u32 %h1, [%out];", "narrower"},
  };
  for (const auto& [body, named] : bodies) {
    SCOPED_TRACE(body);
    try {
      Machine().load(testing::kernel_of(body));
      ADD_FAILURE() << "it was accepted";
    } catch (const ParseError& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  }
}

TEST(Parser, SectionsForDebuggersAreSkipped) {
  const std::string section = "\n.section .debug_str\n{\n$L_a:\n.b8 97, 0\n\n}\n";
  std::string text = testing::kernel_of("add.s32 %r1, %r2;", section);
  const auto error_of = [](const std::string& ptx) -> std::string {
    try {
      Machine().load(ptx);
    } catch (const ParseError& error) {
      return error.what();
    }
    return "";
  };
  // The line numbers count from the start of the text.
  const auto line = 1 + std::count(text.begin(), text.begin() + text.find("add.s32"), '\n');
  EXPECT_NE(error_of(text).find("PTX line " + std::to_string(line) + ","), std::string::npos)
      << error_of(text);
  EXPECT_EQ(error_of(testing::kernel_of("", section)), "");
  EXPECT_EQ(error_of(testing::kernel_of("") + section), "");
  EXPECT_NE(error_of(testing::kernel_of("") + ".section .debug_str {").find("expected"),
            std::string::npos);
  EXPECT_NE(error_of(testing::kernel_of("") + ".section .debug_str").find("expected"),
            std::string::npos);
}

TEST(Parser, NamesInBlocksHideThoseOutside) {
  const auto got = run({R"(
  mov.u32 %r1, 1;
  {
    .reg .b32 %r1;
    mov.u32 %r1, 2;
    { .reg .pred %p1; setp.eq.u32 %p1, %r1, 2; @%p1 bra OUT; trap; OUT: }
  }
  mov.u32 %r2, %laneid;
  setp.eq.u32 %p2, %r2, 0;
  @%p2 st.global.u32 [%out], %r1;
)"},
                       0);
  EXPECT_EQ(got[0], 1u);
}

TEST(Machine, RefusesWrongLaunches) {
  Machine machine;
  machine.load(testing::kernel_of(""));
  const int stream = machine.new_stream(0);
  const auto kernel = machine.kernel("test");
  EXPECT_THROW(machine.kernel("other"), std::invalid_argument);
  EXPECT_THROW(machine.launch(stream, kernel, {1, 1, 1}, {32, 1, 1}), std::invalid_argument);
  EXPECT_THROW(machine.launch(stream, kernel, {1, 1, 1}, {32, 1, 1}, 5), std::invalid_argument);
  EXPECT_THROW(machine.launch(stream, kernel, {1, 1, 1}, {2048, 1, 1}, uint64_t{5}),
               std::invalid_argument);
}

}  // namespace
}  // namespace axonn::gpu_machine
