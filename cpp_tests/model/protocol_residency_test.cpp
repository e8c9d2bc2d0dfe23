// Runs the protocol on devices whose CTAs hold an SM until they end. A kernel that spins on a flag
// must not hold the SM that the flag's producer needs. Slots stand for SMs; virtual ranks share a
// device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/gemm/launch_config.h"
#include "core/schedule/tile_schedule.h"
#include "core/symmetric/signal_layout.h"
#include "model/happens_before.h"
#include "model/protocol_simulator.h"

namespace axonn::comm::testing {
namespace {

constexpr Epoch kBeforeWrap = Epoch{0} - 2;
constexpr int64_t kMaxStates = 2'000'000;

struct GatherGemm {
  int64_t size;
  ChunkPlan plan;
  int64_t block = 4;
  int64_t num_slots = 0;  // per device
  int64_t ranks_per_device = 1;
  int64_t num_ctas = 1;        // per rank's GEMM
  bool copy_by_kernel = true;  // whether the transport needs a slot; the copy engine needs none
  WaitRule rule = WaitRule::kEachChunk;
  int64_t num_calls = 1;
};

// Each rank has one stream that copies and one that multiplies.
World world_of(const GatherGemm& setup) {
  World world{{{setup.size, kBeforeWrap}}, SignalLayout::of(setup.plan, 2).num_flags(), {}};
  world.devices.resize(static_cast<size_t>(setup.size / setup.ranks_per_device),
                       Device{setup.num_slots, {}});
  for (int64_t rank = 0; rank < setup.size; ++rank) {
    Stream copy, compute;
    const kernels::GatherTiles tiles{setup.plan, rank, setup.block, 1};
    for (int64_t call = 1; call <= setup.num_calls; ++call) {
      const Caller caller{rank, setup.size, kBeforeWrap + static_cast<Epoch>(call)};
      copy.push_back({{begin_program(caller)}, false});
      copy.push_back({{transport_program(setup.plan, caller)}, setup.copy_by_kernel});
      Kernel gemm{{}, true};
      for (int64_t cta = 0; cta < setup.num_ctas; ++cta) {
        gemm.ctas.push_back(gemm_program(tiles, cta, setup.num_ctas, setup.rule, caller));
      }
      compute.push_back(std::move(gemm));
      compute.push_back({{complete_program(caller)}, false});
    }
    auto& streams = world.devices[static_cast<size_t>(rank / setup.ranks_per_device)].streams;
    streams.push_back(std::move(copy));
    streams.push_back(std::move(compute));
  }
  return world;
}

std::string explored(const World& world) {
  const auto result = explore(world, kMaxStates);
  EXPECT_TRUE(result.exhaustive || !result.violation.empty()) << result.num_states << " states";
  return result.violation;
}

bool deadlocks(const std::string& violation) {
  return violation.find("deadlock") != std::string::npos;
}

// Returns max_ctas for a device with `num_slots` SMs.
int64_t clamped_ctas(int64_t num_slots, int64_t ranks_per_device, int64_t producer_ctas) {
  auto limits = kernels::kSm90;
  limits.num_sms = num_slots;
  return kernels::max_ctas({64, 64, 64, 4, 4, 4}, {ranks_per_device, producer_ctas}, limits);
}

TEST(Residency, AGridOnEverySmDeadlocksAndTheClampPreventsIt) {
  GatherGemm setup{.size = 2, .plan = {8, 2}};
  setup.num_slots = 2;
  setup.num_ctas = 2;
  EXPECT_TRUE(deadlocks(explored(world_of(setup))));
  setup.num_ctas = clamped_ctas(2, 1, 1);
  EXPECT_EQ(setup.num_ctas, 1);
  EXPECT_EQ(explored(world_of(setup)), "");
  setup.num_calls = 3;
  EXPECT_EQ(explored(world_of(setup)), "");
}

TEST(Residency, VirtualRanksShareADevice) {
  GatherGemm setup{.size = 2, .plan = {8, 2}};
  setup.ranks_per_device = 2;
  setup.num_slots = 4;
  setup.num_ctas = 2;
  EXPECT_TRUE(deadlocks(explored(world_of(setup))));
  setup.num_ctas = clamped_ctas(4, 2, 1);
  EXPECT_EQ(setup.num_ctas, 1);
  EXPECT_EQ(explored(world_of(setup)), "");
}

TEST(Residency, TheCopyEngineNeedsNoSm) {
  GatherGemm setup{.size = 2, .plan = {8, 2}};
  setup.copy_by_kernel = false;
  setup.num_slots = 2;
  setup.num_ctas = clamped_ctas(2, 1, 0);
  EXPECT_EQ(setup.num_ctas, 2);
  EXPECT_EQ(explored(world_of(setup)), "");
}

TEST(Residency, BackToBackCallsOfManyRanks) {
  for (const int64_t size : {2, 4, 8}) {
    for (const int64_t ranks_per_device : {int64_t{1}, size}) {
      GatherGemm setup{.size = size, .plan = {size * 10, size, 3, 4}};
      setup.block = 8;  // straddles shards and chunks
      setup.ranks_per_device = ranks_per_device;
      setup.num_slots = 3 * ranks_per_device;
      setup.num_ctas = clamped_ctas(setup.num_slots, ranks_per_device, 1);
      setup.num_calls = 4;
      for (const WaitRule rule : {WaitRule::kEachChunk, WaitRule::kLastDelivered}) {
        setup.rule = rule;
        const World world = world_of(setup);
        for (uint64_t seed = 0; seed < 3; ++seed) {
          ASSERT_EQ(run(world, random_scheduler(seed)), "");
        }
        ASSERT_EQ(run(world, most_advanced()), "");
        ASSERT_EQ(run(world, least_advanced()), "");
        ASSERT_EQ(run(world, round_robin()), "");
        ASSERT_EQ(run(world, starving(1, 5)), "");
        ASSERT_EQ(HappensBefore(world).find_race(), "");
      }
    }
  }
}

// One wait per tile is enough if and only if a single transport delivers in order.
TEST(Residency, WaitingForTheLastChunkNeedsInOrderTransport) {
  GatherGemm setup{.size = 2, .plan = {12, 2, 2, 3}};
  setup.block = 6;  // a shard, two chunks
  setup.num_slots = 2;
  const auto violation = [&](WaitRule rule, bool in_order) {
    setup.rule = rule;
    auto world = world_of(setup);
    if (!in_order) {
      for (auto& device : world.devices) {
        auto& program = device.streams[0][1].ctas[0];
        // After this rank's two writes and signals: a wait, read, write and signal per chunk.
        const auto chunks = program.begin() + 4;
        std::rotate(chunks, chunks + 4, chunks + 8);
      }
    }
    const auto race = HappensBefore(world).find_race();
    const auto found = explored(world);
    EXPECT_EQ(race.empty(), found.empty()) << race << found;
    return found;
  };
  EXPECT_EQ(violation(WaitRule::kEachChunk, true), "");
  EXPECT_EQ(violation(WaitRule::kEachChunk, false), "");
  EXPECT_EQ(violation(WaitRule::kLastDelivered, true), "");
  EXPECT_NE(violation(WaitRule::kLastDelivered, false).find("finds epoch"), std::string::npos);
}

// --- Kernels whose own CTAs raise the flags that others wait for ---------------------------------

// Each rank has a device; all its CTAs are in one kernel, and start in the given order.
World one_kernel(int64_t num_slots, const std::vector<std::vector<Program>>& ranks) {
  World world{{{static_cast<int64_t>(ranks.size()), kBeforeWrap}}, 1, {}};
  for (const auto& ctas : ranks) {
    for (const auto& program : ctas) {
      for (const Step& step : program) world.num_flags = std::max(world.num_flags, step.flag + 1);
    }
    world.devices.push_back({num_slots, {{{ctas, true}}}});
  }
  return world;
}

// There is one CTA per shard. The CTA of this rank's shard also publishes it.
std::vector<std::vector<Program>> gather_by_ctas(int64_t size, bool own_shard_first) {
  const Epoch epoch = kBeforeWrap + 1;
  std::vector<std::vector<Program>> ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    std::vector<Program> ctas;
    for (int64_t step = 0; step < size; ++step) {
      const int64_t peer =
          own_shard_first ? own_first(rank, size, step) : own_last(rank, size, step);
      Program program;
      if (peer == rank) {
        program.push_back({Action::kWrite, rank, rank, rank, epoch});
        program.push_back({Action::kSignal, rank, rank, rank, epoch});
      }
      program.push_back({Action::kWait, rank, peer, peer, epoch});
      program.push_back({Action::kRead, rank, peer, peer, epoch});
      ctas.push_back(std::move(program));
    }
    ranks.push_back(std::move(ctas));
  }
  return ranks;
}

TEST(Residency, OwnShardLastDeadlocksWhereCtasMustTakeTurns) {
  for (const auto& [size, slots] : {std::pair<int64_t, int64_t>{2, 1}, {2, 2}, {3, 1}}) {
    EXPECT_EQ(explored(one_kernel(slots, gather_by_ctas(size, true))), "");
    const auto own_last = explored(one_kernel(slots, gather_by_ctas(size, false)));
    EXPECT_EQ(deadlocks(own_last), slots < size) << slots << " slots: " << own_last;
  }
}

// There is one CTA per tile of ScatterTiles, and one per chunk of this rank, which adds it up.
std::vector<std::vector<Program>> scatter_by_ctas(const ChunkPlan& plan, bool reduce_first) {
  const Epoch epoch = kBeforeWrap + 1;
  const int64_t size = plan.num_shards;
  const auto layout = SignalLayout::of(plan, 1);
  std::vector<std::vector<Program>> ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    const kernels::ScatterTiles tiles{plan, rank, plan.tile, 1};
    std::vector<Program> produce, reduce;
    for (int64_t index = 0; index < tiles.num_tiles(); ++index) {
      EXPECT_EQ(tiles.tiles_in(tiles.chunk(index)), 1);  // so each tile may signal
      const int64_t flag = layout.flag(0, tiles.chunk(index));
      produce.push_back(
          {{Action::kWrite, rank, rank, flag, epoch}, {Action::kSignal, rank, rank, flag, epoch}});
    }
    for (int64_t chunk = 0; chunk < plan.chunks_per_shard; ++chunk) {
      const int64_t flag = layout.flag(0, {rank, chunk});
      Program program;
      for (int64_t source = 0; source < size; ++source) {
        program.push_back({Action::kWait, rank, source, flag, epoch});
        program.push_back({Action::kAdd, rank, source, flag, epoch});
      }
      reduce.push_back(std::move(program));
    }
    auto& first = reduce_first ? reduce : produce;
    const auto& second = reduce_first ? produce : reduce;
    first.insert(first.end(), second.begin(), second.end());
    ranks.push_back(std::move(first));
  }
  return ranks;
}

TEST(Residency, ReducingBeforeProducingDeadlocksWhereCtasMustTakeTurns) {
  const ChunkPlan plan{8, 2, 2, 2};
  for (const int64_t slots : {1, 2}) {
    EXPECT_EQ(explored(one_kernel(slots, scatter_by_ctas(plan, false))), "");
    EXPECT_TRUE(deadlocks(explored(one_kernel(slots, scatter_by_ctas(plan, true)))));
  }
  // With one slot more than there are reductions, tiles take turns on it.
  EXPECT_EQ(explored(one_kernel(3, scatter_by_ctas(plan, true))), "");
}

}  // namespace
}  // namespace axonn::comm::testing
