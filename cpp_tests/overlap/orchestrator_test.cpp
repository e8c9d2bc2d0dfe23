#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/overlap/orchestrator_gathers.h"
#include "core/overlap/orchestrator_lanes.h"
#include "core/overlap/orchestrator_order.h"

namespace axonn::orchestrator {
namespace {

constexpr auto kF = Phase::kForward;
constexpr auto kB = Phase::kBackward;
constexpr auto kI = Phase::kInference;

std::vector<Use> step_of(int64_t layers) {
  std::vector<Use> uses;
  for (int64_t i = 0; i < layers; ++i) uses.push_back({i, kF});
  for (int64_t i = layers; i-- > 0;) uses.push_back({i, kB});
  return uses;
}

void run(ExecutionOrder& order, const std::vector<Use>& uses) {
  for (const auto& use : uses) order.use(use);
  order.end_step();
}

TEST(ExecutionOrder, PredictsTheRestOfAStepThatItHasSeen) {
  ExecutionOrder order;
  const auto step = step_of(3);
  order.use(step[0]);
  EXPECT_TRUE(order.predicted().empty());
  EXPECT_FALSE(order.knows_the_rest());
  order.end_step();
  run(order, step);
  for (size_t i = 0; i < step.size(); ++i) {
    order.use(step[i]);
    // The first step had only one use; the second is the latest one that began like this.
    ASSERT_EQ(std::vector<Use>(order.predicted().begin(), order.predicted().end()),
              std::vector<Use>(step.begin() + i + 1, step.end()));
  }
  EXPECT_TRUE(order.knows_the_rest());
  EXPECT_EQ(order.num_mispredictions(), 0);
}

TEST(ExecutionOrder, ADivergedStepIsSilentUntilItsEndAndKnownFromThenOn) {
  ExecutionOrder order;
  const std::vector<Use> first{{0, kF}, {1, kF}, {2, kF}}, second{{0, kF}, {2, kF}, {1, kF}};
  run(order, first);
  order.use(second[0]);
  EXPECT_EQ(order.predicted()[0], first[1]);
  order.use(second[1]);
  EXPECT_EQ(order.num_mispredictions(), 1);
  EXPECT_TRUE(order.predicted().empty());
  order.use(second[2]);
  order.end_step();
  run(order, second);
  EXPECT_EQ(order.num_mispredictions(), 1) << "the same change was mispredicted twice";
  // Back to the first order: one misprediction, corrected at once from memory.
  order.use(first[0]);
  order.use(first[1]);
  EXPECT_EQ(order.num_mispredictions(), 2);
  ASSERT_EQ(order.predicted().size(), 1u);
  EXPECT_EQ(order.predicted()[0], first[2]);
}

TEST(ExecutionOrder, APassOfInferenceEndsWhereTheNextBegins) {
  ExecutionOrder order;
  const std::vector<Use> pass{{0, kI}, {1, kI}, {2, kI}};
  for (int i = 0; i < 5; ++i) {
    for (size_t at = 0; at < pass.size(); ++at) {
      order.use(pass[at]);
      const std::vector<Use> rest(pass.begin() + (i == 0 ? 3 : at + 1), pass.end());
      EXPECT_EQ(std::vector<Use>(order.predicted().begin(), order.predicted().end()), rest);
    }
  }
  // A table that is used again at the end, as the weight of the head.
  ExecutionOrder tied;
  for (int i = 0; i < 5; ++i) {
    for (const int64_t weight : {0, 1, 2, 0}) tied.use({weight, kI});
  }
  EXPECT_EQ(tied.num_mispredictions(), 0);
  tied.use({0, kI});
  tied.use({1, kI});
  ASSERT_EQ(tied.predicted().size(), 1u);
  EXPECT_EQ(tied.predicted()[0].weight, 2);
}

TEST(ExecutionOrder, EvaluationBetweenStepsDisturbsNothing) {
  ExecutionOrder order;
  const auto step = step_of(2);
  run(order, step);
  order.use({0, kI});
  order.use({1, kI});
  for (const auto& use : step) order.use(use);
  order.end_step();
  order.use({0, kI});
  ASSERT_EQ(order.predicted().size(), 1u);
  order.use({1, kI});
  order.use(step[0]);
  EXPECT_EQ(order.predicted().size(), step.size() - 1);
  EXPECT_EQ(order.num_mispredictions(), 0);
}

TEST(ExecutionOrder, RemembersAsManyOrdersAsAskedFor) {
  ExecutionOrder order(3);
  const auto knows = [&](int64_t first) {
    order.use({first, kF});
    const bool known = order.knows_the_rest();
    order.use({9, kF});
    order.end_step();
    return known;
  };
  for (const int64_t first : {0, 1, 2}) EXPECT_FALSE(knows(first));
  for (const int64_t first : {0, 1, 2, 2, 2, 2, 0, 1}) EXPECT_TRUE(knows(first)) << first;
  EXPECT_FALSE(knows(3));
  EXPECT_FALSE(knows(2)) << "the one that was longest ago";
}

// Carries out the actions of a plan, and checks that they are allowed.
struct Executor {
  GatherPlan& plan;
  std::vector<int64_t> sizes;
  std::set<int64_t> gathered, in_use;
  std::vector<int64_t> gathers;
  int64_t peak = 0;

