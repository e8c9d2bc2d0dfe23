#include "core/emulation/emulated_link.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/ranks/errors.h"
#include "core/ranks/rendezvous.h"

namespace axonn::comm {

namespace {

// A rank may be this many transfers ahead of a peer. Beyond that, an arrival would be read too late
// and the transfer would take longer; but no program has that many in flight.
constexpr int64_t kSlots = 1024;

}  // namespace

struct EmulatedLink::Board {
  std::array<std::atomic<double>, kSlots> came;  // seconds of the steady clock
  static_assert(std::atomic<double>::is_always_lock_free, "other processes read it");
};

std::unique_ptr<EmulatedLink> EmulatedLink::rendezvous(const Options& options,
                                                       KeyValueStore& store) {
  Rendezvous ranks({"link/" + options.name, options.rank, options.size, options.timeout,
                    options.label + " (its emulated link)"},
                   store);
  std::unique_ptr<EmulatedLink> link(
      new EmulatedLink(options.bytes_per_second,
                       SharedSegment::create("axonn-link:" + options.name, sizeof(Board))));
  std::ostringstream address;
  address << getpid() << ' ' << link->own_.fd() << ' ' << link->own_.nonce() << ' ' << options.host;
  const auto addresses = ranks.exchange("address", address.str());
  for (int64_t peer = 0; peer < options.size; ++peer) {
    std::istringstream in(addresses[peer]);
    pid_t pid = 0;
    int fd = 0;
    uint64_t nonce = 0;
    std::string host;
    in >> pid >> fd >> nonce;
    in.ignore(1);
    std::getline(in, host);
    if (host != options.host) {
      throw CommunicationError("emulated link of group " + options.label + ": ranks " +
                               std::to_string(options.rank) + " and " + std::to_string(peer) +
                               " are not on one host");
    }
    link->boards_.push_back(SharedSegment::open(pid, fd, nonce, sizeof(Board)));
  }
  ranks.exchange("mapped", "yes");  // the descriptor must stay open until then
  link->own_.close_descriptor();
  return link;
}

int64_t EmulatedLink::begin(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const int64_t number = num_begun_++;
  untimed_.push_back({number, static_cast<double>(bytes) / bytes_per_second_});
  const Time now = std::chrono::steady_clock::now();
  auto& board = *reinterpret_cast<Board*>(own_.data());
  board.came[number % kSlots].store(now.time_since_epoch().count());
  return number;
}

EmulatedLink::Time EmulatedLink::end(int64_t number) {
  Time end;
  {
    const std::lock_guard lock(mutex_);
    while (!untimed_.empty() && untimed_.front().number <= number) {
      const Transfer transfer = untimed_.front();
      untimed_.pop_front();
      busy_until_ = std::max(busy_until_, last_arrival(transfer.number)) +
                    std::chrono::duration<double>(transfer.seconds);
      ends_.emplace(transfer.number, busy_until_);
    }
    const auto found = ends_.find(number);
    if (found == ends_.end()) {
      throw std::logic_error("EmulatedLink: transfer " + std::to_string(number) +
                             " is not under way");
    }
    end = found->second;
    ends_.erase(found);
  }
  std::this_thread::sleep_until(end);
  return end;
}

// Returns when the last rank reached the transfer. The real collective is done, so every rank has
// reached it.
EmulatedLink::Time EmulatedLink::last_arrival(int64_t number) const {
  double last = 0;
  for (const auto& segment : boards_) {
    const auto& board = *reinterpret_cast<const Board*>(segment.data());
    last = std::max(last, board.came[number % kSlots].load());
  }
  return Time(std::chrono::duration<double>(last));
}

}  // namespace axonn::comm
