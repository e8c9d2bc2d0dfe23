// Bulk copies: what they copy, and what must order them. Error messages are checked wherever one
// wait, fence or arrival is left out.
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
    ".shared .align 8 .b64 barrier[2]; .shared .align 128 .b8 buffer[1024];";

// %r1 is an mbarrier for one arrival, %r2 a buffer; %p1 holds for the first thread.
const std::string kBegin = R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mov.u32 %r3, %tid.x;
  setp.eq.u32 %p1, %r3, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
)";
const std::string kInitFence = "fence.mbarrier_init.release.cluster;\n";
const std::string kAwait =
    "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra WAIT;\n";

// 64 threads write words 0 to 63 of the output. A load of these 256 bytes comes out 64 words
// further on.
std::string load(const std::string& fences, const std::string& after_init,
                 const std::string& wait) {
  return kBegin + after_init + R"(
  mul.wide.u32 %d1, %r3, 4;
  add.s64 %d1, %out, %d1;
  add.s32 %r4, %r3, 500;
  st.global.u32 [%d1], %r4;
)" + fences +
         R"(
  bar.sync 0;
  @!%p1 bra WAIT;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%out], 256, [%r1];
)" + wait +
         R"(
  shl.b32 %r5, %r3, 2;
  add.s32 %r5, %r2, %r5;
  ld.shared.u32 %r6, [%r5];
  st.global.u32 [%d1+256], %r6;
)";
}

Case two_warps(const std::string& body) { return {body, kVariables, {1, 1, 1}, {64, 1, 1}}; }

TEST(Bulk, ALoadBringsWhatIsFenced) {
  const std::string fence = "fence.proxy.async.global;";
  for (const std::string& right : {fence, std::string("fence.proxy.async;")}) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const auto got = run(two_warps(load(right, kInitFence, kAwait)), seed);
      for (uint32_t i = 0; i < 64; ++i) EXPECT_EQ(got[64 + i], 500 + i);
    }
  }
  for (const std::string& wrong : {std::string(), std::string("fence.proxy.async.shared::cta;"),
                                   std::string("fence.acq_rel.gpu;")}) {
    EXPECT_EQ(failures(two_warps(load(wrong, kInitFence, kAwait)), MachineError::Kind::kRace,
                       {"no fence.proxy.async orders", "begun by", "cp.async.bulk"}),
              kSeeds);
  }
  EXPECT_EQ(failures(two_warps(load(fence, "", kAwait)), MachineError::Kind::kRace,
                     {"initialization of the mbarrier"}),
            kSeeds);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(two_warps(load(fence, kInitFence, "WAIT:\n")), seed), MachineError);
  }
}

TEST(Bulk, SourcesUnderALoadStayAsTheyAre) {
  const std::string overwrites =
      load("fence.proxy.async;", kInitFence, "@%p1 st.global.u32 [%out+8], 1;\n" + kAwait);
  EXPECT_EQ(failures(two_warps(overwrites), MachineError::Kind::kRace, {}), kSeeds);
}

// One thread writes 256 bytes of shared memory and stores them.
Case store(const std::string& fence, const std::string& wait, const std::string& then) {
  return {R"(
  mov.u32 %r2, buffer;
  mov.u32 %r3, %tid.x;
  shl.b32 %r5, %r3, 2;
  add.s32 %r5, %r2, %r5;
  add.s32 %r4, %r3, 900;
  st.shared.u32 [%r5], %r4;
)" + fence +
              R"(
  bar.sync 0;
  setp.ne.u32 %p1, %r3, 0;
  @%p1 bra END;
  cp.async.bulk.global.shared::cta.bulk_group [%out+256], [%r2], 256;
  cp.async.bulk.commit_group;
)" + wait + then +
              "\nEND:\n",
          kVariables,
          {1, 1, 1},
          {64, 1, 1}};
}

