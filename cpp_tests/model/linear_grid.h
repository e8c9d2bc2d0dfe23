// Grids of ranks with one group per axis, and the ops that the ranks run there: Linears, whose
// programs have calls on three groups open at once, and collectives on one group.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "model/linear_program.h"
#include "model/protocol_simulator.h"

namespace axonn::comm::testing {

inline constexpr int64_t kMaxStates = 1'000'000;
inline constexpr int kNumAxes = 3;

using Coordinates = std::array<int64_t, kNumAxes>;
using Callers = std::array<Caller, kNumAxes>;

// The numbers of ranks along r, s and z.
struct Grid {
  Coordinates sizes;

  int64_t num_ranks() const { return sizes[0] * sizes[1] * sizes[2]; }
  int64_t rank_at(Coordinates at) const { return (at[0] * sizes[1] + at[1]) * sizes[2] + at[2]; }
  Coordinates coordinates(int64_t rank) const {
    return {rank / sizes[2] / sizes[1], rank / sizes[2] % sizes[1], rank % sizes[2]};
  }
  // Groups are numbered by axis and first rank, and start at different epochs, some of which wrap.
  // The numbers in between belong to groups without ranks.
  Callers callers(int64_t rank) const {
    Callers callers{};
    for (int axis = 0; axis < kNumAxes; ++axis) {
      auto at = coordinates(rank);
      const int64_t own = std::exchange(at[axis], 0);
      const int64_t group = axis * num_ranks() + rank_at(at);
      callers[axis] = {own, sizes[axis], first_epoch(group), group};
    }
    return callers;
  }
  static Epoch first_epoch(int64_t group) { return Epoch{0} - 1 - static_cast<Epoch>(group % 4); }
};

inline const std::vector<Grid> kGrids = {{{2, 1, 1}}, {{2, 2, 1}}, {{2, 2, 2}}, {{3, 1, 2}}};

// Returns what a rank appends to its program.
using Op = std::function<Program(Callers&)>;

// Layers alternate between expanding and contracting, which swaps r and s.
inline Op linear(const LinearPass& pass, bool contracts = false) {
  return [=](Callers& callers) {
    auto& [x, y, z] = callers;
    return linear_program(pass, {contracts ? y : x, contracts ? x : y, z});
  };
}

// Returns a call on one group, or one that is refused as by Call::refuse.
inline Op collective(int axis, Pattern pattern, bool refused = false) {
  return [=](Callers& callers) {
    Caller& caller = callers[axis];
    if (caller.size == 1) return Program{};
    if (!refused) return call_program(pattern, 4 * caller.size, caller);
    ++caller.epoch;
    Program program = begin_program(caller);
    program.push_back(complete_program(caller).front());
    return program;
  };
}

using Change = std::function<void(int64_t rank, Program&)>;

// Returns a world in which each rank runs all ops; `change` is applied to each op of each rank.
inline World world_of(const Grid& grid, const std::vector<Op>& ops,
                      const Change& change = nullptr) {
  World world;
  world.num_flags = 1;
  for (int64_t group = 0; group < kNumAxes * grid.num_ranks(); ++group) {
    world.groups.push_back({0, Grid::first_epoch(group)});
  }
  for (int64_t rank = 0; rank < grid.num_ranks(); ++rank) {
    Callers callers = grid.callers(rank);
    for (const Caller& caller : callers) {
      world.groups[static_cast<size_t>(caller.group)].size = caller.size;
    }
    Program program;
    for (const Op& op : ops) {
      Program steps = op(callers);
      if (change) change(rank, steps);
      program.insert(program.end(), steps.begin(), steps.end());
    }
    for (const Step& step : program) world.num_flags = std::max(world.num_flags, step.flag + 1);
    world.devices.push_back({0, {{{{std::move(program)}, false}}}});
  }
  return world;
}

inline LinearPass forward() { return {}; }
inline LinearPass backward() {
  LinearPass pass;
  pass.kind = LinearPass::Kind::kBackward;
  return pass;
}

// Returns the ops of two layers of a network, forward and backward.
inline std::vector<Op> two_layers() {
  return {linear(forward()), linear(forward(), true), collective(1, Pattern::kAllReduce),
          linear(backward(), true), linear(backward())};
}

inline std::string explored(const World& world) {
  const auto result = explore(world, kMaxStates);
  EXPECT_TRUE(result.exhaustive || !result.violation.empty()) << result.num_states << " states";
  return result.violation;
}

inline ::testing::AssertionResult says(const std::string& got, const std::string& part) {
  if (got.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "got '" << got << "', not '" << part << "'";
}

}  // namespace axonn::comm::testing
