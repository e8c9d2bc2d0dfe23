#include "model/times_ranking.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "model/times_calls.h"
#include "model/times_choice.h"

namespace axonn::times {
namespace {

double least(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}
double most(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

TEST(Ranking, HasEveryLetterWithTimesBeforeAndAfter) {
  std::set<char> ranked;
  for (const Step& step : steps()) ranked.insert(step.letter);
  for (const Letter& each : kLetters) EXPECT_TRUE(ranked.count(each.letter)) << each.letter;
}

// (j) is worth it only with (e), where the sums run next to the GEMM.
bool is_behind_the_gemm(const Step& step) {
  return step.letter == 'j' && step.on_top_of.find('e') == std::string::npos;
}

// As docs/kernel_model.md says of the worthwhile letters: only (p) makes any layer slower, since
// its costs are rougher than this model, and each makes some layer clearly faster.
TEST(Ranking, WhatIsWorthItMakesNothingSlowerThanSaid) {
  const std::map<char, double> some = {{'m', 1.08}, {'o', 1.05}, {'c', 1.15}, {'g', 1.04},
                                       {'a', 1.04}, {'e', 1.04}, {'l', 1.1},  {'h', 1.25},
                                       {'j', 1.5},  {'p', 1.05}};
  for (const Step& step : steps()) {
    if (some.count(step.letter) == 0 || is_behind_the_gemm(step)) continue;
    const Design before = with(step.on_top_of);
    const auto gain = gains(step.call, before, with(std::string(1, step.letter), before));
    EXPECT_GE(least(gain), step.letter == 'p' ? 0.96 : 0.999) << step.letter << name_of(step.call);
    EXPECT_GE(median(gain), 0.999) << step.letter << name_of(step.call);
    if (step.call != Call::kHostsGather || step.letter != 'm') {
      EXPECT_GE(most(gain), some.at(step.letter)) << step.letter << name_of(step.call);
    }
  }
}

TEST(Ranking, WhatIsNotWorthItGainsLittle) {
  EXPECT_LT(most(gains(Call::kGather, with("mo"), with("mod"))), 1.03);
  EXPECT_LT(median(gains(Call::kScatter, with("mae"), with("maen"))), 1);
  EXPECT_LT(median(gains(Call::kSum, with("ma"), with("maj"))), 1);
}

// (b) gains nothing while the host is ahead; it is for calls that find the host idle.
TEST(Ranking, TheOrderOfEnqueueingMattersToAnIdleHost) {
  const Work work{8192, 28672 / 8, 8192};
  EXPECT_NEAR(all_gather_gemm(work, with("mb")).us(), all_gather_gemm(work, with("m")).us(), 1e-6);
  EXPECT_GT(all_gather_gemm(work, with("m"), Host::kIdle).us(),
            all_gather_gemm(work, with("mb"), Host::kIdle).us() + 100);
}

// The aims for modelled speed-ups over cuBLAS and NCCL are 1.35 (gather), 1.3 (reduce-scatter) and
// 1.8 (all-reduce). The last is missed.
TEST(Ranking, ReachesTheAimsButForAllReduce) {
  EXPECT_GE(speedup(Call::kGather, with("mcg")).median, 1.34);
  EXPECT_GE(speedup(Call::kScatter, with("ma")).median, 1.3);
  EXPECT_GE(speedup(Call::kSum, with("maej")).median, 1.3);
  EXPECT_GE(speedup(Call::kSum, with("maej")).worst, 1);
  EXPECT_LT(speedup(Call::kSum, with("malegj")).median, 1.8);
}

TEST(Designs, LettersSwitchOneThingEach) {
  for (const Letter& each : kLetters) {
    const Design design = with(std::string(1, each.letter));
    for (const Letter& other : kLetters) {
      EXPECT_EQ(design.*other.on, other.letter == each.letter);
    }
  }
}

}  // namespace
}  // namespace axonn::times
