#include "ops/group/agreement.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace axonn::ops {
namespace {

// What ranks leave in the store for each comparison, in addition to each rank's own mark.
constexpr const char* kFirst = "first";    // the call of the first rank
constexpr const char* kEqual = "equal";    // counts the ranks that make that call
constexpr const char* kAnswer = "answer";  // that call once all make it, or one that differs

// A rank and its call, as one text.
std::string text_of(int64_t rank, const std::string& call) {
  return std::to_string(rank) + " " + call;
}

std::string call_of(const std::string& text) { return text.substr(text.find(' ') + 1); }

}  // namespace

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
                   timeout_seconds(), call_number_);
  publish();
}

// All ranks compare their call with the first rank's. A rank that differs tells all the others; if
// none differs, the last rank to arrive does.
void Agreement::publish() {
  const auto own = text_of(group_.rank, signature_.describe());
  mailbox_->mark(here(number_, group_.rank));
  first_ = mailbox_->first(key(number_, kFirst), own);
  if (call_of(first_) != call_of(own)) {
    mailbox_->first(key(number_, kAnswer), own);
  } else if (mailbox_->count(key(number_, kEqual)) == group_.size) {
    mailbox_->first(key(number_, kAnswer), first_);
    // Every peer has begun this call, so each is done with the one before.
    for (const char* what : {kFirst, kEqual, kAnswer}) forget(what);
  }
}

void Agreement::forget(const std::string& what) {
  if (number_ > 0) mailbox_->take_back(key(number_ - 1, what));
}

std::string Agreement::key(int64_t number, const std::string& what) {
  return "call/" + std::to_string(number) + "/" + what;
}

std::string Agreement::here(int64_t number, int64_t rank) {
  return key(number, std::to_string(rank));
}

void Agreement::reach() {
  if (call_) {
    call_->compare();
    call_.reset();
  }
  if (!mailbox_) return;
  const auto own = signature_.describe();
  auto theirs = first_;
  if (call_of(theirs) == own) {
    theirs =
        mailbox_->read(key(number_, kAnswer), [&](int64_t peer) { return here(number_, peer); });
  }
  if (call_of(theirs) != own) {
    throw comm::CommunicationError(
        comm::waited_for(own, group_.rank, std::stoll(theirs), group_.label()) +
        comm::called_instead(call_of(theirs), own));
  }
  forget(std::to_string(group_.rank));
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
