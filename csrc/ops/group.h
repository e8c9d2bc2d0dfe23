// A c10d process group as the ops see it: found by name, with the shared memory of its ranks, and
// with the collectives of c10d for groups that have none.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "core/symmetric_group.h"

namespace axonn::ops {

struct GroupSettings {
  double timeout_seconds;
  int64_t symmetric_memory_bytes;  // address space per rank and group
};

// Values that axonn_ext/settings.py read; they hold for groups met from now on.
void configure_groups(const GroupSettings& settings);

// How long a rank waits for another, as configured.
double timeout_seconds();

// Bytes of symmetric memory that this rank has used in all of its groups.
int64_t symmetric_memory_bytes_in_use();

// How long this process has waited for peers inside ops so far, in seconds, by group name.
std::map<std::string, double> waited_seconds();

struct Group {
  std::string name;
  int64_t rank = 0;
  int64_t size = 1;
  // Null where one rank is alone, where the algorithm needs none, and where "auto" finds that the
  // ranks cannot share memory.
  std::shared_ptr<comm::SymmetricGroup> shared;

  bool can_fuse() const { return shared != nullptr; }
  // A rank without peers.
  static Group alone() { return {"", 0, 1, nullptr}; }
};

// How a collective meets its matmul.
enum class Algorithm { kFused, kChunked, kSequential };

// Raises ValueError for an algorithm that does not exist, NotImplementedError for "fused" where
// the device has none; also where one rank needs none. On CUDA some ops have one: `fused_on_cuda`.
void check_algorithm(const char* op, const std::string& algorithm, c10::Device device,
                     bool fused_on_cuda = false);

// The group of that name; one of size 1 is not looked up. The first call of a group that may be
// fused is collective: its ranks exchange mappings. Tensors on `device` other than the CPU share no
// memory. Raises ValueError for a size that is not the group's, or "fused" across hosts. `op` opens
// the message.
Group resolve_group(const char* op, const std::string& name, int64_t size,
                    const std::string& algorithm, c10::Device device);

// A c10d collective under way. On a GPU it runs on a stream of c10d's, behind what the current
// stream has been given so far, and the host never waits.
struct Pending {
  at::Tensor output;  // to be read after wait()
  // The CPU returns when `output` is there. On a GPU the stream that is current then waits for it:
  // that must be the one that was current at the start, whose allocator may reuse the input next.
  std::function<void()> wait;
};

// c10d adds in the tensor's own dtype. So on the CPU sums of bfloat16 are made, and sent, in fp32;
// on a GPU they travel as they are, as users of NCCL expect. `output` has the dtype of the sum.

// Gathers the ranks' shards into [group size, ...]. Any strides.
Pending start_all_gather(const Group& group, const at::Tensor& shard);
// Sums [group size, ...] over ranks; this rank's block is left.
Pending start_reduce_scatter(const Group& group, const at::Tensor& stacked);
// Sums over ranks, likewise; may overwrite its input.
Pending start_all_reduce(const Group& group, const at::Tensor& input);

// [group size, ...] <-> the concatenation of the blocks along `dim`; no copy where dim is 0.
at::Tensor joined(const at::Tensor& stacked, int64_t dim);
at::Tensor stacked(const at::Tensor& whole, int64_t dim, int64_t num_blocks);

// c10d collectives, waited for. Tensors of any strides; results are contiguous.
at::Tensor c10d_all_gather(const Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor c10d_reduce_scatter(const Group& group, const at::Tensor& input, int64_t dim);
at::Tensor c10d_all_reduce(const Group& group, const at::Tensor& input, bool maximum);

}  // namespace axonn::ops
