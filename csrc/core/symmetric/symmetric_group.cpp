#include "core/symmetric/symmetric_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>

#include "core/ranks/errors.h"
#include "core/ranks/rendezvous.h"
#include "core/symmetric/bounded_wait.h"
#include "core/symmetric/futex.h"
#include "core/symmetric/protocol.h"

namespace axonn::comm {

struct SymmetricGroup::Pad {
  EpochFlag started;
  EpochFlag completed;
  SharedWord end;       // 0, kFailed or kLeft
  SharedWord sleeping;  // 1 while this rank sleeps until some peer's flag is raised
  CallSignature signature[kNumHalves];
  EpochFlag ready[kNumFlags];
};

// What a rank publishes about its arena.
struct SymmetricGroup::Address {
  int64_t pid;
  int64_t fd;  // -1: it has none
  int64_t arena_bytes;
  Epoch first_epoch;
  std::string host;

  std::string encode() const {
    std::ostringstream out;
    out << pid << ' ' << fd << ' ' << arena_bytes << ' ' << first_epoch << ' ' << host;
    return out.str();
  }
  static Address decode(const std::string& text) {
    Address address{};
    std::istringstream in(text);
    in >> address.pid >> address.fd >> address.arena_bytes >> address.first_epoch;
    in.ignore(1);
    std::getline(in, address.host);
    return address;
  }
};

namespace {

// How a rank's part in its group ended; 0 while it has not.
constexpr Epoch kFailed = 1;  // a call was left by an exception
constexpr Epoch kLeft = 2;    // the group was destroyed

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kPadBytes = int64_t{256} << 10;
// Flags older than 2^31 epochs would compare as new: long before that the owner renews all of them.
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

SymmetricGroup::SymmetricGroup(GroupOptions options)
    : options_(std::move(options)), epoch_(options_.first_epoch) {
  // Halves start on pages of their own, whatever size was asked for.
  options_.workspace_bytes = (options_.workspace_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

SymmetricGroup::~SymmetricGroup() {
  // A forked child (a data loader's worker) that exits has a copy of this object, but is no rank.
  if (process_.is_this() && on_one_host()) pad(rank()).end.value.store(broken_ ? kFailed : kLeft);
}

void SymmetricGroup::abandon() {
  if (!process_.is_this()) return;  // a fork's failure is not its parent's
  broken_ = true;
  if (on_one_host()) pad(rank()).end.value.store(kFailed);
}

int64_t SymmetricGroup::arena_bytes() const {
  static_assert(sizeof(Pad) <= kPadBytes);
  return kPadBytes + 2 * options_.workspace_bytes;
}

// An arena whose flags stand at the epoch before the first call's. For epoch 0 its zeros will do.
SharedSegment SymmetricGroup::create_arena() const {
  auto arena = SharedSegment::create("axonn:" + options_.name, arena_bytes());
  if (epoch_ != 0) {
    auto& pad = *reinterpret_cast<Pad*>(arena.data());
    pad.started.raise_to(epoch_);
    pad.completed.raise_to(epoch_);
    for (auto& flag : pad.ready) flag.raise_to(epoch_);
  }
  return arena;
}

std::unique_ptr<SymmetricGroup> SymmetricGroup::rendezvous(const GroupOptions& options,
                                                           KeyValueStore& store) {
  std::unique_ptr<SymmetricGroup> group(new SymmetricGroup(options));
  Rendezvous ranks({options.name, options.rank, options.size, options.timeout, options.label},
                   store);
  // From here on this rank answers every question of its peers, whatever fails: they wait for it.
  std::optional<SharedSegment> own;
  std::string obstacle;
  try {
    own.emplace(group->create_arena());
  } catch (const std::system_error& error) {
    obstacle = error.what();
  }
  const int own_fd = own ? own->fd() : -1;
  std::vector<Address> addresses;
  for (const auto& text : ranks.exchange("address", Address{getpid(), own_fd, group->arena_bytes(),
                                                            options.first_epoch, options.host}
                                                        .encode())) {
    addresses.push_back(Address::decode(text));
  }
  group->check_layouts(addresses);
  group->watch_ranks(addresses);
  if (obstacle.empty()) obstacle = group->map_arenas(addresses, own);
  // Tells the peers, and keeps this rank's descriptor open until all of them have used it.
  const std::string none = "none";  // not every store keeps an empty value
  const auto answers = ranks.exchange("obstacle", obstacle.empty() ? none : obstacle,
                                      [&](int64_t peer) -> std::string {
                                        const auto& watch = group->watches_[peer];
                                        return watch && !watch->alive() ? "has died" : "";
                                      });
  for (int64_t peer = 0; peer < options.size; ++peer) {
    if (answers[peer] == none) continue;
    group->obstacle_ = "rank " + std::to_string(peer) + ": " + answers[peer];
    group->arenas_.clear();
    group->watches_.clear();
    return group;
  }
  group->arenas_[options.rank]->close_descriptor();
  return group;
}

// Every rank sees all addresses, so that all of them throw.
void SymmetricGroup::check_layouts(const std::vector<Address>& addresses) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    const auto& [pid, fd, bytes, first_epoch, host] = addresses[peer];
    const auto& first = addresses[0];
    if (bytes == first.arena_bytes && first_epoch == first.first_epoch) continue;
    throw CommunicationError(
        "rendezvous of group " + label() + ": rank " + std::to_string(peer) + " comes with " +
        std::to_string(bytes) + " bytes of symmetric memory, rank 0 with " +
        std::to_string(first.arena_bytes) +
        "; AXONN_SYMMETRIC_MEMORY_BYTES (and the first epoch) must be the same on all ranks");
  }
}

// Before their memory is opened: of a rank that has ended by then, that is all one learns.
void SymmetricGroup::watch_ranks(const std::vector<Address>& addresses) {
  watches_.resize(addresses.size());
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    const auto pid = static_cast<pid_t>(addresses[peer].pid);
    if (addresses[peer].host == options_.host && pid != getpid()) watches_[peer].emplace(pid);
  }
}

// Returns what stopped it: another host, container or user, whose memory /proc does not let us
// into; or a limit on address space.
std::string SymmetricGroup::map_arenas(const std::vector<Address>& addresses,
                                       std::optional<SharedSegment>& own) {
  for (int64_t peer = 0; peer < size(); ++peer) {
    const auto& address = addresses[peer];
    if (address.host != options_.host) {
      return "is on another host than rank " + std::to_string(peer);
    }
    if (address.fd < 0) return "";  // that rank tells why it has no arena
    const auto pid = static_cast<pid_t>(address.pid);
    try {
      arenas_.push_back(std::make_shared<SharedSegment>(
          peer == rank() ? std::move(*own)
                         : SharedSegment::open(pid, static_cast<int>(address.fd), arena_bytes())));
    } catch (const std::system_error& error) {
      return error.what();
    }
  }
  return "";
}

std::vector<std::unique_ptr<SymmetricGroup>> SymmetricGroup::of_threads(GroupOptions options) {
  std::vector<std::unique_ptr<SymmetricGroup>> groups;
  std::vector<std::shared_ptr<SharedSegment>> arenas;
  for (options.rank = 0; options.rank < options.size; ++options.rank) {
    groups.emplace_back(new SymmetricGroup(options));
    arenas.push_back(std::make_shared<SharedSegment>(groups.back()->create_arena()));
    arenas.back()->close_descriptor();
  }
  for (const auto& group : groups) {
    group->arenas_ = arenas;
    group->watches_.resize(arenas.size());
  }
  return groups;
}

// The pad is memory that other processes share, so no constructor can run on it: all-zero bytes
// stand for it, which is what a new arena holds and what the atomics of every supported ABI are.
SymmetricGroup::Pad& SymmetricGroup::pad(int64_t rank) const {
  return *reinterpret_cast<Pad*>(arenas_[rank]->data());
}

std::byte* SymmetricGroup::half(int64_t rank, Epoch epoch) const {
  return arenas_[rank]->data() + kPadBytes + (epoch % kNumHalves) * options_.workspace_bytes;
}

// Takes the memory for all halves at once: the next calls of this size, whichever half they fall
// on, need not.
void SymmetricGroup::note_use(int64_t workspace_bytes, const CallSignature& call) {
  const int64_t before = used_half_bytes_;
  if (workspace_bytes <= before) return;
  for (Epoch index = 0; index < kNumHalves; ++index) {
    const auto offset = half(rank(), index) - arenas_[rank()]->data();
    arenas_[rank()]->populate(offset + before, workspace_bytes - before);
  }
  used_half_bytes_ = workspace_bytes;
  if (options_.on_growth) options_.on_growth(*this, call.op());
}

// A sleeper announces itself and then looks at the flag once more; here the flag is raised and then
// the announcements are looked at. All four are sequentially consistent, so one sees the other.
void SymmetricGroup::raise(EpochFlag& flag, Epoch epoch) const {
  flag.raise_to(epoch);
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (peer != rank() && pad(peer).sleeping.value.load(std::memory_order_seq_cst) != 0) {
      return futex_wake(flag.value);
    }
  }
}

