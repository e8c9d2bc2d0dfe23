#include "ops/cuda/symmetric_workspace.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/cuda/peer_state.h"

namespace axonn::ops::cuda {
namespace {

namespace symm_mem = c10d::symmetric_memory;
using kernels::cuda::CallStreams;
using kernels::cuda::kMaxPeers;
using kernels::cuda::kPadBytes;
using kernels::cuda::Peers;
using kernels::cuda::SpinFailure;

constexpr uint64_t kLeastBytes = 2 << 20;                 // a page of device memory
constexpr int64_t kFrontBytes = kPadBytes + kStateBytes;  // the pad, in front of the workspace

// Says on stderr which wait a kernel gave up, since the errors that CUDA then raises, from whatever
// is called next, do not. Lives as long as the process.
class FailureWatch {
 public:
  void add(std::shared_ptr<const FailureRecord> record, std::string group) {
    const std::lock_guard lock(mutex_);
    records_.emplace_back(std::move(record), std::move(group));
    if (!std::exchange(watches_, true)) std::thread([this] { watch(); }).detach();
  }

 private:
  void watch() {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      const std::lock_guard lock(mutex_);
      std::erase_if(records_, [](const auto& item) { return report(*item.first, item.second); });
    }
  }

  static bool report(const FailureRecord& record, const std::string& group) {
    const volatile SpinFailure& failure = *record.get();
    if (failure.state != SpinFailure::kWritten) return false;
    std::ostringstream text;
    text << "axonn_ext: a fused op of rank " << failure.rank << " in group '" << group
         << "' waited in vain for rank " << failure.peer << " (chunk " << failure.chunk << ", call "
         << failure.expected << ", which had come as far as call " << failure.seen
         << "). Its CUDA context is lost; see what happened to that rank.\n";
    std::cerr << text.str() << std::flush;
    return true;
  }

  std::mutex mutex_;
  bool watches_ = false;
  std::vector<std::pair<std::shared_ptr<const FailureRecord>, std::string>> records_;
};

FailureWatch& failure_watch() {
  static auto* watch = new FailureWatch;  // its thread may outlive static objects
  return *watch;
}

// Makes the group known to torch's symmetric memory, unless it is.
void introduce(const std::string& name, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  try {
    symm_mem::get_group_info(name);
  } catch (const c10::Error&) {
    auto store = c10::make_intrusive<c10d::PrefixStore>("axonn_ext/symmetric_memory/" + name,
                                                        group->getStore());
    symm_mem::set_group_info(name, group->getRank(), group->getSize(), store);
  }
}

class Workspace {
 public:
  Workspace(std::string group_name, c10::Device device, double timeout_seconds)
      : group_name_(std::move(group_name)), device_(device), copies_(device.index()) {
    peers_.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), failure_->get(), 0};
    failure_watch().add(failure_, group_name_);
  }

  int64_t bytes() const { return bytes_; }

  void require(const char* op, int64_t bytes) {
    if (bytes <= bytes_) return;
    TORCH_CHECK(
        c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None, op,
        ": the workspace of group '", group_name_, "' must grow from ", bytes_, " to ", bytes,
        " bytes, which cannot be captured into a graph; make the call once before capturing it");
    // Peers may still write what this rank has asked for: all ranks wait for their calls, and meet
    // in the rendezvous, before the old memory goes.
    AXONN_CUDA_CHECK(cudaEventSynchronize(ended_.get()));
    const auto size = static_cast<int64_t>(
        std::bit_ceil(std::max(static_cast<uint64_t>(bytes + kFrontBytes), kLeastBytes)));
    auto memory = symm_mem::empty_strided_p2p({size}, {1}, at::kByte, device_, group_name_, {});
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    AXONN_CUDA_CHECK(cudaMemsetAsync(memory.mutable_data_ptr(), 0, kFrontBytes, stream));
    AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));  // before any peer can raise a flag
    auto handle = symm_mem::rendezvous(memory, group_name_);
    set_peers(op, *handle);
    memory_ = std::move(memory);
    handle_ = std::move(handle);
    bytes_ = size - kFrontBytes;
    LOG(INFO) << "axonn_ext: " << size << " bytes of symmetric memory on " << device_
              << " for group '" << group_name_ << "'";
  }

  at::Tensor call(const std::function<at::Tensor(const Peers&, const CallStreams&)>& run) {
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index());
    const bool captured =
        c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    // Calls of a group follow each other, whatever streams they come from.
    if (last_ && *last_ != stream && !captured) {
      AXONN_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), ended_.get(), 0));
    }
    auto output = run(peers_, copies_.behind(stream));
    if (!captured) {
      AXONN_CUDA_CHECK(cudaEventRecord(ended_.get(), stream.stream()));
      last_ = stream;
    }
    return output;
  }

 private:
  void set_peers(const char* op, symm_mem::SymmetricMemory& handle) {
    TORCH_CHECK_NOT_IMPLEMENTED(handle.world_within_direct_access(), op,
                                ": algorithm='fused' needs GPUs that reach each ",
                                "other's memory, which those of group '", group_name_,
                                "' do not; use 'auto', 'chunked' or 'sequential'");
    const auto buffers = handle.get_buffer_ptrs();
    peers_.rank = handle.get_rank();
    peers_.num_ranks = handle.get_world_size();
    peers_.limit.rank = peers_.rank;
    for (size_t rank = 0; rank < buffers.size(); ++rank) {
      peers_.pads[rank] = buffers[rank];
      peers_.workspaces[rank] = static_cast<char*>(buffers[rank]) + kFrontBytes;
    }
    set_own_pad(peers_, buffers[static_cast<size_t>(peers_.rank)]);
  }

  std::string group_name_;
  c10::Device device_;
  std::shared_ptr<FailureRecord> failure_ = std::make_shared<FailureRecord>();
  CopyLane copies_;
  OrderEvent ended_;
  std::optional<c10::cuda::CUDAStream> last_;
  at::Tensor memory_;
  c10::intrusive_ptr<symm_mem::SymmetricMemory> handle_;
  int64_t bytes_ = 0;
  Peers peers_;
};