TEST(Bulk, AStoreWritesWhatIsFenced) {
  const std::string fence = "fence.proxy.async.shared::cta;";
  const std::string overwrite = "st.shared.u32 [%r2], 5; cp.async.bulk.wait_group 0;";
  const std::string read_back = "ld.global.u32 %r6, [%out+260]; st.global.u32 [%out], %r6;";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(store(fence, "cp.async.bulk.wait_group.read 0;", overwrite), seed);
    for (uint32_t i = 0; i < 64; ++i) EXPECT_EQ(got[64 + i], 900 + i);
    EXPECT_EQ(run(store(fence, "cp.async.bulk.wait_group 0;", read_back), seed)[0], 901u);
  }
  EXPECT_EQ(failures(store("", "cp.async.bulk.wait_group 0;", ""), MachineError::Kind::kRace,
                     {"no fence.proxy.async orders", "read after the write"}),
            kSeeds);
  EXPECT_EQ(failures(store("fence.proxy.async.global;", "cp.async.bulk.wait_group 0;", ""),
                     MachineError::Kind::kRace, {"no fence.proxy.async orders"}),
            kSeeds);
  // The source, and the CTA too, must stay until the source has been read.
  EXPECT_EQ(failures(store(fence, "", overwrite), MachineError::Kind::kRace, {"shared memory"}),
            kSeeds);
  EXPECT_EQ(failures(store(fence, "cp.async.bulk.wait_group.read 1;", overwrite),
                     MachineError::Kind::kRace, {}),
            kSeeds);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(store(fence, "", ""), seed), MachineError);
  }
  EXPECT_EQ(failures(store(fence, "cp.async.bulk.wait_group.read 0;", read_back),
                     MachineError::Kind::kRace, {"out"}),
            kSeeds);
}

TEST(Bulk, GroupsAreWaitedForInOrder) {
  // Three stores in three groups; the wait leaves one group open, so its source must stay.
  const auto body = [](const std::string& overwritten) {
    return R"(
  mov.u32 %r2, buffer;
  st.shared.v4.u32 [%r2], {1, 2, 3, 4};
  st.shared.v4.u32 [%r2+16], {5, 6, 7, 8};
  st.shared.v4.u32 [%r2+32], {9, 10, 11, 12};
  fence.proxy.async.shared::cta;
  cp.async.bulk.global.shared::cta.bulk_group [%out], [%r2], 16;
  cp.async.bulk.commit_group;
  cp.async.bulk.global.shared::cta.bulk_group [%out+16], [%r2+16], 16;
  cp.async.bulk.commit_group;
  cp.async.bulk.global.shared::cta.bulk_group [%out+32], [%r2+32], 16;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group.read 1;
  st.shared.u32 [)" +
           overwritten + R"(], 77;
  cp.async.bulk.wait_group 0;
)";
  };
  const auto one = [&](const std::string& at) {
    return Case{body(at), kVariables, {1, 1, 1}, {1, 1, 1}};
  };
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(one("%r2+16"), seed);
    for (uint32_t i = 0; i < 12; ++i) EXPECT_EQ(got[i], i + 1);
  }
  EXPECT_EQ(failures(one("%r2+32"), MachineError::Kind::kRace, {}), kSeeds);
}

TEST(Bulk, ReductionsJoinElements) {
  const std::vector<std::pair<std::string, std::vector<uint32_t>>> reductions = {
      {"add.u32", {10 + 7, 20 + 7, 30 + 7, 40 + 7}},
      {"max.s32", {10, 20, 30, 40}},
      {"min.u32", {7, 7, 7, 7}},
      {"and.b32", {10 & 7, 20 & 7, 30 & 7, 40 & 7}},
      {"xor.b32", {10 ^ 7, 20 ^ 7, 30 ^ 7, 40 ^ 7}},
      {"inc.u32", {0, 0, 0, 0}},  // all elements are at least 7
      {"add.u64", {10 + 7, 20 + 7, 30 + 7, 40 + 7}},
  };
  for (const auto& [name, expected] : reductions) {
    SCOPED_TRACE(name);
    const Case what{R"(
  mov.u32 %r2, buffer;
  st.global.v4.u32 [%out], {10, 20, 30, 40};
  st.shared.v4.u32 [%r2], {7, 7, 7, 7};
  fence.proxy.async;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.)" +
                        name + R"( [%out], [%r2], 16;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
)",
                    kVariables,
                    {1, 1, 1},
                    {1, 1, 1}};
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const auto got = run(what, seed);
      EXPECT_EQ(std::vector<uint32_t>(got.begin(), got.begin() + 4), expected);
    }
  }
}

