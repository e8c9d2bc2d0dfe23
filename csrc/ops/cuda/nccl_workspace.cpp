#include "ops/cuda/nccl_workspace.h"

#include <ATen/ops/empty.h>

#include <chrono>
#include <utility>

#include "ops/group/c10d_store.h"

namespace axonn::ops::cuda {
namespace {

kernels::cuda::NcclChunks connect(const c10d::ProcessGroup& group, const std::string& name,
                                  double timeout_seconds) {
  C10dStore store(group.getStore());
  return {group.getRank(), group.getSize(), store, name + "/nccl",
          std::chrono::duration<double>(timeout_seconds)};
}

}  // namespace

NcclWorkspace::NcclWorkspace(const c10d::ProcessGroup& group, std::string group_name,
                             const std::string& name, c10::Device device, double timeout_seconds,
                             int64_t sms, kernels::cuda::CallOrder& order)
    : Workspace(std::move(group_name), device, timeout_seconds, order),
      sms_(sms),
      chunks_(connect(group, name, timeout_seconds)) {
  peers_.rank = static_cast<int32_t>(group.getRank());
  peers_.num_ranks = static_cast<int32_t>(group.getSize());
  peers_.limit.rank = peers_.rank;
}

// Ranks do this independently, because no peer maps their flags and epochs. If this rank has no
// memory left, its peers make the call nevertheless, so its transport gives up.
void NcclWorkspace::grow(const char* op, int64_t size, bool keep) {
  (void)op;
  at::Tensor memory;
  try {
    memory = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device_));
    clear_front(memory);
  } catch (...) {
    chunks_.give_up();
    throw;
  }
  if (keep) retired_.push_back(std::move(memory_));
  memory_ = std::move(memory);
  auto* front = static_cast<char*>(memory_.mutable_data_ptr());
  peers_.workspaces[peers_.rank] = front + kFrontBytes;
  kernels::cuda::set_own_pad(peers_, front);
}

bool NcclWorkspace::free_memory(bool may_free) {
  if (may_free) memory_.reset();
  return may_free;
}

}  // namespace axonn::ops::cuda
