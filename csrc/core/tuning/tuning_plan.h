// Decides how often each algorithm is run to find the fastest, and which one that is. This is plain
// arithmetic on numbers that all ranks have agreed on: every rank must make the same calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace axonn::tuning {

using Numbers = std::vector<int64_t>;

// Ranks send numbers to each other as decimal text, separated by spaces.
std::string to_text(const Numbers& numbers);
// Throws std::invalid_argument for any other text.
Numbers to_numbers(const std::string& text);

// Returns the elementwise maximum over ranks, because a collective is as slow as its slowest rank.
// Throws std::invalid_argument if ranks bring different counts.
Numbers slowest(const std::vector<Numbers>& by_rank);

struct Plan {
  int64_t repetitions;
  Numbers calls;  // per algorithm: calls in one timed batch

  int64_t num_algorithms() const { return static_cast<int64_t>(calls.size()); }
  // Returns the algorithm whose batch comes at `step` of a repetition. Each repetition begins with
  // the next algorithm, so that none always comes first.
  int64_t algorithm_at(int64_t repetition, int64_t step) const {
    return (repetition + step) % num_algorithms();
  }
  // Returns the index of a batch's time.
  int64_t index(int64_t repetition, int64_t algorithm) const {
    return repetition * num_algorithms() + algorithm;
  }
};

// `call_ns` is the time of one call of each algorithm, on the slowest rank. A batch has at least
// one call and takes about 2 ms. Each algorithm has 3 to 7 batches; the batches of all algorithms
// together take about 0.2 s.
Plan plan_of(const Numbers& call_ns);

// Makes `calls` calls of a candidate, one after the other, and returns their time in ns.
using TimeCalls = std::function<int64_t(size_t candidate, int64_t calls)>;

// Returns the time of one call of each candidate in ns, used only to size the batches. The first
// call is not counted, because it touches memory and opens connections; of two more calls, the
// faster counts.
Numbers estimate(size_t num_candidates, const TimeCalls& time_ns);

// Returns the times of a plan's batches, by Plan::index. The batches are interleaved, so that a
// temporary disturbance of the machine affects all algorithms.
Numbers time_batches(const Plan& plan, const TimeCalls& time_ns);

// Returns microseconds per call of each algorithm: the median over repetitions of `batch_ns`, which
// is indexed by Plan::index.
std::vector<double> medians_us(const Plan& plan, const Numbers& batch_ns);

// Returns the index of the fastest, or `preferred` unless another is faster by more than 5 %; less
// may be noise.
size_t choose(const std::vector<double>& medians_us, size_t preferred);

}  // namespace axonn::tuning
