// A c10d process group as the ops see it: found by name, with the shared memory of its ranks, and
// with the collectives of c10d for groups that have none.
#pragma once

#include <ATen/core/Tensor.h>

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

// Bytes of symmetric memory that this rank has used in all of its groups.
int64_t symmetric_memory_bytes_in_use();

struct Group {
  std::string name;
  int64_t rank;
  int64_t size;
  // Null where the algorithm is "sequential", or is "auto" and the ranks span hosts.
  std::shared_ptr<comm::SymmetricGroup> shared;

  bool fused() const { return shared != nullptr; }
};

// Raises ValueError for an algorithm that does not exist; also where one rank needs none.
void check_algorithm(const char* op, const std::string& algorithm);

// The group of that name. The first fused call of a group is collective: its ranks exchange
// mappings. Raises ValueError for a size that is not the group's, or "fused"
// across hosts. `op` opens the message.
Group resolve_group(const char* op, const std::string& name, int64_t size,
                    const std::string& algorithm);

// c10d collectives, waited for. Tensors of any strides; results are contiguous.
at::Tensor c10d_all_gather(const Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor c10d_reduce_scatter(const Group& group, const at::Tensor& input, int64_t dim);
at::Tensor c10d_all_reduce(const Group& group, const at::Tensor& input, bool maximum);

}  // namespace axonn::ops
