// Modules that a program loads itself, and their kernels. A module is PTX text, which a driver
// would compile; the machine cannot run machine code.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "gpu_machine/runtime/api.h"

// A handle is the address of one of these.
struct CUfunc_st {};
struct CUmod_st {
  std::map<std::string, CUfunc_st> functions;
};

using axonn::gpu_machine::Runtime;

namespace {

constexpr std::string_view kMachineCode =
    "\x7f"
    "ELF";

CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }

cudaError_t load(Runtime& runtime, CUmodule* module, const char* text) {
  if (std::string_view(text).starts_with(kMachineCode)) {
    std::fprintf(stderr, "the GPU in software runs PTX, and was given machine code\n");
    return cudaErrorNoKernelImageForDevice;
  }
  auto loaded = std::make_unique<CUmod_st>();
  try {
    for (auto& [name, program] : runtime.machine.load_apart(text)) {
      runtime.kernels_of_modules()[&loaded->functions[name]] = std::move(program);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "the GPU in software: %s\n", error.what());
    return cudaErrorInvalidPtx;
  }
  *module = loaded.release();
  return cudaSuccess;
}

cudaError_t attribute_of(int* value, CUfunction_attribute attribute, const void* function) {
  cudaFuncAttributes all{};
  if (const cudaError_t error = cudaFuncGetAttributes(&all, function)) return error;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = all.numRegs;
      return cudaSuccess;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = static_cast<int>(all.localSizeBytes);
      return cudaSuccess;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = static_cast<int>(all.sharedSizeBytes);
      return cudaSuccess;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = all.maxThreadsPerBlock;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return as_driver(api("cuModuleLoadData", [&](Runtime& r) {
    return load(r, module, static_cast<const char*>(image));
  }));
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  return as_driver(api("cuModuleGetFunction", [&](Runtime&) {
    const auto found = module->functions.find(name);
    if (found == module->functions.end()) return cudaErrorSymbolNotFound;
    *function = &found->second;
    return cudaSuccess;
  }));
}
CUresult cuModuleUnload(CUmodule module) {
  return as_driver(api("cuModuleUnload", [&](Runtime& r) {
    for (const auto& [name, function] : module->functions) r.forget_kernel(&function);
    delete module;
    return cudaSuccess;
  }));
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  return as_driver(attribute_of(value, attribute, function));
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  return as_driver(
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, value));
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  cudaLaunchConfig_t same{};
  same.gridDim = {config->gridDimX, config->gridDimY, config->gridDimZ};
  same.blockDim = {config->blockDimX, config->blockDimY, config->blockDimZ};
  same.dynamicSmemBytes = config->sharedMemBytes;
  same.stream = config->hStream;
  same.attrs = reinterpret_cast<cudaLaunchAttribute*>(config->attrs);  // the same layout
  same.numAttrs = config->numAttrs;
  return as_driver(cudaLaunchKernelExC(&same, function, parameters));
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  cudaPointerAttributes all{};
  const auto* address = reinterpret_cast<const void*>(pointer);
  if (const cudaError_t error = cudaPointerGetAttributes(&all, address)) return as_driver(error);
  if (all.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(value) = pointer;
  return CUDA_SUCCESS;
}

}  // extern "C"
