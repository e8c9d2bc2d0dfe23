#include "ops/group/group.h"

#include <c10/util/Logging.h>

#include <chrono>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "core/ranks/errors.h"
#include "core/ranks/own_process.h"
#include "core/ranks/waits.h"
#include "ops/group/agreement.h"
#include "ops/group/c10d_store.h"
#include "ops/group/group_label.h"
#include "ops/group/meeting.h"

namespace axonn::ops {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Logs a line that is shown with TORCH_CPP_LOG_LEVEL=INFO.
void log_growth(const comm::SymmetricGroup& group, const std::string& op) {
  LOG(INFO) << "axonn_ext: symmetric memory of rank " << group.rank() << " in group "
            << group.label() << " grows to " << group.used_bytes() << " bytes, for " << op;
}

// Keeps what is known of the process groups met so far. An entry is valid as long as its process
// group lives; if c10d later gives the same name to another group, that group gets a new entry.
class SharedGroups {
 public:
  void configure(const GroupSettings& settings) {
    const std::lock_guard lock(mutex_);
    settings_ = settings;
  }

  // Gives the group the state through which its ranks compare calls. This is collective if the
  // state does not exist yet. Other groups can be met and used meanwhile, because the table is not
  // locked while this rank waits for peers.
  void find_or_meet(const char* op, const ProcessGroupPtr& process_group, bool on_cpu,
                    Group& group) {
    std::unique_lock table(mutex_);
    const auto entry = entry_of(process_group, group);
    const auto settings = settings_;
    table.unlock();
    if (!entry->process.is_this()) {
      entry->process.refuse(op, group.rank, label_of(*process_group, group.name));
    }
    if (entry->is_fake) return;
    const std::lock_guard meeting(entry->meeting);
    if (on_cpu && entry->shared == nullptr) {
      const auto shared = rendezvous(op, *process_group, group, settings);
      table.lock();
      entry->shared = shared;
      table.unlock();
    }
    if (on_cpu && entry->shared->on_one_host()) {
      group.shared = entry->shared;
      return;
    }
    if (entry->compared == nullptr) {
      const auto compared = compared_calls(op, *process_group, group, settings);
      table.lock();
      entry->compared = compared;
      table.unlock();
    }
    group.compared = entry->compared;
  }

  std::string obstacle(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto& shared = entries_.at(name)->shared;
    return shared == nullptr ? "its process group is torch's 'fake' one" : shared->obstacle();
  }

  bool ask_once(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto entry = entries_.find(name);
    return entry != entries_.end() && !std::exchange(entry->second->asked, true);
  }

