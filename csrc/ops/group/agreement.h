// Checks that all ranks of a group make the same call before c10d is used, because c10d would hang
// or end the process if they did not.
//
// A call is published when its op begins, on every group that the op uses. It is compared with the
// peers' calls right before the first collective on a group, so ranks that multiply first do not
// wait for each other until then. Ranks that share memory compare every call through that memory,
// as the fused ops do, and number it together with theirs. Other ranks compare through the c10d
// store: the first call of each signature, and every call under AXONN_DEBUG_COLLECTIVES. That takes
// each rank a few store operations, whatever the size of the group. A call that is known costs a
// table lookup.
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

// The calls that the ranks of a group without shared memory have compared.
struct ComparedCalls {
  std::string prefix;  // of the keys in the group's store, which no other group uses
  std::string label;
  bool every_call;
  std::atomic<bool> failed = false;
  std::mutex mutex;  // guards the members below
  std::unordered_set<std::string> known;
  int64_t num_compared = 0;
  int64_t num_calls = 0;  // begun, compared or not
  std::string last;       // the last of those calls
};

// The agreement of one group on one call.
class Agreement {
 public:
  // Publishes the call. Waits only for peers that are two calls behind.
  Agreement(const Group& group, const comm::CallSignature& call);
  // Returns once every rank of the group is known to make this call; calling it again returns at
  // once. Throws CommunicationError, naming both calls, if a rank makes another call. It also
  // throws if a rank has died, failed or left, or does not come within AXONN_TIMEOUT_SECONDS.
  void reach();
  std::string op() const { return signature_.op(); }
  const comm::CallSignature& signature() const { return signature_; }
  // The number of the call in the group, equal on all ranks; 0 if the group compares no calls.
  int64_t call_number() const { return call_number_; }

 private:
  void publish();
  void forget(const std::string& what);  // a key of the previous comparison
  static std::string key(int64_t number, const std::string& what);
  static std::string here(int64_t number, int64_t rank);  // the mark of a rank that has arrived

  const Group& group_;
  comm::CallSignature signature_;
  std::optional<comm::Call> call_;  // in shared memory
  std::optional<Mailbox> mailbox_;  // through the store
  int64_t number_ = 0;              // of the comparison in the store
  std::string first_;               // the first rank in that comparison, and its call
  int64_t call_number_ = 0;
};

constexpr size_t kMostGroups = 3;  // the most groups that an op uses

// Marks the group as one whose ranks are out of step. Peers that share memory with this rank learn
// this at once. Other peers learn it when their wait for this rank times out, or when its process
// ends.
void abandon(Group& group);

// Runs `run()`. If it throws, this rank takes no further part in any of the op's groups, even if
// the error concerns only one of them. Groups stay usable only if all ranks refuse the call alike,
// because no memory or no kernel serves it.
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

// The agreements of all groups of several ranks that an op uses.
class Agreements {
 public:
  // Publishes the call on all groups before waiting for any of them, so that no cycle of waits can
  // form.
  Agreements(const comm::CallSignature& call, std::initializer_list<Group*> groups);
  ~Agreements();
  Agreements(const Agreements&) = delete;
  Agreements& operator=(const Agreements&) = delete;
  void reach();

 private:
  std::array<Group*, kMostGroups> groups_{};  // null: no further group
  std::array<std::optional<Agreement>, kMostGroups> open_;
};

// Runs an op's `run()`, whose collectives wait for the agreements of these groups. On a GPU the
// host is far ahead of the collectives, so the agreements are reached at once.
template <typename Run>
auto agreed(const comm::CallSignature& call, c10::Device device,
            std::initializer_list<Group*> groups, Run&& run) {
  return with_shared_fate(groups, [&] {
    Agreements agreements(call, groups);
    if (!device.is_cpu()) agreements.reach();
    auto result = run();
    agreements.reach();  // also reaches those of groups that had nothing to move
    return result;
  });
}

}  // namespace axonn::ops
