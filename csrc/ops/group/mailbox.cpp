#include "ops/group/mailbox.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "core/ranks/errors.h"
#include "core/ranks/waits.h"

namespace axonn::ops {
namespace {

// The first character of a text's value. It keeps values from being empty, since some stores do not
// keep empty ones, and distinguishes a text from a failure.
constexpr char kText = '+';
constexpr char kFailure = '-';

}  // namespace

Mailbox::Mailbox(const Group& group, c10::intrusive_ptr<c10d::Store> store, std::string prefix,
                 std::string topic, double timeout_seconds, int64_t call_number)
    : group_(group),
      store_(std::move(store)),
      prefix_(std::move(prefix)),
      topic_(std::move(topic)),
      timeout_seconds_(timeout_seconds),
      call_number_(call_number) {}

template <typename Ask>
auto Mailbox::in_store(Ask&& ask) const {
  try {
    return ask();
  } catch (const std::exception& error) {
    throw comm::lost_store(
        topic_ + ": rank " + std::to_string(group_.rank) + " of group " + group_.label(), error);
  }
}

void Mailbox::post(const std::string& name, const std::string& text) {
  in_store([&] { store_->set(key(name), kText + text); });
  // TCPStore returns before its server has the value. The server answers a client in order, so
  // after this look it has the text.
  posted({name});
  own_.insert(name);
}

void Mailbox::mark(const std::string& name) {
  in_store([&] { store_->set(key(name), std::string(1, kText)); });
}

std::string Mailbox::first(const std::string& name, const std::string& text) {
  return in_store([&] {
    return store_->compareSet(key(name), /*currentValue=*/std::string(), kText + text).substr(1);
  });
}

int64_t Mailbox::count(const std::string& name) {
  return in_store([&] { return store_->add(key(name), 1); });
}

void Mailbox::take_back(const std::string& name) {
  in_store([&] { store_->deleteKey(key(name)); });
}

void Mailbox::fail(const std::vector<std::string>& names, const std::string& reason) noexcept {
  try {
    for (const auto& name : names) {
      if (!own_.contains(name)) store_->set(key(name), kFailure + reason);
    }
  } catch (...) {
    // The error that led here is the one to report; the peers will time out.
  }
}

bool Mailbox::posted(const std::vector<std::string>& names) {
  std::vector<std::string> keys;
  for (const auto& name : names) keys.push_back(key(name));
  return in_store([&] { return store_->check(keys); });
}

std::string Mailbox::read(const std::string& name, int64_t peer) {
  wait(name, peer);
  return text_of(name, peer);
}

std::string Mailbox::read(const std::string& name, const NameOfRank& mark) {
  wait_until_posted(name, comm::all_but(group_.rank, group_.size),
                    [&] { return late_rank(name, mark); });
  return text_of(name, /*peer=*/0);
}

// One rank looks, and tells the others: thousands of ranks that all looked would keep the store
// busy for minutes.
int64_t Mailbox::late_rank(const std::string& name, const NameOfRank& mark) {
  const auto late = name + "/late";
  if (count(name + "/askers") == 1)
    return std::stoll(first(late, std::to_string(first_absent(mark))));
  constexpr std::chrono::milliseconds kNap{100};
  for (int naps = 0; naps < 100 && !posted({late}); ++naps) std::this_thread::sleep_for(kNap);
  if (!posted({late})) return (group_.rank + 1) % group_.size;
  const int64_t told = std::stoll(text_of(late, 0));
  return posted({mark(told)}) ? first_absent(mark) : told;  // it may have come since
}

std::string Mailbox::text_of(const std::string& name, int64_t peer) {
  const auto value = in_store([&] { return store_->get_to_str(key(name)); });
  if (value.empty() || value.front() != kText) {
    refuse(name, peer, "failed: " + value.substr(std::min<size_t>(1, value.size())));
  }
  return value.substr(1);
}

void Mailbox::wait(const std::string& name, int64_t peer) {
  wait_until_posted(name, {peer}, [peer] { return peer; });
}

// Halves the ranks that may be the first without a mark, so that a large group costs few looks.
int64_t Mailbox::first_absent(const NameOfRank& mark) {
  int64_t begin = 0, end = group_.size;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    std::vector<std::string> marks;
    for (int64_t rank = begin; rank <= middle; ++rank) marks.push_back(mark(rank));
    if (posted(marks)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin < group_.size ? begin : (group_.rank + 1) % group_.size;
}

// Polls instead of blocking in the store, because the store's connection is shared with other
// threads and because a peer that went on has to be noticed. A long wait polls less often, and one
// of many ranks, too.
void Mailbox::wait_until_posted(const std::string& name, const std::vector<int64_t>& peers,
                                const std::function<int64_t()>& late) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::microseconds;
  const auto longest_nap = group_.size * microseconds{100} + microseconds{100'000};
  constexpr int kPolls = 20;  // naps are a share of the time that has passed
  microseconds nap{20};
  const auto start = Clock::now();
  std::optional<comm::NotedWait> noted;
  while (!posted({name})) {
    const auto elapsed = Clock::now() - start;
    if (!noted && elapsed > comm::kNotedAfter) {
      noted.emplace(comm::Wait{.group = group_.name,
                               .axis = group_.label(),
                               .call = topic_,
                               .number = call_number_,
                               .peers = peers,
                               .what = peers.size() == 1 ? "has not come to this call"
                                                         : "may not have come to this call",
                               .since = start});
    }
    std::string obstacle =
        group_.shared != nullptr ? group_.shared->obstacle_to_answer(peers.front()) : "";
    if (obstacle.empty() && std::chrono::duration<double>(elapsed).count() > timeout_seconds_) {
      obstacle = "has not answered " + comm::after_timeout(timeout_seconds_);
    }
    // The peer may have posted it right before it ended or went on; that is no error.
    if (!obstacle.empty() && !posted({name})) refuse(name, late(), obstacle);
    std::this_thread::sleep_for(nap);
    const auto share = std::chrono::duration_cast<microseconds>(elapsed) / kPolls;
    nap = std::min({2 * nap, std::max(share, microseconds{2000}), longest_nap});
  }
}

void Mailbox::refuse(const std::string& name, int64_t peer, const std::string& why) const {
  // Messages name what peers exchange, without the rank and the count.
  const auto what = name.substr(0, name.find('/'));
  throw comm::CommunicationError(topic_ + ": rank " + std::to_string(group_.rank) +
                                 " waited for '" + what + "' of rank " + std::to_string(peer) +
                                 " of group " + group_.label() + ", which " + why);
}

}  // namespace axonn::ops
