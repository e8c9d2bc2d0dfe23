// Multicast addresses, which name the same bytes of all devices of a team, and memory that has two
// addresses: what multimem instructions do there, and which fences they need.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kSeeds = 20;
constexpr uint64_t kBytes = 256;

// Two devices with memory of their own. A kernel gets a table with the addresses of the first
// device's memory, of the second one's, of both (multicast), and a second address of the first
// one's; its registers %d10 to %d13 hold them, and %d14 is the place of 16 words for results.
class Team {
 public:
  explicit Team(uint64_t seed) : machine_(options_of(seed)) {
    Memory& memory = machine_.memory();
    for (int device = 0; device < 2; ++device) {
      regions_.push_back(&memory.create(kBytes, "memory of device " + std::to_string(device)));
    }
    std::vector<uint64_t> table;
    for (Region* region : regions_) {
      table.push_back(memory.reserve());
      EXPECT_TRUE(memory.map(table.back(), *region));
    }
    table.push_back(memory.reserve());
    memory.map_team(table.back(), regions_);
    table.push_back(memory.reserve());
    EXPECT_TRUE(memory.map(table.back(), *regions_[0]));
    result_ = machine_.put(std::vector<uint32_t>(16, 0), "result");
    table.push_back(result_);
    unicast_ = {table[0], table[1]};
    table_ = machine_.put(table, "table");
  }

  // Words of a device's memory.
  void fill(size_t device, const std::vector<uint32_t>& words) {
    machine_.memory().write(unicast_[device], words.data(), words.size() * sizeof(uint32_t));
  }
  std::vector<uint32_t> words(size_t device, uint64_t first, size_t count) {
    return machine_.get<uint32_t>(unicast_[device] + 4 * first, count);
  }
  std::vector<uint32_t> result(size_t count) { return machine_.get<uint32_t>(result_, count); }

  // Enqueues a kernel on a device's stream.
  void launch(int device, const std::string& body, uint32_t threads = 1) {
    const std::string name = "kernel" + std::to_string(++kernels_);
    std::string ptx = testing::kernel_of(R"(
  ld.global.u64 %d10, [%out];
  ld.global.u64 %d11, [%out+8];
  ld.global.u64 %d12, [%out+16];
  ld.global.u64 %d13, [%out+24];
  ld.global.u64 %d14, [%out+32];
)" + body);
    ptx.replace(ptx.find(".entry test"), 11, ".entry " + name);
    machine_.load(ptx);
    std::vector<std::byte> argument(sizeof(table_));
    std::memcpy(argument.data(), &table_, sizeof(table_));
    machine_.enqueue(machine_.new_stream(device), machine_.kernel(name), {}, {threads, 1, 1},
                     {argument}, 0);
  }
  void run() { machine_.run(); }

 private:
  static Options options_of(uint64_t seed) {
    Options options;
    options.seed = seed;
    options.patience = 200'000;
    return options;
  }

  Machine machine_;
  std::vector<Region*> regions_;
  std::vector<uint64_t> unicast_;
  uint64_t result_ = 0, table_ = 0;
  int kernels_ = 0;
};

using Words = std::vector<uint32_t>;

// --- What they do ------------------------------------------------------------------

TEST(Multimem, StoresReachAllDevices) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
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

// The words of the two devices, the instruction, and the words that come out.
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
      // 1.5 + 2.25, and four of them
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
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
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
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
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
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {  // 64 threads of each device add one
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

// --- What orders them --------------------------------------------------------------

// How many seeds end with an error that has these words.
int failures(const std::vector<std::pair<int, std::string>>& kernels, const std::string& words,
             uint32_t threads = 1) {
  int count = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Team team(seed);
    team.fill(0, Words(kBytes / 4, 0));
    team.fill(1, Words(kBytes / 4, 0));
    for (const auto& [device, body] : kernels) team.launch(device, body, threads);
    try {
      team.run();
    } catch (const MachineError& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      ++count;
    }
  }
  return count;
}

const std::string kAliasFence = "fence.proxy.alias;\n";
const std::string kLacksFence = "no fence.proxy.alias orders";

TEST(Aliases, ASecondAddressNeedsAFence) {
  const std::string write = "st.global.u32 [%d10+8], 5;\n";
  const std::string read = "ld.global.u32 %r1, [%d13+8]; st.global.u32 [%d14], %r1;\n";
  EXPECT_EQ(failures({{0, write + read}}, kLacksFence), kSeeds);
  for (const char* other : {"fence.acq_rel.sys;\n", "fence.proxy.async;\n"}) {
    EXPECT_EQ(failures({{0, write + other + read}}, kLacksFence), kSeeds) << other;
  }
  EXPECT_EQ(failures({{0, write + kAliasFence + read}}, ""), 0);
  // By the same address, and of what a fence lies in front of, nothing changes.
  EXPECT_EQ(failures({{0, write + "ld.global.u32 %r1, [%d10+8];\n"}}, ""), 0);
  EXPECT_EQ(failures({{0, kAliasFence + write + read}}, kLacksFence), kSeeds);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Team team(seed);
    team.fill(0, Words(8, 0));
    team.launch(0, write + kAliasFence + read);
    team.run();
    EXPECT_EQ(team.result(1)[0], 5u);
    team.launch(0, "ld.global.u32 %r1, [%d13+8]; st.global.u32 [%d14+4], %r1;\n");
    team.run();  // the end of a kernel is a fence, too
    EXPECT_EQ(team.result(2)[1], 5u);
  }
}

