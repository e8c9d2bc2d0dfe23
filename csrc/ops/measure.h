// Times the candidates for one call on all ranks of a group together.
#pragma once

#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

#include "ops/mailbox.h"

namespace axonn::ops {

// Collective: microseconds per call of each of `num_candidates`, `run(candidate)`, of the slowest
// rank. Rank 0 fixes how often each is run; the others learn it through `mailbox`, which a rank
// that is alone does without. Where `run` throws on one rank, peers that wait in the mailbox fail
// with its message.
std::vector<double> measure(const Group& group, Mailbox* mailbox, c10::Device device,
                            size_t num_candidates, c10::function_ref<void(size_t)> run);

// For a rank that cannot take part: peers that wait for its timings get an error with `reason`.
void fail_measurement(const Group& group, Mailbox& mailbox, const std::string& reason);

}  // namespace axonn::ops
