// Decides which weights are held gathered, and when. Weights are prefetched in execution order and
// kept between uses, within a memory budget.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/overlap/orchestrator_order.h"

namespace axonn::orchestrator {

enum class ActionKind {
  kFree,    // wait for the weight's gather if it is running, then free its memory
  kGather,  // allocate memory and start the gather
};

struct Action {
  ActionKind kind;
  int64_t weight;
  bool operator==(const Action&) const = default;
};

// A GatherPlan decides; the caller carries out the actions in the order in which they are returned.
// Decisions depend only on the sequence of calls, never on time, so ranks that run the same program
// start the same gathers in the same order.
//
// A weight is in use from use() to release(). The bytes held exceed the budget only if the weights
// in use at the same time do; then nothing else is held. To make room, the weights needed last are
// freed first.
class GatherPlan {
 public:
  // `num_prefetched` is the number of different weights gathered ahead of the one in use. Throws
  // std::invalid_argument for negative values.
  GatherPlan(int64_t num_prefetched, int64_t budget_bytes);

  // Returns the weight's number, counted from 0.
  int64_t add_weight(int64_t bytes);

  // The weight is needed now. After the actions, the caller waits for the weight's gather.
  std::vector<Action> use(int64_t weight, Phase phase);
  // The weight is no longer needed until its next use.
  std::vector<Action> release(int64_t weight);
  // Ends a pass of a step whose tasks have no fixed order, so any pass may follow. From now on, the
  // order of each pass is learned and predicted separately, and weights within the budget are kept
  // at the end of a pass.
  void end_pass();
  // Ends a step: the weights change, so all that are held are freed. Throws std::logic_error if one
  // is in use.
  std::vector<Action> end_step();

  int64_t bytes() const { return bytes_; }
  const ExecutionOrder& order() const { return order_; }

 private:
  struct Weight {
    int64_t bytes;
    int num_users = 0;
    bool gathered = false;
    bool last_used_in_backward = false;
    int64_t last_use = 0;
  };

  void gather(int64_t weight, std::vector<Action>& actions);
  void free(int64_t weight, std::vector<Action>& actions);
  void prefetch(std::vector<Action>& actions);
  // Frees weights needed later than `position` of the prediction, until `bytes` fit. If they cannot
  // fit, frees nothing and returns false; with `force`, frees as much as it can.
  bool make_room(int64_t bytes, int64_t position, bool force, std::vector<Action>& actions);
  std::vector<int64_t> next_uses() const;

  int64_t num_prefetched_;
  int64_t budget_bytes_;
  int64_t bytes_ = 0;
  int64_t clock_ = 0;
  std::vector<Weight> weights_;
  ExecutionOrder order_;
  bool in_passes_ = false;  // predictions cover the rest of a pass, not of a step
};

}  // namespace axonn::orchestrator