TEST(Bulk, ReductionsOfSeveralCtasAllCount) {
  // 1.5 as bfloat16 is 0x3FC0; 4 CTAs add it to zeros.
  const Case what{R"(
  mov.u32 %r2, buffer;
  st.shared.v4.u32 [%r2], {0x3FC03FC0, 0x3FC03FC0, 0x3FC03FC0, 0x3FC03FC0};
  fence.proxy.async;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%out], [%r2], 16;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
)",
                  kVariables,
                  {4, 1, 1},
                  {1, 1, 1}};
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(run(what, seed)[i], 0x40C040C0u);  // 6
  }
}

// --- Clusters --------------------------------------------------------------------

// CTA 0 sends 16 bytes of its own shared memory to CTA 1.
Case send(const std::string& wait, const std::string& end) {
  Case result{kBegin + kInitFence + R"(
  mov.u32 %r4, %cluster_ctarank;
  st.shared.v4.u32 [%r2], {%r4, 11, 12, 13};
  fence.proxy.async.shared::cta;
  mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 16;
  mbarrier.arrive.shared::cta.b64 _, [%r1];
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  setp.eq.u32 %p2, %r4, 1;
  @%p2 bra WAIT;
  mapa.shared::cluster.u32 %r5, %r2, 1;
  mapa.shared::cluster.u32 %r6, %r1, 1;
  cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5+32], [%r2], 16, [%r6];
  bra.uni END;
)" + wait + R"(
  ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r2+32];
  st.global.v4.u32 [%out], {%r7, %r8, %r9, %r10};
END:
)" + end,
              kVariables,
              {2, 1, 1},
              {1, 1, 1}};
  result.cluster = {2, 1, 1};
  return result;
}

TEST(Bulk, CopiesBetweenCtas) {
  const std::string together = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(send(kAwait, together), seed);
    EXPECT_EQ(std::vector<uint32_t>(got.begin(), got.begin() + 4),
              (std::vector<uint32_t>{0, 11, 12, 13}));
    // CTA 0 leaves while its memory is being read.
    EXPECT_THROW(run(send(kAwait, ""), seed), MachineError) << "seed " << seed;
  }
}

TEST(Bulk, MisuseIsAnError) {
  const std::string begin = "mov.u32 %r2, buffer; mov.u32 %r1, barrier;\n";
  const auto one = [&](const std::string& body) {
    return Case{begin + body, kVariables, {1, 1, 1}, {1, 1, 1}};
  };
  EXPECT_EQ(failures(one("cp.async.bulk.global.shared::cta.bulk_group [%out], [%r2], 24;"),
                     MachineError::Kind::kUndefined, {"a multiple of 16 bytes, got 24"}),
            kSeeds);
  EXPECT_EQ(failures(one("cp.async.bulk.global.shared::cta.bulk_group [%out+8], [%r2], 16;"),
                     MachineError::Kind::kMemory, {"misaligned"}),
            kSeeds);
  EXPECT_EQ(failures(one("cp.async.bulk.global.shared::cta.bulk_group [%out+1008], [%r2], 32;"),
                     MachineError::Kind::kMemory, {"outside memory"}),
            kSeeds);
  EXPECT_EQ(failures(one("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], "
                         "[%out], 16, [%r1]; SPIN: bra SPIN;"),
                     MachineError::Kind::kUndefined, {"no mbarrier"}),
            kSeeds);
}

}  // namespace
}  // namespace axonn::gpu_machine
