// Lets the ranks of a group meet, before they do anything else together.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace axonn::ops {

// Returns the name of the backend that runs the group's collectives on CPU tensors, such as "gloo"
// or "fake", or "" if there is none.
std::string cpu_backend(c10d::ProcessGroup& group);

// Returns once every rank of a gloo group has called it; it is collective and called once per
// group. Ranks send to each other over gloo's own connections, which close when a process ends, so
// a rank that has ended is noticed even if it never told anybody which process it is. Throws
// CommunicationError, naming op, rank, group and peer, if a rank has ended or does not come in
// time; the group is closed then.
void meet(const char* op, c10d::ProcessGroup& group, const std::string& label,
          double timeout_seconds);

}  // namespace axonn::ops
