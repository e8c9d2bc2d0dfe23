#include "core/symmetric_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>

#include "core/bounded_wait.h"
#include "core/errors.h"

namespace axonn::comm {

struct SymmetricGroup::Pad {
  EpochFlag started;
  EpochFlag completed;
  EpochFlag failed;  // of the failed call; 0: none
  CallSignature signature[2];
  EpochFlag ready[kNumFlags];
};

namespace {

constexpr int64_t kPadBytes = int64_t{256} << 10;
// Flags older than 2^31 epochs would compare as new: long before that the owner renews all of them.
constexpr Epoch kRenewInterval = Epoch{1} << 30;

// What a rank publishes about its arena.
struct Address {
  std::string host;
  int64_t pid;
  int64_t fd;

  std::string encode() const {
    std::ostringstream out;
    out << pid << ' ' << fd << ' ' << host;
    return out.str();
  }
  static Address decode(const std::string& text) {
    Address address{};
    std::istringstream in(text);
    in >> address.pid >> address.fd;
    in.ignore(1);
    std::getline(in, address.host);
    return address;
  }
};

// The part of the store that one rendezvous uses: a name may be used again after its process group
// was destroyed, so each rendezvous counts itself.
class RendezvousKeys {
 public:
  RendezvousKeys(const GroupOptions& options, KeyValueStore& store)
      : options_(options), store_(store), prefix_("axonn/" + options.name + "/") {
    const auto own = std::to_string(options.rank);
    prefix_ += std::to_string(store.add(prefix_ + "count/" + own, 1)) + "/";
  }

  // Every rank's value of `what`, by rank.
  std::vector<std::string> exchange(const std::string& what, const std::string& value) {
    store_.set(key(what, options_.rank), value);
    std::vector<std::string> values;
    for (int64_t peer = 0; peer < options_.size; ++peer) values.push_back(get(what, peer));
    return values;
  }

 private:
  std::string key(const std::string& what, int64_t rank) const {
    return prefix_ + what + "/" + std::to_string(rank);
  }
  std::string get(const std::string& what, int64_t peer) {
    try {
      return store_.get(key(what, peer));
    } catch (const std::exception& error) {
      throw CommunicationError("rendezvous of group " + options_.name + ": rank " +
                               std::to_string(options_.rank) + " found no " + what + " of rank " +
                               std::to_string(peer) + ": " + error.what());
    }
  }

