#include "ops/group/agreement.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace axonn::ops {

Agreement::Agreement(const Group& group, const comm::CallSignature& call)
    : group_(group), signature_(call) {
  if (group.shared != nullptr) {
    call_.emplace(*group.shared, call, /*workspace_bytes=*/0);
    call_number_ = call_->number();
    return;
  }
  if (group.compared == nullptr) return;
  auto& calls = *group.compared;
  if (calls.failed) throw comm::group_is_broken(op(), calls.label, group.rank);
  {
    const std::lock_guard lock(calls.mutex);
    call_number_ = ++calls.num_calls;
    calls.last = call.describe();
    if (!calls.every_call && calls.known.contains(calls.last)) return;
    number_ = calls.num_compared++;
  }
  mailbox_.emplace(group, c10d::resolve_process_group(group.name)->getStore(), calls.prefix, op(),
                   calls.timeout_seconds, call_number_);
  mailbox_->post(key(number_, group.rank), call.describe());
}

std::string Agreement::key(int64_t number, int64_t rank) {
  return "call/" + std::to_string(number) + "/" + std::to_string(rank);
}

void Agreement::reach() {
  if (call_) {
    call_->compare();
    call_.reset();
  }
  if (!mailbox_) return;
  const auto own = signature_.describe();
  for (int64_t peer = 0; peer < group_.size; ++peer) {
    const auto theirs = mailbox_->read(key(number_, peer), peer);
    if (theirs == own) continue;
    throw comm::CommunicationError(comm::waited_for(own, group_.rank, peer, group_.label()) +
                                   comm::called_instead(theirs));
  }
  // Every peer has posted this call, so each has read the one before.
  if (number_ > 0) mailbox_->take_back(key(number_ - 1, group_.rank));
  mailbox_.reset();
  const std::lock_guard lock(group_.compared->mutex);
  group_.compared->known.insert(own);
}

void abandon(Group& group) {
  if (group.shared != nullptr) group.shared->abandon();
  if (group.compared != nullptr) group.compared->failed = true;
}

Agreements::Agreements(const comm::CallSignature& call, std::initializer_list<Group*> groups) {
  size_t count = 0;
  for (Group* group : groups) {
    if (group->size > 1) groups_.at(count++) = group;
  }
  for (size_t i = 0; i < count; ++i) open_[i].emplace(*groups_[i], call);
  for (size_t i = 0; i < count; ++i) groups_[i]->agreement = &*open_[i];
}

Agreements::~Agreements() {
  for (Group* group : groups_) {
    if (group != nullptr) group->agreement = nullptr;
  }
}

void Agreements::reach() {
  for (auto& one : open_) {
    if (one) one->reach();
  }
}

}  // namespace axonn::ops
