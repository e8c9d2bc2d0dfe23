// Symmetric memory of two kinds for test_direct_access.py: one that tells whether GPUs reach each
// other's memory, and one that leaves the question to torch's base class, which throws "NYI".
#include "ops/cuda/direct_access.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

namespace {

class Silent : public c10d::symmetric_memory::SymmetricMemory {
 public:
  std::vector<void*> get_buffer_ptrs() override { return {}; }
  std::vector<void*> get_signal_pad_ptrs() override { return {}; }
  void** get_buffer_ptrs_dev() override { return nullptr; }
  void** get_signal_pad_ptrs_dev() override { return nullptr; }
  size_t get_buffer_size() override { return 0; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void barrier(int, size_t) override {}
  void put_signal(int, int, size_t) override {}
  void wait_signal(int, int, size_t) override {}
  int get_rank() override { return 0; }
  int get_world_size() override { return 2; }
  c10::Device get_device() override { return c10::kCPU; }
};

class Telling : public Silent {
 public:
  explicit Telling(bool reaches) : reaches_(reaches) {}
  bool world_within_direct_access() override { return reaches_; }

 private:
  bool reaches_;
};

// Asks a memory that answers this, or that does not answer.
bool reaches_all_peers(std::optional<bool> answer) {
  Silent silent;
  Telling telling(answer.value_or(false));
  c10d::symmetric_memory::SymmetricMemory& memory = answer ? telling : silent;
  return axonn::ops::cuda::reaches_all_peers("matmul_all_reduce", "model", memory);
}

}  // namespace

TORCH_LIBRARY(axonn_direct_access_test, m) {
  m.def("reaches_all_peers(bool? answer) -> bool", &reaches_all_peers);
}
