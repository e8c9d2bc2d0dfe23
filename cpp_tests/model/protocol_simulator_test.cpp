// Tests the protocol of comm::Call and core/symmetric/fused_order.h for ranks of one thread: no
// interleaving of ranks deadlocks, reads too early or overwrites too early, and the simulator finds
// protocols that are broken.
#include "model/protocol_simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "model/happens_before.h"
#include "model/schedulers.h"

namespace axonn::comm::testing {
namespace {

constexpr Epoch kBeforeWrap = Epoch{0} - 3;  // the third call has epoch 0
constexpr int64_t kMaxStates = 2'000'000;

struct CollectiveCall {
  Pattern pattern;
  int64_t count;
  bool refused = false;  // on all ranks, as by Call::refuse: completed without hearing from peers
};

World world_of(std::vector<Program> ranks, Epoch first_epoch = kBeforeWrap) {
  World world{{{static_cast<int64_t>(ranks.size()), first_epoch}}, 1, {}};
  for (auto& program : ranks) {
    for (const Step& step : program) world.num_flags = std::max(world.num_flags, step.flag + 1);
    world.devices.push_back({0, {{{{std::move(program)}, false}}}});
  }
  return world;
}

std::vector<Program> programs_of(int64_t size, const std::vector<CollectiveCall>& calls,
                                 Epoch first_epoch = kBeforeWrap) {
  std::vector<Program> ranks(static_cast<size_t>(size));
  for (int64_t rank = 0; rank < size; ++rank) {
    Caller caller{rank, size, first_epoch};
    for (const auto& [pattern, count, refused] : calls) {
      Program call = call_program(pattern, count, caller);
      if (refused) {
        call = begin_program(caller);
        call.push_back(complete_program(caller).front());
      }
      auto& program = ranks[static_cast<size_t>(rank)];
      program.insert(program.end(), call.begin(), call.end());
    }
  }
  return ranks;
}

// Returns the kinds of calls that ops make. In one of the sums, the last rank's part is empty.
std::vector<CollectiveCall> kinds(int64_t size) {
  return {{Pattern::kGather, size},        {Pattern::kReduceScatter, size},
          {Pattern::kAllReduce, size},     {Pattern::kOneShot, 4},
          {Pattern::kAllReduce, size - 1}, {Pattern::kGather, size, /*refused=*/true}};
}

std::vector<CollectiveCall> random_calls(int64_t size, size_t count, uint64_t seed) {
  std::mt19937_64 engine(seed);
  const auto choice = kinds(size);
  std::vector<CollectiveCall> calls;
  while (calls.size() < count) calls.push_back(choice[engine() % choice.size()]);
  return calls;
}

std::string explored(const World& world) {
  const auto result = explore(world, kMaxStates);
  EXPECT_TRUE(result.exhaustive || !result.violation.empty()) << result.num_states << " states";
  return result.violation;
}

// --- Recorded programs ---------------------------------------------------------------------------

Program program_of(Pattern pattern, int64_t count, Caller caller) {
  return call_program(pattern, count, caller);
}

TEST(ProtocolProgram, AGatherPublishesFirstAndStartsAtTheNextRank) {
  std::string text;
  for (const Step& step : program_of(Pattern::kGather, 3, {1, 3, 6})) {
    text += step.describe() + "\n";
  }
  EXPECT_EQ(text,
            "rank 1 in epoch 5 awaits completion flag 0 of rank 0\n"
            "rank 1 in epoch 5 awaits completion flag 0 of rank 1\n"
            "rank 1 in epoch 5 awaits completion flag 0 of rank 2\n"
            "rank 1 in epoch 7 writes flag 1 of rank 1\n"
            "rank 1 in epoch 7 signals flag 1 of rank 1\n"
            "rank 1 in epoch 7 waits for flag 2 of rank 2\n"
            "rank 1 in epoch 7 reads flag 2 of rank 2\n"
            "rank 1 in epoch 7 waits for flag 0 of rank 0\n"
            "rank 1 in epoch 7 reads flag 0 of rank 0\n"
            "rank 1 in epoch 7 completes flag 0 of rank 1\n");
}

std::vector<int64_t> flags_of(const Program& program, Action action) {
  std::vector<int64_t> flags;
  for (const Step& step : program) {
    if (step.action == action) flags.push_back(step.flag);
  }
  return flags;
}

TEST(ProtocolProgram, AScatterServesPeersFirstAndAddsItsOwnPartOncePerRank) {
  const Program program = program_of(Pattern::kReduceScatter, 24, {1, 3, 0});
  EXPECT_EQ(flags_of(program, Action::kWrite), (std::vector<int64_t>{2, 0, 1}));
  EXPECT_EQ(flags_of(program, Action::kSignal), flags_of(program, Action::kWrite));
  EXPECT_EQ(flags_of(program, Action::kAdd), (std::vector<int64_t>{1, 1, 1}));
}

TEST(ProtocolProgram, AnAllReduceInOneShotSavesTheSecondRound) {
  const Program one = program_of(Pattern::kOneShot, 8, {1, 3, 0});
  EXPECT_EQ(flags_of(one, Action::kAdd), (std::vector<int64_t>{0, 0, 0}));
  EXPECT_TRUE(flags_of(one, Action::kRead).empty());
  const Program two = program_of(Pattern::kAllReduce, 9, {1, 3, 0});
  EXPECT_EQ(flags_of(two, Action::kAdd), (std::vector<int64_t>{1, 1, 1}));
  EXPECT_EQ(flags_of(two, Action::kRead), (std::vector<int64_t>{4, 5, 3}));
}

TEST(ProtocolProgram, EmptyPartsAreSignalledButNotTouched) {
  const Program program = program_of(Pattern::kAllReduce, 2, {2, 3, 0});
  EXPECT_EQ(flags_of(program, Action::kWrite), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(flags_of(program, Action::kSignal), (std::vector<int64_t>{0, 1, 2, 5}));
  EXPECT_TRUE(flags_of(program, Action::kAdd).empty());
  EXPECT_EQ(flags_of(program, Action::kRead), (std::vector<int64_t>{3, 4}));
}

// --- Every interleaving --------------------------------------------------------------------------

TEST(ProtocolSimulator, EveryInterleavingOfTwoRanksOfAnyThreeCalls) {
  const auto choice = kinds(2);
  int64_t num_states = 0;
  for (const auto& first : choice) {
    for (const auto& second : choice) {
      for (const auto& third : choice) {
        const auto result = explore(world_of(programs_of(2, {first, second, third})), kMaxStates);
        ASSERT_EQ(result.violation, "");
        ASSERT_TRUE(result.exhaustive);
        num_states += result.num_states;
      }
    }
  }
  EXPECT_GT(num_states, 343 * 100);
}

TEST(ProtocolSimulator, EveryInterleavingOfTwoRanksOfEightCalls) {
  EXPECT_EQ(explored(world_of(programs_of(2, random_calls(2, 8, 1)))), "");
}

TEST(ProtocolSimulator, EveryInterleavingOfThreeRanks) {
  const CollectiveCall gather{Pattern::kGather, 6}, sum{Pattern::kAllReduce, 6},
      scatter{Pattern::kReduceScatter, 6}, one_shot{Pattern::kOneShot, 1},
      refused{Pattern::kGather, 6, /*refused=*/true};
  EXPECT_EQ(explored(world_of(programs_of(3, {gather, gather, gather}))), "");
  EXPECT_EQ(explored(world_of(programs_of(3, {one_shot, scatter, one_shot}))), "");
  EXPECT_EQ(explored(world_of(programs_of(3, {scatter, refused, gather}))), "");
  EXPECT_EQ(explored(world_of(programs_of(3, {sum}))), "");
}

// --- More ranks, longer runs ---------------------------------------------------------------------

TEST(ProtocolSimulator, ManySchedulesOfMixedCalls) {
  for (const int64_t size : {2, 3, 4, 8}) {
    const size_t num_calls = size == 8 ? 6 : 12;
    for (uint64_t seed = 0; seed < 8; ++seed) {
      const World world = world_of(programs_of(size, random_calls(size, num_calls, seed)));
      for (uint64_t order = 0; order < 4; ++order) {
        ASSERT_EQ(run(world, random_scheduler(100 * seed + order)), "");
      }
      ASSERT_EQ(run(world, most_advanced()), "");
      ASSERT_EQ(run(world, least_advanced()), "");
      ASSERT_EQ(run(world, round_robin()), "");
      ASSERT_EQ(run(world, starving(seed % static_cast<uint64_t>(size), seed)), "");
    }
  }
}

TEST(ProtocolSimulator, SignalsOrderEveryWriteWithEveryOtherAccess) {
  for (const int64_t size : {2, 3, 4, 8}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const World world = world_of(programs_of(size, random_calls(size, 8, seed)));
      ASSERT_EQ(HappensBefore(world).find_race(), "") << size << " ranks, seed " << seed;
    }
  }
}

// The first epochs soon count past 2^32, or past 2^31 (the sign of the comparison), or belong to a
// new arena.
TEST(ProtocolSimulator, AnyFirstEpoch) {
  for (const Epoch first :
       {Epoch{0}, Epoch{0} - 1, Epoch{0} - 2, kBeforeWrap, Epoch{1} << 31, (Epoch{1} << 31) - 2}) {
    const auto calls = random_calls(2, 5, first);
    EXPECT_EQ(explored(world_of(programs_of(2, calls, first), first)), "") << first;
  }
}

// --- Broken protocols are caught -----------------------------------------------------------------

// Returns two gathers, the first followed by a refused call, and a sum, on two ranks; `change` is
// applied to each rank's program.
template <typename Change>
World broken(Change&& change) {
  auto ranks = programs_of(2, {{Pattern::kGather, 4},
                               {Pattern::kGather, 4, /*refused=*/true},
                               {Pattern::kGather, 4},
                               {Pattern::kReduceScatter, 4}});
  for (auto& program : ranks) change(program);
  return world_of(std::move(ranks));
}

void erase(Program& program, Action action) {
  program.erase(std::remove_if(program.begin(), program.end(),
                               [&](const Step& step) { return step.action == action; }),
                program.end());
}

size_t find(const Program& program, Action action, size_t from = 0) {
  while (program.at(from).action != action) ++from;
  return from;
}

::testing::AssertionResult says(const std::string& got, const std::string& part) {
  if (got.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "got '" << got << "', not '" << part << "'";
}

TEST(ProtocolSimulator, TheUnbrokenOneIsFine) {
  EXPECT_EQ(explored(broken([](Program&) {})), "");
}

TEST(ProtocolSimulator, FindsAHalfThatIsReusedWithoutWaiting) {
  const auto world = broken([](Program& p) { erase(p, Action::kAwaitCompleted); });
  EXPECT_NE(explored(world), "");
  EXPECT_TRUE(says(HappensBefore(world).find_race(), "not ordered"));
}

// A call that hears from every peer implies the wait of the next call, because peers signal in it
// only after they have completed the previous call. So the wait costs nothing where such calls
// follow each other. It is needed after calls that do not hear from all peers (and on streams that
// run ahead).
TEST(ProtocolSimulator, CallsThatHearFromEveryPeerImplyTheWait) {
  for (const int64_t size : {2, 3, 4}) {
    auto calls = random_calls(size, 8, 3);
    for (auto& call : calls) call.refused = false;
    auto ranks = programs_of(size, calls);
    for (auto& program : ranks) erase(program, Action::kAwaitCompleted);
    EXPECT_EQ(HappensBefore(world_of(std::move(ranks))).find_race(), "");
  }
}

TEST(ProtocolSimulator, FindsAWaitForOneEpochTooFew) {
  const auto world = broken([](Program& program) {
    for (Step& step : program) step.epoch -= step.action == Action::kAwaitCompleted ? 1 : 0;
  });
  EXPECT_NE(explored(world), "");
  EXPECT_TRUE(says(HappensBefore(world).find_race(), "not ordered"));
}

// With one half, a call must wait for the previous call; with two, for the one before that.
TEST(ProtocolSimulator, FindsThatOneHalfNeedsALongerWait) {
  auto world = broken([](Program&) {});
  world.num_halves = 1;
  EXPECT_NE(explored(world), "");
  EXPECT_NE(HappensBefore(world).find_race(), "");
  world = broken([](Program& program) {
    for (Step& step : program) step.epoch += step.action == Action::kAwaitCompleted ? 1 : 0;
  });
  world.num_halves = 1;
  EXPECT_EQ(explored(world), "");
}

TEST(ProtocolSimulator, FindsAMissingCompletion) {
  const auto world = broken([](Program& p) { erase(p, Action::kComplete); });
  EXPECT_TRUE(says(explored(world), "deadlock"));
  EXPECT_TRUE(says(run(world, round_robin()), "awaits completion"));
}

TEST(ProtocolSimulator, FindsACompletionBeforeTheLastRead) {
  const auto world = broken([](Program& program) {
    for (size_t i = 1; i < program.size(); ++i) {
      if (program[i].action == Action::kComplete && program[i - 1].action == Action::kRead) {
        std::swap(program[i], program[i - 1]);
      }
    }
  });
  EXPECT_NE(explored(world), "");
  EXPECT_TRUE(says(HappensBefore(world).find_race(), "not ordered"));
}

TEST(ProtocolSimulator, FindsASignalBeforeItsWrite) {
  const auto world = broken([](Program& program) {
    std::swap(program[find(program, Action::kWrite)], program[find(program, Action::kSignal)]);
  });
  EXPECT_TRUE(says(explored(world), "finds epoch"));
}

TEST(ProtocolSimulator, FindsAMissingWait) {
  const auto world = broken([](Program& p) { erase(p, Action::kWait); });
  EXPECT_TRUE(says(explored(world), "finds epoch"));
}

TEST(ProtocolSimulator, FindsAMissingSignal) {
  const auto world = broken([](Program& program) {
    program.erase(program.begin() + static_cast<int64_t>(find(program, Action::kSignal)));
  });
  EXPECT_TRUE(says(explored(world), "deadlock"));
}

// Each rank wants its peer's shard before it publishes its own.
TEST(ProtocolSimulator, FindsReadingBeforePublishing) {
  const auto world = broken([](Program& program) {
    const size_t read = find(program, Action::kRead);
    const auto write = program.begin() + static_cast<int64_t>(find(program, Action::kWrite));
    const auto wait = program.begin() + static_cast<int64_t>(read) - 1;
    std::rotate(write, wait, wait + 2);
  });
  EXPECT_TRUE(says(explored(world), "deadlock"));
}

TEST(ProtocolSimulator, FindsSumsThatAreOutOfOrderRepeatedOrUnfinished) {
  const auto swapped = broken([](Program& program) {
    const size_t add = find(program, Action::kAdd);
    std::swap(program[add], program[add + 1]);
  });
  EXPECT_TRUE(says(run(swapped, round_robin()), "out of order"));
  const auto repeated = broken([](Program& program) {
    const auto add = program.begin() + static_cast<int64_t>(find(program, Action::kAdd));
    const Step step = add[1];
    program.insert(add + 2, step);
  });
  EXPECT_TRUE(says(run(repeated, round_robin()), "out of order"));
  const auto unfinished = broken([](Program& program) {
    program.erase(program.begin() + static_cast<int64_t>(find(program, Action::kAdd)) + 1);
  });
  EXPECT_TRUE(says(run(unfinished, round_robin()), "a sum is unfinished"));
}

TEST(ProtocolSimulator, FindsAFlagThatDoesNotRise) {
  const auto world = broken([](Program& program) {
    const auto signal = program.begin() + static_cast<int64_t>(find(program, Action::kSignal));
    const Step step = *signal;
    program.insert(signal, step);
  });
  EXPECT_TRUE(says(run(world, round_robin()), "does not rise"));
}

}  // namespace
}  // namespace axonn::comm::testing
