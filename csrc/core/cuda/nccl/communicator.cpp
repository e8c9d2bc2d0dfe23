#include "core/cuda/nccl/communicator.h"

#include <algorithm>
#include <utility>

#include "core/cuda/nccl/nccl.h"
#include "core/cuda/nccl/nccl_connect.h"

namespace axonn::comm {
namespace {

std::string signature_of(const char* op, int64_t count, kernels::DataType dtype) {
  return std::string(op) + " " + name_of(dtype) + "[" + std::to_string(count) + "]";
}

const char* name_of_op(kernels::ReduceOp op) {
  return op == kernels::ReduceOp::kSum ? "sum" : "max";
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  AXONN_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

Communicator::Communicator(CommunicatorGrid& grid, const AxisRanks& axis, ncclComm_t comm)
    : grid_(grid),
      axis_(axis.name),
      rank_(std::find(axis.ranks.begin(), axis.ranks.end(), grid.rank_) - axis.ranks.begin()),
      size_(static_cast<int64_t>(axis.ranks.size())),
      comm_(comm) {
  // Ranks with the same name for their axis but with other members are another group.
  const auto prefix = grid.prefix_ + "/" + axis_ + "/" + std::to_string(axis.ranks[0]);
  collectives_ = numbered({.axis = axis_,
                           .prefix = prefix,
                           .rank = rank_,
                           .ranks = axis.ranks,
                           .compare = grid.options_.compare_calls,
                           .timeout = grid.options_.timeout},
                          *grid.watch_store_);
  transfers_ = numbered({.axis = axis_,
                         .prefix = prefix + "/transfers/" + std::to_string(rank_),
                         .rank = 0,
                         .ranks = {grid.rank_},
                         .compare = false,
                         .timeout = grid.options_.timeout},
                        *grid.watch_store_);
}

Communicator::Numbered Communicator::numbered(CallLogOptions options, KeyValueStore& store) {
  auto log = std::make_shared<CallLog>(std::move(options), store);
  return {log, std::make_shared<WatchedCalls>(log)};
}

Communicator::~Communicator() { abort(); }

PendingCall Communicator::all_gather(const void* input, void* output, int64_t count,
                                     kernels::DataType dtype, cudaStream_t caller) {
  return issue(Kind::kCollective, signature_of("all_gather", count, dtype), caller,
               [=](auto comm, auto stream) {
                 return ncclAllGather(input, output, static_cast<size_t>(count), nccl_type(dtype),
                                      comm, stream);
               });
}

PendingCall Communicator::reduce_scatter(const void* input, void* output, int64_t count,
                                         kernels::DataType dtype, kernels::ReduceOp op,
                                         cudaStream_t caller) {
  const auto signature = signature_of("reduce_scatter", count, dtype) + " " + name_of_op(op);
  return issue(Kind::kCollective, signature, caller, [=](auto comm, auto stream) {
    return ncclReduceScatter(input, output, static_cast<size_t>(count), nccl_type(dtype),
                             nccl_op(op), comm, stream);
  });
}

PendingCall Communicator::all_reduce(const void* input, void* output, int64_t count,
                                     kernels::DataType dtype, kernels::ReduceOp op,
                                     cudaStream_t caller) {
  const auto signature = signature_of("all_reduce", count, dtype) + " " + name_of_op(op);
  return issue(Kind::kCollective, signature, caller, [=](auto comm, auto stream) {
    return ncclAllReduce(input, output, static_cast<size_t>(count), nccl_type(dtype), nccl_op(op),
                         comm, stream);
  });
}

// NCCL has all-to-alls of its own from 2.28 on only. What `enqueue` opens makes one call of these.
PendingCall Communicator::all_to_all(const void* input, void* output, int64_t count,
                                     kernels::DataType dtype, cudaStream_t caller) {
  const auto* sent = static_cast<const char*>(input);
  auto* received = static_cast<char*>(output);
  const int64_t bytes = count * kernels::size_of(dtype);
  return issue(Kind::kCollective, signature_of("all_to_all", count, dtype), caller,
               [=, size = size_](auto comm, auto stream) {
                 for (int peer = 0; peer < size; ++peer) {
                   ncclResult_t result = ncclSend(sent + peer * bytes, static_cast<size_t>(count),
                                                  nccl_type(dtype), peer, comm, stream);
                   if (result != ncclSuccess && result != ncclInProgress) return result;
                   result = ncclRecv(received + peer * bytes, static_cast<size_t>(count),
                                     nccl_type(dtype), peer, comm, stream);
                   if (result != ncclSuccess && result != ncclInProgress) return result;
                 }
                 return ncclSuccess;
               });
}

PendingCall Communicator::send(const void* input, int64_t count, kernels::DataType dtype,
                               int64_t peer, cudaStream_t caller) {
  return issue(Kind::kTransfer, signature_of("send", count, dtype) + " to " + std::to_string(peer),
               caller, [=](auto comm, auto stream) {
                 return ncclSend(input, static_cast<size_t>(count), nccl_type(dtype),
                                 static_cast<int>(peer), comm, stream);
               });
}

PendingCall Communicator::receive(void* output, int64_t count, kernels::DataType dtype,
                                  int64_t peer, cudaStream_t caller) {
  return issue(Kind::kTransfer,
               signature_of("receive", count, dtype) + " from " + std::to_string(peer), caller,
               [=](auto comm, auto stream) {
                 return ncclRecv(output, static_cast<size_t>(count), nccl_type(dtype),
                                 static_cast<int>(peer), comm, stream);
               });
}

void Communicator::group_start() {
  if (grouping_) throw std::invalid_argument("axis " + axis_ + ": a group is open already");
  grouping_ = true;
  grouped_kind_ = Kind::kCollective;
}

PendingCall Communicator::group_end(cudaStream_t caller) {
  if (!grouping_) throw std::invalid_argument("axis " + axis_ + ": no group is open");
  grouping_ = false;
  const auto calls = std::exchange(grouped_, {});
  return launch(grouped_kind_, "group of " + std::exchange(grouped_signature_, ""), caller, calls);
}

PendingCall Communicator::issue(Kind kind, const std::string& signature, cudaStream_t caller,
                                Issue call) {
  if (!grouping_) return launch(kind, signature, caller, {std::move(call)});
  if (kind == Kind::kTransfer) grouped_kind_ = kind;
  grouped_.push_back(std::move(call));
  grouped_signature_ += (grouped_signature_.empty() ? "" : ", ") + signature;
  return {0, nullptr};
}

// The order is: caller's stream -> our stream -> the event that the result waits for.
PendingCall Communicator::launch(Kind kind, const std::string& signature, cudaStream_t caller,
                                 const std::vector<Issue>& calls) {
  if (!grid_.process_.is_this()) grid_.process_.refuse(signature, rank_, axis_);
  grid_.check();
  const cuda::DeviceGuard guard(grid_.options_.device);
  const Numbered& numbered = kind == Kind::kCollective ? collectives_ : transfers_;
  const int64_t sequence = numbered.log->announce(signature);
  try {
    numbered.log->agree([this] { grid_.check(); });
    cuda::Event ready;
    ready.record(caller);
    ready.block(stream_.get());
    enqueue(signature, calls);
    auto end = std::make_shared<cuda::Event>();
    end->record(stream_.get());
    // An event of a capture cannot be queried, and a graph that is replayed is not watched.
    if (is_capturing(stream_.get())) {
      numbered.log->complete(sequence);
    } else {
      numbered.watched->add(sequence, signature, [end] { return end->is_done(); });
    }
    return {sequence, std::move(end)};
  } catch (const NotAccepted&) {  // at their first calls, NCCL waits for all ranks to connect
    numbered.log->publish();
    const std::string why =
        numbered.log->explain_timeout(sequence, signature, grid_.options_.timeout.count());
    grid_.watch_->fail(why);
    throw CommunicationError(why);
  } catch (const std::exception& error) {
    grid_.watch_->fail(error.what());  // peers have issued the call, or will: end their wait
    throw;
  }
}

void Communicator::enqueue(const std::string& signature, const std::vector<Issue>& calls) {
  const std::string what = "axis " + axis_ + ": " + signature;
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) throw CommunicationError("axis " + axis_ + ": was closed");
  AXONN_NCCL_CHECK(ncclGroupStart());
  ncclResult_t result = ncclSuccess;
  for (const auto& call : calls) {
    const ncclResult_t one = call(comm_, stream_.get());
    if (one != ncclSuccess && one != ncclInProgress && result == ncclSuccess) result = one;
  }
  const ncclResult_t end = ncclGroupEnd();  // even after an error, because NCCL waits for it
  if (result != ncclSuccess) throw_nccl(result, what, __FILE__, __LINE__);
  grid_.settle(end, comm_, what);
}

void Communicator::register_buffer(void* data, int64_t bytes) {
  grid_.check();
  const std::lock_guard lock(mutex_);
  void* handle = nullptr;
  grid_.settle(ncclCommRegister(comm_, data, static_cast<size_t>(bytes), &handle), comm_,
               "axis " + axis_ + ": ncclCommRegister");
  registrations_.push_back({.data = data, .handle = handle});
}

void Communicator::register_window(void* data, int64_t bytes) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  grid_.check();
  const std::lock_guard lock(mutex_);
  Registration& made = registrations_.emplace_back();
  grid_.settle(ncclCommWindowRegister(comm_, data, static_cast<size_t>(bytes), &made.window,
                                      NCCL_WIN_COLL_SYMMETRIC),
               comm_, "axis " + axis_ + ": ncclCommWindowRegister");
  made.data = data;
#else
  (void)data, (void)bytes;
  throw std::invalid_argument("windows need NCCL 2.27 or newer at build time");
#endif
}

void Communicator::deregister(void* data) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(registrations_.begin(), registrations_.end(),
                                  [data](const auto& r) { return r.data == data; });
  if (found == registrations_.end()) {
    throw std::invalid_argument("axis " + axis_ + ": this memory is not registered");
  }
  const Registration gone = *found;
  registrations_.erase(found);
  if (comm_ == nullptr) return;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  if (gone.window != nullptr) {
    grid_.settle(ncclCommWindowDeregister(comm_, gone.window), comm_,
                 "axis " + axis_ + ": ncclCommWindowDeregister");
    return;
  }
#endif
  grid_.settle(ncclCommDeregister(comm_, gone.handle), comm_,
               "axis " + axis_ + ": ncclCommDeregister");
}

void Communicator::check_async() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || comm_ == nullptr) return;  // a call is being issued, which checks by itself
  ncclResult_t state = ncclSuccess;
  AXONN_NCCL_CHECK(ncclCommGetAsyncError(comm_, &state));
  if (state == ncclSuccess || state == ncclInProgress) return;
  throw CommunicationError("axis " + axis_ + ": NCCL reports " + ncclGetErrorString(state) + "; " +
                           ncclGetLastError(comm_));
}

void Communicator::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) (void)ncclCommAbort(std::exchange(comm_, nullptr));
}

void Communicator::close() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  grid_.settle(ncclCommFinalize(comm_), comm_, "axis " + axis_ + ": ncclCommFinalize");
  AXONN_NCCL_CHECK(ncclCommDestroy(std::exchange(comm_, nullptr)));
}

}  // namespace axonn::comm