void SymmetricGroup::sleep(const EpochFlag& flag, Epoch epoch,
                           std::chrono::nanoseconds timeout) const {
  auto& sleeping = pad(rank()).sleeping;
  sleeping.value.store(1);
  const Epoch value = flag.value.load(std::memory_order_seq_cst);
  if (!epoch_reached(value, epoch)) futex_wait(flag.value, value, timeout);
  sleeping.value.store(0);
}

// Why `peer` will do nothing more for this group; empty: it may.
std::string SymmetricGroup::obstacle_so_far(int64_t peer) const {
  const Epoch end = pad(peer).end.value.load(std::memory_order_acquire);
  if (end == kFailed) return "failed; see the error of that rank";
  if (end == kLeft) return "has left the group";
  if (const auto& watch = watches_[peer]; watch && !watch->alive()) return "has died";
  return "";
}

// Why there is no point in waiting for `peer` any longer; empty: wait on.
std::string SymmetricGroup::obstacle_to_waiting(int64_t peer, std::chrono::duration<double> elapsed,
                                                const char* what) const {
  if (auto obstacle = obstacle_so_far(peer); !obstacle.empty()) return obstacle;
  if (elapsed <= options_.timeout) return "";
  return std::string(what) + " " + after_timeout(options_.timeout.count());
}

