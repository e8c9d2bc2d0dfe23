#include "core/symmetric/symmetric_group.h"

#include <unistd.h>

#include <sstream>
#include <system_error>
#include <utility>

#include "core/ranks/errors.h"
#include "core/ranks/rendezvous.h"
#include "core/symmetric/futex.h"
#include "core/symmetric/protocol.h"
#include "core/symmetric/signal_pad.h"

namespace axonn::comm {

// A rank's description of its arena, which it publishes to its peers.
struct SymmetricGroup::Address {
  int64_t pid;
  int64_t fd;  // -1 if it has none
  uint64_t nonce;
  int64_t arena_bytes;
  Epoch first_epoch;

  std::string encode() const {
    std::ostringstream out;
    out << pid << ' ' << fd << ' ' << nonce << ' ' << arena_bytes << ' ' << first_epoch;
    return out.str();
  }
  static Address decode(const std::string& text) {
    Address address{};
    std::istringstream in(text);
    in >> address.pid >> address.fd >> address.nonce >> address.arena_bytes >> address.first_epoch;
    return address;
  }
};

namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kPadBytes = int64_t{256} << 10;
constexpr std::chrono::seconds kAnswerTime{5};

}  // namespace

SymmetricGroup::SymmetricGroup(GroupOptions options)
    : options_(std::move(options)), epoch_(options_.first_epoch) {
  // Halves start on page boundaries, whatever size is requested.
  options_.workspace_bytes = (options_.workspace_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

SymmetricGroup::~SymmetricGroup() {
  // A forked child that exits (such as a data loader's worker) has a copy of this object but is not
  // a rank.
  if (process_.is_this() && on_one_host())
    pad(rank()).end.value.store(broken_ ? Pad::kFailed : Pad::kLeft);
}

void SymmetricGroup::abandon() {
  if (!process_.is_this()) return;  // a failure in a fork does not concern its parent
  broken_ = true;
  if (on_one_host()) pad(rank()).end.value.store(Pad::kFailed);
}

int64_t SymmetricGroup::arena_bytes() const {
  static_assert(sizeof(Pad) <= kPadBytes);
  return kPadBytes + 2 * options_.workspace_bytes;
}

// Returns an arena whose flags hold the epoch before the first call's. If that is epoch 0, the
// arena's initial zeros are already right.
SharedSegment SymmetricGroup::create_arena() const {
  const auto name = "axonn:" + options_.name + ":" + std::to_string(rank());
  auto arena = SharedSegment::create(name, arena_bytes());
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
  if (!ranks.all_say("host", options.host)) {
    group->obstacle_ = "its ranks are on several hosts";
    return group;
  }
  // From here on, this rank answers all questions of its peers even if something fails, because
  // they wait for it.
  std::optional<SharedSegment> own;
  std::string obstacle;
  try {
    own.emplace(group->create_arena());
  } catch (const std::system_error& error) {
    obstacle = error.what();
  }
  const Address own_address{.pid = getpid(),
                            .fd = own ? own->fd() : -1,
                            .nonce = own ? own->nonce() : 0,
                            .arena_bytes = group->arena_bytes(),
                            .first_epoch = options.first_epoch};
  std::vector<Address> addresses;
  for (const auto& text : ranks.exchange("address", own_address.encode())) {
    addresses.push_back(Address::decode(text));
  }
  group->check_layouts(addresses);
  group->watch_ranks(addresses);
  if (obstacle.empty()) obstacle = group->map_arenas(addresses, own);
  // Tells the peers the outcome, and keeps this rank's descriptor open until all peers have used
  // it.
  const std::string none = "none";  // not every store keeps an empty value
  const auto start = std::chrono::steady_clock::now();
  const auto answers = ranks.exchange(
      "obstacle", obstacle.empty() ? none : obstacle, [&](int64_t peer) -> std::string {
        const auto& watch = group->watches_[peer];
        if (!watch || watch->alive()) return "";
        // A rank on a clone of this host seems to be dead here, but still answers.
        const auto waited = std::chrono::steady_clock::now() - start;
        return waited < kAnswerTime ? "" : "has died";
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

// Every rank sees all addresses, so all of them throw.
void SymmetricGroup::check_layouts(const std::vector<Address>& addresses) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    const auto& [pid, fd, nonce, bytes, first_epoch] = addresses[peer];
    const auto& first = addresses[0];
    if (bytes == first.arena_bytes && first_epoch == first.first_epoch) continue;
    throw CommunicationError(
        "rendezvous of group " + label() + ": rank " + std::to_string(peer) + " comes with " +
        std::to_string(bytes) + " bytes of symmetric memory, rank 0 with " +
        std::to_string(first.arena_bytes) +
        "; AXONN_SYMMETRIC_MEMORY_BYTES (and the first epoch) must be the same on all ranks");
  }
}

// Ranks are watched before their memory is opened: if a rank has ended by then, nothing else can be
// learned about it.
void SymmetricGroup::watch_ranks(const std::vector<Address>& addresses) {
  watches_.resize(addresses.size());
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    const auto pid = static_cast<pid_t>(addresses[peer].pid);
    if (pid != getpid()) watches_[peer].emplace(pid);
  }
}

// Returns why arenas cannot be mapped, if so: a rank is in another container or belongs to another
// user, so /proc gives no access to its memory; or its host only looks like this one; or there is a
// limit on address space.
std::string SymmetricGroup::map_arenas(const std::vector<Address>& addresses,
                                       std::optional<SharedSegment>& own) {
  for (int64_t peer = 0; peer < size(); ++peer) {
    const auto& address = addresses[peer];
    if (address.fd < 0) return "";  // that rank reports why it has no arena
    const auto pid = static_cast<pid_t>(address.pid);
    try {
      arenas_.push_back(std::make_shared<SharedSegment>(
          peer == rank() ? std::move(*own)
                         : SharedSegment::open(pid, static_cast<int>(address.fd), address.nonce,
                                               arena_bytes())));
    } catch (const std::exception& error) {
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

// Processes share the pad's memory, so no constructor may run on it. All-zero bytes are a valid
// new pad: a new arena holds zeros, and on every supported ABI they are valid atomics with the
// value 0.
SymmetricGroup::Pad& SymmetricGroup::pad(int64_t rank) const {
  return *reinterpret_cast<Pad*>(arenas_[rank]->data());
}

std::byte* SymmetricGroup::half(int64_t rank, Epoch epoch) const {
  return arenas_[rank]->data() + kPadBytes + (epoch % kNumHalves) * options_.workspace_bytes;
}

// Allocates the memory of all halves at once, so that later calls of this size need no allocation,
// whichever half they use.
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

// A sleeper announces itself and then checks the flag once more; this function raises the flag and
// then checks the announcements. All four steps are sequentially consistent, so at least one side
// sees the other.
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

// Returns why `peer` will do nothing more for this group, or an empty string if it still may.
std::string SymmetricGroup::obstacle_so_far(int64_t peer) const {
  const Epoch end = pad(peer).end.value.load(std::memory_order_acquire);
  if (end == Pad::kFailed) return "failed; see the error of that rank";
  if (end == Pad::kLeft) return "has left the group";
  if (const auto& watch = watches_[peer]; watch && !watch->alive()) return "has died";
  return "";
}

// Returns why waiting for `peer` has become pointless, or an empty string to go on waiting.
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

CallProgress SymmetricGroup::progress() const {
  const std::lock_guard lock(progress_mutex_);
  const Epoch epoch = epoch_;
  const Pad& own = pad(rank());
  const auto completed = own.completed.value.load(std::memory_order_relaxed);
  return {number_of(epoch), number_of(completed), own.signature[epoch % kNumHalves].describe()};
}

int64_t SymmetricGroup::failed_peer() const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (peer != rank() && pad(peer).end.value.load(std::memory_order_acquire) == Pad::kFailed)
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
  // This check comes first, because a fork copies a lock in whatever state it is in.
  if (!process_.is_this()) process_.refuse(call.op(), rank(), label());
  return std::unique_lock(mutex_);
}

}  // namespace axonn::comm
