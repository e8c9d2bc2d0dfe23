#include "core/tuning/tuning_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

namespace axonn::tuning {
namespace {

TEST(TuningPlan, NumbersTravelAsText) {
  EXPECT_EQ(to_text({1, -2, 3'000'000'000'000}), "1 -2 3000000000000");
  EXPECT_EQ(to_numbers("1 -2 3000000000000"), (Numbers{1, -2, 3'000'000'000'000}));
  EXPECT_EQ(to_numbers(to_text({})), Numbers{});
  EXPECT_THROW(to_numbers("1 two"), std::invalid_argument);
}

TEST(TuningPlan, SlowestRankCounts) {
  EXPECT_EQ(slowest({{1, 9}, {5, 2}, {3, 3}}), (Numbers{5, 9}));
  EXPECT_THROW(slowest({{1, 9}, {5}}), std::invalid_argument);
}

TEST(TuningPlan, TinyCallsComeInBatchesLargeOnesAlone) {
  const auto plan = plan_of({20'000, 700'000, 5'000'000});
  EXPECT_EQ(plan.calls, (Numbers{100, 3, 1}));
  EXPECT_EQ(plan.repetitions, 7);
  EXPECT_EQ(plan_of({1, 0}).calls, (Numbers{200, 200}));
}

// Whatever a call takes: 3 to 7 batches each, in 0.2 s altogether unless 3 take longer.
TEST(TuningPlan, TimeIsBounded) {
  for (int64_t ns = 1; ns < 10'000'000'000; ns = ns * 3 / 2 + 1) {
    const Numbers call_ns{ns, 2 * ns, ns / 3};
    const auto plan = plan_of(call_ns);
    EXPECT_GE(plan.repetitions, 3);
    EXPECT_LE(plan.repetitions, 7);
    const int64_t once =
        std::inner_product(call_ns.begin(), call_ns.end(), plan.calls.begin(), int64_t{0});
    EXPECT_TRUE(plan.repetitions == 3 || plan.repetitions * once <= 200'000'000) << ns;
  }
}

TEST(TuningPlan, EveryBatchHasItsPlaceAndNoneIsAlwaysFirst) {
  const auto plan = plan_of({1'000'000, 1'000'000, 1'000'000});
  std::set<int64_t> indices, first;
  for (int64_t repetition = 0; repetition < plan.repetitions; ++repetition) {
    first.insert(plan.algorithm_at(repetition, 0));
    for (int64_t step = 0; step < plan.num_algorithms(); ++step) {
      indices.insert(plan.index(repetition, plan.algorithm_at(repetition, step)));
    }
  }
  EXPECT_EQ(first.size(), 3u);
  EXPECT_EQ(indices.size(), static_cast<size_t>(plan.repetitions * plan.num_algorithms()));
  EXPECT_EQ(*indices.rbegin() + 1, static_cast<int64_t>(indices.size()));
}

// A clock that the test controls, for the candidates' times: measured ones lead to a choice.
struct Clock {
  Numbers call_ns;
  int64_t first_call_ns = 0;    // added to each candidate's first call
  int64_t disturbed_until = 0;  // the first batches that take twice as long
  std::vector<int64_t> calls = std::vector<int64_t>(call_ns.size(), 0);
  int64_t batches = 0;

  int64_t operator()(size_t candidate, int64_t num_calls) {
    const int64_t extra = calls[candidate] == 0 ? first_call_ns : 0;
    calls[candidate] += num_calls;
    const int64_t slowdown = batches++ < disturbed_until ? 2 : 1;
    return extra + slowdown * num_calls * call_ns[candidate];
  }
};

size_t chosen_by(Clock& clock, size_t preferred) {
  const auto plan = plan_of(estimate(clock.call_ns.size(), std::ref(clock)));
  return choose(medians_us(plan, time_batches(plan, std::ref(clock))), preferred);
}

TEST(TuningPlan, TheFastestOfWhatIsTimedIsChosen) {
  for (size_t fastest = 0; fastest < 4; ++fastest) {
    Clock clock{.call_ns = {100'000, 110'000, 120'000, 130'000}};
    clock.call_ns[fastest] = 50'000;
    EXPECT_EQ(chosen_by(clock, /*preferred=*/0), fastest);
  }
}

TEST(TuningPlan, TheFirstCallsDoNotCount) {
  Clock clock{.call_ns = {100'000, 50'000}, .first_call_ns = 1'000'000'000};
  EXPECT_EQ(estimate(2, std::ref(clock)), (Numbers{100'000, 50'000}));
  EXPECT_EQ(clock.calls, (std::vector<int64_t>{3, 3}));
}

TEST(TuningPlan, AnotherMustWinByAMargin) {
  Clock near{.call_ns = {104'000, 100'000}};
  EXPECT_EQ(chosen_by(near, /*preferred=*/0), 0u);
  Clock far{.call_ns = {106'000, 100'000}};
  EXPECT_EQ(chosen_by(far, /*preferred=*/0), 1u);
}

// After the 6 timings of the estimate, each repetition has one batch of each: both are disturbed.
TEST(TuningPlan, ADisturbanceOfWholeRepetitionsChangesNothing) {
  for (int64_t until = 0; until <= 20; until += 2) {
    Clock clock{.call_ns = {3'000'000, 2'000'000}, .disturbed_until = until};
    EXPECT_EQ(chosen_by(clock, /*preferred=*/0), 1u) << until;
  }
}

TEST(TuningPlan, MediansArePerCallAndForgiveAnOutlier) {
  const Plan plan{.repetitions = 3, .calls = {10, 1}};
  EXPECT_EQ(medians_us(plan, {10'000, 7'000, 900'000, 5'000, 20'000, 6'000}),
            (std::vector<double>{2.0, 6.0}));
  const Plan even{.repetitions = 4, .calls = {1}};
  EXPECT_EQ(medians_us(even, {4'000, 1'000, 2'000, 90'000}), (std::vector<double>{3.0}));
}

TEST(TuningPlan, TiesGoToThePreferred) {
  EXPECT_EQ(choose({100.0, 96.0, 99.0}, 0), 0u);
  EXPECT_EQ(choose({100.0, 94.0, 90.0}, 0), 2u);
  EXPECT_EQ(choose({100.0, 94.0, 90.0}, 1), 1u);
  EXPECT_EQ(choose({100.0}, 0), 0u);
}

}  // namespace
}  // namespace axonn::tuning
