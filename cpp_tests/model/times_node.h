// One rank of a node during a call: its host, its compute stream, its copy engines and its outgoing
// link. All ranks do the same at the same time, so no other rank is modelled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model/times_rates.h"
#include "model/times_timeline.h"

namespace axonn::times {

// Whether calls follow each other so closely that the host has enqueued an entire call before the
// previous one ends, or a call finds the host and the GPU idle.
enum class Host { kAhead, kIdle };

// How a flag is raised after a copy.
enum class Raise { kHostWord, kDeviceWord, kWrittenValue };

class Node {
 public:
  Node(const Rates& rates, Host host, int num_engines = 1)
      : rates_(rates), host_(host), engines_(static_cast<std::size_t>(num_engines)) {}

  const Rates& rates() const { return rates_; }
  Server& out() { return out_; }
  double now() const { return compute_us_; }  // when the compute stream's work ends
  double host_us() const { return host_queue_.busy_us(); }

  // Keeps the host busy for `for_us`. Returns when the work that it enqueues by then can start.
  double enqueue(double for_us) {
    const Interval spent = host_queue_.serve(0, for_us);
    return host_ == Host::kAhead ? 0 : spent.end;
  }

  // Returns when a kernel begins that is enqueued at `enqueued_us`.
  double kernel_begin(double enqueued_us) const {
    return std::max(compute_us_, enqueued_us) + rates_.kernel_us;
  }
  // Runs a kernel, or other work of the compute stream, until `end_us`.
  void until(double end_us) { compute_us_ = std::max(compute_us_, end_us); }
  void kernel(double for_us) { until(kernel_begin(enqueue(rates_.host_launch_us)) + for_us); }

  // Copies within the GPU on the compute stream.
  void copy(int64_t bytes) {
    const double ready = std::max(compute_us_, enqueue(rates_.host_copy_us));
    until(ready + rates_.copy_us + us_of(2 * static_cast<double>(bytes), rates_.hbm_gbps));
  }

  // Pushes bytes to a peer and raises a flag there. Returns when the peer can see the flag.
  double push(std::size_t queue, double ready_us, int64_t bytes, Raise raise_by) {
    Server& engine = engines_[queue % engines_.size()];
    const double begin = std::max(ready_us, enqueue(rates_.host_copy_us));
    const Interval started = engine.serve(begin, rates_.copy_us);
    const double copy_us = us_of(static_cast<double>(bytes), rates_.copy_gbps);
    const Interval sent = out_.serve(started.end, copy_us);
    engine.serve(sent.end, 0);
    pushed_bytes_ += bytes;
    return raise(engine, sent.end, raise_by) + rates_.peer_us;
  }

  double engines_free_us() const {
    double result = 0;
    for (const Server& engine : engines_) result = std::max(result, engine.free_us());
    return result;
  }
  int64_t pushed_bytes() const { return pushed_bytes_; }

 private:
  double raise(Server& engine, double ready_us, Raise by) {
    if (by == Raise::kWrittenValue) {
      const double begin = std::max(ready_us, enqueue(rates_.host_call_us));
      return engine.serve(begin, rates_.write_value_us).end;
    }
    const double begin = std::max(ready_us, enqueue(rates_.host_copy_us));
    const double read_us = by == Raise::kHostWord ? rates_.host_read_us : rates_.device_read_us;
    return engine.serve(begin, rates_.copy_us + read_us).end;
  }

  const Rates& rates_;
  Host host_;
  Server host_queue_;
  Server out_;
  std::vector<Server> engines_;
  double compute_us_ = 0;
  int64_t pushed_bytes_ = 0;
};

}  // namespace axonn::times
