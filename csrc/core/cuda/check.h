// Turns CUDA's return codes into exceptions with expression, error name, text and file:line.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace axonn::cuda {

class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t error, const char* expression, const char* file, int line)
      : std::runtime_error(std::string(expression) + " failed with " + cudaGetErrorName(error) +
                           ": " + cudaGetErrorString(error) + " (" + file + ":" +
                           std::to_string(line) + ")"),
        status(error) {}

  const cudaError_t status;
};

}  // namespace axonn::cuda

#define AXONN_CUDA_CHECK(expression)                                                       \
  do {                                                                                     \
    const cudaError_t axonn_status = (expression);                                         \
    if (axonn_status != cudaSuccess) {                                                     \
      (void)cudaGetLastError(); /* otherwise a later, unrelated call reports this error */ \
      throw ::axonn::cuda::CudaError(axonn_status, #expression, __FILE__, __LINE__);       \
    }                                                                                      \
  } while (false)
