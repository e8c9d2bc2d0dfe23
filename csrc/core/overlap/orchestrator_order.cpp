#include "core/overlap/orchestrator_order.h"

#include <algorithm>
#include <utility>

namespace axonn::orchestrator {

void ExecutionOrder::use(const Use& use) {
  const bool inference = use.phase == Phase::kInference;
  if (!current_.empty()) {
    const bool switches = inference != (current_.back().phase == Phase::kInference);
    if (switches || (inference && use == current_.front())) end_step();
  }

  current_.push_back(use);
  if (unknown_) return;
  const size_t position = current_.size() - 1;
  if (followed_ != nullptr) {
    if (position < followed_->size() && (*followed_)[position] == use) return;
    if (position < followed_->size()) ++num_mispredictions_;
  }
  follow_one_that_began_like_this();
}

void ExecutionOrder::follow_one_that_began_like_this() {
  followed_ = nullptr;
  for (const auto& step : remembered_) {
    if (step.size() < current_.size()) continue;
    if (std::equal(current_.begin(), current_.end(), step.begin())) {
      followed_ = &step;
      return;
    }
  }
  unknown_ = true;
}

void ExecutionOrder::end_step() {
  if (current_.empty()) return;
  followed_ = nullptr;
  unknown_ = false;
  std::erase(remembered_, current_);
  remembered_.insert(remembered_.begin(), std::exchange(current_, {}));
  if (remembered_.size() > num_remembered_) remembered_.pop_back();
}

std::span<const Use> ExecutionOrder::predicted() const {
  if (followed_ == nullptr) return {};
  return std::span<const Use>(*followed_).subspan(current_.size());
}

}  // namespace axonn::orchestrator
