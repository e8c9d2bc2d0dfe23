// A workspace in torch's symmetric memory, which the rank's peers have mapped.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>
#include <vector>

#include "ops/cuda/workspace.h"

namespace axonn::ops::cuda {

class SymmetricWorkspace : public Workspace {
 public:
  // Construction and growth are collective. `name` begins the keys that the group's ranks write
  // into their store.
  SymmetricWorkspace(const c10d::ProcessGroup& group, std::string group_name,
                     const std::string& name, c10::Device device, double timeout_seconds,
                     kernels::cuda::CallOrder& order);

  // Processes that share a GPU take turns on it, each with all of its SMs. Kernels may copy data
  // within the GPU, so a grid that waits must leave SMs for them.
  kernels::Residency residency() const override {
    return {.ranks_per_device = 1, .producer_ctas = ranks_on_device_ > 1 ? 2 : 0};
  }

 private:
  void grow(const char* op, int64_t size, bool keep) override;
  bool free_memory(bool may_free) override;
  kernels::cuda::ShardTransport& transport() override { return push_; }
  // Returns every rank's value of `what`, by rank; collective.
  std::vector<std::string> tell(const std::string& what, const std::string& value) const;
  // Returns memory with a clear front. If some rank cannot get it, all ranks raise its error.
  at::Tensor allocate(const char* op, int64_t size) const;
  void set_peers(const char* op, c10d::symmetric_memory::SymmetricMemory& handle);
  // Finds out which peers' flags a stream's queue can write; collective.
  void probe_writes();

  using Handle = c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory>;
  const std::string name_;
  const double timeout_seconds_;
  int64_t ranks_on_device_ = 1;
  bool probed_ = false;
  at::Tensor memory_;
  Handle handle_;
  std::vector<std::pair<at::Tensor, Handle>> retired_;
  kernels::cuda::CopyEnginePush push_;
};

}  // namespace axonn::ops::cuda
