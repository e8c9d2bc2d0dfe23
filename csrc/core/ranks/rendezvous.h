// Lets the ranks of a group tell each other who and where they are, through a store.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/ranks/key_value_store.h"

namespace axonn::comm {

// Returns the value of `key` once it is set. It polls, less and less often: the store's own get
// would wait for the whole timeout of the store, and keep its connection from other threads. A wait
// of seconds polls a few times per second, and less often the more ranks wait on one store. `check`
// is called between polls with the time waited so far, and ends the wait by throwing.
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

// The keys of one rendezvous in the store. A name may be reused after its process group was
// destroyed, so each rendezvous has a number.
class Rendezvous {
 public:
  // Returns why a peer will never come, or an empty string if it still may.
  using Obstacle = std::function<std::string(int64_t peer)>;

  Rendezvous(RendezvousOptions options, KeyValueStore& store);

  // Returns every rank's value of `what`, in rank order; collective. Throws CommunicationError,
  // naming the missing ranks, if some do not arrive within the timeout, or as soon as there is an
  // obstacle.
  std::vector<std::string> exchange(
      const std::string& what, const std::string& value,
      const Obstacle& obstacle = [](int64_t) { return ""; });

  // Returns whether all ranks give the same value of `what`; collective. A rank accesses the store
  // only a few times, whatever the size of the group. Throws as above.
  bool all_say(const std::string& what, const std::string& value);

 private:
  std::string key(const std::string& what, int64_t rank) const;
  // Once the time is up, throws the error about the ranks, from `first` on, that have not set
  // `what`.
  void check_time(const std::string& what, int64_t first, std::chrono::duration<double> waited);
  // Names these ranks. The first rank to ask looks them up, and tells the others.
  std::string named_missing(const std::string& what, int64_t first);
  std::vector<int64_t> missing(const std::string& what, int64_t first);
  std::string where() const;  // the beginning of messages
  [[noreturn]] void fail(const std::string& problem) const;

  RendezvousOptions options_;
  std::string prefix_;
  KeyValueStore& store_;
};

}  // namespace axonn::comm
