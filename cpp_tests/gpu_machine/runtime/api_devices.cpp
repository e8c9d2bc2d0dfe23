// Devices, errors and properties.
#include <cuda.h>

#include <climits>
#include <cstdio>
#include <cstring>
#include <string>

#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Runtime;

namespace {

constexpr int kSharedWithoutAsking = 49152, kRegistersOfSm = 65536;

bool is_device(const Runtime& runtime, int device) {
  return device >= 0 && device < runtime.options.devices;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return api("cudaGetDeviceCount", [&](Runtime& r) {
    *count = r.options.devices;
    return cudaSuccess;
  });
}
cudaError_t cudaGetDevice(int* device) {
  return api("cudaGetDevice", [&](Runtime& r) {
    *device = r.device;
    return cudaSuccess;
  });
}
cudaError_t cudaSetDevice(int device) {
  return api("cudaSetDevice", [&](Runtime& r) {
    if (!is_device(r, device)) return cudaErrorInvalidDevice;
    r.device = device;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceSynchronize() {
  return api("cudaDeviceSynchronize", [&](Runtime& r) { return r.wait_for_device(r.device); });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return api("cudaDeviceGetAttribute", [&](Runtime& r) {
    if (!is_device(r, device)) return cudaErrorInvalidDevice;
    switch (static_cast<int>(attribute)) {
      case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
        *value = r.options.capability.sm >= 90;
        return cudaSuccess;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        *value = 0;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMajor:
        *value = r.options.capability.major();
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = r.options.capability.minor();
        return cudaSuccess;
      case cudaDevAttrMultiProcessorCount:
        *value = r.machine.options().sms;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = r.options.capability.shared_of_block;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = r.options.capability.shared_of_sm;
        return cudaSuccess;
      case cudaDevAttrMaxRegistersPerBlock:
        *value = kRegistersOfSm;
        return cudaSuccess;
      case cudaDevAttrWarpSize:
        *value = 32;
        return cudaSuccess;
      case cudaDevAttrClockRate:
      case cudaDevAttrMemoryClockRate:
      case cudaDevAttrGlobalMemoryBusWidth:
        *value = 1;  // time is virtual
        return cudaSuccess;
      default:
        return cudaErrorNotSupported;
    }
  });
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return api("cudaGetDeviceProperties", [&](Runtime& r) {
    if (!is_device(r, device)) return cudaErrorInvalidDevice;
    std::memset(properties, 0, sizeof *properties);
    std::strcpy(properties->name, "GPU in software");
    properties->uuid.bytes[0] = static_cast<char>(device + 1);
    properties->pciBusID = device + 1;
    properties->major = r.options.capability.major();
    properties->minor = r.options.capability.minor();
    properties->multiProcessorCount = r.machine.options().sms;
    properties->totalGlobalMem = r.options.device_bytes;
    properties->sharedMemPerBlock = kSharedWithoutAsking;
    properties->sharedMemPerBlockOptin = r.options.capability.shared_of_block;
    properties->sharedMemPerMultiprocessor = r.options.capability.shared_of_sm;
    properties->regsPerBlock = properties->regsPerMultiprocessor = kRegistersOfSm;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = INT_MAX;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->warpSize = 32;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  return api("cudaDeviceGetPCIBusId", [&](Runtime& r) {
    if (!is_device(r, device)) return cudaErrorInvalidDevice;
    std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
  });
}
cudaError_t cudaDriverGetVersion(int* version) {
  return api("cudaDriverGetVersion", [&](Runtime& r) {
    *version = r.options.driver_version;
    return cudaSuccess;
  });
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return api("cudaDeviceCanAccessPeer", [&](Runtime& r) {
    if (!is_device(r, device) || !is_device(r, peer)) return cudaErrorInvalidDevice;
    *can = device != peer;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return api("cudaDeviceEnablePeerAccess", [&](Runtime& r) {
    if (!is_device(r, peer) || peer == r.device) return cudaErrorInvalidDevice;
    return r.machine.enable_peer(r.device, peer) ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return api("cudaGetDriverEntryPointByVersion", [&](Runtime& r) {
    *function = r.entry_point(name);
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function != nullptr ? cudaSuccess : cudaErrorSymbolNotFound;
  });
}

cudaError_t cudaGetLastError() { return Runtime::current().take_last_error(true); }
cudaError_t cudaPeekAtLastError() { return Runtime::current().take_last_error(false); }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorECCUncorrectable:
      return "cudaErrorECCUncorrectable";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorIllegalState:
      return "cudaErrorIllegalState";
    default:
      break;
  }
  thread_local std::string text;
  text = "error " + std::to_string(static_cast<int>(error)) + " of CUDA";
  return text.c_str();
}
const char* cudaGetErrorString(cudaError_t error) {
  const Runtime& runtime = Runtime::current();
  if (runtime.failure() && error != cudaSuccess) return runtime.failure()->what();
  const bool asks_too_much =
      error == cudaErrorInvalidDeviceFunction || error == cudaErrorNotSupported;
  return asks_too_much && !runtime.why_not().empty() ? runtime.why_not().c_str()
                                                     : cudaGetErrorName(error);
}

}  // extern "C"
