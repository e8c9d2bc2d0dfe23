// Devices, errors and properties.
#include <cstring>

#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Runtime;

namespace {

constexpr int kSharedOfBlock = 232448;  // of an H100

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
    switch (attribute) {
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        return cudaSuccess;
      case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        return cudaSuccess;
      case cudaDevAttrMultiProcessorCount:
        *value = r.machine.options().sms;
        return cudaSuccess;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = kSharedOfBlock;
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
    properties->major = 9;
    properties->multiProcessorCount = r.machine.options().sms;
    properties->sharedMemPerBlockOptin = kSharedOfBlock;
    properties->warpSize = 32;
    return cudaSuccess;
  });
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
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    default:
      return "an error of CUDA";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  const auto& failure = Runtime::current().failure();
  return failure && error != cudaSuccess ? failure->what() : cudaGetErrorName(error);
}

}  // extern "C"
