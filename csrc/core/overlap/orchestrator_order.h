// Learns from previous steps the order in which a step uses its weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace axonn::orchestrator {

enum class Phase { kForward, kBackward, kInference };

struct Use {
  int64_t weight;
  Phase phase;
  bool operator==(const Use&) const = default;
};

// Records the uses of the current step and, as long as they match a remembered step, predicts the
// next ones. At the first use that differs, it switches to another remembered step that began in
// the same way. If there is none, it predicts nothing until the step ends, so one change of a
// model's control flow is never mispredicted twice.
//
// Predictions depend only on the sequence of calls, so ranks that run the same program make the
// same predictions.
class ExecutionOrder {
 public:
  explicit ExecutionOrder(size_t num_remembered = 4) : num_remembered_(num_remembered) {}

  // A switch between inference and training ends a step. In inference, so does a use of the weight
  // that the step began with, because nothing else marks the end of a pass.
  void use(const Use& use);
  void end_step();

  // Returns the expected rest of the step, the next use first; empty if nothing is known.
  std::span<const Use> predicted() const;
  // Returns whether predicted() is the whole rest of the step, even if it is empty.
  bool knows_the_rest() const { return followed_ != nullptr; }
  int64_t num_mispredictions() const { return num_mispredictions_; }

 private:
  void follow_one_that_began_like_this();

  size_t num_remembered_;
  std::vector<std::vector<Use>> remembered_;  // the latest first
  std::vector<Use> current_;
  const std::vector<Use>* followed_ = nullptr;  // one of remembered_, which begins with current_
  bool unknown_ = false;                        // no remembered step begins with current_
  int64_t num_mispredictions_ = 0;
};

}  // namespace axonn::orchestrator
