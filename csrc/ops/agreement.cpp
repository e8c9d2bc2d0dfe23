#include "ops/agreement.h"

#include <exception>

#include "core/errors.h"

namespace axonn::ops {

Agreement::Agreement(const Group& group, const comm::CallSignature& call)
    : group_(group), signature_(call) {
  if (group.shared != nullptr) {
    call_.emplace(*group.shared, call, /*workspace_bytes=*/0);
    return;
  }
  if (group.compared == nullptr) return;
  auto& calls = *group.compared;
  if (calls.failed) {
    throw comm::CommunicationError(op() + ": group " + calls.label +
                                   " cannot be used any more: an earlier call failed on rank " +
                                   std::to_string(group.rank));
  }
  int64_t number = 0;
  {
    const std::lock_guard lock(calls.mutex);
    if (!calls.every_call && calls.known.contains(call.describe())) return;
    number = calls.num_compared++;
  }
  mailbox_.emplace(group, calls.store, calls.prefix + std::to_string(number) + "/", op(),
                   calls.timeout_seconds);
  mailbox_->post(std::to_string(group.rank), call.describe());
}

void Agreement::reach() {
  if (call_) {
    call_->compare();
    call_.reset();
  }
  if (!mailbox_) return;
  const auto own = signature_.describe();
  for (int64_t peer = 0; peer < group_.size; ++peer) {
    const auto theirs = mailbox_->read(std::to_string(peer), peer);
    if (theirs == own) continue;
    throw comm::CommunicationError(
        own + ": rank " + std::to_string(group_.rank) + " waited for rank " + std::to_string(peer) +
        " of group " + group_.label() + ", which called " + theirs +
        " instead: all ranks of a group must make the same calls, in the same order, with equal "
        "shapes and dtypes");
  }
  mailbox_.reset();
  const std::lock_guard lock(group_.compared->mutex);
  group_.compared->known.insert(own);
}

SharedFate::SharedFate(std::initializer_list<Group*> groups)
    : exceptions_at_start_(std::uncaught_exceptions()) {
  size_t count = 0;
  for (Group* group : groups) {
    if (group->size > 1) groups_.at(count++) = group;
  }
}

SharedFate::~SharedFate() {
  if (std::uncaught_exceptions() <= exceptions_at_start_) return;
  for (Group* group : groups_) {
    if (group == nullptr) break;
    if (group->shared != nullptr) group->shared->abandon();
    if (group->compared != nullptr) group->compared->failed = true;
  }
}

Agreements::Agreements(const comm::CallSignature& call, std::initializer_list<Group*> groups)
    : fate_(groups) {
  for (size_t i = 0; i < kMostGroups && fate_.groups()[i] != nullptr; ++i) {
    Group* group = fate_.groups()[i];
    group->agreement = &open_[i].emplace(*group, call);
  }
}

Agreements::~Agreements() {
  for (Group* group : fate_.groups()) {
    if (group != nullptr) group->agreement = nullptr;
  }
}

void Agreements::reach() {
  for (auto& one : open_) {
    if (one) one->reach();
  }
}

}  // namespace axonn::ops
