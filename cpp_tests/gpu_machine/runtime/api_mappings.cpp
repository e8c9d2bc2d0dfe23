// The driver's memory functions: physical memory, the addresses that it is mapped to, and multicast
// objects, whose addresses name the same bytes on all devices of a team. Processes pass both to
// each other as file descriptors. Not supported are partial mappings, binding at an offset, and
// handles for other hosts. Source: CUDA driver API 13.0, "Virtual Memory Management" and "Multicast
// Object Management".
#include <cuda.h>
#include <fcntl.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <vector>

#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Description;
using axonn::gpu_machine::Mappings;
using axonn::gpu_machine::Memory;
using axonn::gpu_machine::Region;
using axonn::gpu_machine::Runtime;
using axonn::gpu_machine::window_start;

namespace {

constexpr size_t kGranularity = size_t{1} << 21;

template <typename Body>
CUresult driver(const char* name, const Body& body) {
  return static_cast<CUresult>(api(name, [&](Runtime& r) {
    try {
      return static_cast<cudaError_t>(body(r, r.mappings()));
    } catch (const std::bad_alloc&) {
      return cudaErrorMemoryAllocation;
    } catch (const std::invalid_argument&) {
      return cudaErrorInvalidValue;
    }
  }));
}

bool is_device(const Runtime& runtime, int device) {
  return device >= 0 && device < runtime.options.devices;
}

// Whether handles of these types can be exported to other processes.
bool is_known(unsigned long long handle_types) {
  return handle_types == 0 || handle_types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUresult create(Runtime& runtime, Mappings& mappings, CUmemGenericAllocationHandle* handle,
                size_t size, const CUmemAllocationProp* prop) {
  if (size == 0 || size % kGranularity != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      !is_device(runtime, prop->location.id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!is_known(prop->requestedHandleTypes)) return CUDA_ERROR_NOT_SUPPORTED;
  *handle = mappings.create(runtime.machine.memory(), Description(size, prop->location.id),
                            prop->requestedHandleTypes != 0);
  return CUDA_SUCCESS;
}

CUresult create_multicast(Runtime& runtime, Mappings& mappings,
                          CUmemGenericAllocationHandle* handle, const CUmulticastObjectProp* prop) {
  if (prop->numDevices < 1 || prop->numDevices > Description::kMostDevices || prop->size == 0 ||
      prop->size % kGranularity != 0 || prop->flags != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!is_known(prop->handleTypes)) return CUDA_ERROR_NOT_SUPPORTED;
  *handle = mappings.create(runtime.machine.memory(),
                            Description::of_multicast(prop->size, prop->numDevices),
                            prop->handleTypes != 0);
  return CUDA_SUCCESS;
}

// Waits until all devices have joined the team, as CUDA does. Fails if they never can, because no
// other process can add them.
CUresult wait_for_team(Runtime& runtime, Mappings::Handle multicast) {
  const Description& description = *multicast.description;
  if (!multicast.is_shareable && !description.is_complete()) return CUDA_ERROR_INVALID_VALUE;
  return static_cast<CUresult>(runtime.wait_until([&] { return description.is_complete(); },
                                                  "a multicast object waits for its devices"));
}

// A multicast address names no memory until all devices of the team have bound theirs.
std::vector<Region*> find_team(Memory& memory, const Description& multicast) {
  std::vector<Region*> team;
  for (const auto& file : multicast.bound()) {
    team.push_back(&memory.of_file(file, multicast.bytes(), "memory of another process", true));
  }
  return team;
}

CUresult map(Runtime& runtime, Mappings& mappings, CUdeviceptr address, size_t size, size_t offset,
             CUmemGenericAllocationHandle handle) {
  const auto reserved = mappings.reserved.find(address);
  const Mappings::Handle* what = mappings.find(handle);
  if (reserved == mappings.reserved.end() || what == nullptr || reserved->second.handle != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (offset != 0 || size != what->description->bytes() || size != reserved->second.bytes) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  Memory& memory = runtime.machine.memory();
  if (what->region != nullptr) {
    if (!memory.map(address, *what->region)) return CUDA_ERROR_NOT_SUPPORTED;
  } else {
    const auto description = what->description;
    if (const CUresult error = wait_for_team(runtime, *what)) return error;
    memory.map_team(address, [&memory, description] { return find_team(memory, *description); });
  }
  mappings.reserved[address].handle = handle;
  return CUDA_SUCCESS;
}

// Waits for all devices first, since their kernels may be using the address.
CUresult unmap(Runtime& runtime, Mappings& mappings, CUdeviceptr address, size_t size) {
  const auto found = mappings.reserved.find(address);
  if (found == mappings.reserved.end() || found->second.bytes != size ||
      found->second.handle == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (int device = 0; device < runtime.options.devices; ++device) {
    if (const cudaError_t error = runtime.wait_for_device(device)) {
      return static_cast<CUresult>(error);
    }
  }
  runtime.machine.memory().unmap(address);
  mappings.reserved[address].handle = 0;
  return CUDA_SUCCESS;
}

// Binds the memory of a region to its device's place in a team.
CUresult bind(Runtime& runtime, Mappings& mappings, CUmemGenericAllocationHandle multicast,
              size_t multicast_offset, Region* from, size_t memory_offset, size_t size) {
  const Mappings::Handle* to = mappings.find(multicast);
  if (to == nullptr || from == nullptr || to->region != nullptr || from->file == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!to->description->has(from->lies_on)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = wait_for_team(runtime, *to)) return error;
  Mappings::Handle* const still = mappings.find(multicast);
  // Meanwhile another thread may have released either of them.
  if (still == nullptr || from->file == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (multicast_offset != 0 || memory_offset != 0 || size != still->description->bytes() ||
      size != from->bytes.size()) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (!still->description->bind(from->lies_on, *from->file)) return CUDA_ERROR_INVALID_VALUE;
  Memory::keep(*from);
  from->counts_as_written |= still->is_shareable;
  still->bound.push_back(from);
  return CUDA_SUCCESS;
}

CUresult unbind(Runtime& runtime, Mappings& mappings, CUmemGenericAllocationHandle handle,
                int device) {
  Mappings::Handle* const from = mappings.find(handle);
  if (from == nullptr || from->region != nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto bound = std::find_if(from->bound.begin(), from->bound.end(),
                                  [&](const Region* r) { return r->lies_on == device; });
  if (bound == from->bound.end() || !from->description->unbind(device)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Memory::let_go(**bound);
  from->bound.erase(bound);
  for (const auto& [address, reserved] : mappings.reserved) {
    if (reserved.handle == handle) runtime.machine.memory().forget_team(address);
  }
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  return driver("cuMemGetAllocationGranularity", [&](Runtime&, Mappings&) {
    *bytes = kGranularity;
    return CUDA_SUCCESS;
  });
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* prop, unsigned long long flags) {
  return driver("cuMemCreate", [&](Runtime& r, Mappings& mappings) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : create(r, mappings, handle, size, prop);
  });
}
// Mapped memory stays until it is unmapped.
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return driver("cuMemRelease", [&](Runtime&, Mappings& mappings) {
    if (mappings.find(handle) == nullptr) return CUDA_ERROR_INVALID_VALUE;
    mappings.release(handle);
    return CUDA_SUCCESS;
  });
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                             unsigned long long flags) {
  return driver("cuMemAddressReserve", [&](Runtime& r, Mappings& mappings) {
    if (size == 0 || size % kGranularity != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    *address = r.machine.memory().reserve();
    mappings.reserved[*address] = {size, 0};
    return CUDA_SUCCESS;
  });
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  return driver("cuMemAddressFree", [&](Runtime&, Mappings& mappings) {
    const auto found = mappings.reserved.find(address);
    if (found == mappings.reserved.end() || found->second.bytes != size ||
        found->second.handle != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    mappings.reserved.erase(found);
    return CUDA_SUCCESS;
  });
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return driver("cuMemMap", [&](Runtime& r, Mappings& mappings) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : map(r, mappings, address, size, offset, handle);
  });
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  return driver("cuMemUnmap",
                [&](Runtime& r, Mappings& mappings) { return unmap(r, mappings, address, size); });
}
// The machine does not refuse access; see cudaDeviceEnablePeerAccess.
CUresult cuMemSetAccess(CUdeviceptr address, size_t, const CUmemAccessDesc*, size_t) {
  return driver("cuMemSetAccess", [&](Runtime&, Mappings& mappings) {
    const auto found = mappings.reserved.find(address);
    return found == mappings.reserved.end() || found->second.handle == 0 ? CUDA_ERROR_INVALID_VALUE
                                                                         : CUDA_SUCCESS;
  });
}

CUresult cuMulticastGetGranularity(size_t* bytes, const CUmulticastObjectProp*,
                                   CUmulticastGranularity_flags) {
  return driver("cuMulticastGetGranularity", [&](Runtime&, Mappings&) {
    *bytes = kGranularity;
    return CUDA_SUCCESS;
  });
}
CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle,
                           const CUmulticastObjectProp* prop) {
  return driver("cuMulticastCreate", [&](Runtime& r, Mappings& mappings) {
    return create_multicast(r, mappings, handle, prop);
  });
}
CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  return driver("cuMulticastAddDevice", [&](Runtime& r, Mappings& mappings) {
    const Mappings::Handle* multicast = mappings.find(handle);
    if (multicast == nullptr || multicast->region != nullptr || !is_device(r, device)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return multicast->description->add(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle multicast, size_t multicast_offset,
                            CUmemGenericAllocationHandle memory, size_t memory_offset, size_t size,
                            unsigned long long flags) {
  return driver("cuMulticastBindMem", [&](Runtime& r, Mappings& mappings) {
    const Mappings::Handle* from = mappings.find(memory);
    if (flags != 0 || from == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return bind(r, mappings, multicast, multicast_offset, from->region, memory_offset, size);
  });
}
CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle multicast, size_t multicast_offset,
                             CUdeviceptr address, size_t size, unsigned long long flags) {
  return driver("cuMulticastBindAddr", [&](Runtime& r, Mappings& mappings) {
    Region* const from = r.machine.memory().find(address);
    if (flags != 0 || from == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const size_t offset = address & (window_start(1) - 1);
    return bind(r, mappings, multicast, multicast_offset, from, offset, size);
  });
}
CUresult cuMulticastUnbind(CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset,
                           size_t size) {
  return driver("cuMulticastUnbind", [&](Runtime& r, Mappings& mappings) {
    const Mappings::Handle* from = mappings.find(multicast);
    if (from == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (offset != 0 || size != from->description->bytes()) return CUDA_ERROR_NOT_SUPPORTED;
    return unbind(r, mappings, multicast, device);
  });
}

// --- Objects that processes share ---
// The caller closes the descriptor, and may pass it to other processes.
CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  return driver("cuMemExportToShareableHandle", [&](Runtime&, Mappings& mappings) {
    const Mappings::Handle* found = mappings.find(handle);
    if (found == nullptr || !found->is_shareable || flags != 0 ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const int descriptor = fcntl(found->file->descriptor(), F_DUPFD_CLOEXEC, 0);
    *static_cast<int*>(shareable) = descriptor;
    return descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
  });
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type) {
  return driver("cuMemImportFromShareableHandle", [&](Runtime& r, Mappings& mappings) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    const auto descriptor = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    const auto made = mappings.import(r.machine.memory(), descriptor);
    *handle = made.value_or(0);
    return made ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

}  // extern "C"
