#include "ops/emulation/emulated_links.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include "ops/group/c10d_store.h"
#include "ops/group/group.h"
#include "ops/group/group_label.h"

namespace axonn::ops {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// The emulated links of the groups met so far. An entry is valid as long as its process group
// lives.
class EmulatedLinks {
 public:
  void configure(std::map<std::string, double> bytes_per_second) {
    const std::lock_guard lock(mutex_);
    any_ = !bytes_per_second.empty();
    bytes_per_second_ = std::move(bytes_per_second);
  }

  bool any() const { return any_; }

  // Returns the bandwidth for a group of that description, or 0 if it has no emulated link.
  double bytes_per_second(const std::string& description) {
    const std::lock_guard lock(mutex_);
    // axonn_ext/ranks/grid.py describes the group of an axis in this form.
    const auto axis = description.substr(0, description.find(" (ranks "));
    const auto found = bytes_per_second_.find(axis);
    return found == bytes_per_second_.end() ? 0 : found->second;
  }

  std::shared_ptr<comm::EmulatedLink> find_or_rendezvous(const std::string& name,
                                                         const ProcessGroupPtr& group) {
    const double speed = bytes_per_second(group->getGroupDesc());
    if (speed == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    if (const auto entry = entries_.find(name); entry != entries_.end()) {
      if (entry->second.owner.lock() == group) return entry->second.link;
    }
    std::erase_if(entries_, [](const auto& entry) { return entry.second.owner.expired(); });
    C10dStore store(group->getStore());
    const std::chrono::duration<double> timeout(timeout_seconds());
    std::shared_ptr<comm::EmulatedLink> link =
        comm::EmulatedLink::rendezvous({.name = name,
                                        .rank = group->getRank(),
                                        .size = group->getSize(),
                                        .bytes_per_second = speed,
                                        .timeout = timeout,
                                        .label = label_of(*group, name)},
                                       store);
    entries_.insert_or_assign(name,
                              Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), link});
    return link;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> owner;
    std::shared_ptr<comm::EmulatedLink> link;
  };

  std::atomic<bool> any_ = false;
  std::mutex mutex_;
  std::map<std::string, double> bytes_per_second_;
  std::map<std::string, Entry> entries_;
};

EmulatedLinks& emulated_links() {
  static EmulatedLinks links;
  return links;
}

}  // namespace

void configure_links(std::map<std::string, double> bytes_per_second) {
  emulated_links().configure(std::move(bytes_per_second));
}

bool has_emulated_link(const c10d::ProcessGroup& group) {
  return emulated_links().any() && emulated_links().bytes_per_second(group.getGroupDesc()) > 0;
}

std::shared_ptr<comm::EmulatedLink> find_link(const std::string& name,
                                              const ProcessGroupPtr& group) {
  return emulated_links().any() ? emulated_links().find_or_rendezvous(name, group) : nullptr;
}

}  // namespace axonn::ops
