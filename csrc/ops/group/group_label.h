// What messages call a process group.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace axonn::ops {

// Its description, as "x"; c10d's name, which is often a hash, if nobody has given it one.
inline std::string label_of(const c10d::ProcessGroup& group, const std::string& name) {
  const auto& description = group.getGroupDesc();
  return description == "undefined" ? name : description;
}

}  // namespace axonn::ops