TEST(Aliases, TheFenceMayLieAnywhereOnTheWay) {
  // Warp 0 writes by one address, and warp 1 reads by the other behind a barrier.
  const auto body = [](const std::string& behind_write, const std::string& before_read) {
    return R"(
  mov.u32 %r2, %tid.x;
  setp.eq.u32 %p1, %r2, 0;
  setp.eq.u32 %p2, %r2, 32;
  @%p1 st.global.u32 [%d10+8], 5;
)" + behind_write +
           "bar.sync 0;\n" + before_read + "@%p2 ld.global.u32 %r1, [%d13+8];\n";
  };
  EXPECT_EQ(failures({{0, body(kAliasFence, "")}}, "", 64), 0);
  EXPECT_EQ(failures({{0, body("", kAliasFence)}}, "", 64), 0);
  EXPECT_EQ(failures({{0, body("", "")}}, kLacksFence, 64), kSeeds);
}

// Device 0 stores by the multicast address, and raises a flag in device 1's memory. Device 1 reads
// its memory by its own address, and stores there in its turn.
std::vector<std::pair<int, std::string>> message(const std::string& store,
                                                 const std::string& behind_store,
                                                 const std::string& before_read) {
  return {{0, store + behind_store + "st.release.sys.global.u32 [%d11+128], 1;\n"}, {1, R"(
WAIT:
  ld.acquire.sys.global.u32 %r1, [%d11+128];
  setp.eq.u32 %p1, %r1, 0;
  @%p1 bra WAIT;
)" + before_read + "ld.global.u32 %r2, [%d11]; st.global.u32 [%d11], 9;\n"}};
}

TEST(Aliases, AMulticastStoreIsReadBehindAFence) {
  const std::string store = "mov.b32 %r1, 7; multimem.st.relaxed.sys.global.b32 [%d12], %r1;\n";
  EXPECT_EQ(failures(message(store, kAliasFence, ""), ""), 0);
  EXPECT_EQ(failures(message(store, "", kAliasFence), ""), 0);
  EXPECT_EQ(failures(message(store, "", ""), kLacksFence), kSeeds);
  // A flag in front of the data.
  const std::string late = "st.release.sys.global.u32 [%d11+128], 1; nanosleep.u32 1000;\n" + store;
  EXPECT_GT(failures(message(late, kAliasFence, kAliasFence), "race"), 0);
}

TEST(Aliases, FlagsMayHaveTwoAddresses) {
  // A barrier of two devices: each adds by the multicast address, and polls by its own.
  const auto barrier = [](const std::string& own, const std::string& order) {
    return "multimem.red." + order +
           ".sys.global.add.u32 [%d12+128], 1;\nfence.proxy.alias;\nWAIT:\n"
           "ld.acquire.sys.global.u32 %r1, [" +
           own + "+128]; setp.lt.u32 %p1, %r1, 2; @%p1 bra WAIT;\n";
  };
  // Each writes a word of the other's memory in front of the barrier, and reads its own behind it.
  const auto kernels = [&](const std::string& order) {
    return std::vector<std::pair<int, std::string>>{
        {0, "st.global.u32 [%d11], 1;\n" + barrier("%d10", order) + "ld.global.u32 %r2, [%d10];\n"},
        {1,
         "st.global.u32 [%d10], 2;\n" + barrier("%d11", order) + "ld.global.u32 %r2, [%d11];\n"}};
  };
  EXPECT_EQ(failures(kernels("release"), ""), 0);
  EXPECT_EQ(failures(kernels("relaxed"), "race: nothing orders"), kSeeds);
}

// --- Misuse ------------------------------------------------------------------------

TEST(Multimem, MisuseIsAnError) {
  EXPECT_EQ(failures({{0, "ld.global.u32 %r1, [%d12];"}}, "multimem instructions alone"), kSeeds);
  EXPECT_EQ(failures({{0, "mov.b32 %r1, 1; multimem.st.b32 [%d10], %r1;"}}, "multicast address"),
            kSeeds);
  EXPECT_EQ(failures({{0, "mov.b32 %r1, 1; multimem.st.b32 [%d12+2], %r1;"}}, "misaligned"),
            kSeeds);
  EXPECT_EQ(failures({{0, "mov.b64 %d1, 1; multimem.st.b64 [%d12+256], %d1;"}}, "outside memory"),
            kSeeds);
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

TEST(Multimem, MemoryHasThreeAddressesAtMost) {
  Memory memory;
  Region& region = memory.create(64, "memory");
  for (int i = 0; i < kMostAliases; ++i) EXPECT_TRUE(memory.map(memory.reserve(), region));
  const uint64_t fourth = memory.reserve();
  EXPECT_FALSE(memory.map(fourth, region));
  EXPECT_EQ(memory.find(fourth), nullptr);
}

}  // namespace
}  // namespace axonn::gpu_machine
