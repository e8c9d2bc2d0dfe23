// The kernels that nvcc built into this program, which registers them before main.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "gpu_machine/ptx.h"

namespace axonn::gpu_machine {

struct Registered {
  struct Function {
    const void* fat_binary;
    std::string name;  // in PTX
  };
  std::map<const void*, Function> functions;
};

// Everything registered so far. The list is complete when main begins, unless libraries are opened
// later.
const Registered& registered();
// The module of a fat binary, parsed at the first use. Not for several threads at a time. Throws as
// ptx_of does.
const Module& module_of(const void* fat_binary);

// The PTX of a fat binary that was built with --no-compress. Throws std::runtime_error if there is
// none. Source: the layout that the fatbinary tool of CUDA 13.0 writes.
std::string_view ptx_of(const void* fat_binary);

}  // namespace axonn::gpu_machine