  void carry_out(const std::vector<Action>& actions) {
    for (const auto& action : actions) {
      if (action.kind == ActionKind::kFree) {
        ASSERT_EQ(gathered.erase(action.weight), 1u);
        ASSERT_FALSE(in_use.contains(action.weight));
      } else {
        ASSERT_TRUE(gathered.insert(action.weight).second);
        gathers.push_back(action.weight);
      }
      int64_t bytes = 0;
      for (const int64_t weight : gathered) bytes += sizes[weight];
      peak = std::max(peak, bytes);
    }
  }
  void use(int64_t weight, Phase phase) {
    in_use.insert(weight);
    carry_out(plan.use(weight, phase));
    ASSERT_TRUE(gathered.contains(weight));
  }
  void release(int64_t weight) {
    in_use.erase(weight);
    carry_out(plan.release(weight));
  }
  void step(const std::vector<Use>& uses) {
    for (const auto& use_now : uses) {
      use(use_now.weight, use_now.phase);
      release(use_now.weight);
    }
    carry_out(plan.end_step());
    ASSERT_TRUE(gathered.empty());
    ASSERT_EQ(plan.bytes(), 0);
  }
};

Executor executor(GatherPlan& plan, const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) plan.add_weight(size);
  return {plan, sizes, {}, {}, {}, 0};
}

TEST(GatherPlan, PrefetchesInTheOrderOfExecution) {
  GatherPlan plan(2, 1000);
  auto run = executor(plan, {10, 10, 10, 10});
  run.step(step_of(4));
  EXPECT_EQ(run.gathers, (std::vector<int64_t>{0, 1, 2, 3}));
  run.use(0, kF);
  EXPECT_EQ(run.gathered, (std::set<int64_t>{0, 1, 2}));
  run.release(0);
  run.use(1, kF);
  EXPECT_EQ(run.gathered, (std::set<int64_t>{0, 1, 2, 3}));
}

TEST(GatherPlan, KeepsForBackwardWhatTheBudgetAllows) {
  for (const int64_t budget : {20, 30, 40, 1000}) {
    GatherPlan plan(1, budget);
    auto run = executor(plan, std::vector<int64_t>(8, 10));
    run.step(step_of(8));
    run.gathers.clear();
    run.step(step_of(8));
    // Forward leaves as many weights as fit; the others are gathered again.
    const auto kept = std::min<int64_t>(8, budget / 10);
    EXPECT_EQ(run.gathers.size(), 16u - kept) << "budget " << budget;
    EXPECT_LE(run.peak, budget);
  }
}

// Source: Belady, IBM Syst. J. 5 (1966) 78.
size_t fewest_gathers(const std::vector<Use>& step, size_t room) {
  std::set<int64_t> held;
  size_t count = 0;
  for (auto now = step.begin(); now != step.end(); ++now) {
    const auto next = [&](int64_t weight) {
      return std::find_if(now, step.end(), [&](const Use& use) { return use.weight == weight; });
    };
    if (held.contains(now->weight)) continue;
    ++count;
    if (held.size() == room) {
      held.erase(std::max_element(held.begin(), held.end(),
                                  [&](int64_t a, int64_t b) { return next(a) < next(b); }));
    }
    held.insert(now->weight);
  }
  return count;
}

TEST(GatherPlan, AKnownStepGathersAsFewAsPossible) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    std::vector<Use> step;
    for (int i = 0; i < 40; ++i) step.push_back({static_cast<int64_t>(random() % 6), kF});
    GatherPlan plan(0, 30);
    auto run = executor(plan, std::vector<int64_t>(6, 10));
    run.step(step);
    run.gathers.clear();
    run.step(step);
    EXPECT_EQ(run.gathers.size(), fewest_gathers(step, 3));
  }
}

