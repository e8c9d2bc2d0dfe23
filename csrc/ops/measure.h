// Times the algorithms of one call on all ranks of a group together.
#pragma once

#include <c10/util/FunctionRef.h>

#include <span>
#include <string>
#include <vector>

#include "ops/mailbox.h"
#include "ops/tuner.h"

namespace axonn::ops {

// Collective: microseconds per call of each of `legal`, of the slowest rank. Rank 0 fixes how often
// each is run; the others learn it through `mailbox`. Where `run` throws on one rank, peers that
// wait in the mailbox fail with its message.
std::vector<double> measure(const Group& group, Mailbox& mailbox, c10::Device device,
                            std::span<const Algorithm> legal,
                            c10::function_ref<void(Algorithm)> run);

// For a rank that cannot take part: peers that wait for its timings get an error with `reason`.
void fail_measurement(const Group& group, Mailbox& mailbox, const std::string& reason);

}  // namespace axonn::ops
