// How the ranks of a group settle which candidate a call takes: rank 0 answers, the others hear it,
// and all measure where that is the answer. What is settled is kept by tuner.cpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/tuning/tuning_cache.h"
#include "ops/group/mailbox.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {

// The op that is called, which opens messages.
std::string op_of(const Tunable& call);

// What the call is known under in this process.
std::string key_of(const Tunable& call);

// What a rank asks with.
struct Asking {
  std::shared_ptr<const tuning::TuningCache> cache;
  bool is_warm_up;                      // may measure
  std::atomic<int64_t>& num_questions;  // of the group, so far
};

// What is chosen for a call; collective over its group. A rank that is alone has no mailbox. Counts
// the question as soon as there is an answer, be it that rank 0 failed, and whatever becomes of it.
// Throws as resolve() does.
Choice ask(const Tunable& call, Mailbox* mailbox, const Asking& asking);

}  // namespace axonn::ops
