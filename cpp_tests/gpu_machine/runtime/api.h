// Common to all functions of CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "gpu_machine/runtime/runtime.h"

// Wraps a CUDA function: counts the call, injects its error, lets the machine run, and keeps the
// error that it returns.
template <typename Call>
cudaError_t api(const char* function, Call&& call) {
  auto& runtime = axonn::gpu_machine::Runtime::current();
  const axonn::gpu_machine::RuntimeLock lock(runtime);
  if (const cudaError_t error = runtime.enter(function)) return error;
  return runtime.leave(std::forward<Call>(call)(runtime));
}
