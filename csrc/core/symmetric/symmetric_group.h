// Symmetric memory for a group of ranks on one host, and the protocol that every fused CPU op uses.
//
// Each rank owns one arena: a signal pad and a workspace in two halves. Only the owner writes to
// it; peers map it and read in place. A collective is a Call with the next epoch number e:
//
//   publish  the signature of the call, then raise `started` to e
//   produce  write into this rank's half e % 2, raise `ready[i]` to e  (release)
//   consume  wait until a peer's `ready[i]` has reached e, then read   (acquire)
//   finish   raise `completed` to e: this rank no longer reads any peer's half e % 2
//
// A call waits for a buffer only at its start: half e % 2 was last read in epoch e - 2, so every
// peer must have completed that call. Calls follow each other without a barrier; a rank can be at
// most one call ahead of the slowest. The CUDA kernels use the same epochs and flags.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/ranks/call_log.h"
#include "core/ranks/key_value_store.h"
#include "core/ranks/own_process.h"
#include "core/ranks/waits.h"
#include "core/symmetric/bounded_wait.h"
#include "core/symmetric/epoch_flag.h"
#include "core/symmetric/protocol.h"
#include "core/symmetric/shared_segment.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::comm {

// The part of a call that ranks must agree on: its op, then everything that must be equal on all
// ranks. It lives in shared memory, so it has no pointers.
struct CallSignature {
  std::array<char, 256> text{};  // ends with a zero

  // A text that is too long is truncated, and then ends with a hash of the whole text.
  static CallSignature of(std::string_view text);
  // Makes a text such as "op(1, -2)".
  static CallSignature of(const char* op, std::initializer_list<int64_t> arguments);

  std::string op() const;  // the first word
  std::string describe() const { return text.data(); }
  friend bool operator==(const CallSignature&, const CallSignature&) = default;
};

class SymmetricGroup;

struct GroupOptions {
  std::string name;
  int64_t rank;
  int64_t size;
  // The address space per workspace half, equal on all ranks. Memory is allocated only when calls
  // first touch it.
  int64_t workspace_bytes = int64_t{16} << 30;
  std::chrono::duration<double> timeout = std::chrono::minutes(10);
  // The epoch before the first call's, equal on all ranks. A test can count past 2^32 with it.
  Epoch first_epoch = 0;
  // Ranks share memory if these are equal. A test can imitate several hosts with it.
  std::string host = host_identity();
  // The name that messages use for the group, if not `name`; c10d's names are hashes.
  std::string label = {};
  // Called when a call of this rank uses more memory than any before.
  std::function<void(const SymmetricGroup& group, const std::string& op)> on_growth = {};
};

class Call;

class SymmetricGroup {
 public:
  static constexpr int64_t kNumFlags = kNumSignals;

  // Collective over the group's ranks. `on_one_host()` returns the same on every rank; if it is
  // false, there is no shared memory and no Call may be made. Throws CommunicationError if a rank
  // does not arrive within the timeout, or has a different workspace size.
  static std::unique_ptr<SymmetricGroup> rendezvous(const GroupOptions& options,
                                                    KeyValueStore& store);

  // Returns all ranks of a group whose ranks are threads of this process; `options.rank` is
  // ignored. Each arena is mapped only once, so that a thread sanitizer sees both sides of every
  // access.
  static std::vector<std::unique_ptr<SymmetricGroup>> of_threads(GroupOptions options);

  // Peers that still wait for this rank then fail within about 20 ms (kSleep of bounded_wait.h).
  ~SymmetricGroup();
  SymmetricGroup(const SymmetricGroup&) = delete;
  SymmetricGroup& operator=(const SymmetricGroup&) = delete;

  int64_t rank() const { return options_.rank; }
  int64_t size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  const std::string& label() const { return options_.label.empty() ? name() : options_.label; }
  int64_t workspace_bytes() const { return options_.workspace_bytes; }
  bool on_one_host() const { return static_cast<int64_t>(arenas_.size()) == size(); }
  // Ends this rank's part because of an error, as a Call that fails does.
  void abandon();
  // Returns why on_one_host() is false: the first rank that cannot share memory, and the reason.
  const std::string& obstacle() const { return obstacle_; }
  // Returns why `peer` will not answer a question of this rank between two calls: it failed, left,
  // died, or has gone on to the next call. Returns an empty string if it may still answer.
  std::string obstacle_to_answer(int64_t peer) const;
  // Names a lost rank, as in "rank 2, which has died": a peer that failed or, if none has, one that
  // died or left; empty if there is none.
  std::string lost_peer() const;
  bool has_failed_peer() const { return failed_peer() >= 0; }
  // Returns how many calls this rank has begun, not counting calls that it could not begin yet, and
  // the last of them. Any thread may ask.
  CallProgress progress() const;
  // Bytes of this rank's workspace, over all halves, that calls have needed so far. They are
  // allocated when a call first needs them, and kept.
  int64_t used_bytes() const { return kNumHalves * used_half_bytes_; }
  // Returns how long this rank's calls have waited for peers so far, in seconds.
  double waited_seconds() const { return 1e-9 * static_cast<double>(waited_ns_); }

