#include "core/cuda/fused/write_value.h"

#include <cuda.h>

namespace axonn::kernels::cuda {
namespace {

using WriteValue = decltype(&cuStreamWriteValue32);

// Looked up through the runtime, so nothing links to the driver, which machines without GPUs lack.
WriteValue find_write_value() {
  // From this CUDA version on, the function needs no setting of the kernel module.
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function,
                                                             kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess) (void)cudaGetLastError();  // else the next launch reports it
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WriteValue>(function);
}

WriteValue found_write_value() {
  static const WriteValue found = find_write_value();
  return found;
}

}  // namespace

void load_write_value() { (void)found_write_value(); }

cudaError_t write_value(void* to, uint32_t value, cudaStream_t stream) {
  const WriteValue write = found_write_value();
  if (write == nullptr) return cudaErrorNotSupported;
  // Driver errors have the same numbers as runtime errors.
  return static_cast<cudaError_t>(
      write(stream, reinterpret_cast<CUdeviceptr>(to), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

}  // namespace axonn::kernels::cuda
