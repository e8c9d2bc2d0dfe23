// The name that messages use for a process group.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace axonn::ops {

// Returns the group's description, such as "x", or its c10d name, which is often a hash, if it has
// none.
inline std::string label_of(const c10d::ProcessGroup& group, const std::string& name) {
  const auto& description = group.getGroupDesc();
  return description == "undefined" ? name : description;
}

}  // namespace axonn::ops