class Registry {
 public:
  Workspace& find(const std::string& group_name, c10::Device device, double timeout_seconds) {
    const std::lock_guard lock(mutex_);
    const auto group = c10d::resolve_process_group(group_name);
    auto& entry = workspaces_[{group_name, device.index()}];
    // Names are given anew once a group is destroyed.
    if (entry.workspace == nullptr || entry.owner.lock() != group) {
      introduce(group_name, group);
      entry = {c10::weak_intrusive_ptr<c10d::ProcessGroup>(group),
               std::make_unique<Workspace>(group_name, device, timeout_seconds)};
    }
    return *entry.workspace;
  }

  int64_t bytes() {
    const std::lock_guard lock(mutex_);
    int64_t total = 0;
    for (const auto& [key, entry] : workspaces_) total += entry.workspace->bytes();
    return total;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> owner =
        c10::weak_intrusive_ptr<c10d::ProcessGroup>(c10::intrusive_ptr<c10d::ProcessGroup>());
    std::unique_ptr<Workspace> workspace;
  };

  std::mutex mutex_;
  std::map<std::pair<std::string, c10::DeviceIndex>, Entry> workspaces_;
};

Registry& registry() {
  static auto* all = new Registry;  // CUDA is gone before static objects are
  return *all;
}

}  // namespace

at::Tensor with_workspace(const char* op, const std::string& group_name, int64_t group_size,
                          c10::Device device, int64_t bytes, double timeout_seconds,
                          const std::function<at::Tensor(const Peers&, const CallStreams&)>& run) {
  TORCH_CHECK_NOT_IMPLEMENTED(group_size <= kMaxPeers, op, ": algorithm='fused' serves at most ",
                              kMaxPeers, " ranks, group '", group_name, "' has ", group_size,
                              "; use 'auto', 'chunked' or 'sequential'");
  const c10::cuda::CUDAGuard guard(device);
  Workspace& workspace = registry().find(group_name, device, timeout_seconds);
  workspace.require(op, bytes);
  return workspace.call(run);
}

int64_t symmetric_workspace_bytes() { return registry().bytes(); }

}  // namespace axonn::ops::cuda
