// Runs the fused Linear on grids of ranks, mixed with collectives: no interleaving of ranks
// deadlocks, reads too early or overwrites too early.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "model/happens_before.h"
#include "model/linear_grid.h"
#include "model/linear_program.h"
#include "model/protocol_simulator.h"
#include "model/schedulers.h"

namespace axonn::comm::testing {
namespace {

LinearPass random_pass(std::mt19937_64& engine) {
  const auto flip = [&] { return engine() % 2 == 1; };
  LinearPass pass;
  pass.kind = flip() ? LinearPass::Kind::kForward : LinearPass::Kind::kBackward;
  pass.sharded = engine() % 4 > 0;
  pass.gather_dim = flip();
  pass.scatter_dim = flip();
  pass.one_shot = flip();
  pass.in_one_piece = {flip(), flip()};
  pass.joins = {flip(), flip(), flip(), flip()};
  pass.save_input = flip();
  pass.save_weight = flip();
  if (engine() % 4 == 0) pass.mask = {flip(), flip(), flip()};
  if (engine() % 8 == 0) pass.rows = 0;
  return pass;
}

std::vector<Op> random_ops(size_t count, uint64_t seed) {
  static constexpr Pattern kPatterns[] = {Pattern::kGather, Pattern::kReduceScatter,
                                          Pattern::kAllReduce};
  std::mt19937_64 engine(seed);
  std::vector<Op> ops;
  while (ops.size() < count) {
    if (engine() % 3 > 0) {
      const LinearPass pass = random_pass(engine);
      ops.push_back(linear(pass, engine() % 2 == 1));
    } else {
      const int axis = static_cast<int>(engine() % kNumAxes);
      const Pattern pattern = kPatterns[engine() % 3];
      ops.push_back(collective(axis, pattern, engine() % 4 == 0));
    }
  }
  return ops;
}

// --- Recorded programs ---------------------------------------------------------------------------

TEST(LinearProgram, AForwardPublishesOnAllGroupsBeforeItWaits) {
  const Grid grid{{2, 1, 2}};
  Callers callers = grid.callers(0);
  auto& [r, s, z] = callers;
  r.epoch = z.epoch = 6;
  std::string text;
  for (const Step& step : linear_program(forward(), {r, s, z})) text += step.describe() + "\n";
  EXPECT_EQ(text,
            "rank 0 in epoch 5 awaits completion flag 0 of rank 0 in group 8\n"
            "rank 0 in epoch 5 awaits completion flag 0 of rank 1 in group 8\n"
            "rank 0 in epoch 7 writes flag 0 of rank 0 in group 8\n"
            "rank 0 in epoch 7 signals flag 0 of rank 0 in group 8\n"
            "rank 0 in epoch 5 awaits completion flag 0 of rank 0\n"
            "rank 0 in epoch 5 awaits completion flag 0 of rank 1\n"
            "rank 0 in epoch 7 writes flag 0 of rank 0\n"
            "rank 0 in epoch 7 signals flag 0 of rank 0\n"
            "rank 0 in epoch 7 waits for flag 1 of rank 1 in group 8\n"
            "rank 0 in epoch 7 reads flag 1 of rank 1 in group 8\n"
            "rank 0 in epoch 7 waits for flag 1 of rank 1\n"
            "rank 0 in epoch 7 reads flag 1 of rank 1\n"
            "rank 0 in epoch 7 reads flag 1 of rank 1\n"
            "rank 0 in epoch 7 reads flag 1 of rank 1 in group 8\n"
            "rank 0 in epoch 7 completes flag 0 of rank 0\n"
            "rank 0 in epoch 7 completes flag 0 of rank 0 in group 8\n");
}

// This is why no order of ranks deadlocks: the rank that is furthest behind waits for nobody.
TEST(LinearProgram, OpensAllCallsBeforeItWaitsAndClosesThemInReverse) {
  std::mt19937_64 engine(1);
  const Grid grid{{2, 2, 2}};
  for (int i = 0; i < 200; ++i) {
    Callers callers = grid.callers(i % grid.num_ranks());
    auto& [r, s, z] = callers;
    const Program program = linear_program(random_pass(engine), {r, s, z});
    std::vector<int64_t> opened, closed;
    bool waited = false;
    for (const Step& step : program) {
      waited |= step.action == Action::kWait;
      if (step.action == Action::kAwaitCompleted) {
        EXPECT_FALSE(waited) << step.describe();
        if (step.peer == 0) opened.push_back(step.group);
      }
      EXPECT_TRUE(closed.empty() || step.action == Action::kComplete) << step.describe();
      if (step.action == Action::kComplete) closed.insert(closed.begin(), step.group);
    }
    EXPECT_EQ(opened, closed);
  }
}

// --- No interleaving goes wrong ------------------------------------------------------------------

TEST(LinearProtocol, ManySchedulesOfLinearsAndCollectives) {
  for (const Grid& grid : kGrids) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      const World world = world_of(grid, random_ops(8, seed));
      for (uint64_t order = 0; order < 3; ++order) {
        ASSERT_EQ(run(world, random_scheduler(100 * seed + order)), "") << "seed " << seed;
      }
      ASSERT_EQ(run(world, most_advanced()), "") << "seed " << seed;
      ASSERT_EQ(run(world, least_advanced()), "") << "seed " << seed;
      ASSERT_EQ(run(world, round_robin()), "") << "seed " << seed;
      const auto starved = seed % static_cast<uint64_t>(grid.num_ranks());
      ASSERT_EQ(run(world, starving(starved, seed)), "") << "seed " << seed;
    }
  }
}