std::string SymmetricGroup::obstacle_to_answer(int64_t peer) const {
  if (auto obstacle = obstacle_so_far(peer); !obstacle.empty()) return obstacle;
  const auto& theirs = pad(peer);
  const Epoch next = epoch_ + 1;
  if (!theirs.started.reached(next)) return "";
  return "has gone on to " + theirs.signature[next % kNumHalves].describe();
}

int64_t SymmetricGroup::failed_peer() const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (peer != rank() && pad(peer).end.value.load(std::memory_order_acquire) == kFailed)
      return peer;
  }
  return -1;
}

std::string SymmetricGroup::lost_peer() const {
  int64_t lost = failed_peer();
  for (int64_t peer = 0; lost < 0 && peer < size(); ++peer) {
    if (peer != rank() && !obstacle_so_far(peer).empty()) lost = peer;
  }
  return lost < 0 ? "" : "rank " + std::to_string(lost) + ", which " + obstacle_so_far(lost);
}

void SymmetricGroup::fail_wait(const std::string& what, int64_t peer,
                               const std::string& why) const {
  throw CommunicationError(waited_for(what, rank(), peer, label()) + why);
}

std::unique_lock<std::mutex> SymmetricGroup::lock_for(const CallSignature& call) {
  // First: a fork copies a lock as it is.
  if (!process_.is_this()) process_.refuse(call.op(), rank(), label());
  return std::unique_lock(mutex_);
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
  group_.epoch_ = epoch_;
  if (workspace_bytes > group_.options_.workspace_bytes) refuse(workspace_bytes);
  // A peer may still be in the call before: to it, the flags must not go back behind that one.
  if (epoch_ % kRenewInterval == 0) {
    for (auto& flag : own.ready) flag.raise_to(epoch_ - 1);
  }
  own.signature[epoch_ % kNumHalves] = signature_;
  group_.raise(own.started, epoch_);
}

// Gives this call up without breaking the group: it counts as made, under a signature that no peer
// shares, so that a peer that does wait for this rank gets an error at once.
void Call::refuse(int64_t workspace_bytes) {
  auto& own = group_.pad(rank());
  const std::string op = signature_.op();
  own.signature[epoch_ % kNumHalves] =
      CallSignature::of(("[too large] " + op).c_str(), {workspace_bytes});
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

// Those that follow this rank first, so that not all look at one.
void Call::compare() {
  for (int64_t step = 1; step < size(); ++step) compare_with((rank() + step) % size());
}

void Call::compare_with(int64_t peer) {
  if (checked_[peer]) return;
  const auto& pad = group_.pad(peer);
  wait_for(peer, pad.started, epoch_, "has not started this call");
  if (const auto& theirs = pad.signature[epoch_ % kNumHalves]; theirs != signature_) {
    group_.fail_wait(signature_.describe(), peer, called_instead(theirs.describe()));
  }
  checked_[peer] = true;
}

void Call::wait_for(int64_t peer, const EpochFlag& flag, Epoch epoch, const char* what) {
  const auto waited =
      bounded_wait([&] { return flag.reached(epoch); },
                   [&](std::chrono::nanoseconds timeout) { group_.sleep(flag, epoch, timeout); },
                   [&](std::chrono::duration<double> elapsed) {
                     const std::string obstacle = group_.obstacle_to_waiting(peer, elapsed, what);
                     // The peer may have raised the flag right before it ended: then all is well.
                     if (!obstacle.empty() && !flag.reached(epoch)) {
                       group_.fail_wait(signature_.op(), peer, obstacle);
                     }
                   },
                   group_.crowding_);
  if (waited.count() > 0) group_.waited_ns_ += waited.count();
}

}  // namespace axonn::comm
