// Memory with several addresses: which accesses need a fence.proxy.alias between them.
#include "gpu_machine/multimem_case.h"

namespace axonn::gpu_machine::testing {
namespace {

const std::string kAliasFence = "fence.proxy.alias;\n";
const std::string kLacksFence = "no fence.proxy.alias orders";

TEST(Aliases, ASecondAddressNeedsAFence) {
  const std::string write = "st.global.u32 [%d10+8], 5;\n";
  const std::string read = "ld.global.u32 %r1, [%d13+8]; st.global.u32 [%d14], %r1;\n";
  EXPECT_EQ(failures({{0, write + read}}, kLacksFence), kTeamSeeds);
  for (const char* other : {"fence.acq_rel.sys;\n", "fence.proxy.async;\n"}) {
    EXPECT_EQ(failures({{0, write + other + read}}, kLacksFence), kTeamSeeds) << other;
  }
  EXPECT_EQ(failures({{0, write + kAliasFence + read}}, ""), 0);
  // Nothing is needed for the same address, and a fence before the write does not help.
  EXPECT_EQ(failures({{0, write + "ld.global.u32 %r1, [%d10+8];\n"}}, ""), 0);
  EXPECT_EQ(failures({{0, kAliasFence + write + read}}, kLacksFence), kTeamSeeds);
  for (uint64_t seed = 0; seed < kTeamSeeds; ++seed) {
    Team team(seed);
    team.fill(0, Words(8, 0));
    team.launch(0, write + kAliasFence + read);
    team.run();
    EXPECT_EQ(team.result(1)[0], 5u);
    team.launch(0, "ld.global.u32 %r1, [%d13+8]; st.global.u32 [%d14+4], %r1;\n");
    team.run();  // a kernel launched after run() needs no fence of its own
    EXPECT_EQ(team.result(2)[1], 5u);
  }
}

TEST(Aliases, TheFenceMayLieAnywhereOnTheWay) {
  // Warp 0 writes through one address; warp 1 reads through the other after a barrier.
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
  EXPECT_EQ(failures({{0, body("", "")}}, kLacksFence, 64), kTeamSeeds);
}

// Device 0 stores through the multicast address, then raises a flag in device 1's memory. Device 1
// reads its memory through its own address, and then stores there itself.
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
  EXPECT_EQ(failures(message(store, "", ""), kLacksFence), kTeamSeeds);
  // The flag is raised before the data is stored.
  const std::string late = "st.release.sys.global.u32 [%d11+128], 1; nanosleep.u32 1000;\n" + store;
  EXPECT_GT(failures(message(late, kAliasFence, kAliasFence), "race"), 0);
}

TEST(Aliases, FlagsMayHaveTwoAddresses) {
  // A barrier of two devices: each adds through the multicast address, and polls through its own.
  const auto barrier = [](const std::string& own, const std::string& order) {
    return "multimem.red." + order +
           ".sys.global.add.u32 [%d12+128], 1;\nfence.proxy.alias;\nWAIT:\n"
           "ld.acquire.sys.global.u32 %r1, [" +
           own + "+128]; setp.lt.u32 %p1, %r1, 2; @%p1 bra WAIT;\n";
  };
  // Each writes a word of the other's memory before the barrier, and reads its own after it.
  const auto kernels = [&](const std::string& order) {
    return std::vector<std::pair<int, std::string>>{
        {0, "st.global.u32 [%d11], 1;\n" + barrier("%d10", order) + "ld.global.u32 %r2, [%d10];\n"},
        {1,
         "st.global.u32 [%d10], 2;\n" + barrier("%d11", order) + "ld.global.u32 %r2, [%d11];\n"}};
  };
  EXPECT_EQ(failures(kernels("release"), ""), 0);
  EXPECT_EQ(failures(kernels("relaxed"), "race: nothing orders"), kTeamSeeds);
}

TEST(Aliases, MemoryHasThreeAddressesAtMost) {
  Memory memory;
  Region& region = memory.create(64, "memory");
  for (int i = 0; i < kMostAliases; ++i) EXPECT_TRUE(memory.map(memory.reserve(), region));
  const uint64_t fourth = memory.reserve();
  EXPECT_FALSE(memory.map(fourth, region));
  EXPECT_EQ(memory.find(fourth), nullptr);
}

}  // namespace
}  // namespace axonn::gpu_machine::testing
