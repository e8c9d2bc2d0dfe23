// How often each algorithm is run to find the fastest, and which one that is. Plain arithmetic on
// numbers that all ranks have agreed on: every rank must make the same calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace axonn::tuning {

using Numbers = std::vector<int64_t>;

// How numbers travel between ranks: decimal, separated by spaces.
std::string to_text(const Numbers& numbers);
// Throws std::invalid_argument for anything else.
Numbers to_numbers(const std::string& text);

// Elementwise, over ranks: a collective is as slow as its slowest rank.
// Throws std::invalid_argument if ranks bring different counts.
Numbers slowest(const std::vector<Numbers>& by_rank);

struct Plan {
  int64_t repetitions;
  Numbers calls;  // per algorithm: calls in one timed batch

  int64_t num_algorithms() const { return static_cast<int64_t>(calls.size()); }
  // The algorithm whose batch comes at `step` of a repetition: each is first at times, so that none
  // always follows the same one.
  int64_t algorithm_at(int64_t repetition, int64_t step) const {
    return (repetition + step) % num_algorithms();
  }
  // Where the time of a batch is kept.
  int64_t index(int64_t repetition, int64_t algorithm) const {
    return repetition * num_algorithms() + algorithm;
  }
};

// `call_ns`: one call of each algorithm, on the slowest rank. Batches take about 2 ms, of one call
// at least; there are 3 to 7 of each algorithm, in about 0.2 s together.
Plan plan_of(const Numbers& call_ns);

// What times: `calls` calls of a candidate, one after the other, in ns.
using TimeCalls = std::function<int64_t(size_t candidate, int64_t calls)>;

// One call of each candidate, in ns: only to size the batches. The first call does not count (it
// touches memory and opens connections); of two more the faster does.
Numbers estimate(size_t num_candidates, const TimeCalls& time_ns);

// The batches of a plan, by Plan::index. Interleaved, so that what disturbs the machine for a while
// disturbs all of them.
Numbers time_batches(const Plan& plan, const TimeCalls& time_ns);

// Microseconds per call and algorithm: the median over repetitions of `batch_ns`, by Plan::index.
std::vector<double> medians_us(const Plan& plan, const Numbers& batch_ns);

// The fastest; `preferred` unless another is faster by more than 5 %, which is noise.
size_t choose(const std::vector<double>& medians_us, size_t preferred);

}  // namespace axonn::tuning
