// The functions of NVML that PyTorch asks for: its symmetric memory, whether memory can be shared
// with other hosts, and its allocator, who else has some. CUDA's toolkit need not have NVML's
// header.
#include <cuda_runtime_api.h>

namespace {

constexpr int kSuccess = 0, kNotSupported = 3;
int any_device = 0;  // all are the same here

}  // namespace

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = &any_device;
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned*, void*) { return kNotSupported; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return cudaDriverGetVersion(version) == cudaSuccess ? kSuccess : kNotSupported;
}

}  // extern "C"
