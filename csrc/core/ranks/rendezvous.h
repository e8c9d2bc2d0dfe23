// Lets the ranks of a group tell each other who and where they are, through a store.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/ranks/key_value_store.h"

namespace axonn::comm {

// Returns the value of `key` once it is set. It polls, less and less often: a store's own get would
// wait for as long as the store's timeout, and keep its connection from other threads. A wait of
// seconds polls a few times per second, and less often the more ranks wait at one store. `check` is
// called between two polls with the time waited so far, and ends the wait by throwing.
std::string await_value(KeyValueStore& store, const std::string& key,
                        const std::function<void(std::chrono::duration<double>)>& check,
                        int64_t num_ranks = 1);

struct RendezvousOptions {
  std::string name;
  int64_t rank;
  int64_t size;
  std::chrono::duration<double> timeout = std::chrono::minutes(10);  // of each exchange
  std::string label = {};  // the name that messages use, if not `name`
};

// The keys of the store that one rendezvous uses. A name may be used again after its process group
// was destroyed, so each rendezvous has a number.
class Rendezvous {
 public:
  // Returns why a peer will never come, or an empty text if it may.
  using Obstacle = std::function<std::string(int64_t peer)>;

  Rendezvous(RendezvousOptions options, KeyValueStore& store);

  // Returns every rank's value of `what`, by rank; collective. Throws CommunicationError, naming
  // the ranks that are missing, if some do not arrive within the timeout, or as soon as there is an
  // obstacle.
  std::vector<std::string> exchange(
      const std::string& what, const std::string& value,
      const Obstacle& obstacle = [](int64_t) { return ""; });

  // Returns whether all ranks give the same value of `what`; collective. A rank uses the store a
  // few times, whatever the size of the group. Throws as above.
  bool all_say(const std::string& what, const std::string& value);

 private:
  std::string key(const std::string& what, int64_t rank) const;
  // Throws, once the time is up, the error about the ranks that have not set `what`, from `first`
  // on.
  void check_time(const std::string& what, int64_t first, std::chrono::duration<double> waited);
  // Names these ranks. The first rank that asks looks, and tells the others.
  std::string named_missing(const std::string& what, int64_t first);
  std::vector<int64_t> missing(const std::string& what, int64_t first);
  std::string where() const;  // the beginning of messages
  [[noreturn]] void fail(const std::string& problem) const;

  RendezvousOptions options_;
  std::string prefix_;
  KeyValueStore& store_;
};

}  // namespace axonn::comm
