// Linears whose ranks depart from the order of ops/cpu/linear.cpp. The simulator finds the
// departures that break something, and shows which are legal.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "model/happens_before.h"
#include "model/linear_grid.h"
#include "model/linear_program.h"
#include "model/protocol_simulator.h"
#include "model/schedulers.h"

namespace axonn::comm::testing {
namespace {

constexpr int64_t kOpened = 15;  // a flag that no Linear uses

bool deadlocks(const World& world) { return run(world, round_robin()).find("deadlock") == 0; }

bool is(const Step& step, Action action, const Caller& axis) {
  return step.action == action && step.group == axis.group;
}

// Returns the index after the group's last step with this action, or 0 if there is none.
size_t after_last(const Program& program, Action action, const Caller& axis) {
  size_t end = program.size();
  while (end > 0 && !is(program[end - 1], action, axis)) --end;
  return end;
}

// Moves the steps for which `moves` holds before the others; both keep their order.
template <typename Moves>
void move_ahead(Program& program, size_t begin, size_t end, Moves&& moves) {
  std::stable_partition(program.begin() + static_cast<int64_t>(begin),
                        program.begin() + static_cast<int64_t>(end), moves);
}

// A rank waits for peers' shards of one axis before it publishes its own shard of the other axis.
// If all ranks take the axes in one order, this is merely slow, because less overlaps; otherwise
// the waits form a cycle.
TEST(LinearOrder, FindsRanksThatGatherBeforeTheyPublishInOppositeOrders) {
  const Grid grid{{2, 1, 2}};
  const auto world = [&](bool opposite) {
    return world_of(grid, {linear(forward())}, [&](int64_t rank, Program& program) {
      const auto [r, s, z] = grid.callers(rank);
      const Caller& first = opposite && (r.rank + z.rank) % 2 == 1 ? r : z;
      move_ahead(program, 0, program.size(), [&](const Step& step) {
        return step.group == first.group && step.action != Action::kRead &&
               step.action != Action::kComplete;
      });
    });
  };
  EXPECT_TRUE(deadlocks(world(true)));
  EXPECT_TRUE(says(explored(world(true)), "deadlock"));
  EXPECT_EQ(explored(world(false)), "");
}

// The same holds for sums: one axis is finished before the slots of the other are signalled.
TEST(LinearOrder, FindsRanksThatFinishBeforeTheySignalInOppositeOrders) {
  const Grid grid{{2, 1, 2}};
  auto pass = backward();
  pass.save_input = pass.save_weight = true;
  const auto world = [&](bool opposite) {
    return world_of(grid, {linear(pass)}, [&](int64_t rank, Program& program) {
      const auto [r, s, z] = grid.callers(rank);
      const Caller& first = opposite && (r.rank + z.rank) % 2 == 1 ? r : z;
      move_ahead(program, after_last(program, Action::kAwaitCompleted, r), program.size() - 2,
                 [&](const Step& step) { return step.group == first.group; });
    });
  };
  EXPECT_TRUE(deadlocks(world(true)));
  EXPECT_TRUE(says(explored(world(true)), "deadlock"));
  EXPECT_EQ(explored(world(false)), "");
}

// Every other rank opens the call on r, and publishes its shard, before the calls on other axes.
void open_r_first(const Grid& grid, int64_t rank, Program& program) {
  const auto at = grid.coordinates(rank);
  if ((at[0] + at[1] + at[2]) % 2 == 0) return;
  const auto first_wait = std::find_if(program.begin(), program.end(), [](const Step& step) {
    return step.action == Action::kWait && step.flag != kOpened;
  });
  const auto group = grid.callers(rank)[0].group;
  move_ahead(program, 0, static_cast<size_t>(first_wait - program.begin()),
             [&](const Step& step) { return step.group == group; });
}

// A rank that opens a call waits only for what peers did in earlier calls, which does not depend on
// this call. So ranks need not agree on the order of groups.
TEST(LinearOrder, CallsMayBeOpenedInDifferentOrders) {
  for (const Grid& grid : kGrids) {
    const auto world = world_of(grid, two_layers(), [&](int64_t rank, Program& program) {
      open_r_first(grid, rank, program);
    });
    EXPECT_EQ(run(world, most_advanced()), "");
    EXPECT_EQ(HappensBefore(world).find_race(), "");
  }
}

// If opening a call were a rendezvous, ranks would have to agree on the order of groups.
TEST(LinearOrder, FindsThatARendezvousAtTheOpeningNeedsOneOrder) {
  const Grid grid{{2, 1, 2}};
  const auto world = [&](bool same_order) {
    return world_of(grid, {linear(forward())}, [&](int64_t rank, Program& program) {
      const auto callers = grid.callers(rank);
      for (const int axis : {0, 2}) {
        const Caller caller{callers[axis].rank, callers[axis].size, callers[axis].epoch + 1,
                            callers[axis].group};
        Program meet;
        Recorder recorder(caller, meet);
        recorder.signal(kOpened);
        for (int64_t peer = 0; peer < caller.size; ++peer) recorder.wait(peer, kOpened);
        const auto at = after_last(program, Action::kAwaitCompleted, caller);
        program.insert(program.begin() + static_cast<int64_t>(at), meet.begin(), meet.end());
      }
      if (!same_order) open_r_first(grid, rank, program);
    });
  };
  EXPECT_EQ(explored(world(true)), "");
  EXPECT_TRUE(deadlocks(world(false)));
}

// The sum of dx waits only for dx, so any of the ranks may finish it before the dweight product.
TEST(LinearOrder, DxMayBeFinishedBeforeDweightIsSignalled) {
  for (const Grid& grid : kGrids) {
    for (const int64_t every : {1, 2, 3}) {
      const auto change = [&](int64_t rank, Program& program) {
        const Caller r = grid.callers(rank)[0];
        const auto begin = after_last(program, Action::kSignal, r);
        if (rank % every > 0) return;
        const auto moved = [&](const Step& step) {  // x has the lower flags
          return step.group == r.group && step.flag >= r.size && step.action != Action::kComplete;
        };
        ASSERT_TRUE(
            std::any_of(program.begin() + static_cast<int64_t>(begin), program.end(), moved));
        move_ahead(program, begin, program.size(), moved);
      };
      const auto world = world_of(grid, std::vector<Op>(3, linear(backward())), change);
      EXPECT_EQ(run(world, most_advanced()), "");
      EXPECT_EQ(run(world, random_scheduler(1)), "");
      EXPECT_EQ(HappensBefore(world).find_race(), "");
    }
  }
}

TEST(LinearOrder, FindsASumThatIsFinishedBeforeItsSlotsAreSignalled) {
  const Grid grid{{2, 1, 1}};
  const auto world = world_of(grid, {linear(backward())}, [&](int64_t rank, Program& program) {
    const Caller r = grid.callers(rank)[0];
    const auto last = after_last(program, Action::kSignal, r) - 1;
    std::rotate(program.begin() + static_cast<int64_t>(last),
                program.begin() + static_cast<int64_t>(last) + 1, program.end() - 1);
  });
  EXPECT_TRUE(says(explored(world), "deadlock"));
}

// One rank omits its completion in one of the groups. The call after the next one needs that half
// again.
TEST(LinearOrder, FindsAMissingCompletion) {
  const Grid grid{{2, 2, 2}};
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const auto world = [&](size_t num_calls) {
      const std::vector<Op> ops(num_calls, linear(forward()));
      return world_of(grid, ops, [&](int64_t rank, Program& program) {
        const Caller caller = grid.callers(rank)[axis];
        if (rank != 5) return;
        program.erase(program.begin() +
                      static_cast<int64_t>(after_last(program, Action::kComplete, caller)) - 1);
      });
    };
    EXPECT_EQ(run(world(2), round_robin()), "");
    EXPECT_TRUE(says(run(world(3), round_robin()), "awaits completion"));
  }
}

// The sums of the bias's gradient read dy last, so dy's call must stay open until then. A call in
// between that waits for nobody lets peers run ahead.
TEST(LinearOrder, FindsACallThatIsClosedBeforeItsLastRead) {
  const Grid grid{{1, 2, 1}};
  const std::vector<Op> ops = {
      linear(backward()), collective(1, Pattern::kGather, /*refused=*/true), linear(backward())};
  EXPECT_EQ(explored(world_of(grid, ops)), "");
  const auto world = world_of(grid, ops, [&](int64_t, Program& program) {
    const auto end = program.end();
    if (end[-2].action == Action::kRead) std::swap(end[-2], end[-1]);
  });
  EXPECT_NE(explored(world), "");
  EXPECT_TRUE(says(HappensBefore(world).find_race(), "not ordered"));
}

TEST(LinearOrder, FindsHalvesThatAreReusedWithoutWaiting) {
  const Grid grid{{2, 2, 2}};
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const std::vector<Op> ops = {
        linear(forward()), collective(axis, Pattern::kGather, /*refused=*/true), linear(forward())};
    EXPECT_EQ(HappensBefore(world_of(grid, ops)).find_race(), "");
    const auto world = world_of(grid, ops, [&](int64_t rank, Program& program) {
      const Caller caller = grid.callers(rank)[axis];
      std::erase_if(program,
                    [&](const Step& step) { return is(step, Action::kAwaitCompleted, caller); });
    });
    EXPECT_TRUE(says(HappensBefore(world).find_race(), "not ordered"));
  }
}

// Groups are mixed up: what arrives in one group says nothing about the other.
TEST(LinearOrder, FindsAWaitInTheWrongGroup) {
  const Grid grid{{2, 1, 2}};
  const auto world = world_of(grid, {linear(forward())}, [&](int64_t rank, Program& program) {
    const auto [r, s, z] = grid.callers(rank);
    for (Step& step : program) {
      if (!is(step, Action::kWait, z)) continue;
      step.group = r.group;
      step.epoch = r.epoch + 1;
    }
  });
  EXPECT_TRUE(says(explored(world), "finds epoch"));
}

TEST(LinearOrder, FindsASignalBeforeItsWriteOnEachAxis) {
  const Grid grid{{2, 2, 2}};
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const auto world = world_of(grid, {linear(forward())}, [&](int64_t rank, Program& program) {
      const Caller caller = grid.callers(rank)[axis];
      const auto first = [&](Action action) {
        return std::find_if(program.begin(), program.end(),
                            [&](const Step& step) { return is(step, action, caller); });
      };
      std::iter_swap(first(Action::kWrite), first(Action::kSignal));
    });
    EXPECT_NE(HappensBefore(world).find_race(), "");
  }
}

}  // namespace
}  // namespace axonn::comm::testing
