// The last arguments of every op: the name and the size of its group, and the algorithm.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "ops/algorithm.h"
#include "ops/group/group.h"

namespace axonn::ops {

// The algorithm of that name. Raises ValueError for one that does not exist, NotImplementedError
// for "fused" where the device has none; also where one rank needs none. On CUDA some ops have one:
// `fused_on_cuda`.
AskedAlgorithm parse_algorithm(const char* op, const std::string& name, c10::Device device,
                               bool fused_on_cuda = false);

// The group of that name, and whether it may fuse; one of size 1 is not looked up. Collective and
// raising as find_group, and ValueError for a size that is not the group's, or for "fused" across
// hosts or along an emulated link. `op` opens the message.
Group resolve_group(const char* op, const std::string& name, int64_t size, AskedAlgorithm asked,
                    c10::Device device);

}  // namespace axonn::ops
