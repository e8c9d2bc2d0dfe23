// The NCCL communicators of a grid: one per axis, split from one parent, each with its own
// stream.
//
// Events order every call: the communicator's stream waits for everything that the caller's stream
// has enqueued so far, runs the collective, and records its end; the caller makes a stream wait for
// that event when it needs the result. The host never waits, except for NCCL to accept the call.
//
// Calls may be captured in graphs, whose replays are not watched. The graphs must be destroyed
// before the grid is closed or destroyed, because NCCL waits for that when it ends a communicator.
//
// A thread watches all communicators. The first error, or the first call that exceeds the timeout,
// aborts every communicator of the grid on every rank; from then on, every call throws a
// CommunicationError that says what happened.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/cuda/stream.h"
#include "core/numeric/data_type.h"
#include "core/ranks/call_log.h"
#include "core/ranks/key_value_store.h"
#include "core/ranks/own_process.h"
#include "core/ranks/watchdog.h"

namespace axonn::comm {

struct CommunicatorOptions {
  int device = 0;
  int max_ctas = 0;            // 0: NCCL chooses
  bool compare_calls = false;  // compare each call with the peers' before issuing it
  std::chrono::duration<double> timeout = std::chrono::minutes(10);
};

// The ranks along one axis, including this one, in the order of the axis.
struct AxisRanks {
  std::string name;
  std::vector<int64_t> ranks;
};

// A call in flight, with the event that marks its end on the communicator's stream.
class PendingCall {
 public:
  explicit PendingCall(std::shared_ptr<cuda::Event> end) : end_(std::move(end)) {}

  // Makes everything enqueued on the stream from now on wait for the result.
  void block(cudaStream_t stream) const { end_->block(stream); }

 private:
  std::shared_ptr<cuda::Event> end_;
};

class CommunicatorGrid;

// The communicator of one axis. One thread at a time issues calls, and all ranks issue them in the
// same order. Buffers must stay valid until the call has ended; counts are in elements.
class Communicator {
 public:
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::string& axis() const { return axis_; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  cudaStream_t stream() const { return stream_.get(); }
  // The stream, kept for a caller that uses it even after this communicator has ended.
  cudaStream_t stream_that_stays() {
    stream_.stay();
    return stream_.get();
  }

  // output[r * count + i] = input[i] of rank r
  PendingCall all_gather(const void* input, void* output, int64_t count, kernels::DataType dtype,
                         cudaStream_t caller);
  // output[i] = sum over ranks of input[i], in dtype and in NCCL's order.
  PendingCall all_reduce(const void* input, void* output, int64_t count, kernels::DataType dtype,
                         cudaStream_t caller);
  // Block r of input, `count` elements, becomes block `rank` of rank r's output.
  PendingCall all_to_all(const void* input, void* output, int64_t count, kernels::DataType dtype,
                         cudaStream_t caller);

 private:
  friend class CommunicatorGrid;
  using Issue = std::function<ncclResult_t(ncclComm_t, cudaStream_t)>;
  Communicator(CommunicatorGrid& grid, const AxisRanks& axis, ncclComm_t comm);

  PendingCall issue(const std::string& signature, cudaStream_t caller, const Issue& call);
  void enqueue(const std::string& signature, const Issue& call);
  void check_async();
  void abort() noexcept;
  void close();

  CommunicatorGrid& grid_;
  const std::string axis_;
  int64_t rank_ = 0;
  const int64_t size_;
  cuda::HighPriorityStream stream_;
  std::mutex mutex_;  // guards comm_: NCCL takes one call at a time
  ncclComm_t comm_;
  std::shared_ptr<CallLog> log_;
  std::shared_ptr<WatchedCalls> watched_;
};

class CommunicatorGrid {
 public:
  // Collective over the world. `axes` lists the axes with more than one rank, with the same names
  // in the same order on every rank. `prefix` begins the store's keys; it is equal on all ranks and
  // used once. Throws CommunicationError if the ranks do not meet within the timeout. Other threads
  // must not use the stores; only the watching thread uses `watch_store`.
  CommunicatorGrid(CommunicatorOptions options, int64_t rank, int64_t world_size,
                   const std::vector<AxisRanks>& axes, const std::string& prefix,
                   std::shared_ptr<KeyValueStore> store,
                   std::shared_ptr<KeyValueStore> watch_store);
  // Aborts calls in flight, and does not wait for other ranks.
  ~CommunicatorGrid();
  CommunicatorGrid(const CommunicatorGrid&) = delete;
  CommunicatorGrid& operator=(const CommunicatorGrid&) = delete;

  // Throws std::invalid_argument for an axis that has no communicator.
  Communicator& axis(const std::string& name);

  // Throws CommunicationError if a communicator, of this rank or another, has failed.
  void check() const { watch_->check(); }
  int device() const { return options_.device; }

  // Ends the communicators in order, within the timeout. All ranks must call it.
  void close();

 private:
  friend class Communicator;

  ncclComm_t connect(int64_t rank, int64_t world_size, const std::string& prefix);
  std::unique_ptr<Communicator> split(const AxisRanks& axis);
  ncclConfig_t config() const;
  // Waits until NCCL has accepted the call that returned `result`. Errors name `what`.
  void settle(ncclResult_t result, ncclComm_t comm, const std::string& what) const;
  void check_health();
  void abort_all();

  const OwnProcess process_;  // a forked process has neither the watching thread nor a GPU
  const CommunicatorOptions options_;
  const int64_t rank_;
  const std::string prefix_;
  const std::shared_ptr<KeyValueStore> store_, watch_store_;
  // Where NCCL stores the communicators that it makes. It may do so after this rank has given up
  // waiting.
  std::deque<ncclComm_t> made_;
  std::mutex parent_mutex_;
  ncclComm_t parent_ = nullptr;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::unique_ptr<Watchdog> watch_;  // last: its thread uses all of the above
};

}  // namespace axonn::comm
