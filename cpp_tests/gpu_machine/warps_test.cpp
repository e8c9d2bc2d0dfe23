// Lanes, warps and CTAs together: divergence, barriers, exchange between lanes, races, deadlocks
// and the checks of memory. Each is repeated with seeds, because an adversary decides who comes
// next.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr int kSeeds = 20;

struct Case {
  std::string body;
  std::string variables = "";
  Dim grid{1, 1, 1}, block{32, 1, 1};
  size_t words = 256;      // of the output
  bool is_written = true;  // it is zero at first
  uint64_t patience = 200'000;
};

std::vector<uint32_t> run(const Case& what, uint64_t seed) {
  Options options;
  options.seed = seed;
  options.patience = what.patience;
  Machine machine(options);
  machine.load(testing::kernel_of(what.body, what.variables));
  const uint64_t out = what.is_written ? machine.put(std::vector<uint32_t>(what.words, 0), "out")
                                       : machine.memory().allocate(4 * what.words, "out");
  machine.launch(machine.new_stream(0), machine.kernel("test"), what.grid, what.block, out);
  machine.run();
  return machine.get<uint32_t>(out, what.words);
}

// Runs it with many seeds. Returns how often it fails in this way, and expects that other errors
// never come and that the message names what is given.
int failures(const Case& what, MachineError::Kind kind, const std::vector<std::string>& names) {
  int count = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    try {
      run(what, seed);
    } catch (const MachineError& error) {
      EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
      for (const std::string& name : names) {
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      }
      ++count;
    }
  }
  return count;
}

// %r1 = lane, %d1 = out + 4 lane
const std::string kLane = R"(
  mov.u32 %r1, %laneid;
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d1, %out, %d1;
)";
// %r1 = thread of the CTA, %d1 = out + 4 thread
const std::string kThread = R"(
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d1, %out, %d1;
)";

TEST(Warps, LanesDivergeAndMeetAgain) {
  // A lane runs its own number of turns; behind the loop all vote.
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
  // Lane 0 spins at a lower address until lane 1, behind it, has raised a flag.
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
  std::string instruction;  // %r3 of %r1, the lane; %p1 is a result, too
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

// --- Barriers, races
// -------------------------------------------------------------------------------

// Each thread writes a word, and then reads that of the thread 33 further on.
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

TEST(Warps, ABarrierOrdersSharedMemory) {
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

TEST(Warps, AMissingBarrierIsARaceOrAReadOfWhatIsNotWritten) {
  const Case without{exchange_in_shared(""), kBuffer, {1, 1, 1}, {128, 1, 1}};
  int races = 0, unwritten = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
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

TEST(Warps, ABarrierForFewerThreadsOrdersNotEnough) {
  // Half of the warps use one barrier, half another.
  const Case two{exchange_in_shared("shr.u32 %r8, %r1, 6; barrier.sync %r8, 64;"),
                 kBuffer,
                 {1, 1, 1},
                 {128, 1, 1}};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_THROW(run(two, seed), MachineError);
}

// The first warp writes a word and raises a flag; the second one waits for the flag and reads.
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

TEST(Warps, OrdersAndScopesDecideWhetherAMessageIsARace) {
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

TEST(Warps, ScopeOfACtaDoesNotReachAnother) {
  // CTA 0 raises a flag, CTA 1 reads it: the scope must be that of the device.
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

TEST(Warps, AtomicsOfAllLanesCount) {
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

// --- Deadlocks, memory ---------------------------------------------------------------------------

TEST(Warps, DeadlocksNameWhoWaitsForWhat) {
  // The last warp goes round the barrier; since it ends, nobody waits for it.
  const std::string half = "setp.ge.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 0, 64;\nEND:\n";
  EXPECT_EQ(failures({kThread + half, "", {1, 1, 1}, {64, 1, 1}}, MachineError::Kind::kDeadlock,
                     {"barrier 0", "warp 0", "bar.sync"}),
            kSeeds);
  // Half of a warp cannot pass a barrier of all of it, whose other half waits elsewhere.
  const std::string lanes =
      "setp.ge.u32 %p1, %r1, 16; @%p1 bra HIGH; bar.sync 0; bra.uni END;\nHIGH: bar.sync "
      "1;\nEND:\n";
  EXPECT_EQ(failures({kThread + lanes, "", {1, 1, 1}, {32, 1, 1}}, MachineError::Kind::kDeadlock,
                     {"lanes wait for each other"}),
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

TEST(Warps, FaultsOfMemoryNameTheLane) {
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

TEST(Warps, VectorsAndConstantsAreLoaded) {
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

TEST(Warps, SleepMovesVirtualTimeAndTrapEnds) {
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