  const GroupOptions& options_;
  KeyValueStore& store_;
  std::string prefix_;
};

}  // namespace

CallSignature CallSignature::of(const char* op, std::initializer_list<int64_t> arguments) {
  CallSignature signature;
  std::strncpy(signature.op.data(), op, signature.op.size() - 1);
  std::copy_n(arguments.begin(), std::min(arguments.size(), signature.arguments.size()),
              signature.arguments.begin());
  return signature;
}

std::string CallSignature::describe() const {
  std::ostringstream out;
  out << op.data() << '(';
  for (size_t i = 0; i < arguments.size(); ++i) out << (i ? ", " : "") << arguments[i];
  out << ')';
  return out.str();
}

std::unique_ptr<SymmetricGroup> SymmetricGroup::rendezvous(const GroupOptions& options,
                                                           KeyValueStore& store) {
  static_assert(sizeof(Pad) <= kPadBytes);
  const int64_t arena_bytes = kPadBytes + 2 * options.workspace_bytes;
  auto own = SharedSegment::create("axonn:" + options.name, arena_bytes);
  RendezvousKeys keys(options, store);
  const Address address{host_identity(), getpid(), own.fd()};

  std::vector<Address> addresses;
  for (const auto& text : keys.exchange("address", address.encode())) {
    addresses.push_back(Address::decode(text));
  }
  bool mapped = std::all_of(addresses.begin(), addresses.end(),
                            [&](const Address& peer) { return peer.host == address.host; });
  std::unique_ptr<SymmetricGroup> group(new SymmetricGroup(options));
  for (int64_t peer = 0; mapped && peer < options.size; ++peer) {
    const auto pid = static_cast<pid_t>(addresses[peer].pid);
    try {
      group->arenas_.push_back(
          peer == options.rank
              ? std::move(own)
              : SharedSegment::open(pid, static_cast<int>(addresses[peer].fd), arena_bytes));
    } catch (const std::system_error&) {
      mapped = false;  // another container or user: /proc does not let us in
      break;
    }
    group->watches_.emplace_back();
    if (pid != getpid()) group->watches_.back().emplace(pid);
  }
  // Tells the peers, and keeps this rank's descriptor open until all of them have used it.
  const auto answers = keys.exchange("mapping", mapped ? "yes" : "no");
  const bool all = std::all_of(answers.begin(), answers.end(),
                               [](const std::string& answer) { return answer == "yes"; });
  if (!all) group->arenas_.clear();
  if (all) group->arenas_[options.rank].close_descriptor();
  return group;
}

SymmetricGroup::Pad& SymmetricGroup::pad(int64_t rank) const {
  return *reinterpret_cast<Pad*>(arenas_[rank].data());
}

std::byte* SymmetricGroup::half(int64_t rank, Epoch epoch) const {
  return arenas_[rank].data() + kPadBytes + (epoch % 2) * options_.workspace_bytes;
}

void SymmetricGroup::fail_wait(const char* op, int64_t peer, const std::string& why) const {
  throw CommunicationError(std::string(op) + ": rank " + std::to_string(rank()) +
                           " waited for rank " + std::to_string(peer) + " of group " + name() +
                           ", which " + why);
}

Call::Call(SymmetricGroup& group, const CallSignature& signature, int64_t workspace_bytes)
    : group_(group),
      lock_(group.mutex_),
      signature_(signature),
      epoch_(group.epoch_ + 1),
      exceptions_at_start_(std::uncaught_exceptions()),
      checked_(static_cast<size_t>(group.size()), false) {
  const char* op = signature_.op.data();
  if (group_.broken_) {
    throw CommunicationError(std::string(op) + ": group " + group_.name() +
                             " cannot be used any more: an earlier call failed on rank " +
                             std::to_string(rank()));
  }
  if (workspace_bytes > group_.options_.workspace_bytes) {
    throw CommunicationError(std::string(op) + ": needs " + std::to_string(workspace_bytes) +
                             " bytes of symmetric memory, more than the " +
                             std::to_string(group_.options_.workspace_bytes) +
                             " reserved; raise AXONN_SYMMETRIC_MEMORY_BYTES");
  }
  auto& own = group_.pad(rank());
  try {
    for (int64_t peer = 0; peer < size(); ++peer) {
      wait_for(peer, group_.pad(peer).completed, epoch_ - 2, "is two calls behind");
    }
  } catch (...) {  // no destructor runs for a half-built object
    group_.broken_ = true;
    own.failed.raise_to(epoch_);
    throw;
  }
  group_.epoch_ = epoch_;
  group_.used_bytes_ = std::max(group_.used_bytes_, workspace_bytes);
  if (epoch_ % kRenewInterval == 0) {
    for (auto& flag : own.ready) flag.raise_to(epoch_ - 1);
  }
  own.signature[epoch_ % 2] = signature_;
  own.started.raise_to(epoch_);
}

Call::~Call() {
  auto& own = group_.pad(rank());
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    group_.broken_ = true;
    own.failed.raise_to(epoch_);
  } else {
    own.completed.raise_to(epoch_);
  }
}

void Call::signal(int64_t flag) { group_.pad(rank()).ready[flag].raise_to(epoch_); }

void Call::wait(int64_t peer, int64_t flag) {
  const auto& pad = group_.pad(peer);
  if (!checked_[peer]) {
    wait_for(peer, pad.started, epoch_, "has not started this call");
    if (const auto& theirs = pad.signature[epoch_ % 2]; theirs != signature_) {
      group_.fail_wait(signature_.describe().c_str(), peer,
                       "called " + theirs.describe() +
                           " instead: all ranks of a group must make the same calls, in the same "
                           "order, with equal shapes and dtypes");
    }
    checked_[peer] = true;
  }
  wait_for(peer, pad.ready[flag], epoch_, "has not delivered its part");
}

void Call::wait_for(int64_t peer, const EpochFlag& flag, Epoch epoch, const char* what) {
  const char* op = signature_.op.data();
  bounded_wait([&] { return flag.reached(epoch); },
               [&](std::chrono::duration<double> elapsed) {
                 if (group_.pad(peer).failed.value.load(std::memory_order_acquire) != 0) {
                   group_.fail_wait(op, peer, "failed; see the error of that rank");
                 }
                 // A peer may have ended right after it raised the flag: look at the flag once more.
                 const auto& watch = group_.watches_[peer];
                 if (watch && !watch->alive() && !flag.reached(epoch)) {
                   group_.fail_wait(op, peer, "has died");
                 }
                 if (elapsed > group_.options_.timeout) {
                   group_.fail_wait(op, peer,
                                    std::string(what) + " after " +
                                        std::to_string(group_.options_.timeout.count()) +
                                        " s (AXONN_TIMEOUT_SECONDS)");
                 }
               });
}

}  // namespace axonn::comm
