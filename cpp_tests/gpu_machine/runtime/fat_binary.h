// The kernels that nvcc has built into this program: it registers them before main.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "gpu_machine/ptx.h"

namespace axonn::gpu_machine {

struct Registered {
  struct Function {
    size_t module;
    std::string name;  // in PTX
  };
  std::vector<std::string_view> modules;  // their PTX
  std::map<const void*, Function> functions;
};

// What was registered so far. The list is complete when main begins.
const Registered& registered();
// A module that was registered, which is parsed when it is first asked for. Not for several threads
// at a time.
const Module& registered_module(size_t number);

// The PTX of a fat binary that was built with --no-compress. Throws std::runtime_error if there is
// none. Source: the layout as fatbinary of CUDA 13.0 writes it.
std::string_view ptx_of(const void* fat_binary);

}  // namespace axonn::gpu_machine
