// Parses the arguments that end most ops: the name and size of the group, and the algorithm.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "ops/algorithm.h"
#include "ops/group/group.h"

namespace axonn::ops {

// Returns the algorithm of that name. Raises ValueError for an unknown name, and
// NotImplementedError for "fused" on a device without it, even if the group has one rank and needs
// no algorithm. `fused_on_cuda` says whether the op has "fused" on CUDA.
AskedAlgorithm parse_algorithm(const char* op, const std::string& name, c10::Device device,
                               bool fused_on_cuda = false);

// Returns the group of that name, and sets whether it may fuse; a group of size 1 is not looked up.
// Collective like find_group, whose errors it raises. Also raises ValueError if the size differs
// and, on the CPU, for "fused" across hosts or along an emulated link. `op` opens the message.
Group resolve_group(const char* op, const std::string& name, int64_t size, AskedAlgorithm asked,
                    c10::Device device);

}  // namespace axonn::ops
