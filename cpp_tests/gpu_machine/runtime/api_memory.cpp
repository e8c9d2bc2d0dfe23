// Memory and copies.
#include <cuda.h>

#include <cstring>
#include <new>

#include "gpu_machine/runtime/api.h"
#include "gpu_machine/strong.h"

using axonn::gpu_machine::Access;
using axonn::gpu_machine::Agent;
using axonn::gpu_machine::load_strong;
using axonn::gpu_machine::MachineError;
using axonn::gpu_machine::Order;
using axonn::gpu_machine::Region;
using axonn::gpu_machine::RemoteWrites;
using axonn::gpu_machine::Runtime;
using axonn::gpu_machine::Scope;
using axonn::gpu_machine::store_strong;
using axonn::gpu_machine::window_start;

namespace {

// From this window on, addresses may belong to the process itself; no allocation may lie there.
constexpr uint64_t kMostWindow = 1024;

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
bool is_of_machine(Runtime& runtime, const void* pointer) {
  return runtime.machine.memory().find(address_of(pointer)) != nullptr;
}

cudaError_t allocate(Runtime& runtime, void** pointer, size_t bytes, bool is_pinned) {
  if (const cudaError_t error = runtime.refuse_in_global_capture()) return error;
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  auto& memory = runtime.machine.memory();
  const int device = is_pinned ? -1 : runtime.device;
  uint64_t& allocated = runtime.allocated_bytes[device];
  if (!is_pinned && allocated + bytes > runtime.options.device_bytes) {
    return cudaErrorMemoryAllocation;
  }
  const std::string name =
      is_pinned ? "pinned memory" : "memory of device " + std::to_string(device);
  const bool for_host = is_pinned || runtime.options.host_reaches_devices;
  uint64_t address = 0;
  try {
    address = for_host ? memory.allocate_for_host(bytes, name, device)
                       : memory.allocate(bytes, name, device);
  } catch (const std::bad_alloc&) {  // host memory, of which each byte takes several
    return cudaErrorMemoryAllocation;
  }
  if (address >= window_start(kMostWindow)) return cudaErrorMemoryAllocation;
  allocated += bytes;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

// Waits for all devices first, as CUDA does.
cudaError_t release(Runtime& runtime, void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  if (!is_of_machine(runtime, pointer)) return cudaErrorInvalidValue;
  for (int d = 0; d < runtime.options.devices; ++d) {
    if (const cudaError_t error = runtime.wait_for_device(d)) return error;
  }
  const Region& region = *runtime.machine.memory().find(address_of(pointer));
  if (region.freed) return cudaErrorInvalidValue;
  runtime.allocated_bytes[region.device] -= region.bytes.size();
  runtime.machine.memory().free(address_of(pointer));
  return cudaSuccess;
}

// Frees the staging memory of copies that have ended.
void free_staged(Runtime& runtime) {
  std::erase_if(runtime.staged, [&](const auto& copy) {
    if (!runtime.machine.is_idle(copy.second)) return false;
    runtime.machine.memory().free(copy.first);
    return true;
  });
}

// Enqueues a copy from pageable host memory, which is read before the call returns. A graph keeps
// what it read.
cudaError_t copy_from_host(Runtime& runtime, uint64_t target, const void* from, size_t bytes,
                           cudaStream_t stream) {
  auto& machine = runtime.machine;
  free_staged(runtime);
  const uint64_t source = machine.memory().allocate(bytes, "staged for a copy");
  machine.memory().write(source, from, bytes);
  machine.memory().find(source)->read_only = true;
  const cudaError_t status = runtime.submit(stream, [&machine, target, source, bytes](int on) {
    machine.copy(on, target, source, bytes);
  });
  const CUstream_st* found = runtime.resolve(stream);
  if (status == cudaSuccess && found->capture == nullptr) {
    runtime.staged.emplace_back(source, found->stream);
  }
  return status;
}

// Memory that the machine does not know is pageable host memory: it is read before the call
// returns, or has been written by then.
cudaError_t copy(Runtime& runtime, void* to, const void* from, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  auto& machine = runtime.machine;
  const bool to_machine = is_of_machine(runtime, to), from_machine = is_of_machine(runtime, from);
  if (!to_machine && !from_machine) return cudaErrorInvalidValue;
  uint64_t target = address_of(to);
  const uint64_t source = address_of(from);
  if (!from_machine) return copy_from_host(runtime, target, from, bytes, stream);
  if (!to_machine) target = machine.memory().allocate(bytes, "staged for a copy");
  const cudaError_t status = runtime.submit(stream, [&machine, target, source, bytes](int on) {
    machine.copy(on, target, source, bytes);
  });
  if (status != cudaSuccess || to_machine) return status;
  if (const cudaError_t error = runtime.wait_for_stream(stream)) return error;
  machine.memory().read(target, to, bytes);
  machine.memory().free(target);
  return cudaSuccess;
}

// The device that memory lies on; -1 for host memory.
int device_of(const Region& region) {
  if (region.is_host) return -1;
  return region.lies_on >= 0 ? region.lies_on : region.device;
}

// Whether memory lies on another device than the stream's, no matter which process made it.
bool is_remote(Runtime& runtime, const Region& region, cudaStream_t handle) {
  const CUstream_st* stream = runtime.resolve(handle);
  const int device = device_of(region);
  return stream != nullptr && device >= 0 && device != stream->device;
}

// A flag that a stream itself reads or writes.
struct Flag {
  Flag(Agent& agent, uint64_t address)
      : region(*agent.machine.region_at(address)), offset(address & (window_start(1) - 1)) {
    if (region.freed || offset + sizeof(uint32_t) > region.bytes.size()) {
      agent.fail(MachineError::Kind::kMemory, "a stream reaches outside an allocation", -1);
    }
  }
  std::byte* data() const { return region.bytes.data() + offset; }

  Region& region;
  uint64_t offset;
};

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return api("cudaMalloc", [&](Runtime& r) { return allocate(r, pointer, bytes, false); });
}
cudaError_t cudaFree(void* pointer) {
  return api("cudaFree", [&](Runtime& r) { return release(r, pointer); });
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return api("cudaHostAlloc", [&](Runtime& r) { return allocate(r, pointer, bytes, true); });
}
cudaError_t cudaFreeHost(void* pointer) {
  return api("cudaFreeHost", [&](Runtime& r) { return release(r, pointer); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return api("cudaMemcpyAsync", [&](Runtime& r) { return copy(r, to, from, bytes, stream); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return api("cudaMemcpy", [&](Runtime& r) {
    const cudaError_t status = copy(r, to, from, bytes, nullptr);
    return status != cudaSuccess ? status : r.wait_for_stream(nullptr);
  });
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return api("cudaMemcpyPeerAsync", [&](Runtime& r) { return copy(r, to, from, bytes, stream); });
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t status = cudaMemsetAsync(to, value, bytes, nullptr);
  return status != cudaSuccess ? status : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return api("cudaMemGetInfo", [&](Runtime& r) {
    *total = r.options.device_bytes;
    *free = *total - r.allocated_bytes[r.device];
    return cudaSuccess;
  });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return api("cudaPointerGetAttributes", [&](Runtime& r) {
    *attributes = {};
    const Region* region = r.machine.memory().find(address_of(pointer));
    if (region == nullptr || region->freed) {
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->hostPointer = const_cast<void*>(pointer);
      return cudaSuccess;
    }
    attributes->type = region->is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = region->is_host ? r.device : device_of(*region);
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = region->is_host ? const_cast<void*>(pointer) : nullptr;
    return cudaSuccess;
  });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return api("cudaMemsetAsync", [&](Runtime& r) {
    if (bytes == 0) return cudaSuccess;
    if (!is_of_machine(r, to)) return cudaErrorInvalidValue;
    return r.submit(stream, [&machine = r.machine, target = address_of(to), value, bytes](int on) {
      machine.fill(on, target, value, bytes);
    });
  });
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  return static_cast<CUresult>(api("cuStreamWriteValue32", [&](Runtime& r) {
    const Region* const region = r.machine.region_at(address);
    if (region == nullptr || address % 4 != 0) return cudaErrorInvalidValue;
    if (r.options.remote_writes != RemoteWrites::kWork && is_remote(r, *region, stream)) {
      if (r.options.remote_writes == RemoteWrites::kRefused) return cudaErrorInvalidValue;
      return r.submit(stream, [](int) {});
    }
    return r.submit(stream, [&machine = r.machine, address, value](int on) {
      machine.enqueue_task(on, "writes a value", [address, value](Agent& agent) {
        const Flag flag(agent, address);
        agent.note_write(flag.region, flag.offset, sizeof value,
                         Access{Order::kRelease, Scope::kSystem}, -1);
        store_strong(flag.data(), &value, sizeof value);
        agent.machine.note_change();
        return true;
      });
    });
  }));
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                             unsigned flags) {
  return static_cast<CUresult>(api("cuStreamWaitValue32", [&](Runtime& r) {
    if (r.machine.region_at(address) == nullptr || address % 4 != 0) return cudaErrorInvalidValue;
    return r.submit(stream, [&machine = r.machine, address, value, flags](int on) {
      machine.enqueue_task(on, "waits for a value", [address, value, flags](Agent& agent) {
        const Flag flag(agent, address);
        uint32_t seen = 0;
        load_strong(&seen, flag.data(), sizeof seen);
        const bool reached = flags == CU_STREAM_WAIT_VALUE_EQ ? seen == value
                             : flags == CU_STREAM_WAIT_VALUE_AND
                                 ? (seen & value) != 0
                                 : static_cast<int32_t>(seen - value) >= 0;
        if (!reached) return false;
        agent.note_read(flag.region, flag.offset, sizeof seen,
                        Access{Order::kAcquire, Scope::kSystem}, -1);
        return true;
      });
    });
  }));
}

}  // extern "C"
