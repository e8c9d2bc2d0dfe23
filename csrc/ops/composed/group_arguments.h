// Parses the last arguments of every op: the name and the size of its group, and the algorithm.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "ops/algorithm.h"
#include "ops/group/group.h"

namespace axonn::ops {

// Returns the algorithm of that name. Raises ValueError for one that does not exist, and
// NotImplementedError for "fused" on a device that does not have it, even where a group of one rank
// needs none. `fused_on_cuda` says whether the op has "fused" on CUDA.
AskedAlgorithm parse_algorithm(const char* op, const std::string& name, c10::Device device,
                               bool fused_on_cuda = false);

// Returns the group of that name, and sets whether it may fuse; a group of size 1 is not looked up.
// It is collective and raises as find_group does. It also raises ValueError for a size that is not
// the group's, and for "fused" across hosts or along an emulated link. `op` opens the message.
Group resolve_group(const char* op, const std::string& name, int64_t size, AskedAlgorithm asked,
                    c10::Device device);

}  // namespace axonn::ops
