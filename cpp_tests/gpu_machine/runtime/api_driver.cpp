// Functions of the driver for devices, contexts and errors. A device has one context, which exists
// from the start.
#include <cuda.h>

#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Runtime;

namespace {

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1);
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return static_cast<CUresult>(cudaGetDeviceCount(count)); }
CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return number >= 0 && number < Runtime::current().options.devices ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDriverGetVersion(int* version) {
  return static_cast<CUresult>(cudaDriverGetVersion(version));
}
// The attributes have the same numbers in the driver and the runtime.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(
      cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(Runtime::device);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = Runtime::device;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  if (context == nullptr) return CUDA_SUCCESS;
  const auto device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return static_cast<CUresult>(cudaSetDevice(device));
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
#if CUDA_VERSION >= 12080
// The machine does not write a log.
CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  if (handle != nullptr) *handle = nullptr;
  return CUDA_SUCCESS;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
#endif

}  // extern "C"
