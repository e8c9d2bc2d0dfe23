// The NVML functions that PyTorch calls: its symmetric memory asks whether memory can be shared
// with other hosts, and its allocator asks which other processes have some. NVML's header may be
// missing from the CUDA toolkit.
#include <cuda_runtime_api.h>

namespace {

constexpr int kSuccess = 0, kNotSupported = 3;
int any_device = 0;  // all devices are the same here

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
