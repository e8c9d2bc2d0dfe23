#include "core/overlap/orchestrator_gathers.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>

namespace axonn::orchestrator {

namespace {
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
}

GatherPlan::GatherPlan(int64_t num_prefetched, int64_t budget_bytes)
    : num_prefetched_(num_prefetched), budget_bytes_(budget_bytes) {
  if (num_prefetched < 0 || budget_bytes < 0) {
    throw std::invalid_argument("GatherPlan: expected num_prefetched and budget_bytes >= 0, got " +
                                std::to_string(num_prefetched) + " and " +
                                std::to_string(budget_bytes));
  }
}

int64_t GatherPlan::add_weight(int64_t bytes) {
  weights_.push_back({.bytes = bytes});
  return static_cast<int64_t>(weights_.size()) - 1;
}

std::vector<Action> GatherPlan::use(int64_t weight, Phase phase) {
  std::vector<Action> actions;
  order_.use({weight, phase});
  auto& w = weights_.at(weight);
  w.last_use = ++clock_;
  w.last_used_in_backward = phase == Phase::kBackward;
  ++w.num_users;
  if (!w.gathered) {
    make_room(w.bytes, /*position=*/-1, /*force=*/true, actions);
    gather(weight, actions);
  }
  prefetch(actions);
  return actions;
}

std::vector<Action> GatherPlan::release(int64_t weight) {
  std::vector<Action> actions;
  auto& w = weights_.at(weight);
  if (w.num_users == 0) {
    throw std::logic_error("GatherPlan: weight " + std::to_string(weight) + " is not in use");
  }
  if (--w.num_users > 0) return actions;
  const auto rest = order_.predicted();
  const bool needed =
      in_passes_ || !order_.knows_the_rest() ||
      std::any_of(rest.begin(), rest.end(), [&](const Use& use) { return use.weight == weight; });
  if (!needed || bytes_ > budget_bytes_) free(weight, actions);
  return actions;
}

void GatherPlan::end_pass() {
  order_.end_step();
  in_passes_ = true;
}

std::vector<Action> GatherPlan::end_step() {
  std::vector<Action> actions;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i].num_users > 0) {
      throw std::logic_error("GatherPlan: a step ends while weight " + std::to_string(i) +
                             " is in use");
    }
    if (weights_[i].gathered) free(static_cast<int64_t>(i), actions);
  }
  order_.end_step();
  return actions;
}

void GatherPlan::gather(int64_t weight, std::vector<Action>& actions) {
  auto& w = weights_[weight];
  w.gathered = true;
  bytes_ += w.bytes;
  actions.push_back({ActionKind::kGather, weight});
}

void GatherPlan::free(int64_t weight, std::vector<Action>& actions) {
  auto& w = weights_[weight];
  w.gathered = false;
  bytes_ -= w.bytes;
  actions.push_back({ActionKind::kFree, weight});
}

void GatherPlan::prefetch(std::vector<Action>& actions) {
  const auto rest = order_.predicted();
  std::vector<int64_t> ahead;
  for (size_t i = 0; i < rest.size(); ++i) {
    const int64_t weight = rest[i].weight;
    if (std::find(ahead.begin(), ahead.end(), weight) != ahead.end()) continue;
    if (static_cast<int64_t>(ahead.size()) == num_prefetched_) return;
    ahead.push_back(weight);
    if (weights_[weight].gathered) continue;
    const auto position = static_cast<int64_t>(i);
    // Weights after one that does not fit have to wait, too, because gathers keep their
    // order.
    if (!make_room(weights_[weight].bytes, position, /*force=*/false, actions)) return;
    gather(weight, actions);
  }
}

bool GatherPlan::make_room(int64_t bytes, int64_t position, bool force,
                           std::vector<Action>& actions) {
  if (bytes_ + bytes <= budget_bytes_) return true;
  const auto next = next_uses();
  std::vector<int64_t> idle;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const auto& w = weights_[i];
    if (w.gathered && w.num_users == 0 && next[i] > position) idle.push_back(i);
  }
  // Sorts the weights needed last to the front. If the future is unknown, weights that backward has
  // used are not needed again; of the others, backward first needs those that forward used last.
  std::sort(idle.begin(), idle.end(), [&](int64_t a, int64_t b) {
    const auto key = [&](int64_t i) {
      return std::tuple(-next[i], !weights_[i].last_used_in_backward, weights_[i].last_use);
    };
    return key(a) < key(b);
  });
  int64_t left = bytes_ + bytes - budget_bytes_;
  size_t count = 0;
  while (count < idle.size() && left > 0) left -= weights_[idle[count++]].bytes;
  if (left > 0 && !force) return false;
  for (size_t i = 0; i < count; ++i) free(idle[i], actions);
  return left <= 0;
}

std::vector<int64_t> GatherPlan::next_uses() const {
  std::vector<int64_t> next(weights_.size(), kNever);
  const auto rest = order_.predicted();
  for (size_t i = rest.size(); i-- > 0;) next[rest[i].weight] = static_cast<int64_t>(i);
  return next;
}

}  // namespace axonn::orchestrator
