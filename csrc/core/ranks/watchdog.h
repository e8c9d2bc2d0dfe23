// A thread that watches the calls of several axes, and ends all of them when one fails or is late.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/ranks/call_log.h"

namespace axonn::comm {

// The calls of one axis, which run on one stream, in the order in which they complete.
class WatchedCalls {
 public:
  explicit WatchedCalls(std::shared_ptr<CallLog> log) : log_(std::move(log)) {}

  // The watching thread calls `is_done`, which throws if the call has failed.
  void add(int64_t sequence, const std::string& signature, std::function<bool()> is_done);

  // Removes the calls that are done. Throws CommunicationError for a call that failed or is late.
  void poll(std::chrono::duration<double> timeout);

  CallLog& log() { return *log_; }

 private:
  struct Call {
    int64_t sequence;
    std::string signature;
    std::function<bool()> is_done;
    std::chrono::steady_clock::time_point start;
  };

  std::shared_ptr<CallLog> log_;
  std::mutex mutex_;
  std::deque<Call> calls_;
};

struct WatchdogOptions {
  std::string prefix;  // of the key under which a rank reports its failure
  int64_t rank;        // for messages
  std::chrono::duration<double> timeout = std::chrono::minutes(10);
  std::chrono::duration<double> poll_interval = std::chrono::milliseconds(20);
  std::chrono::duration<double> store_interval = std::chrono::seconds(1);
};

// Returns the interval at which a rank polls a store of num_ranks ranks: long enough that their
// polls, about 6 us each, leave the store idle for nine tenths of the time.
inline std::chrono::duration<double> interval_for(int64_t num_ranks) {
  return std::max<std::chrono::duration<double>>(std::chrono::seconds(1),
                                                 num_ranks * std::chrono::microseconds(100));
}

class Watchdog {
 public:
  // `health` is called at each poll and throws if a communicator has failed. A peer may have
  // aborted that communicator: if a peer has reported why, its report is the failure. `abort` ends
  // every call of every axis; it is called once, at the first failure, on this rank or on a peer.
  // Both run on the watching thread. `store` must outlive this object, and no other thread should
  // wait in it.
  Watchdog(WatchdogOptions options, KeyValueStore& store, std::function<void()> health,
           std::function<void()> abort);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void watch(std::shared_ptr<WatchedCalls> calls);

  // Throws CommunicationError if this rank has failed or if a peer is known here to have failed.
  void check() const;

  // Reports a failure that the issuing thread has encountered. Only the first failure is kept.
  void fail(const std::string& why);

  // Returns why NCCL failed with `error` here: the first failure of this rank or, since a failing
  // peer breaks its communicators, a peer's report. If there is neither, returns `error`.
  std::string reason(const std::string& error);

 private:
  void run();
  void poll();
  void check_health();
  void exchange();
  std::string failure_key() const { return options_.prefix + "/failure"; }

  const WatchdogOptions options_;
  KeyValueStore& store_;
  const std::function<void()> health_, abort_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<WatchedCalls>> calls_;
  std::string failure_;
  bool stop_ = false, aborted_ = false, told_ = false;
  std::thread thread_;
};

}  // namespace axonn::comm
