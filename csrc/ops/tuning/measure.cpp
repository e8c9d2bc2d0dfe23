#include "ops/tuning/measure.h"

#include "ops/tuning/stopwatch.h"

namespace axonn::ops {
namespace {

using tuning::Numbers;

constexpr auto kWord = "word";
constexpr auto kReady = "ready";
constexpr auto kEstimate = "estimate";
constexpr auto kTimes = "times";

std::string slowest_name(const std::string& name) { return name + "/slowest"; }

std::string of_rank(const std::string& name, int64_t rank) {
  return name + "/" + std::to_string(rank);
}

// Returns, on every rank, the elementwise maximum over ranks of `own`. Rank 0 collects the numbers
// and posts the result.
Numbers slowest_of_ranks(const Group& group, Mailbox* mailbox, const std::string& name,
                         const Numbers& own) {
  if (mailbox == nullptr) return own;
  if (group.rank != 0) {
    mailbox->post(of_rank(name, group.rank), tuning::to_text(own));
    return tuning::to_numbers(mailbox->read(slowest_name(name), 0));
  }
  std::vector<Numbers> by_rank{own};
  for (int64_t peer = 1; peer < group.size; ++peer) {
    by_rank.push_back(tuning::to_numbers(mailbox->read(of_rank(name, peer), peer)));
  }
  const auto result = tuning::slowest(by_rank);
  mailbox->post(slowest_name(name), tuning::to_text(result));
  return result;
}

}  // namespace

void fail_measurement(const Group& group, Mailbox& mailbox, const std::string& reason) {
  const auto own = [&](const std::string& name) {
    return group.rank == 0 ? slowest_name(name) : of_rank(name, group.rank);
  };
  mailbox.fail({of_rank(kWord, group.rank), own(kReady), own(kEstimate), own(kTimes)}, reason);
}

bool all_say_the_same(const Group& group, Mailbox& mailbox, const std::string& word) {
  mailbox.post(of_rank(kWord, group.rank), word);
  bool same = !word.empty();
  for (int64_t peer = 0; peer < group.size; ++peer) {
    same = mailbox.read(of_rank(kWord, peer), peer) == word && same;
  }
  return same;
}

Outcome measure(const Group& group, Mailbox* mailbox, c10::Device device,
                c10::function_ref<Numbers()> check, c10::function_ref<void(size_t)> run) {
  Outcome outcome;
  const auto time_ns = [&](size_t candidate, int64_t calls) {
    return elapsed_ns(device, [&] {
      for (int64_t call = 0; call < calls; ++call) run(outcome.right[candidate]);
    });
  };
  try {
    // All ranks wait here, so that none starts a collective that a peer has already refused.
    const auto wrong = slowest_of_ranks(group, mailbox, kReady, check());
    for (size_t i = 0; i < wrong.size(); ++i) {
      if (wrong[i] == 0) outcome.right.push_back(i);
    }
    const auto call_ns = slowest_of_ranks(group, mailbox, kEstimate,
                                          tuning::estimate(outcome.right.size(), time_ns));
    const auto plan = tuning::plan_of(call_ns);
    const auto batch_ns =
        slowest_of_ranks(group, mailbox, kTimes, tuning::time_batches(plan, time_ns));
    outcome.median_us = tuning::medians_us(plan, batch_ns);
    return outcome;
  } catch (const std::exception& error) {
    if (mailbox != nullptr) fail_measurement(group, *mailbox, error.what());
    throw;
  }
}

}  // namespace axonn::ops
