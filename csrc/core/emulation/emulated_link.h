// An emulated link of a given bandwidth between the ranks of one group on one host. Their
// collectives take as long as on such a link, while their bytes really move through memory.
//
// A transfer of n bytes starts when the last rank has come to it and the transfer before it is
// over, since a link serves one at a time; it lasts n / bandwidth. Each rank notes when it came to
// each transfer, in memory that its peers read, on the clock that all processes of a host share.
// Once the real collective is done, all ranks have come, so that reading the notes needs no wait
// and all ranks compute the same end. A rank sleeps until then: the cores are free for others, and
// what the rank did between start and end was hidden. A transfer is late only where the real
// collective is slower than the link.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/ranks/key_value_store.h"
#include "core/symmetric/shared_segment.h"

namespace axonn::comm {

class EmulatedLink {
 public:
  // Times are in seconds of the steady clock.
  using Time = std::chrono::time_point<std::chrono::steady_clock, std::chrono::duration<double>>;

  struct Options {
    std::string name;
    int64_t rank;
    int64_t size;
    double bytes_per_second;  // that a rank can send
    // Ranks share memory if these are equal. With it a test can imitate several hosts.
    std::string host = host_identity();
    std::chrono::duration<double> timeout = std::chrono::minutes(10);  // of the rendezvous
    std::string label = name;                                          // the name that messages use
  };

  // Collective over the group's ranks. Throws CommunicationError if they are not on one host, or do
  // not come within the timeout.
  static std::unique_ptr<EmulatedLink> rendezvous(const Options& options, KeyValueStore& store);

  // Notes that this rank comes to a transfer, in which it sends `bytes`, and returns its number.
  // All ranks begin the same transfers in the same order, just before the real ones.
  int64_t begin(int64_t bytes);

  // Sleeps until the transfer is over, and returns when that was. Call it once per transfer, after
  // the real one is done on this rank, in any order; transfers that began earlier are timed first.
  Time end(int64_t number);

 private:
  struct Board;
  struct Transfer {
    int64_t number;
    double seconds;
  };

  EmulatedLink(double bytes_per_second, SharedSegment own)
      : bytes_per_second_(bytes_per_second), own_(std::move(own)) {}
  Time last_arrival(int64_t number) const;

  double bytes_per_second_;
  SharedSegment own_;
  std::vector<SharedSegment> boards_;  // of the ranks, for reading
  std::mutex mutex_;
  int64_t num_begun_ = 0;
  Time busy_until_{};
  std::deque<Transfer> untimed_;  // in the order of their start
  std::map<int64_t, Time> ends_;  // of transfers that were timed and not yet asked for
};

}  // namespace axonn::comm