TEST(GatherPlan, InAnUnknownStepWhatForwardLeftStaysForBackward) {
  GatherPlan plan(1, 20);
  auto run = executor(plan, {10, 10, 10});
  run.step({{0, kF}, {1, kF}, {1, kB}, {2, kB}, {0, kB}});
  EXPECT_EQ(run.gathers, (std::vector<int64_t>{0, 1, 2}));
}

TEST(GatherPlan, AWeightStaysUntilItsLastUserReleasesIt) {
  GatherPlan plan(1, 1000);
  auto run = executor(plan, {10});
  for (int number = 0; number < 2; ++number) {  // the second step knows that no use follows
    run.use(0, kF);
    run.carry_out(plan.use(0, kF));
    run.carry_out(plan.release(0));
    EXPECT_TRUE(run.gathered.contains(0));
    run.release(0);
    run.carry_out(plan.end_step());
  }
}

// Forward and backward passes of micro-batches, in another order in each step.
TEST(GatherPlan, PassesInAnyOrderArePredicted) {
  for (const int64_t budget : {30, 1000}) {
    GatherPlan plan(1, budget);
    auto run = executor(plan, std::vector<int64_t>(6, 10));
    const auto step = step_of(6);
    const std::vector<Use> forward(step.begin(), step.begin() + 6),
        backward(step.begin() + 6, step.end());
    std::mt19937 random(3);
    int num_passes = 0, num_ahead = 0;
    for (int number = 0; number < 20; ++number) {
      for (int i = 0; i < 8; ++i, ++num_passes) {
        const auto& pass = random() % 2 ? forward : backward;
        for (size_t place = 0; place < pass.size(); ++place) {
          num_ahead += place > 0 && run.gathered.contains(pass[place].weight);
          run.use(pass[place].weight, pass[place].phase);
          run.release(pass[place].weight);
        }
        plan.end_pass();
      }
      ASSERT_LE(run.peak, budget);
      run.carry_out(plan.end_step());
      ASSERT_TRUE(run.gathered.empty());
    }
    EXPECT_EQ(plan.order().num_mispredictions(), 0);
    // Once both passes are known, all but a pass's first weight are there before their use.
    EXPECT_GE(num_ahead, 5 * (num_passes - 2)) << "budget " << budget;
    // With room for all weights, each is gathered once per step.
    if (budget == 1000) {
      EXPECT_EQ(run.gathers.size(), 20u * 6u);
    }
  }
}

