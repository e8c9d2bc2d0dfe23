#include "gpu_machine/async.h"

#include <algorithm>
#include <limits>

#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {

Identity& Identities::lease(const Warp& issuer, Key key) {
  std::deque<Identity>& known = free_and_busy_[key];
  auto found =
      std::find_if(known.begin(), known.end(), [](const Identity& i) { return !i.is_busy; });
  if (found == known.end()) {
    Actor actor = issuer.actor;
    actor.is_async = true;
    known.push_back({issuer.machine.new_actor(actor).id, 1, false});
    found = known.end() - 1;
  }
  found->is_busy = true;
  return *found;
}

AsyncOperation::AsyncOperation(Warp& issuer, int lane, Proxy by, Identities::Key key)
    : AsyncOperation(issuer, lane, by, issuer.launch.identities.lease(issuer, key)) {}

AsyncOperation::AsyncOperation(Warp& issuer, int lane, Proxy by, Identity& identity)
    : Agent(issuer.machine, issuer.machine.actor(identity.actor), issuer.snapshot(lane), by,
            identity.time),
      origin_(issuer.origin(lane)),
      identity_(identity) {}

void AsyncOperation::fail(MachineError::Kind kind, const std::string& what, int) const {
  throw MachineError(kind, "kernel " + short_name(origin_.launch.program->name) + ": " + what +
                               "; begun by " + origin_.describe());
}

void AsyncOperation::reach(Stage stage) {
  if (stage_ == Stage::kBegun) seen_at_read_ = snapshot();
  stage_ = stage;
  if (stage != Stage::kDone) return;
  seen_at_end_ = snapshot();
  identity_.time = time();
  identity_.is_busy = false;
}

void AsyncGroups::commit() {
  committed_.push_back({std::move(open_)});
  open_.clear();
}

bool AsyncGroups::have_reached(AsyncStage stage, uint32_t most) const {
  for (size_t i = 0; i + most < committed_.size(); ++i) {
    if (committed_[i].learned >= stage) continue;
    for (const Operation& operation : committed_[i].operations) {
      if (operation->stage() < stage) return false;
    }
  }
  return true;
}

void AsyncGroups::learn(Agent& who, AsyncStage stage, uint32_t most) {
  for (size_t i = 0; i + most < committed_.size(); ++i) {
    Group& group = committed_[i];
    if (group.learned >= stage) continue;
    for (const Operation& operation : group.operations) who.clock.join(operation->seen_at(stage));
    group.learned = stage;
  }
  if (stage != AsyncStage::kDone) return;
  while (committed_.size() > most) committed_.pop_front();
}

// Most operations follow soon. Some are delayed for as long as part of a kernel may take, and very
// few until after the end of a CTA that should have waited for them.
uint64_t AsyncQueue::draw_delay(const AsyncOperation& operation) {
  if (operation.may_outlast_its_cta() && machine_.draw(32) == 0) return machine_.draw(1'000'000);
  return machine_.draw(5) == 0 ? machine_.draw(20'000) : machine_.draw(300);
}

void AsyncQueue::begin(const std::shared_ptr<AsyncOperation>& operation) {
  operation->due_ns = machine_.now_ns() + draw_delay(*operation);
  pending_.push_back(operation);
  machine_.note_change();
}

void AsyncQueue::step_one(size_t index) {
  const std::shared_ptr<AsyncOperation> operation = pending_[index];
  operation->step();
  operation->due_ns = machine_.now_ns() + draw_delay(*operation) / 4;
  machine_.note_change();
  if (operation->stage() != AsyncOperation::Stage::kDone) return;
  pending_[index] = std::move(pending_.back());
  pending_.pop_back();
  machine_.note_end(operation->launch());
}

bool AsyncQueue::step() {
  bool stepped = false;
  for (size_t i = pending_.size(); i-- > 0;) {
    const AsyncOperation& operation = *pending_[i];
    if (operation.due_ns > machine_.now_ns() || !may_begin(operation)) continue;
    if (machine_.draw(2) == 0) continue;
    step_one(i);
    stepped = true;
  }
  return stepped;
}

uint64_t AsyncQueue::first_due_ns() const {
  uint64_t first = std::numeric_limits<uint64_t>::max();
  for (const auto& operation : pending_) {
    if (may_begin(*operation)) first = std::min(first, operation->due_ns);
  }
  return first;
}

bool AsyncQueue::step_first() {
  const uint64_t first = first_due_ns();
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (!may_begin(*pending_[i]) || pending_[i]->due_ns != first) continue;
    step_one(i);
    return true;
  }
  return false;
}

const AsyncOperation* AsyncQueue::user_of(const Cta& cta) const {
  const auto found = std::find_if(pending_.begin(), pending_.end(),
                                  [&](const auto& operation) { return operation->uses(cta); });
  return found == pending_.end() ? nullptr : found->get();
}

bool AsyncQueue::has_any_of(const Launch& launch) const {
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](const auto& operation) { return &operation->launch() == &launch; });
}

}  // namespace axonn::gpu_machine
