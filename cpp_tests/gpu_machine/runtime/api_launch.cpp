// Kernels: launches, attributes and occupancy.
#include <cuda_runtime.h>

#include <cstring>

#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Dim;
using axonn::gpu_machine::Node;
using axonn::gpu_machine::Program;
using axonn::gpu_machine::Runtime;

namespace {

constexpr uint64_t kSharedWithoutAsking = 49152;

Dim dim_of(dim3 d) { return {d.x, d.y, d.z}; }

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
  dim3 cluster = {1, 1, 1};
  bool is_cooperative = false;
  bool overlaps = false;  // may begin before the previous kernel ends
};

cudaError_t launch(Runtime& runtime, const void* function, const Configuration& with,
                   void** arguments) {
  const std::shared_ptr<const Program> program = runtime.kernel_of(function);
  if (program == nullptr) return cudaErrorInvalidDeviceFunction;
  const auto limit = runtime.shared_limits().find(function);
  // A requested limit is for dynamic memory only; the default one includes the kernel's own.
  const bool asked = limit != runtime.shared_limits().end();
  const uint64_t most = asked ? static_cast<uint64_t>(limit->second) : kSharedWithoutAsking;
  if (with.shared_bytes + (asked ? 0 : program->shared_bytes) > most) return cudaErrorInvalidValue;
  if (const cudaError_t error = runtime.load_on_device(function, true)) return error;
  const auto footprint =
      axonn::gpu_machine::footprint_of(*program, dim_of(with.block).count(), with.shared_bytes);
  const auto most_ctas = static_cast<uint64_t>(axonn::gpu_machine::ctas_of_sm(footprint)) *
                         static_cast<uint64_t>(runtime.machine.options().sms);
  if (with.is_cooperative && dim_of(with.grid).count() > most_ctas) {
    return cudaErrorCooperativeLaunchTooLarge;
  }
  std::vector<std::vector<std::byte>> values;
  for (size_t i = 0; i < program->params.size(); ++i) {
    const auto* from = static_cast<const std::byte*>(arguments[i]);
    values.emplace_back(from, from + program->params[i].bytes);
  }
  const auto enqueue = [&machine = runtime.machine, program, with, values](int on) {
    machine.enqueue(on, program, dim_of(with.grid), dim_of(with.block), values, with.shared_bytes,
                    dim_of(with.cluster), with.is_cooperative, with.overlaps);
  };
  return runtime.submit(with.stream, enqueue, Node::Kind::kKernel);
}

bool fits(dim3 cluster, dim3 grid) {
  const uint64_t ctas = dim_of(cluster).count();
  return ctas != 0 && ctas <= axonn::gpu_machine::kMostClusterCtas && grid.x % cluster.x == 0 &&
         grid.y % cluster.y == 0 && grid.z % cluster.z == 0;
}

// The configuration that <<<...>>> passes to the call after it.
Configuration& pushed() {
  thread_local Configuration configuration;
  return configuration;
}

cudaError_t attributes_of(Runtime& runtime, cudaFuncAttributes* attributes, const void* function) {
  const std::shared_ptr<const Program> program = runtime.kernel_of(function);
  if (program == nullptr) return cudaErrorInvalidDeviceFunction;
  if (const cudaError_t error = runtime.load_on_device(function, false)) return error;
  std::memset(attributes, 0, sizeof *attributes);
  attributes->sharedSizeBytes = program->shared_bytes;
  attributes->numRegs = static_cast<int>(axonn::gpu_machine::registers_of_thread(
      *program, program->max_threads != 0 ? static_cast<uint64_t>(program->max_threads) : 1024));
  attributes->maxThreadsPerBlock = program->max_threads != 0 ? program->max_threads : 1024;
  attributes->ptxVersion = 90;
  attributes->binaryVersion = 90;
  return cudaSuccess;
}

}  // namespace

extern "C" {

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     CUstream_st* stream) {
  pushed() = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  *grid = pushed().grid;
  *block = pushed().block;
  *shared_bytes = pushed().shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed().stream;
  return cudaSuccess;
}
// A kernel's handle is its host function. nvcc's code asks for it once per process.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t stream) {
  return api("cudaLaunchKernel", [&](Runtime& r) {
    return launch(r, function, {grid, block, shared_bytes, stream}, arguments);
  });
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                        void** arguments, size_t shared_bytes,
                                        cudaStream_t stream) {
  return api("cudaLaunchCooperativeKernel", [&](Runtime& r) {
    return launch(r, function, {grid, block, shared_bytes, stream, {1, 1, 1}, true}, arguments);
  });
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return api("cudaLaunchKernelExC", [&](Runtime& r) {
    Configuration with{config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream};
    for (unsigned i = 0; i < config->numAttrs; ++i) {
      const cudaLaunchAttribute& attribute = config->attrs[i];
      if (attribute.id == cudaLaunchAttributeCooperative) {
        with.is_cooperative = attribute.val.cooperative != 0;
        continue;
      }
      if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
        with.overlaps = attribute.val.programmaticStreamSerializationAllowed != 0;
        continue;
      }
      if (attribute.id != cudaLaunchAttributeClusterDimension) {
        return cudaErrorNotSupported;  // an attribute unknown to the machine
      }
      const auto& cluster = attribute.val.clusterDim;
      with.cluster = {cluster.x, cluster.y, cluster.z};
    }
    if (!fits(with.cluster, with.grid)) return cudaErrorInvalidClusterSize;
    return launch(r, function, with, arguments);
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  return api("cudaFuncGetAttributes",
             [&](Runtime& r) { return attributes_of(r, attributes, function); });
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  return api("cudaFuncSetAttribute", [&](Runtime& r) {
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorNotSupported;
    const std::shared_ptr<const Program> program = r.kernel_of(function);
    if (program == nullptr) return cudaErrorInvalidDeviceFunction;
    const auto whole = static_cast<uint64_t>(r.options.capability.shared_of_block);
    if (value < 0 || static_cast<uint64_t>(value) + program->shared_bytes > whole) {
      return cudaErrorInvalidValue;
    }
    r.shared_limits()[function] = value;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int threads, size_t shared_bytes) {
  return api("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&](Runtime& r) {
    const std::shared_ptr<const Program> program = r.kernel_of(function);
    if (program == nullptr) return cudaErrorInvalidDeviceFunction;
    if (threads < 1 || threads > 1024) return cudaErrorInvalidValue;
    *blocks = axonn::gpu_machine::ctas_of_sm(
        axonn::gpu_machine::footprint_of(*program, static_cast<uint64_t>(threads), shared_bytes));
    return cudaSuccess;
  });
}

}  // extern "C"
