// An emulated link of a given bandwidth between the ranks of one group on one host. Collectives
// take as long as they would on such a link, although their bytes move through memory.
//
// A transfer of n bytes starts when the last rank has reached it and the previous transfer is over,
// because a link serves one at a time; it lasts n / bandwidth. Each rank notes when it reached each
// transfer, in memory that its peers read, on the clock that all processes of a host share. Once
// the real collective is done, all ranks have reached it, so reading the notes needs no wait and
// all ranks compute the same end. A rank sleeps until then: the cores are free for others, and the
// rank's work between start and end was hidden. A transfer is late only if the real collective is
// slower than the link.
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
    double bytes_per_second;  // the rate at which a rank can send
    // Ranks must have the same host to share memory. A test can imitate several hosts with it.
    std::string host = host_identity();
    std::chrono::duration<double> timeout = std::chrono::minutes(10);  // of the rendezvous
    std::string label = name;                                          // the name that messages use
  };

  // Collective over the group's ranks. Throws CommunicationError if they are not on one host, or do
  // not arrive within the timeout.
  static std::unique_ptr<EmulatedLink> rendezvous(const Options& options, KeyValueStore& store);

  // Notes that this rank has reached a transfer in which it sends `bytes`; returns its number. All
  // ranks begin the same transfers in the same order, just before the real ones.
  int64_t begin(int64_t bytes);

  // Sleeps until the transfer is over, and returns when that was. Call it once per transfer, in any
  // order, after the real one is done on this rank; earlier transfers are timed first.
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
  std::vector<SharedSegment> boards_;  // of all ranks, for reading
  std::mutex mutex_;
  int64_t num_begun_ = 0;
  Time busy_until_{};
  std::deque<Transfer> untimed_;  // in the order of their starts
  std::map<int64_t, Time> ends_;  // of timed transfers whose end() is still to be called
};

}  // namespace axonn::comm
