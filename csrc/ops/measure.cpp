#include "ops/measure.h"

#include <algorithm>
#include <limits>

#include "core/tuning_plan.h"
#include "ops/stopwatch.h"

namespace axonn::ops {
namespace {

using tuning::Numbers;
using tuning::Plan;
using Run = c10::function_ref<void(Algorithm)>;

constexpr auto kReady = "ready";
constexpr auto kEstimate = "estimate";
constexpr auto kTimes = "times";

std::string slowest_name(const std::string& name) { return name + "/slowest"; }

std::string of_rank(const std::string& name, int64_t rank) {
  return name + "/" + std::to_string(rank);
}

int64_t time_ns(c10::Device device, int64_t calls, Algorithm algorithm, Run run) {
  return elapsed_ns(device, [&] {
    for (int64_t call = 0; call < calls; ++call) run(algorithm);
  });
}

// One call of each, in ns: only to size the batches. The first call is not timed (it touches
// memory and opens connections); of two more the faster counts.
Numbers estimate(c10::Device device, std::span<const Algorithm> legal, Run run) {
  Numbers call_ns(legal.size(), std::numeric_limits<int64_t>::max());
  for (const auto algorithm : legal) run(algorithm);
  for (int sample = 0; sample < 2; ++sample) {
    for (size_t i = 0; i < legal.size(); ++i) {
      call_ns[i] = std::min(call_ns[i], time_ns(device, 1, legal[i], run));
    }
  }
  return call_ns;
}

// Interleaved, so that what disturbs the machine for a while disturbs all of them.
Numbers time_batches(const Plan& plan, c10::Device device, std::span<const Algorithm> legal,
                     Run run) {
  Numbers batch_ns(static_cast<size_t>(plan.repetitions * plan.num_algorithms()));
  for (int64_t repetition = 0; repetition < plan.repetitions; ++repetition) {
    for (int64_t step = 0; step < plan.num_algorithms(); ++step) {
      const int64_t i = plan.algorithm_at(repetition, step);
      batch_ns[plan.index(repetition, i)] = time_ns(device, plan.calls[i], legal[i], run);
    }
  }
  return batch_ns;
}

// The largest over ranks of what each posted, on every rank: rank 0 collects and hands it out.
Numbers slowest_of_ranks(const Group& group, Mailbox& mailbox, const std::string& name,
                         const Numbers& own) {
  if (group.rank != 0) {
    mailbox.post(of_rank(name, group.rank), tuning::to_text(own));
    return tuning::to_numbers(mailbox.read(slowest_name(name), 0));
  }
  std::vector<Numbers> by_rank{own};
  for (int64_t peer = 1; peer < group.size; ++peer) {
    by_rank.push_back(tuning::to_numbers(mailbox.read(of_rank(name, peer), peer)));
  }
  const auto result = tuning::slowest(by_rank);
  mailbox.post(slowest_name(name), tuning::to_text(result));
  return result;
}

}  // namespace

void fail_measurement(const Group& group, Mailbox& mailbox, const std::string& reason) {
  const auto own = [&](const std::string& name) {
    return group.rank == 0 ? slowest_name(name) : of_rank(name, group.rank);
  };
  mailbox.fail({own(kReady), own(kEstimate), own(kTimes)}, reason);
}

std::vector<double> measure(const Group& group, Mailbox& mailbox, c10::Device device,
                            std::span<const Algorithm> legal, Run run) {
  try {
    // Lest a rank starts a collective that a peer has already refused.
    slowest_of_ranks(group, mailbox, kReady, {});
    const auto call_ns = slowest_of_ranks(group, mailbox, kEstimate, estimate(device, legal, run));
    const auto plan = tuning::plan_of(call_ns);
    const auto batch_ns =
        slowest_of_ranks(group, mailbox, kTimes, time_batches(plan, device, legal, run));
    return tuning::medians_us(plan, batch_ns);
  } catch (const std::exception& error) {
    fail_measurement(group, mailbox, error.what());
    throw;
  }
}

}  // namespace axonn::ops
