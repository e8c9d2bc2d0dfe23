// A c10d process group as the ops see it: found by name, with the shared memory of its ranks.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <map>
#include <memory>
#include <string>

#include "core/symmetric/symmetric_group.h"

namespace c10d {
class ProcessGroup;
}

namespace axonn::ops {

struct GroupSettings {
  double timeout_seconds;
  int64_t symmetric_memory_bytes;  // address space per rank and group
  bool compare_every_call;         // also of groups that share no memory
};

// Values that axonn_ext/settings.py read; they hold for groups met from now on.
void configure_groups(const GroupSettings& settings);

// How long a rank waits for another, as configured.
double timeout_seconds();

// Bytes of symmetric memory that this rank has used in all of its groups.
int64_t symmetric_memory_bytes_in_use();

// How long this process has waited for peers inside ops so far, in seconds, by group name: in
// shared memory, and in what was added for c10d's collectives.
std::map<std::string, double> waited_seconds();
void add_c10d_wait(const std::string& name, double seconds);

class Agreement;
struct ComparedCalls;

struct Group {
  std::string name;
  int64_t rank = 0;
  int64_t size = 1;
  // What its ranks share, if they are on one host and work on the CPU; else null.
  std::shared_ptr<comm::SymmetricGroup> shared = nullptr;
  // Which calls its ranks are known to make alike, for those that share nothing; else null.
  std::shared_ptr<ComparedCalls> compared = nullptr;
  bool may_fuse = false;  // as far as the algorithm that was asked for and its links go
  // Of the op that is under way, to be reached before its first collective; null: there is none.
  Agreement* agreement = nullptr;

  bool can_fuse() const { return may_fuse && shared != nullptr; }
  // As messages call it.
  const std::string& label() const;
  // A rank without peers.
  static Group alone() { return {}; }
};

// The group of that process group, whose c10d name is `name`. The first call of a group on the CPU
// is collective: its ranks exchange mappings. Tensors on `device` other than the CPU share no
// memory. Raises CommunicationError if a rank has ended or does not come in time, or in a fork of a
// rank that has called before. `op` opens the message.
Group find_group(const char* op, const std::string& name,
                 const c10::intrusive_ptr<c10d::ProcessGroup>& process_group, c10::Device device);

// What keeps the ranks of a group that was found from sharing memory.
std::string obstacle_to_sharing(const std::string& name);

// True the first time that it is asked of a group that was found: what users are told once of each.
bool ask_once(const std::string& name);

}  // namespace axonn::ops
