// Memory by the driver: physical memory, addresses that it is mapped to, and multicast objects,
// whose addresses name the same bytes of all devices of a team. What the machine refuses of it:
// mappings of a part, and binding at an offset. Source: CUDA driver API 13.0, "Virtual Memory
// Management" and "Multicast Object Management".
#include <cuda.h>

#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Mappings;
using axonn::gpu_machine::Region;
using axonn::gpu_machine::Runtime;

namespace {

constexpr size_t kGranularity = size_t{1} << 21;

template <typename Body>
CUresult driver(const char* name, const Body& body) {
  return static_cast<CUresult>(
      api(name, [&](Runtime& r) { return static_cast<cudaError_t>(body(r, r.mappings())); }));
}

Mappings::Handle* find(Mappings& mappings, CUmemGenericAllocationHandle handle) {
  const auto found = mappings.handles.find(handle);
  return found == mappings.handles.end() ? nullptr : &found->second;
}

bool is_device(const Runtime& runtime, int device) {
  return device >= 0 && device < runtime.options.devices;
}

CUmemGenericAllocationHandle add(Mappings& mappings, Mappings::Handle handle) {
  const uint64_t name = ++mappings.last_handle;
  mappings.handles.emplace(name, std::move(handle));
  return name;
}

CUresult create(Runtime& runtime, Mappings& mappings, CUmemGenericAllocationHandle* handle,
                size_t size, const CUmemAllocationProp* prop) {
  if (size == 0 || size % kGranularity != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      !is_device(runtime, prop->location.id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::string name = "memory of device " + std::to_string(prop->location.id);
  Region& region = runtime.machine.memory().create(size, name);
  *handle = add(mappings, {size, &region, prop->location.id, 0, {}});
  return CUDA_SUCCESS;
}

// A multicast address names nothing before all devices of the team have bound their memory.
void name_team(Runtime& runtime, uint64_t address, const Mappings::Handle& multicast) {
  std::vector<Region*> regions;
  for (const auto& [device, region] : multicast.team) {
    if (region == nullptr) return;
    regions.push_back(region);
  }
  runtime.machine.memory().map_team(address, regions);
}

CUresult map(Runtime& runtime, Mappings& mappings, CUdeviceptr address, size_t size, size_t offset,
             CUmemGenericAllocationHandle handle) {
  const auto reserved = mappings.reserved.find(address);
  const Mappings::Handle* what = find(mappings, handle);
  if (reserved == mappings.reserved.end() || what == nullptr || reserved->second.handle != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (offset != 0 || size != what->bytes || size != reserved->second.bytes) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (what->region != nullptr) {
    if (!runtime.machine.memory().map(address, *what->region)) return CUDA_ERROR_NOT_SUPPORTED;
  } else {
    if (what->team.size() != what->num_devices) return CUDA_ERROR_INVALID_VALUE;
    name_team(runtime, address, *what);
  }
  reserved->second.handle = handle;
  return CUDA_SUCCESS;
}

CUresult bind(Runtime& runtime, Mappings& mappings, CUmemGenericAllocationHandle multicast,
              size_t multicast_offset, CUmemGenericAllocationHandle memory, size_t memory_offset,
              size_t size) {
  Mappings::Handle *to = find(mappings, multicast), *from = find(mappings, memory);
  if (to == nullptr || from == nullptr || to->region != nullptr || from->region == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto member = to->team.find(from->device);
  if (member == to->team.end() || member->second != nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (to->team.size() != to->num_devices) return CUDA_ERROR_INVALID_VALUE;
  if (multicast_offset != 0 || memory_offset != 0 || size != to->bytes || size != from->bytes) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  member->second = from->region;
  for (const auto& [address, reserved] : mappings.reserved) {
    if (reserved.handle == multicast) name_team(runtime, address, *to);
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
// Memory that is mapped stays until it is unmapped.
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return driver("cuMemRelease", [&](Runtime&, Mappings& mappings) {
    return mappings.handles.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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
// Waits for all devices first, since their kernels may use the address.
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  return driver("cuMemUnmap", [&](Runtime& r, Mappings& mappings) {
    const auto found = mappings.reserved.find(address);
    if (found == mappings.reserved.end() || found->second.bytes != size ||
        found->second.handle == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (int device = 0; device < r.options.devices; ++device) {
      if (const cudaError_t error = r.wait_for_device(device)) return static_cast<CUresult>(error);
    }
    r.machine.memory().unmap(address);
    found->second.handle = 0;
    return CUDA_SUCCESS;
  });
}
// The machine does not refuse access, see cudaDeviceEnablePeerAccess.
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
    if (prop->numDevices < 1 || prop->numDevices > static_cast<unsigned>(r.options.devices) ||
        prop->size == 0 || prop->size % kGranularity != 0 || prop->flags != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    *handle = add(mappings, {prop->size, nullptr, 0, prop->numDevices, {}});
    return CUDA_SUCCESS;
  });
}
CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  return driver("cuMulticastAddDevice", [&](Runtime& r, Mappings& mappings) {
    Mappings::Handle* multicast = find(mappings, handle);
    if (multicast == nullptr || multicast->region != nullptr || !is_device(r, device) ||
        multicast->team.size() == multicast->num_devices) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return multicast->team.emplace(device, nullptr).second ? CUDA_SUCCESS
                                                           : CUDA_ERROR_INVALID_VALUE;
  });
}
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle multicast, size_t multicast_offset,
                            CUmemGenericAllocationHandle memory, size_t memory_offset, size_t size,
                            unsigned long long flags) {
  return driver("cuMulticastBindMem", [&](Runtime& r, Mappings& mappings) {
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE
                      : bind(r, mappings, multicast, multicast_offset, memory, memory_offset, size);
  });
}

}  // extern "C"
