// Times the candidates for one call on all ranks of a group together.
#pragma once

#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

#include "core/tuning/tuning_plan.h"
#include "ops/group/mailbox.h"

namespace axonn::ops {

struct Outcome {
  std::vector<size_t> right;      // candidates that every rank's check passed
  std::vector<double> median_us;  // of these: a call, on the slowest rank
};

// Collective. `check()` says of every candidate 0 if it is right on this rank, else 1; it may call
// nothing collective. `run(candidate)` makes the call. Rank 0 fixes how often each is run; the
// others learn it through `mailbox`, which a rank that is alone does without. Where either throws
// on one rank, peers that wait in the mailbox fail with its message.
Outcome measure(const Group& group, Mailbox* mailbox, c10::Device device,
                c10::function_ref<tuning::Numbers()> check, c10::function_ref<void(size_t)> run);

// Collective, once per mailbox: of the candidates at most one has a condition. Whether every rank
// says the same word, and none of them an empty one.
bool all_say_the_same(const Group& group, Mailbox& mailbox, const std::string& word);

// For a rank that cannot take part: peers that wait for its word or its timings get an error with
// `reason`.
void fail_measurement(const Group& group, Mailbox& mailbox, const std::string& reason);

}  // namespace axonn::ops
