#include "core/cuda/fused/write_value.h"

#include <cuda.h>

namespace axonn::kernels::cuda {
namespace {

using WriteValue = decltype(&cuStreamWriteValue32);

// The runtime finds it, so that nothing links to the driver, which machines without a GPU lack.
WriteValue find() {
  constexpr unsigned kVersion = 12000;  // whose form of it every GPU has
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &function,
                                                             kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WriteValue>(function);
}

WriteValue driver() {
  static const WriteValue found = find();
  return found;
}

}  // namespace

bool can_write_values() { return driver() != nullptr; }

cudaError_t write_value(void* to, uint32_t value, cudaStream_t stream) {
  // Errors of the driver have the numbers of the runtime's.
  return static_cast<cudaError_t>(
      driver()(stream, reinterpret_cast<CUdeviceptr>(to), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

}  // namespace axonn::kernels::cuda
