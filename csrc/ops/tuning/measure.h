// Times the candidates for one call on all ranks of a group together.
#pragma once

#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

#include "core/tuning/tuning_plan.h"
#include "ops/group/mailbox.h"

namespace axonn::ops {

struct Outcome {
  std::vector<size_t> right;      // candidates that are correct on every rank
  std::vector<double> median_us;  // by candidate in `right`: time of a call, on the slowest rank
};

// Collective. `check()` returns for each candidate 0 if it is correct on this rank, else 1; it must
// not call a collective. `run(candidate)` makes the call, equally often on all ranks: they all
// follow the times of the slowest rank, which rank 0 posts in `mailbox`. A group of one rank passes
// null. If `check` or `run` throws on one rank, peers that wait in the mailbox fail with its
// message.
Outcome measure(const Group& group, Mailbox* mailbox, c10::Device device,
                c10::function_ref<tuning::Numbers()> check, c10::function_ref<void(size_t)> run);

// Returns whether every rank passes the same non-empty word. It is collective and is called at most
// once per mailbox, because at most one of the candidates has a condition.
bool all_say_the_same(const Group& group, Mailbox& mailbox, const std::string& word);

// Called by a rank that cannot take part: peers that wait for its word or its timings get an error
// with `reason`.
void fail_measurement(const Group& group, Mailbox& mailbox, const std::string& reason);

}  // namespace axonn::ops
