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
  // Groups along the same axis share its name, so their first rank tells them apart.
  const auto prefix = grid.prefix_ + "/" + axis_ + "/" + std::to_string(axis.ranks[0]);
  log_ = std::make_shared<CallLog>(CallLogOptions{.axis = axis_,
                                                  .prefix = prefix,
                                                  .rank = rank_,
                                                  .ranks = axis.ranks,
                                                  .compare = grid.options_.compare_calls,
                                                  .timeout = grid.options_.timeout},
                                   *grid.watch_store_);
  watched_ = std::make_shared<WatchedCalls>(log_);
}

Communicator::~Communicator() { abort(); }

PendingCall Communicator::all_gather(const void* input, void* output, int64_t count,
                                     kernels::DataType dtype, cudaStream_t caller) {
  return issue(signature_of("all_gather", count, dtype), caller, [=](auto comm, auto stream) {
    return ncclAllGather(input, output, static_cast<size_t>(count), nccl_type(dtype), comm, stream);
  });
}

PendingCall Communicator::all_reduce(const void* input, void* output, int64_t count,
                                     kernels::DataType dtype, cudaStream_t caller) {
  return issue(signature_of("all_reduce", count, dtype), caller, [=](auto comm, auto stream) {
    return ncclAllReduce(input, output, static_cast<size_t>(count), nccl_type(dtype), ncclSum, comm,
                         stream);
  });
}

// NCCL has no all-to-all before 2.28. The group that `enqueue` opens fuses these calls into one.
PendingCall Communicator::all_to_all(const void* input, void* output, int64_t count,
                                     kernels::DataType dtype, cudaStream_t caller) {
  const auto* sent = static_cast<const char*>(input);
  auto* received = static_cast<char*>(output);
  const int64_t bytes = count * kernels::size_of(dtype);
  return issue(signature_of("all_to_all", count, dtype), caller,
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

// Order: caller's stream -> our stream -> the event that the result waits for.
PendingCall Communicator::issue(const std::string& signature, cudaStream_t caller,
                                const Issue& call) {
  if (!grid_.process_.is_this()) grid_.process_.refuse(signature, rank_, axis_);
  grid_.check();
  const cuda::DeviceGuard guard(grid_.options_.device);
  const int64_t sequence = log_->announce(signature);
  try {
    log_->agree([this] { grid_.check(); });
    cuda::Event ready;
    ready.record(caller);
    ready.block(stream_.get());
    try {
      enqueue(signature, call);
    } catch (const NotAccepted&) {
      throw;
    } catch (const CommunicationError& error) {
      throw CommunicationError(grid_.watch_->reason(error.what()));
    }
    auto end = std::make_shared<cuda::Event>();
    end->record(stream_.get());
    // A captured event cannot be queried, and graph replays are not watched.
    if (is_capturing(stream_.get())) {
      log_->complete(sequence);
    } else {
      watched_->add(sequence, signature, [end] { return end->is_done(); });
    }
    return PendingCall(std::move(end));
  } catch (const NotAccepted&) {  // at the first call, NCCL waits for all ranks to connect
    log_->publish();
    const std::string why =
        log_->explain_timeout(sequence, signature, grid_.options_.timeout.count());
    grid_.watch_->fail(why);
    throw CommunicationError(why);
  } catch (const std::exception& error) {
    grid_.watch_->fail(error.what());  // peers have issued or will issue the call: end their wait
    throw;
  }
}

void Communicator::enqueue(const std::string& signature, const Issue& call) {
  const std::string what = "axis " + axis_ + ": " + signature;
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) throw CommunicationError("axis " + axis_ + ": was closed");
  AXONN_NCCL_CHECK(ncclGroupStart());
  const ncclResult_t result = call(comm_, stream_.get());
  const ncclResult_t end = ncclGroupEnd();  // needed even after an error, because NCCL waits for it
  if (result != ncclSuccess && result != ncclInProgress)
    throw_nccl(result, what, __FILE__, __LINE__);
  grid_.settle(end, comm_, what);
}

void Communicator::check_async() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || comm_ == nullptr) return;  // a call is being issued, and checks for errors itself
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
