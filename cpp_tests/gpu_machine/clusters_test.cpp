// Clusters: the position of CTAs in them, their barrier, access to each other's shared memory, and
// registers that warps give to others.
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

Case cluster_case(const std::string& body, Dim grid, Dim cluster, Dim block = {32, 1, 1}) {
  Case result{body, ".shared .align 16 .b8 buffer[256];", grid, block};
  result.cluster = cluster;
  return result;
}

// --- Where a CTA is --------------------------------------------------------------

TEST(Clusters, RegistersTellThePlace) {
  // Each CTA of a grid [4, 4, 2] writes 8 words. Clusters are [2, 1, 2].
  const Case what = cluster_case(R"(
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ctaid.y;
  mov.u32 %r3, %ctaid.z;
  mad.lo.u32 %r4, %r3, 4, %r2;
  mad.lo.u32 %r4, %r4, 4, %r1;
  mul.wide.u32 %d1, %r4, 32;
  add.s64 %d1, %out, %d1;
  mov.u32 %r5, %cluster_ctarank;
  mov.u32 %r6, %cluster_ctaid.x;
  mov.u32 %r7, %cluster_ctaid.z;
  mov.u32 %r8, %cluster_nctaid.x;
  st.global.v4.u32 [%d1], {%r5, %r6, %r7, %r8};
  mov.u32 %r5, %cluster_nctarank;
  mov.u32 %r6, %clusterid.x;
  mov.u32 %r7, %clusterid.y;
  mov.u32 %r8, %nclusterid.z;
  st.global.v4.u32 [%d1+16], {%r5, %r6, %r7, %r8};
)",
                                 {4, 4, 2}, {2, 1, 2}, {1, 1, 1});
  const auto got = run(what, 3);
  for (uint32_t z = 0; z < 2; ++z) {
    for (uint32_t y = 0; y < 4; ++y) {
      for (uint32_t x = 0; x < 4; ++x) {
        const std::vector<uint32_t> expected = {x % 2 + 2 * z, x % 2, z, 2, 4, x / 2, y, 1};
        const auto at = got.begin() + 8 * ((z * 4 + y) * 4 + x);
        EXPECT_EQ(std::vector<uint32_t>(at, at + 8), expected) << x << y << z;
      }
    }
  }
}

// --- Shared memory of others -----------------------------------------------------

// Each CTA of a cluster of 4 writes its rank; then each reads the next one's rank.
std::string exchange(const std::string& before, const std::string& after) {
  return R"(
  mov.u32 %r1, %cluster_ctarank;
  mov.u32 %r2, buffer;
  add.s32 %r3, %r1, 100;
  st.shared.u32 [%r2+16], %r3;
)" + before +
         R"(
  add.s32 %r4, %r1, 1;
  and.b32 %r4, %r4, 3;
  mapa.shared::cluster.u32 %r5, %r2, %r4;
  ld.shared::cluster.u32 %r6, [%r5+16];
  getctarank.shared::cluster.u32 %r7, %r5;
  mad.lo.u32 %r6, %r7, 1000, %r6;
)" + after +
         R"(
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d1, %out, %d1;
  st.global.u32 [%d1], %r6;
)";
}
const std::string kBarrier = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n";

Case exchange_case(const std::string& before, const std::string& after) {
  return cluster_case(exchange(before, after), {4, 1, 1}, {4, 1, 1}, {1, 1, 1});
}

TEST(Clusters, ABarrierOrdersSharedMemoryOfOthers) {
  const std::vector<std::string> barriers = {
      kBarrier, "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;\n",
      "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;\n"};
  for (const std::string& barrier : barriers) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const auto got = run(exchange_case(barrier, kBarrier), seed);
      for (uint32_t rank = 0; rank < 4; ++rank) {
        const uint32_t next = (rank + 1) % 4;
        EXPECT_EQ(got[rank], 1000 * next + 100 + next);
      }
    }
  }
}

TEST(Clusters, ABarrierLeftOutIsFound) {
  int unordered = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(exchange_case("", kBarrier), seed), MachineError);
    try {
      run(exchange_case(kBarrier, ""), seed);
      ADD_FAILURE() << "seed " << seed << " noticed nothing";
    } catch (const MachineError& error) {
      unordered += error.kind() == MachineError::Kind::kRace ? 1 : 0;
    }
  }
  EXPECT_GT(unordered, 0);
  EXPECT_EQ(
      failures(exchange_case("barrier.cluster.arrive.relaxed; barrier.cluster.wait;\n", kBarrier),
               MachineError::Kind::kRace, {"of its cluster"}),
      kSeeds);
}

