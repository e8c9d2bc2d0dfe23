// Functions of the driver that programs look up by name.
#include "gpu_machine/runtime/driver_api.h"

#include <cuda.h>

#include "gpu_machine/runtime/runtime.h"
#include "gpu_machine/tensor_map.h"

extern "C" CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
    const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill) {
  auto& runtime = axonn::gpu_machine::Runtime::current();
  const axonn::gpu_machine::RuntimeLock lock(runtime);
  // Like the driver, this does not set the runtime's last error.
  const int injected = runtime.count_call("cuTensorMapEncodeTiled");
  if (injected != 0) return static_cast<CUresult>(injected);
  return static_cast<CUresult>(axonn::gpu_machine::encode_tiled(
      map, type, rank, reinterpret_cast<uint64_t>(base), sizes, strides, box, element_strides,
      interleave, swizzle, l2_promotion, fill));
}

namespace axonn::gpu_machine {

std::map<std::string, void*> driver_functions() {
  return {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&cuTensorMapEncodeTiled)},
      {"cuStreamWriteValue32", reinterpret_cast<void*>(&cuStreamWriteValue32)},
      {"cuStreamWaitValue32", reinterpret_cast<void*>(&cuStreamWaitValue32)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&cuMemGetAllocationGranularity)},
      {"cuMemCreate", reinterpret_cast<void*>(&cuMemCreate)},
      {"cuMemRelease", reinterpret_cast<void*>(&cuMemRelease)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&cuMemAddressReserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&cuMemAddressFree)},
      {"cuMemMap", reinterpret_cast<void*>(&cuMemMap)},
      {"cuMemUnmap", reinterpret_cast<void*>(&cuMemUnmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&cuMemSetAccess)},
      {"cuMulticastGetGranularity", reinterpret_cast<void*>(&cuMulticastGetGranularity)},
      {"cuMulticastCreate", reinterpret_cast<void*>(&cuMulticastCreate)},
      {"cuMulticastAddDevice", reinterpret_cast<void*>(&cuMulticastAddDevice)},
      {"cuMulticastBindMem", reinterpret_cast<void*>(&cuMulticastBindMem)},
      {"cuMulticastBindAddr", reinterpret_cast<void*>(&cuMulticastBindAddr)},
      {"cuMulticastUnbind", reinterpret_cast<void*>(&cuMulticastUnbind)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&cuMemExportToShareableHandle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&cuMemImportFromShareableHandle)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&cuDeviceGetAttribute)},
  };
}

}  // namespace axonn::gpu_machine
