// A c10d process group as the ops see it: found by name, and with the memory that its ranks
// share.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/symmetric/symmetric_group.h"

namespace c10d {
class ProcessGroup;
}

namespace axonn::ops {

struct GroupSettings {
  double timeout_seconds;
  int64_t symmetric_memory_bytes;  // address space per rank and group
  bool compare_every_call;         // even in groups that share no memory
};

// Takes the values of axonn_ext/spec/settings.py; they hold for groups met from now on. The time
// limit also holds for earlier groups that share no memory.
void configure_groups(const GroupSettings& settings);

// Returns how long a rank waits for another, as configured.
double timeout_seconds();

// Returns the bytes of symmetric memory that this rank has used in all of its groups.
int64_t symmetric_memory_bytes_in_use();

// Returns how long this process has waited for peers inside ops so far, in seconds, by group name.
// This counts waits in shared memory and waits for c10d's collectives.
std::map<std::string, double> waited_seconds();
void add_c10d_wait(const std::string& name, double seconds);

// This rank's progress in a group.
struct GroupProgress {
  std::string group;  // its c10d name
  std::string axis;   // the name that messages use
  int64_t num_calls;
  std::string last;  // the last of these calls
};

// Returns this rank's progress in every group in which it has made a call.
std::vector<GroupProgress> group_progress();

class Agreement;
struct ComparedCalls;

struct Group {
  std::string name;
  int64_t rank = 0;
  int64_t size = 1;
  // The memory that its ranks share, if they are on one host and work on the CPU; else null.
  std::shared_ptr<comm::SymmetricGroup> shared = nullptr;
  // The calls that its ranks have agreed on, if they share no memory; else null.
  std::shared_ptr<ComparedCalls> compared = nullptr;
  bool may_fuse = false;  // whether the requested algorithm and the group's links allow it
  // The agreement of the op under way, which must be reached before its first collective; null if
  // there is none.
  Agreement* agreement = nullptr;

  bool can_fuse() const { return may_fuse && shared != nullptr; }
  // The name that messages use.
  const std::string& label() const;
  // Returns a group of one rank, which has no peers.
  static Group alone() { return {}; }
};

// Returns the group whose c10d name is `name`. The first call of a group on the CPU is collective:
// its ranks exchange mappings. On a `device` other than the CPU, ranks share no memory. Raises
// CommunicationError if a rank has ended or does not come in time, or if the caller is a fork of a
// rank that has called before. `op` opens the message.
Group find_group(const char* op, const std::string& name,
                 const c10::intrusive_ptr<c10d::ProcessGroup>& process_group, c10::Device device);

// Returns what prevents the ranks of a group, which must have been found, from sharing memory.
std::string obstacle_to_sharing(const std::string& name);

// Returns true on the first call for a group that was found, so that users are told something only
// once per group.
bool ask_once(const std::string& name);

}  // namespace axonn::ops
