// That all ranks of a group make the same call, found out before c10d, which would hang or end the
// process, is asked for anything.
//
// A call is published when its op begins, on every group that the op uses, and compared with the
// peers' right before the first collective on a group: ranks that multiply first do not wait for
// each other before. Ranks that share memory compare every call, through it, as the fused ops do,
// with whose calls it is numbered. Others compare the first call of each signature, and every call
// under AXONN_DEBUG_COLLECTIVES, through the c10d store; a call that is known costs a look into a
// table.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>

#include "core/ranks/errors.h"
#include "core/symmetric/symmetric_group.h"
#include "ops/group/group.h"
#include "ops/group/mailbox.h"

namespace axonn::ops {

// Of a group whose ranks share no memory.
struct ComparedCalls {
  std::string prefix;  // of the keys in the group's store, which no other group uses
  std::string label;
  double timeout_seconds;
  bool every_call;
  std::atomic<bool> failed = false;
  std::mutex mutex;  // of the rest
  std::unordered_set<std::string> known;
  int64_t num_compared = 0;
};

// One group's.
class Agreement {
 public:
  // Publishes the call. Waits for no peer that is not two calls behind.
  Agreement(const Group& group, const comm::CallSignature& call);
  // Returns once every rank of the group is known to make this call; at once from then on. Throws
  // CommunicationError, naming both calls, if one makes another, and likewise if one has died,
  // failed, left or does not come within AXONN_TIMEOUT_SECONDS.
  void reach();
  std::string op() const { return signature_.op(); }

 private:
  static std::string key(int64_t number, int64_t rank);

  const Group& group_;
  comm::CallSignature signature_;
  std::optional<comm::Call> call_;  // in shared memory
  std::optional<Mailbox> mailbox_;  // through the store
  int64_t number_ = 0;              // of the comparison there
};

constexpr size_t kMostGroups = 3;  // that an op uses

// Marks the group as one whose ranks are out of step. Peers that share memory with this rank learn
// of it at once; others when they wait for it in vain, or when its process ends.
void abandon(Group& group);

// Runs `run()`. If it throws, this rank comes to none of the op's groups any more, be it an error
// of one. A call that all ranks refuse alike, since no memory or no kernel serves it, breaks
// nothing.
template <typename Run>
auto with_shared_fate(std::initializer_list<Group*> groups, Run&& run) {
  try {
    return run();
  } catch (const comm::CallRefused&) {
    throw;
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (...) {
    for (Group* group : groups) abandon(*group);
    throw;
  }
}

// Those of all groups of several ranks that an op uses.
class Agreements {
 public:
  // Publishes on all groups before any is waited for, so that no cycle of waits can form.
  Agreements(const comm::CallSignature& call, std::initializer_list<Group*> groups);
  ~Agreements();
  Agreements(const Agreements&) = delete;
  Agreements& operator=(const Agreements&) = delete;
  void reach();

 private:
  std::array<Group*, kMostGroups> groups_{};  // null: no further one
  std::array<std::optional<Agreement>, kMostGroups> open_;
};

// Runs an op's `run()`, whose collectives on these groups wait for their agreements. On a GPU the
// host is far ahead of them, and agrees at once.
template <typename Run>
auto agreed(const comm::CallSignature& call, c10::Device device,
            std::initializer_list<Group*> groups, Run&& run) {
  return with_shared_fate(groups, [&] {
    Agreements agreements(call, groups);
    if (!device.is_cpu()) agreements.reach();
    auto result = run();
    agreements.reach();  // those of groups that had nothing to move
    return result;
  });
}

}  // namespace axonn::ops
