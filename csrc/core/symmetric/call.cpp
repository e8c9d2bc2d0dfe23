// Implements one collective of a SymmetricGroup, and the comparison of calls between ranks.
#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>

#include "core/ranks/errors.h"
#include "core/symmetric/bounded_wait.h"
#include "core/symmetric/protocol.h"
#include "core/symmetric/signal_pad.h"
#include "core/symmetric/symmetric_group.h"

namespace axonn::comm {
namespace {

// Flags older than 2^31 epochs would compare as new, so the owner renews all of them long before
// that.
constexpr Epoch kRenewInterval = Epoch{1} << 30;

void check_flag(int64_t flag) {
  if (flag < 0 || flag >= SymmetricGroup::kNumFlags) {
    throw std::out_of_range("flag " + std::to_string(flag) + " of " +
                            std::to_string(SymmetricGroup::kNumFlags));
  }
}

}  // namespace

CallSignature CallSignature::of(std::string_view text) {
  CallSignature signature;
  const size_t room = signature.text.size() - 1;
  std::memcpy(signature.text.data(), text.data(), std::min(text.size(), room));
  if (text.size() > room) {
    std::ostringstream end;
    end << "... #" << std::hex << std::hash<std::string_view>()(text);
    const auto hash = end.str();
    std::memcpy(signature.text.data() + room - hash.size(), hash.data(), hash.size());
  }
  return signature;
}

CallSignature CallSignature::of(const char* op, std::initializer_list<int64_t> arguments) {
  std::string text = std::string(op) + "(";
  for (const int64_t argument : arguments) {
    text += (text.back() == '(' ? "" : ", ") + std::to_string(argument);
  }
  return of(text + ")");
}

std::string CallSignature::op() const {
  const std::string whole = describe();
  return whole.substr(0, whole.find_first_of(" ("));
}

Call::Call(SymmetricGroup& group, const CallSignature& signature, int64_t workspace_bytes)
    : group_(group),
      lock_(group.lock_for(signature)),
      signature_(signature),
      epoch_(group.epoch_ + 1),
      exceptions_at_start_(std::uncaught_exceptions()),
      checked_(static_cast<size_t>(group.size()), false) {
  if (group_.broken_) throw group_is_broken(signature_.op(), group_.label(), rank());
  auto& own = group_.pad(rank());
  try {
    for (int64_t peer = 0; peer < size(); ++peer) {
      wait_for(peer, group_.pad(peer).completed, epoch_to_await(epoch_), "is two calls behind");
    }
    if (workspace_bytes <= group_.options_.workspace_bytes) {
      group_.note_use(workspace_bytes, signature_);
    }
  } catch (...) {  // no destructor runs for a half-built object
    group_.abandon();
    throw;
  }
  if (workspace_bytes > group_.options_.workspace_bytes) refuse(workspace_bytes);
  // A peer may still be in the previous call, so the flags get that call's epoch, not an older one.
  if (epoch_ % kRenewInterval == 0) {
    for (auto& flag : own.ready) flag.raise_to(epoch_ - 1);
  }
  publish(signature_);
  group_.raise(own.started, epoch_);
}

void Call::publish(const CallSignature& signature) {
  const std::lock_guard lock(group_.progress_mutex_);
  group_.epoch_ = epoch_;
  group_.pad(rank()).signature[epoch_ % kNumHalves] = signature;
}

// Gives up this call without breaking the group. The call counts as made, under a signature that no
// peer shares, so a peer that waits for this rank in it gets an error at once.
void Call::refuse(int64_t workspace_bytes) {
  auto& own = group_.pad(rank());
  const std::string op = signature_.op();
  publish(CallSignature::of(("[too large] " + op).c_str(), {workspace_bytes}));
  group_.raise(own.started, epoch_);
  group_.raise(own.completed, epoch_);
  throw CallRefused(op + ": needs " + std::to_string(workspace_bytes) +
                    " bytes of symmetric memory, more than the " +
                    std::to_string(group_.options_.workspace_bytes) +
                    " reserved; raise AXONN_SYMMETRIC_MEMORY_BYTES");
}

Call::~Call() {
  auto& own = group_.pad(rank());
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    group_.abandon();
  } else {
    group_.raise(own.completed, epoch_);
  }
}

void Call::signal(int64_t flag) {
  check_flag(flag);
  group_.raise(group_.pad(rank()).ready[flag], epoch_);
}

void Call::wait(int64_t peer, int64_t flag) {
  check_flag(flag);
  compare_with(peer);
  wait_for(peer, group_.pad(peer).ready[flag], epoch_, "has not delivered its part");
}

// Each rank begins with the ranks after it, so that they do not all read the same pad at once.
void Call::compare() {
  for (int64_t step = 1; step < size(); ++step) compare_with((rank() + step) % size());
}

void Call::compare_with(int64_t peer) {
  if (checked_[peer]) return;
  const auto& pad = group_.pad(peer);
  wait_for(peer, pad.started, epoch_, "has not started this call");
  if (const auto& theirs = pad.signature[epoch_ % kNumHalves]; theirs != signature_) {
    const auto own = signature_.describe();
    group_.fail_wait(own, peer, called_instead(theirs.describe(), own));
  }
  checked_[peer] = true;
}

void Call::wait_for(int64_t peer, const EpochFlag& flag, Epoch epoch, const char* what) {
  std::optional<NotedWait> noted;
  const auto waited =
      bounded_wait([&] { return flag.reached(epoch); },
                   [&](std::chrono::nanoseconds timeout) { group_.sleep(flag, epoch, timeout); },
                   [&](std::chrono::duration<double> elapsed) {
                     if (!noted && elapsed > kNotedAfter) note(noted, peer, what, elapsed);
                     const std::string obstacle = group_.obstacle_to_waiting(peer, elapsed, what);
                     // The peer may have raised the flag right before it ended; that is no error.
                     if (!obstacle.empty() && !flag.reached(epoch)) {
                       group_.fail_wait(signature_.op(), peer, obstacle);
                     }
                   },
                   group_.crowding_);
  if (waited.count() > 0) group_.waited_ns_ += waited.count();
}

void Call::note(std::optional<NotedWait>& noted, int64_t peer, const char* what,
                std::chrono::duration<double> elapsed) const {
  noted.emplace(Wait{
      .group = group_.name(),
      .axis = group_.label(),
      .call = signature_.describe(),
      .number = number(),
      .peers = {peer},
      .what = what,
      .since = WaitClock::now() - std::chrono::duration_cast<WaitClock::duration>(elapsed),
  });
}

}  // namespace axonn::comm
