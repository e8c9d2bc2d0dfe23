#include "ops/tuning/tuner.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <unordered_map>

#include "ops/group/mailbox.h"
#include "ops/tuning/question.h"

namespace axonn::ops {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// What is settled for one process group. The mutex is not held while ranks communicate.
struct GroupChoices {
  struct Entry {
    Choice choice;
    int64_t question;        // the number of the question that settled it
    int64_t calls = 0;       // since it was settled, if it is a default
    bool announced = false;  // whether this rank has asked for a new question
  };

  std::string prefix;  // of its keys in the store
  std::mutex mutex;
  std::unordered_map<std::string, Entry> entries;  // by the key of the signature
  // Counts only the questions that rank 0 answered: a rank that asked alone, and failed, is not out
  // of step.
  std::atomic<int64_t> num_questions = 0;
};

class Tuner {
 public:
  void configure(const TuningSettings& settings) {
    const std::lock_guard lock(mutex_);
    timeout_seconds_ = settings.timeout_seconds;
    verified_ = settings.verified;
    cache_ = std::make_shared<tuning::TuningCache>(settings.cache_directory, settings.platform);
  }

  std::shared_ptr<const tuning::TuningCache> cache() {
    const std::lock_guard lock(mutex_);
    return cache_;
  }

  VerifiedKernels verified() {
    const std::lock_guard lock(mutex_);
    return verified_;
  }

  void change_warm_up(int64_t by) { warm_up_depth_ += by; }

  std::string resolve(const Tunable& call) {
    if (call.group.size == 1) return resolve_alone(call);
    const auto process_group = c10d::resolve_process_group(call.group.name);
    const auto choices = choices_of(call.group, process_group);
    const auto key = key_of(call);
    std::optional<GroupChoices::Entry> known;
    {
      const std::lock_guard lock(choices->mutex);
      if (const auto it = choices->entries.find(key); it != choices->entries.end()) {
        auto& entry = it->second;
        const bool settled = entry.choice.source != Choice::Source::kDefault;
        if (settled || !call.synchronizes) return entry.choice.algorithm;
        ++entry.calls;
        if (!entry.announced && warm_up_depth_ == 0) return entry.choice.algorithm;
        known = entry;
        entry.announced = true;
      }
    }
    const auto mailbox = [&](int64_t question) {
      return Mailbox(call.group, process_group->getStore(),
                     choices->prefix + std::to_string(question) + "/", op_of(call),
                     timeout_seconds_);
    };
    if (known && !all_ask_again(call, *known, mailbox(known->question))) {
      return known->choice.algorithm;
    }
    const int64_t question = choices->num_questions;
    auto own = mailbox(question);
    auto choice = ask(call, &own, {cache(), warm_up_depth_ > 0, choices->num_questions});
    const std::lock_guard lock(choices->mutex);
    choices->entries.insert_or_assign(key, GroupChoices::Entry{choice, question});
    return choice.algorithm;
  }

  std::vector<Choice> choices() {
    std::vector<Choice> all;
    for (const auto& group : living()) {
      const std::lock_guard lock(group->mutex);
      for (const auto& [signature, entry] : group->entries) all.push_back(entry.choice);
    }
    std::sort(all.begin(), all.end(), [](const Choice& a, const Choice& b) {
      return std::tie(a.group, a.signature) < std::tie(b.group, b.signature);
    });
    return all;
  }

  void clear() {
    for (const auto& group : living()) {
      const std::lock_guard lock(group->mutex);
      group->entries.clear();
    }
  }

 private:
  // Returns what a rank decides by itself. A default is measured in any later warm-up.
  std::string resolve_alone(const Tunable& call) {
    const auto key = key_of(call);
    {
      const std::lock_guard lock(alone_->mutex);
      if (const auto it = alone_->entries.find(key); it != alone_->entries.end()) {
        const auto& choice = it->second.choice;
        if (choice.source != Choice::Source::kDefault || warm_up_depth_ == 0) {
          return choice.algorithm;
        }
      }
    }
    auto choice = ask(call, nullptr, {cache(), warm_up_depth_ > 0, alone_->num_questions});
    choice.group.clear();
    const std::lock_guard lock(alone_->mutex);
    alone_->entries.insert_or_assign(key, GroupChoices::Entry{choice, 0});
    return choice.algorithm;
  }