TEST(LinearProtocol, SignalsOrderEveryWriteWithEveryOtherAccess) {
  for (const Grid& grid : kGrids) {
    ASSERT_EQ(HappensBefore(world_of(grid, two_layers())).find_race(), "");
    for (uint64_t seed = 100; seed < 140; ++seed) {
      const World world = world_of(grid, random_ops(8, seed));
      ASSERT_EQ(HappensBefore(world).find_race(), "") << "seed " << seed;
    }
  }
}

// Runs each kind of pass twice, with a call in between that waits for nobody, each axis in turn.
TEST(LinearProtocol, EveryInterleavingOfTwoRanksOfAnyPass) {
  for (int bits = 0; bits < 1 << 12; ++bits) {
    const auto bit = [&](int index) { return (bits >> index & 1) == 1; };
    LinearPass pass;
    pass.kind = bit(0) ? LinearPass::Kind::kBackward : LinearPass::Kind::kForward;
    pass.sharded = bit(1);
    pass.gather_dim = bit(2);
    pass.scatter_dim = bit(3);
    pass.one_shot = bit(4);
    pass.joins = {bit(5), bit(5), bit(5), bit(5)};
    pass.save_input = bit(6);
    pass.save_weight = bit(7);
    pass.mask = {bit(8), bit(9), bit(10)};
    pass.in_one_piece = {bit(11), bit(11)};
    if (!bit(0) && (bits >> 8 & 7) > 0) continue;  // a forward pass has no mask
    for (int axis = 0; axis < kNumAxes; ++axis) {
      Grid grid{{1, 1, 1}};
      grid.sizes[axis] = 2;
      const auto refused = collective(axis, Pattern::kGather, /*refused=*/true);
      ASSERT_EQ(explored(world_of(grid, {linear(pass), refused, linear(pass)})), "")
          << "axis " << axis << ", bits " << bits;
    }
  }
}

TEST(LinearProtocol, EveryInterleavingOfTwoRanks) {
  for (const Grid& grid : {Grid{{2, 1, 1}}, Grid{{1, 2, 1}}, Grid{{1, 1, 2}}}) {
    EXPECT_EQ(explored(world_of(grid, two_layers())), "");
    for (uint64_t seed = 0; seed < 20; ++seed) {
      EXPECT_EQ(explored(world_of(grid, random_ops(6, seed))), "") << "seed " << seed;
    }
  }
}

TEST(LinearProtocol, EveryInterleavingOfFourRanks) {
  for (const Grid& grid : {Grid{{2, 2, 1}}, Grid{{2, 1, 2}}, Grid{{1, 2, 2}}}) {
    EXPECT_EQ(explored(world_of(grid, {linear(forward())})), "");
  }
}

}  // namespace
}  // namespace axonn::comm::testing
