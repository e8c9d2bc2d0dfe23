// How many CTAs are on a device at a time: as many as fit on its SMs, and no more.
#include "gpu_machine/residency.h"

#include "gpu_machine/kernel_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::kSeeds;

// Counts the CTAs that are resident, and writes the largest count to the second word.
const std::string kMeet = R"(
  atom.global.add.u32 %r1, [%out], 1;
  add.u32 %r1, %r1, 1;
  red.global.max.u32 [%out+4], %r1;
  nanosleep.u32 20000;
  red.global.add.u32 [%out], -1;
)";

struct Grid {
  uint32_t ctas, threads;
  uint64_t shared_bytes;
  bool is_cooperative = false;
  Dim cluster{1, 1, 1};
  int sms = 2;
};

uint32_t most_together(const Grid& grid, uint64_t seed, const std::string& body = kMeet) {
  Options options;
  options.seed = seed;
  options.sms = grid.sms;
  options.patience = 200'000;
  Machine machine(options);
  machine.load(testing::kernel_of(body));
  const uint64_t out = machine.put(std::vector<uint32_t>(2, 0), "out");
  std::vector<std::byte> argument(sizeof(out));
  std::memcpy(argument.data(), &out, sizeof(out));
  machine.enqueue(machine.new_stream(0), machine.kernel("test"), {grid.ctas, 1, 1},
                  {grid.threads, 1, 1}, {argument}, grid.shared_bytes, grid.cluster,
                  grid.is_cooperative);
  machine.run();
  return machine.get<uint32_t>(out, 2)[1] / grid.threads;
}

uint32_t most_of_all_seeds(const Grid& grid) {
  uint32_t most = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) most = std::max(most, most_together(grid, seed));
  return most;
}

TEST(Residency, AnSmHoldsWhatItsMemoryThreadsAndRegistersAllow) {
  EXPECT_EQ(most_of_all_seeds({9, 1, 200'000}), 2u);
  EXPECT_EQ(most_of_all_seeds({9, 1, 100'000}), 4u);
  // A thread may have 248 registers: the 65536 of an SM fit two CTAs of 128 threads, or one of 192.
  EXPECT_EQ(most_of_all_seeds({9, 128, 0}), 4u);
  EXPECT_EQ(most_of_all_seeds({9, 192, 0}), 2u);
  EXPECT_EQ(most_of_all_seeds({9, 1024, 0}), 2u);
}

TEST(Residency, DirectivesBoundTheRegisters) {
  Program program;
  EXPECT_EQ(registers_of_thread(program, 1024), 64u);
  EXPECT_EQ(registers_of_thread(program, 32), 248u);
  program.max_threads = 384;
  EXPECT_EQ(registers_of_thread(program, 32), 168u);
  program.min_ctas = 2;
  EXPECT_EQ(registers_of_thread(program, 32), 80u);
  program.max_registers = 33;
  EXPECT_EQ(registers_of_thread(program, 32), 40u);
  EXPECT_EQ(ctas_of_sm(footprint_of(program, 33, 0)), 25);  // 65536 / (64 * 40)
  EXPECT_EQ(ctas_of_sm(footprint_of(program, 1, 0)), 32);
  EXPECT_EQ(ctas_of_sm(footprint_of(program, 1, kSharedOfSm)), 0);
}

// Each CTA waits until all have started.
const std::string kBarrierOfTheGrid = R"(
  atom.global.add.u32 %r1, [%out], 1;
  mov.u32 %r2, %nctaid.x;
WAIT:
  ld.relaxed.gpu.global.u32 %r3, [%out];
  setp.lt.u32 %p1, %r3, %r2;
  @%p1 bra WAIT;
)";

TEST(Residency, ACooperativeGridIsThereAsAWhole) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_NO_THROW(most_together({40, 1, 0, true, {1, 1, 1}, 5}, seed, kBarrierOfTheGrid));
    EXPECT_NO_THROW(most_together({2, 1, 200'000, true}, seed, kBarrierOfTheGrid));
    try {
      // A grid that is not cooperative has only 16 CTAs resident at a time.
      most_together({40, 1, 0, false, {1, 1, 1}, 5}, seed, kBarrierOfTheGrid);
      ADD_FAILURE() << "expected a deadlock";
    } catch (const MachineError& error) {
      EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(MachineError::Kind::kDeadlock));
    }
  }
  EXPECT_THROW(most_together({3, 1, 200'000, true}, 0), std::invalid_argument);
  EXPECT_THROW(most_together({17, 1, 0, true}, 0), std::invalid_argument);  // 8 per SM
}

TEST(Residency, AClusterNeedsPlaceForAllItsCtas) {
  EXPECT_EQ(most_of_all_seeds({8, 1, 100'000, false, {4, 1, 1}}), 4u);
  EXPECT_THROW(most_together({8, 1, 200'000, false, {4, 1, 1}}, 0), std::invalid_argument);
  EXPECT_EQ(most_of_all_seeds({8, 1, 200'000, false, {4, 1, 1}, 4}), 4u);
}

}  // namespace
}  // namespace axonn::gpu_machine