TEST(GatherPlan, RandomProgramsStayWithinTheBudgetAndAgree) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> sizes(6);
    for (auto& size : sizes) size = 1 + static_cast<int64_t>(random() % 20);
    const int64_t budget = 20 + static_cast<int64_t>(random() % 60);
    const int64_t prefetch = static_cast<int64_t>(random() % 4);
    std::vector<std::vector<Use>> steps;
    for (int i = 0; i < 6; ++i) {
      std::vector<Use> step;
      for (int j = 0; j < 12; ++j) {
        step.push_back({static_cast<int64_t>(random() % sizes.size()), random() % 2 ? kF : kB});
      }
      // Half of the steps repeat an earlier one.
      steps.push_back(i > 0 && random() % 2 ? steps[random() % steps.size()] : step);
    }
    std::vector<int64_t> gathers[2];
    for (auto& result : gathers) {
      GatherPlan plan(prefetch, budget);
      auto run = executor(plan, sizes);
      for (const auto& step : steps) run.step(step);
      ASSERT_LE(run.peak, budget);
      result = run.gathers;
    }
    ASSERT_EQ(gathers[0], gathers[1]);
  }
}

TEST(GatherPlan, WhatIsInUseMayExceedTheBudgetByItself) {
  GatherPlan plan(3, 15);
  auto run = executor(plan, {10, 10, 10});
  run.use(0, kF);
  run.use(1, kF);
  EXPECT_EQ(plan.bytes(), 20);
  run.release(1);
  EXPECT_EQ(plan.bytes(), 10);
  EXPECT_THROW(plan.end_step(), std::logic_error);
  run.release(0);
  EXPECT_THROW(plan.release(0), std::logic_error);
  EXPECT_THROW(GatherPlan(-1, 0), std::invalid_argument);
}

TEST(Lanes, TellExposedFromHidden) {
  using std::chrono::milliseconds;
  Lanes lanes;
  const auto lane = lanes.add_lane("z");
  lanes.record(true);
  const auto first = lanes.submit(lane, "first", 100), second = lanes.submit(lane, "second", 50);
  std::thread network([&] {
    std::this_thread::sleep_for(milliseconds(20));
    lanes.finished(lane, first);
    std::this_thread::sleep_for(milliseconds(10));
    lanes.finished(lane, second);
  });
  EXPECT_THROW(lanes.retire(lane, first, Lanes::now()), std::logic_error);
  network.join();
  // Nobody waited for the first task; the wait for the second one takes 5 ms.
  lanes.retire(lane, first, Lanes::now());
  const double from = Lanes::now();
  std::this_thread::sleep_for(milliseconds(5));
  lanes.retire(lane, second, from);
  const auto totals = lanes.totals(lane);
  EXPECT_EQ(totals.num_tasks, 2);
  EXPECT_EQ(totals.bytes, 150);
  EXPECT_GE(totals.busy, 0.030);
  EXPECT_GE(totals.exposed, 0.005);
  EXPECT_DOUBLE_EQ(totals.hidden(), totals.busy - totals.exposed);
  const auto records = lanes.take_records(lane);
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[1].started, records[0].finished) << "tasks of a lane overlap";
  EXPECT_TRUE(lanes.take_records(lane).empty());
  EXPECT_THROW(lanes.finished(lane, first), std::logic_error);
}

TEST(Lanes, CountWhatADeviceHasMeasured) {
  Lanes lanes;
  const auto lane = lanes.add_lane("z");
  lanes.record(true);
  const auto first = lanes.submit(lane, "first", 10), second = lanes.submit(lane, "second", 20);
  const Times times{.submitted = 1.0, .finished = 3.0, .waited_from = 2.5, .waited_to = 3.0};
  lanes.retire_measured(lane, first, times);
  // Given to the device while the first task ran; nobody had to wait.
  lanes.retire_measured(lane, second, {2.0, 3.5, 4.0, 4.0});
  const auto totals = lanes.totals(lane);
  EXPECT_EQ(totals.num_tasks, 2);
  EXPECT_EQ(totals.bytes, 30);
  EXPECT_DOUBLE_EQ(totals.busy, 2.0 + 0.5);
  EXPECT_DOUBLE_EQ(totals.exposed, 0.5);
  const auto records = lanes.take_records(lane);
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[1].submitted, 2.0);
  EXPECT_EQ(records[1].started, 3.0) << "tasks of a lane overlap";
  EXPECT_THROW(lanes.retire_measured(lane, first, times), std::logic_error);
}

}  // namespace
}  // namespace axonn::orchestrator