  void add_waited_seconds(std::map<std::string, double>& totals) {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, entry] : entries_) {
      if (entry->shared != nullptr) totals[name] += entry->shared->waited_seconds();
    }
  }

  std::vector<GroupProgress> progress() {
    const std::lock_guard lock(mutex_);
    std::vector<GroupProgress> all;
    for (const auto& [name, entry] : entries_) {
      if (entry->shared != nullptr && entry->shared->on_one_host()) {
        const auto calls = entry->shared->progress();
        all.push_back({name, entry->shared->label(), calls.issued, calls.last});
      } else if (entry->compared != nullptr) {
        const std::lock_guard calls(entry->compared->mutex);
        all.push_back(
            {name, entry->compared->label, entry->compared->num_calls, entry->compared->last});
      }
    }
    return all;
  }

  double timeout_seconds() {
    const std::lock_guard lock(mutex_);
    return settings_.timeout_seconds;
  }

  int64_t bytes_in_use() {
    const std::lock_guard lock(mutex_);
    drop_dead_groups();
    int64_t bytes = 0;
    for (const auto& [name, entry] : entries_) {
      if (entry->shared != nullptr) bytes += entry->shared->used_bytes();
    }
    return bytes;
  }

 private:
  struct Entry {
    explicit Entry(const ProcessGroupPtr& process_group)
        : owner(process_group), is_fake(cpu_backend(*process_group) == "fake") {}

    const c10::weak_intrusive_ptr<c10d::ProcessGroup> owner;
    const comm::OwnProcess process;
    const bool is_fake;  // torch's process group of ranks that do not exist
    std::mutex meeting;  // held by the thread that makes the first call
    std::shared_ptr<comm::SymmetricGroup> shared = nullptr;  // also written under the table's lock
    std::shared_ptr<ComparedCalls> compared = nullptr;       // likewise
    bool asked = false;                                      // under the table's lock
  };
  using EntryPtr = std::shared_ptr<Entry>;

  void drop_dead_groups() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second->owner.expired(); });
  }

  EntryPtr entry_of(const ProcessGroupPtr& process_group, const Group& group) {
    const auto found = entries_.find(group.name);
    if (found != entries_.end() && found->second->owner.lock() == process_group) {
      return found->second;
    }
    drop_dead_groups();
    return entries_.insert_or_assign(group.name, std::make_shared<Entry>(process_group))
        .first->second;
  }

  static std::shared_ptr<comm::SymmetricGroup> rendezvous(const char* op,
                                                          c10d::ProcessGroup& process_group,
                                                          const Group& group,
                                                          const GroupSettings& settings) {
    const auto label = label_of(process_group, group.name);
    const comm::NotedWait noted({.group = group.name,
                                 .axis = label,
                                 .call = op,
                                 .number = 1,
                                 .peers = comm::all_but(group.rank, group.size),
                                 .what = "may not have come to the first call of this group",
                                 .since = comm::WaitClock::now()});
    if (cpu_backend(process_group) == "gloo")
      meet(op, process_group, label, settings.timeout_seconds);
    C10dStore store(process_group.getStore());
    return comm::SymmetricGroup::rendezvous(
        {.name = group.name,
         .rank = group.rank,
         .size = group.size,
         .workspace_bytes = settings.symmetric_memory_bytes / 2,
         .timeout = std::chrono::duration<double>(settings.timeout_seconds),
         .label = label,
         .on_growth = &log_growth},
        store);
  }

  static std::shared_ptr<ComparedCalls> compared_calls(const char* op,
                                                       const c10d::ProcessGroup& process_group,
                                                       const Group& group,
                                                       const GroupSettings& settings) {
    auto calls = std::make_shared<ComparedCalls>();
    calls->label = label_of(process_group, group.name);
    calls->every_call = settings.compare_every_call;
    // Each rank counts the groups of a name, because a name may be given again after its group was
    // destroyed.
    const auto prefix = "axonn/calls/" + group.name + "/";
    try {
      const auto number =
          process_group.getStore()->add(prefix + "count/" + std::to_string(group.rank), 1);
      calls->prefix = prefix + std::to_string(number) + "/";
    } catch (const std::exception& error) {
      throw comm::lost_store(
          std::string(op) + ": rank " + std::to_string(group.rank) + " of group " + calls->label,
          error);
    }
    return calls;
  }

  std::mutex mutex_;
  GroupSettings settings_{600.0, int64_t{32} << 30, false};
  std::map<std::string, EntryPtr> entries_;
};

// Adds up the time spent in waits for c10d's collectives, by group name.
class C10dWaits {
 public:
  void add(const std::string& name, double seconds) {
    const std::lock_guard lock(mutex_);
    seconds_[name] += seconds;
  }
  std::map<std::string, double> totals() {
    const std::lock_guard lock(mutex_);
    return seconds_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, double> seconds_;
};

C10dWaits& c10d_waits() {
  static C10dWaits waits;
  return waits;
}

SharedGroups& shared_groups() {
  static SharedGroups groups;
  return groups;
}

}  // namespace

void configure_groups(const GroupSettings& settings) { shared_groups().configure(settings); }

double timeout_seconds() { return shared_groups().timeout_seconds(); }

int64_t symmetric_memory_bytes_in_use() { return shared_groups().bytes_in_use(); }

void add_c10d_wait(const std::string& name, double seconds) { c10d_waits().add(name, seconds); }

std::vector<GroupProgress> group_progress() { return shared_groups().progress(); }

std::map<std::string, double> waited_seconds() {
  auto totals = c10d_waits().totals();
  shared_groups().add_waited_seconds(totals);
  return totals;
}

const std::string& Group::label() const {
  if (shared != nullptr) return shared->label();
  return compared != nullptr ? compared->label : name;
}

Group find_group(const char* op, const std::string& name, const ProcessGroupPtr& process_group,
                 c10::Device device) {
  Group group{.name = name, .rank = process_group->getRank(), .size = process_group->getSize()};
  shared_groups().find_or_meet(op, process_group, device.is_cpu(), group);
  return group;
}

std::string obstacle_to_sharing(const std::string& name) { return shared_groups().obstacle(name); }

bool ask_once(const std::string& name) { return shared_groups().ask_once(name); }

}  // namespace axonn::ops
