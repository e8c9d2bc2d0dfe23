#include "ops/cuda/symmetric_workspace.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

#include "core/cuda/check.h"
#include "core/cuda/fused/write_probe.h"
#include "ops/checks.h"
#include "ops/cuda/direct_access.h"
#include "ops/cuda/exchange.h"

namespace axonn::ops::cuda {
namespace {

namespace symm_mem = c10d::symmetric_memory;

// Returns how many of the group's ranks share this rank's GPU, including this one.
int64_t count_ranks_on_device(const c10d::ProcessGroup& group, const std::string& name,
                              const std::string& prefix, c10::DeviceIndex device,
                              double timeout_seconds) {
  cudaDeviceProp properties;
  AXONN_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  const std::string own(properties.uuid.bytes, sizeof(properties.uuid.bytes));
  const auto devices = exchange(group, name, prefix, "device", own, timeout_seconds);
  return std::count(devices.begin(), devices.end(), own);
}

}  // namespace

SymmetricWorkspace::SymmetricWorkspace(const c10d::ProcessGroup& group, std::string group_name,
                                       const std::string& name, c10::Device device,
                                       double timeout_seconds, kernels::cuda::CallOrder& order)
    : Workspace(std::move(group_name), device, timeout_seconds, order),
      name_(name),
      timeout_seconds_(timeout_seconds) {
  ranks_on_device_ =
      count_ranks_on_device(group, group_name_, name, device.index(), timeout_seconds);
  peers_.alone = ranks_on_device_ == 1;
}

void SymmetricWorkspace::grow(const char* op, int64_t size, bool keep) {
  auto memory = allocate(op, size);
  // Ranks synchronise here, each after its calls, before the old memory is freed.
  auto handle = symm_mem::rendezvous(memory, group_name_);
  set_peers(op, *handle);
  if (!probed_) probe_writes();
  if (keep) retired_.emplace_back(std::move(memory_), std::move(handle_));
  memory_ = std::move(memory);
  handle_ = std::move(handle);
  LOG(INFO) << "axonn_ext: " << size << " bytes of symmetric memory on " << device_
            << " for group '" << group_name_ << "'";
}

bool SymmetricWorkspace::free_memory(bool may_free) {
  const auto answers = tell("release", may_free ? "yes" : "no");
  if (std::count(answers.begin(), answers.end(), "no") != 0) return false;
  handle_.reset();
  memory_.reset();
  return true;
}

std::vector<std::string> SymmetricWorkspace::tell(const std::string& what,
                                                  const std::string& value) const {
  return exchange(*c10d::resolve_process_group(group_name_), group_name_, name_, what, value,
                  timeout_seconds_);
}

// The ranks agree before torch's rendezvous, in which a rank without memory would keep the others
// waiting until the store's timeout.
at::Tensor SymmetricWorkspace::allocate(const char* op, int64_t size) const {
  at::Tensor memory;
  std::string problem;
  try {
    memory = symm_mem::empty_strided_p2p({size}, {1}, at::kByte, device_, group_name_, {});
    clear_front(memory);
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!problem.empty()) (void)cudaGetLastError();  // else the next launch reports it
  const auto problems = tell("memory", problem);
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    TORCH_CHECK(problems[rank].empty(), op, ": rank ", rank, " of group '", group_name_,
                "' cannot allocate ", size,
                " bytes of symmetric memory for its workspace: ", problems[rank]);
  }
  return memory;
}

void SymmetricWorkspace::probe_writes() {
  const auto stream = c10::cuda::getCurrentCUDAStream(device_.index()).stream();
  kernels::cuda::write_probes(peers_, stream);
  (void)tell("written", "");
  const auto arrived = kernels::cuda::arrived_probes(peers_, stream);
  probed_ = true;
  const auto found = tell("arrived", std::to_string(arrived));
  for (size_t rank = 0; rank < found.size(); ++rank) {
    const bool reached = (std::stoul(found[rank]) >> peers_.rank & 1) != 0;
    if (reached) peers_.queue_writes |= uint32_t{1} << rank;
  }
}

void SymmetricWorkspace::set_peers(const char* op, symm_mem::SymmetricMemory& handle) {
  TORCH_CHECK_NOT_IMPLEMENTED(reaches_all_peers(op, group_name_, handle), op,
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
  // This is another address of the same memory. It takes no memory of its own, and is valid as long
  // as the handle is.
  const auto multicast = handle.has_multicast_support() ? handle.get_multicast_ptr() : nullptr;
  peers_.multicast = multicast != nullptr ? static_cast<char*>(multicast) + kFrontBytes : nullptr;
  kernels::cuda::set_own_pad(peers_, buffers[static_cast<size_t>(peers_.rank)]);
}

}  // namespace axonn::ops::cuda
