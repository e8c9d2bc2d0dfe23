#include "core/ranks/rendezvous.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "core/ranks/call_log.h"
#include "core/ranks/errors.h"

namespace axonn::comm {

std::string await_value(KeyValueStore& store, const std::string& key,
                        const std::function<void(std::chrono::duration<double>)>& check,
                        int64_t num_ranks) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kShortNap{10'000};
  const auto longest_nap =
      std::chrono::microseconds{250'000} + num_ranks * std::chrono::microseconds{100};
  std::chrono::microseconds nap{50};
  const auto start = Clock::now();
  while (!store.has(key)) {
    const auto waited = Clock::now() - start;
    check(waited);
    std::this_thread::sleep_for(nap);
    const auto share = std::chrono::duration_cast<std::chrono::microseconds>(waited) / 20;
    nap = std::min({2 * nap, std::max(share, kShortNap), longest_nap});
  }
  return store.get(key);
}

Rendezvous::Rendezvous(RendezvousOptions options, KeyValueStore& store)
    : options_(std::move(options)), prefix_("axonn/" + options_.name + "/"), store_(store) {
  if (options_.label.empty()) options_.label = options_.name;
  try {
    const auto count = store.add(prefix_ + "count/" + std::to_string(options_.rank), 1);
    prefix_ += std::to_string(count) + "/";
  } catch (const std::exception& error) {
    throw lost_store(where(), error);
  }
}

std::vector<std::string> Rendezvous::exchange(const std::string& what, const std::string& value,
                                              const Obstacle& obstacle) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> values;
  try {
    store_.set(key(what, options_.rank), value);
    for (int64_t peer = 0; peer < options_.size; ++peer) {
      values.push_back(await_value(store_, key(what, peer), [&](auto) {
        if (const auto why = obstacle(peer); !why.empty() && !store_.has(key(what, peer))) {
          fail("waited for the " + what + " of rank " + std::to_string(peer) + ", which " + why);
        }
        check_time(what, peer, std::chrono::steady_clock::now() - start);
      }));
    }
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    throw lost_store(where(), error);
  }
  return values;
}

// Ranks with equal values count themselves under the value's hash. The last rank to arrive checks
// whether all ranks are counted there.
bool Rendezvous::all_say(const std::string& what, const std::string& value) {
  const auto equal = prefix_ + what + "/equal/" + std::to_string(std::hash<std::string>{}(value));
  const auto answer = prefix_ + what + "/answer";
  try {
    store_.set(key(what, options_.rank), value);  // for messages about missing ranks
    store_.add(equal, 1);
    if (store_.add(prefix_ + what + "/came", 1) == options_.size) {
      store_.set(answer, store_.add(equal, 0) == options_.size ? "yes" : "no");
    }
    return await_value(
               store_, answer, [&](auto waited) { check_time(what, 0, waited); }, options_.size) ==
           "yes";
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    throw lost_store(where(), error);
  }
}

void Rendezvous::check_time(const std::string& what, int64_t first,
                            std::chrono::duration<double> waited) {
  if (waited < options_.timeout) return;
  fail("found no " + what + " of " + named_missing(what, first) + " " +
       after_timeout(options_.timeout.count()));
}

std::string Rendezvous::named_missing(const std::string& what, int64_t first) {
  const auto named = prefix_ + what + "/missing";
  if (store_.add(prefix_ + what + "/askers", 1) == 1) {
    const auto ranks = missing(what, first);
    store_.set(named, ranks.empty() ? "a rank, which has come since" : name_ranks(ranks));
  }
  constexpr std::chrono::seconds kLook{30};
  return await_value(store_, named, [&](auto waited) {
    if (waited > kLook)
      throw CommunicationError(where() + " found no " + what + " of another rank");
  });
}

std::vector<int64_t> Rendezvous::missing(const std::string& what, int64_t first) {
  std::vector<int64_t> ranks;
  for (int64_t peer = first; peer < options_.size; ++peer) {
    if (!store_.has(key(what, peer))) ranks.push_back(peer);
  }
  return ranks;
}

std::string Rendezvous::key(const std::string& what, int64_t rank) const {
  return prefix_ + what + "/" + std::to_string(rank);
}

std::string Rendezvous::where() const {
  return "rendezvous of group " + options_.label + ": rank " + std::to_string(options_.rank);
}

void Rendezvous::fail(const std::string& problem) const {
  throw CommunicationError(where() + " " + problem);
}

}  // namespace axonn::comm
