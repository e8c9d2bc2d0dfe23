#include "ops/cuda/symmetric_workspace.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
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
// is called next, do not.
class FailureWatch {
 public:
  void add(std::shared_ptr<const PinnedState> state, std::string group) {
    const std::lock_guard lock(mutex_);
    states_.emplace_back(std::move(state), std::move(group));
    if (thread_.joinable()) return;
    thread_ = std::thread([this] { watch(); });
    // Registered behind CUDA's own, so run before it, which takes the memory away.
    std::atexit([] { failure_watch().stop(); });
  }

  static FailureWatch& failure_watch() {
    static auto* watch = new FailureWatch;  // CUDA may be gone before static objects are
    return *watch;
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    stopped_.notify_all();
    thread_.join();
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!stopped_.wait_for(lock, std::chrono::milliseconds(100), [this] { return stops_; })) {
      std::erase_if(states_, [](const auto& item) { return report(*item.first, item.second); });
    }
  }

  static bool report(const PinnedState& state, const std::string& group) {
    const volatile SpinFailure& failure = state.failure();
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
  std::condition_variable stopped_;
  bool stops_ = false;
  std::thread thread_;
  std::vector<std::pair<std::shared_ptr<const PinnedState>, std::string>> states_;
};

// Fused calls of a device follow each other, whatever groups and streams they are of: each fills
// the device with a grid that waits for peers, and two would keep each other's from running.
struct DeviceOrder {
  OrderEvent ended;
  std::optional<c10::cuda::CUDAStream> last;
};

// How many of the group's ranks share this rank's GPU, itself included.
int64_t count_ranks_on_device(c10d::Store& store, const c10d::ProcessGroup& group,
                              c10::DeviceIndex device) {
  cudaDeviceProp properties;
  AXONN_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  const auto* bytes = reinterpret_cast<const uint8_t*>(properties.uuid.bytes);
  const std::vector<uint8_t> own(bytes, bytes + sizeof(properties.uuid.bytes));
  store.set("device/" + std::to_string(group.getRank()), own);
  int64_t count = 0;
  for (int rank = 0; rank < group.getSize(); ++rank) {
    count += store.get("device/" + std::to_string(rank)) == own;
  }
  return count;
}

class Workspace {
 public:
  // Collective. `name` is what the group is called here and in no other call of this.
  Workspace(const c10d::ProcessGroup& group, std::string group_name, std::string name,
            c10::Device device, double timeout_seconds, DeviceOrder& order)
      : group_name_(std::move(group_name)),
        name_(std::move(name)),
        device_(device),
        copies_(device.index()),
        order_(order) {
    auto store = c10::make_intrusive<c10d::PrefixStore>(name_, group.getStore());
    symm_mem::set_group_info(name_, group.getRank(), group.getSize(), store);
    ranks_on_device_ = count_ranks_on_device(*store, group, device.index());
    peers_.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), &pinned_->failure(), 0};
    peers_.epoch_to_push = pinned_->epoch_to_push();
    FailureWatch::failure_watch().add(pinned_, group_name_);
  }

  // Processes that share a GPU take turns on it, each with all of its SMs; copies within it may be
  // the work of kernels, for which a grid that waits must leave room.
  kernels::Residency residency() const {
    return {.ranks_per_device = 1, .producer_ctas = ranks_on_device_ > 1 ? 2 : 0};
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
    AXONN_CUDA_CHECK(cudaEventSynchronize(order_.ended.get()));
    const auto size = static_cast<int64_t>(
        std::bit_ceil(std::max(static_cast<uint64_t>(bytes + kFrontBytes), kLeastBytes)));
    auto memory = symm_mem::empty_strided_p2p({size}, {1}, at::kByte, device_, name_, {});
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    AXONN_CUDA_CHECK(cudaMemsetAsync(memory.mutable_data_ptr(), 0, kFrontBytes, stream));
    AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));  // before any peer can raise a flag
    auto handle = symm_mem::rendezvous(memory, name_);
    set_peers(op, *handle);
    // Graphs that have captured calls go on with the memory that they know.
    if (captured_) retired_.emplace_back(std::move(memory_), std::move(handle_));
    captured_ = false;
    *pinned_->epoch_to_push() = 0;
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
    if (order_.last && *order_.last != stream && !captured) {
      AXONN_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), order_.ended.get(), 0));
    }
    captured_ = captured_ || captured;
    auto output = run(peers_, copies_.behind(stream));
    if (!captured) {
      AXONN_CUDA_CHECK(cudaEventRecord(order_.ended.get(), stream.stream()));
      order_.last = stream;
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

  std::string group_name_, name_;
  c10::Device device_;
  std::shared_ptr<PinnedState> pinned_ = std::make_shared<PinnedState>();
  CopyLane copies_;
  DeviceOrder& order_;
  int64_t ranks_on_device_ = 1;
  at::Tensor memory_;
  c10::intrusive_ptr<symm_mem::SymmetricMemory> handle_;
  bool captured_ = false;  // a graph knows the memory
  std::vector<std::pair<at::Tensor, c10::intrusive_ptr<symm_mem::SymmetricMemory>>> retired_;
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
      auto& order = orders_[device.index()];
      if (order == nullptr) order = std::make_unique<DeviceOrder>();
      const int64_t number = numbers_[group_name]++;  // ranks meet here equally often
      auto name = "axonn_ext/" + group_name + "/" + std::to_string(number);
      entry = {c10::weak_intrusive_ptr<c10d::ProcessGroup>(group),
               std::make_unique<Workspace>(*group, group_name, std::move(name), device,
                                           timeout_seconds, *order)};
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
  std::map<c10::DeviceIndex, std::unique_ptr<DeviceOrder>> orders_;
  std::map<std::string, int64_t> numbers_;
  std::map<std::pair<std::string, c10::DeviceIndex>, Entry> workspaces_;
};

Registry& registry() {
  static auto* all = new Registry;  // CUDA is gone before static objects are
  return *all;
}

}  // namespace

at::Tensor call_fused(const char* op, const std::string& group_name, int64_t group_size,
                      c10::Device device, double timeout_seconds,
                      const std::function<PreparedCall(const kernels::Residency&)>& prepare) {
  TORCH_CHECK_NOT_IMPLEMENTED(group_size <= kMaxPeers, op, ": algorithm='fused' serves at most ",
                              kMaxPeers, " ranks, group '", group_name, "' has ", group_size,
                              "; use 'auto', 'chunked' or 'sequential'");
  const c10::cuda::CUDAGuard guard(device);
  Workspace& workspace = registry().find(group_name, device, timeout_seconds);
  const PreparedCall call = prepare(workspace.residency());
  workspace.require(op, call.workspace_bytes);
  return workspace.call(call.run);
}

int64_t symmetric_workspace_bytes() { return registry().bytes(); }

}  // namespace axonn::ops::cuda
