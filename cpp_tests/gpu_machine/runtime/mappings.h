// What the driver's functions for virtual memory have made.
#pragma once

#include <cstdint>
#include <map>

#include "gpu_machine/memory.h"

namespace axonn::gpu_machine {

struct Mappings {
  // Memory of a device, or a multicast object, which has no region of its own.
  struct Handle {
    uint64_t bytes = 0;
    Region* region = nullptr;
    int device = 0;
    unsigned num_devices = 0;     // of the team
    std::map<int, Region*> team;  // by device; null until its memory is bound
  };
  struct Reserved {
    uint64_t bytes = 0;
    uint64_t handle = 0;  // that is mapped there; 0 if none is
  };

  std::map<uint64_t, Handle> handles;
  std::map<uint64_t, Reserved> reserved;  // by address
  uint64_t last_handle = 0;
};

}  // namespace axonn::gpu_machine