  // An entry is valid as long as its process group lives. If c10d later gives the same name to
  // another group, that group gets a new entry, and new keys in case the store is the same.
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> owner;
    std::shared_ptr<GroupChoices> choices;
  };

  std::shared_ptr<GroupChoices> choices_of(const Group& group, const ProcessGroupPtr& owner) {
    const std::lock_guard lock(mutex_);
    if (const auto entry = groups_.find(group.name); entry != groups_.end()) {
      if (entry->second.owner.lock() == owner) return entry->second.choices;
    }
    std::erase_if(groups_, [](const auto& entry) { return entry.second.owner.expired(); });
    auto choices = std::make_shared<GroupChoices>();
    choices->prefix = "axonn/tuning/" + group.name + "/";
    const auto counter = choices->prefix + "count/" + std::to_string(group.rank);
    choices->prefix += std::to_string(owner->getStore()->add(counter, 1)) + "/";
    groups_.insert_or_assign(group.name,
                             Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(owner), choices});
    return choices;
  }

  std::vector<std::shared_ptr<GroupChoices>> living() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<GroupChoices>> groups{alone_};
    for (const auto& [name, entry] : groups_) {
      if (!entry.owner.expired()) groups.push_back(entry.choices);
    }
    return groups;
  }

  // Returns whether every rank had asked for a new question before this call. Every rank that asked
  // before this call gets the same result.
  static bool all_ask_again(const Tunable& call, const GroupChoices::Entry& known,
                            Mailbox mailbox) {
    const auto wish_of = [](int64_t rank) { return "again/" + std::to_string(rank); };
    if (!known.announced) {
      mailbox.post(wish_of(call.group.rank), std::to_string(known.calls));
      return false;
    }
    std::vector<std::string> wishes;
    for (int64_t rank = 0; rank < call.group.size; ++rank) wishes.push_back(wish_of(rank));
    if (!mailbox.posted(wishes)) return false;
    for (int64_t rank = 0; rank < call.group.size; ++rank) {
      if (std::stoll(mailbox.read(wishes[rank], rank)) >= known.calls) return false;
    }
    return true;
  }

  std::mutex mutex_;
  std::atomic<int64_t> warm_up_depth_ = 0;
  std::atomic<double> timeout_seconds_ = 600.0;
  VerifiedKernels verified_;
  std::shared_ptr<const tuning::TuningCache> cache_ =
      std::make_shared<tuning::TuningCache>("", tuning::Platform{});
  std::map<std::string, Entry> groups_;
  const std::shared_ptr<GroupChoices> alone_ = std::make_shared<GroupChoices>();
};

Tuner& tuner() {
  static Tuner instance;
  return instance;
}

}  // namespace

const char* name_of(Choice::Source source) {
  switch (source) {
    case Choice::Source::kDefault:
      return "default";
    case Choice::Source::kDisk:
      return "disk";
    case Choice::Source::kMeasured:
      return "measured";
  }
  return "";
}

void configure_tuning(const TuningSettings& settings) { tuner().configure(settings); }

VerifiedKernels verified_kernels() { return tuner().verified(); }

void suggest_verify() {
  if (!verified_kernels().suggest) return;
  TORCH_WARN_ONCE(
      "axonn_ext: this GPU could run algorithm='fused' and the fused_sm90 product kernel, but "
      "'auto' measures neither before `axonn-ext verify` (3 minutes) has found them right here");
}

void enter_warm_up() { tuner().change_warm_up(+1); }

void leave_warm_up() { tuner().change_warm_up(-1); }

std::string resolve(const Tunable& call) { return tuner().resolve(call); }

std::vector<Choice> tuning_choices() { return tuner().choices(); }

void clear_tuning_choices() { tuner().clear(); }

}  // namespace axonn::ops
