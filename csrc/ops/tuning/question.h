// The ranks of a group settle which candidate a call takes: rank 0 answers, the others read the
// answer, and all of them measure if it says so. tuner.cpp keeps the settled choices.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/tuning/tuning_cache.h"
#include "ops/group/mailbox.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {

// The name of the op that is called; messages begin with it.
std::string op_of(const Tunable& call);

// The key under which this process keeps the call.
std::string key_of(const Tunable& call);

// What a rank contributes when it asks.
struct Asking {
  std::shared_ptr<const tuning::TuningCache> cache;
  bool is_warm_up;                      // whether this rank may measure
  std::atomic<int64_t>& num_questions;  // the group's questions so far
};

// Chooses a candidate for a call; collective over its group. A group of one rank has no mailbox.
// The question counts as soon as there is an answer, even if the answer is that rank 0 failed, and
// whatever happens afterwards. Throws as resolve() does.
Choice ask(const Tunable& call, Mailbox* mailbox, const Asking& asking);

}  // namespace axonn::ops
