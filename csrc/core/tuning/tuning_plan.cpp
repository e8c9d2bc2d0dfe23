#include "core/tuning/tuning_plan.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace axonn::tuning {

std::string to_text(const Numbers& numbers) {
  std::string text;
  for (const int64_t number : numbers) {
    if (!text.empty()) text += ' ';
    text += std::to_string(number);
  }
  return text;
}

Numbers to_numbers(const std::string& text) {
  Numbers numbers;
  std::istringstream in(text);
  for (int64_t number = 0; in >> number;) numbers.push_back(number);
  if (!in.eof()) throw std::invalid_argument("not numbers: " + text);
  return numbers;
}

Numbers slowest(const std::vector<Numbers>& by_rank) {
  Numbers result = by_rank.at(0);
  for (const auto& numbers : by_rank) {
    if (numbers.size() != result.size()) {
      throw std::invalid_argument("ranks bring " + std::to_string(result.size()) + " and " +
                                  std::to_string(numbers.size()) + " timings");
    }
    std::transform(numbers.begin(), numbers.end(), result.begin(), result.begin(),
                   [](int64_t a, int64_t b) { return std::max(a, b); });
  }
  return result;
}

Plan plan_of(const Numbers& call_ns) {
  constexpr int64_t kBatchNs = 2'000'000;  // thousands of clock ticks, or of clock calls
  constexpr int64_t kBudgetNs = 200'000'000;
  constexpr int64_t kMaxCalls = 200;
  constexpr int64_t kMinRepetitions = 3;  // a median of fewer could be an outlier
  constexpr int64_t kMaxRepetitions = 7;
  Plan plan{kMinRepetitions, {}};
  int64_t repetition_ns = 0;
  for (const int64_t ns : call_ns) {
    const int64_t call = std::max<int64_t>(ns, 1);
    plan.calls.push_back(std::clamp<int64_t>((kBatchNs + call - 1) / call, 1, kMaxCalls));
    repetition_ns += plan.calls.back() * call;
  }
  if (repetition_ns > 0) {
    plan.repetitions = std::clamp(kBudgetNs / repetition_ns, kMinRepetitions, kMaxRepetitions);
  }
  return plan;
}

Numbers estimate(size_t num_candidates, const TimeCalls& time_ns) {
  Numbers call_ns(num_candidates, std::numeric_limits<int64_t>::max());
  for (size_t i = 0; i < num_candidates; ++i) time_ns(i, 1);
  for (int sample = 0; sample < 2; ++sample) {
    for (size_t i = 0; i < num_candidates; ++i) call_ns[i] = std::min(call_ns[i], time_ns(i, 1));
  }
  return call_ns;
}

Numbers time_batches(const Plan& plan, const TimeCalls& time_ns) {
  Numbers batch_ns(static_cast<size_t>(plan.repetitions * plan.num_algorithms()));
  for (int64_t repetition = 0; repetition < plan.repetitions; ++repetition) {
    for (int64_t step = 0; step < plan.num_algorithms(); ++step) {
      const int64_t i = plan.algorithm_at(repetition, step);
      batch_ns[plan.index(repetition, i)] = time_ns(static_cast<size_t>(i), plan.calls[i]);
    }
  }
  return batch_ns;
}

std::vector<double> medians_us(const Plan& plan, const Numbers& batch_ns) {
  std::vector<double> medians;
  for (int64_t algorithm = 0; algorithm < plan.num_algorithms(); ++algorithm) {
    Numbers times;
    for (int64_t repetition = 0; repetition < plan.repetitions; ++repetition) {
      times.push_back(batch_ns.at(plan.index(repetition, algorithm)));
    }
    std::sort(times.begin(), times.end());
    const size_t middle = times.size() / 2;
    const double median = times.size() % 2 == 1
                              ? static_cast<double>(times[middle])
                              : static_cast<double>(times[middle - 1] + times[middle]) / 2;
    medians.push_back(median / 1e3 / static_cast<double>(plan.calls[algorithm]));
  }
  return medians;
}

size_t choose(const std::vector<double>& medians_us, size_t preferred) {
  constexpr double kTie = 1.05;
  const auto best = std::min_element(medians_us.begin(), medians_us.end());
  if (medians_us.at(preferred) <= *best * kTie) return preferred;
  return static_cast<size_t>(best - medians_us.begin());
}

}  // namespace axonn::tuning
