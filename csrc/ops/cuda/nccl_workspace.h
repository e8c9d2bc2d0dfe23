// A workspace that no peer has mapped. NCCL delivers the rows of gathers, also from other
// hosts.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "core/cuda/nccl/nccl_chunks.h"
#include "ops/cuda/workspace.h"

namespace axonn::ops::cuda {

class NcclWorkspace : public Workspace {
 public:
  // Collective. `name` identifies the group in this call and in no other call of this constructor.
  // `sms` is the number of SMs that a GEMM leaves to NCCL, at least NcclChunks::kMostCtas.
  NcclWorkspace(const c10d::ProcessGroup& group, std::string group_name, const std::string& name,
                c10::Device device, double timeout_seconds, int64_t sms,
                kernels::cuda::CallOrder& order);

  kernels::Residency residency() const override {
    return {.ranks_per_device = 1, .producer_ctas = sms_, .link = kernels::kNetwork};
  }

 private:
  void grow(const char* op, int64_t size, bool keep) override;
  bool free_memory(bool may_free) override;
  kernels::cuda::ShardTransport& transport() override { return chunks_; }

  const int64_t sms_;
  at::Tensor memory_;
  std::vector<at::Tensor> retired_;
  kernels::cuda::NcclChunks chunks_;
};

}  // namespace axonn::ops::cuda