 private:
  friend class Call;
  struct Pad;
  struct Address;

  explicit SymmetricGroup(GroupOptions options);
  SharedSegment create_arena() const;
  int64_t arena_bytes() const;
  void check_layouts(const std::vector<Address>& addresses) const;
  void watch_ranks(const std::vector<Address>& addresses);
  std::string map_arenas(const std::vector<Address>& addresses, std::optional<SharedSegment>& own);
  Pad& pad(int64_t rank) const;
  std::byte* half(int64_t rank, Epoch epoch) const;
  std::unique_lock<std::mutex> lock_for(const CallSignature& call);
  void note_use(int64_t workspace_bytes, const CallSignature& call);
  // Raises a flag of this rank's pad and wakes the peers that sleep.
  void raise(EpochFlag& flag, Epoch epoch) const;
  // Sleeps until `flag`, of any rank, may have reached `epoch`.
  void sleep(const EpochFlag& flag, Epoch epoch, std::chrono::nanoseconds timeout) const;
  std::string obstacle_to_waiting(int64_t peer, std::chrono::duration<double> elapsed,
                                  const char* what) const;
  std::string obstacle_so_far(int64_t peer) const;
  int64_t failed_peer() const;  // -1: none
  int64_t number_of(Epoch epoch) const { return static_cast<Epoch>(epoch - options_.first_epoch); }
  [[noreturn]] void fail_wait(const std::string& what, int64_t peer, const std::string& why) const;

  GroupOptions options_;
  OwnProcess process_;  // a fork that used the group would write into its parent's memory
  // By rank; empty if the ranks do not share a host. Shared pointers, because threads of one
  // process map each arena once.
  std::vector<std::shared_ptr<SharedSegment>> arenas_;
  std::vector<std::optional<ProcessWatch>> watches_;  // by rank; none for ranks of this process
  std::mutex mutex_;  // held by a Call: two threads may not interleave calls
  // Held while a call gets its number and its signature, and by progress().
  mutable std::mutex progress_mutex_;
  std::atomic<Epoch> epoch_;                  // also read by other threads while a Call runs
  std::atomic<int64_t> used_half_bytes_ = 0;  // read while a Call runs
  std::atomic<int64_t> waited_ns_ = 0;
  Crowding crowding_;  // of the thread whose call is open
  std::string obstacle_;
  std::atomic<bool> broken_ = false;
};

// One collective of a group, from construction to destruction. If an exception leaves the scope,
// peers that wait for this rank fail at once, and so does every later call.
class Call {
 public:
  // Waits until this rank's half is free. `workspace_bytes` is the number of bytes that this rank
  // will write. If the group has less, throws CallRefused; the group stays usable if all ranks do
  // the same.
  Call(SymmetricGroup& group, const CallSignature& signature, int64_t workspace_bytes);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  int64_t rank() const { return group_.rank(); }
  int64_t size() const { return group_.size(); }
  int64_t number() const { return group_.number_of(epoch_); }  // 1 for the group's first call
  std::byte* workspace() const { return group_.half(rank(), epoch_); }
  // Valid once the flag that covers the bytes has been waited for.
  const std::byte* workspace_of(int64_t peer) const { return group_.half(peer, epoch_); }

  // Tells peers that wait for `flag`, one of SymmetricGroup::kNumFlags, that everything this rank
  // has written to its workspace so far can be read.
  void signal(int64_t flag);
  // Returns when `peer` has signalled `flag` in this call. Throws CommunicationError, naming rank,
  // peer and op, if the peer died, failed or made a different call, or if the time is up.
  void wait(int64_t peer, int64_t flag);
  // Returns when every peer has started this call. Throws as wait() does.
  void compare();

 private:
  void compare_with(int64_t peer);
  [[noreturn]] void refuse(int64_t workspace_bytes);
  void publish(const CallSignature& signature);
  void wait_for(int64_t peer, const EpochFlag& flag, Epoch epoch, const char* what);
  void note(std::optional<NotedWait>& noted, int64_t peer, const char* what,
            std::chrono::duration<double> elapsed) const;

  SymmetricGroup& group_;
  std::unique_lock<std::mutex> lock_;
  CallSignature signature_;
  Epoch epoch_;
  int exceptions_at_start_;
  std::vector<bool> checked_;  // peers whose signature has been compared
};

}  // namespace axonn::comm
