// Lets the ranks of a process group exchange the values that they need before their first fused
// call on GPUs.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "core/ranks/rendezvous.h"
#include "ops/group/c10d_store.h"
#include "ops/group/group_label.h"

namespace axonn::ops::cuda {

// Exchanges the ranks' values of `what` through the group's store, and returns them by rank;
// collective. `name` is the group's c10d name, and `prefix` begins the keys in the store. Throws
// CommunicationError if a rank does not come within the timeout.
inline std::vector<std::string> exchange(const c10d::ProcessGroup& group, const std::string& name,
                                         const std::string& prefix, const std::string& what,
                                         const std::string& value, double timeout_seconds) {
  C10dStore store(group.getStore());
  comm::Rendezvous ranks({.name = prefix,
                          .rank = group.getRank(),
                          .size = group.getSize(),
                          .timeout = std::chrono::duration<double>(timeout_seconds),
                          .label = label_of(group, name)},
                         store);
  return ranks.exchange(what, value);
}

}  // namespace axonn::ops::cuda