TEST(Clusters, GenericAddressesReachOthersAndCtaAddressesDoNot) {
  const std::string generic = R"(
  mov.u32 %r1, %cluster_ctarank;
  mov.u32 %r2, buffer;
  st.shared.u32 [%r2], %r1;
)" + kBarrier + R"(
  cvta.shared.u64 %d2, buffer;
  mov.u32 %r4, 1;
  mapa.u64 %d3, %d2, %r4;
  atom.add.u32 %r5, [%d3], 10;
)" + kBarrier + R"(
  ld.shared.u32 %r6, [%r2];
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d1, %out, %d1;
  st.global.u32 [%d1], %r6;
)";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(cluster_case(generic, {2, 1, 1}, {2, 1, 1}, {1, 1, 1}), seed);
    EXPECT_EQ(got[0], 0u);
    EXPECT_EQ(got[1], 21u);
  }
  const std::string own = R"(
  mov.u32 %r2, buffer;
  mov.u32 %r3, %cluster_ctarank;
  xor.b32 %r3, %r3, 1;
  mapa.shared::cluster.u32 %r4, %r2, %r3;
  st.shared.u32 [%r4], 5;
)";
  EXPECT_EQ(failures(cluster_case(own, {2, 1, 1}, {2, 1, 1}), MachineError::Kind::kMemory,
                     {"shared::cta"}),
            kSeeds);
  EXPECT_EQ(failures(cluster_case("mov.u32 %r2, buffer; mapa.shared::cluster.u32 %r4, %r2, 2;",
                                  {2, 1, 1}, {2, 1, 1}),
                     MachineError::Kind::kUndefined, {"no CTA of rank 2"}),
            kSeeds);
}

TEST(Clusters, TheBarrierIsUsedInTurn) {
  EXPECT_EQ(failures(cluster_case("barrier.cluster.arrive; barrier.cluster.arrive;", {2, 1, 1},
                                  {2, 1, 1}),
                     MachineError::Kind::kUndefined, {"again before it has waited"}),
            kSeeds);
  EXPECT_EQ(failures(cluster_case("barrier.cluster.wait;", {2, 1, 1}, {2, 1, 1}),
                     MachineError::Kind::kUndefined, {"has not arrived"}),
            kSeeds);
  // Threads that have exited need not arrive.
  const std::string half = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 40; @%p1 exit;\n";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_NO_THROW(
        run(cluster_case(half + kBarrier + kBarrier, {2, 1, 1}, {2, 1, 1}, {64, 1, 1}), seed));
  }
}

TEST(Clusters, LaunchesMustFit) {
  EXPECT_THROW(run(cluster_case("", {3, 1, 1}, {2, 1, 1}), 0), std::invalid_argument);
  EXPECT_THROW(run(cluster_case("", {16, 1, 1}, {16, 1, 1}), 0), std::invalid_argument);
}

// --- Registers -------------------------------------------------------------------

// 384 threads have 168 registers each. The last four warps run `give`, the others `take`.
Case registers(const std::string& give, const std::string& take) {
  return cluster_case("mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 256; @%p1 bra LAST;\n" + take +
                          " bra.uni END;\nLAST:\n" + give + "\nEND:\n",
                      {1, 1, 1}, {1, 1, 1}, {384, 1, 1});
}

TEST(Registers, WarpsGiveThemToOthers) {
  const std::string give = "setmaxnreg.dec.sync.aligned.u32 40;";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_NO_THROW(run(registers(give, "setmaxnreg.inc.sync.aligned.u32 232;"), seed));
  }
  EXPECT_EQ(failures(registers(give, "setmaxnreg.inc.sync.aligned.u32 240;"),
                     MachineError::Kind::kDeadlock, {"setmaxnreg"}),
            kSeeds);
  EXPECT_EQ(failures(registers("", "setmaxnreg.inc.sync.aligned.u32 232;"),
                     MachineError::Kind::kDeadlock, {"setmaxnreg"}),
            kSeeds);
  EXPECT_EQ(failures(registers("setmaxnreg.dec.sync.aligned.u32 176;", ""),
                     MachineError::Kind::kUndefined, {"168 registers"}),
            kSeeds);
}

}  // namespace
}  // namespace axonn::gpu_machine
