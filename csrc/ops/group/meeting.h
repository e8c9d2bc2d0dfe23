// The first thing that the ranks of a group do together.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace axonn::ops {

// Who carries the group's collectives on CPU tensors: "gloo", "fake", ...; "" if nobody does.
std::string cpu_backend(c10d::ProcessGroup& group);

// Returns once every rank of a gloo group has called it; collective, and once a group. Ranks tell
// each other over gloo's own connections, which end with a process: so a rank that has ended is
// noticed, though it never told anybody what process it is. Throws CommunicationError, naming op,
// rank, group and peer, for one that has ended or does not come in time; the group is closed then.
void meet(const char* op, c10d::ProcessGroup& group, const std::string& label,
          double timeout_seconds);

}  // namespace axonn::ops
