// Memory of the driver's functions: what they create, and what they refuse.
#include <cuda.h>
#include <gtest/gtest.h>

#include <vector>

#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine {
namespace {

constexpr int kDevices = 3;
constexpr size_t kBytes = size_t{1} << 21;

RuntimeOptions with_devices() {
  RuntimeOptions options;
  options.devices = kDevices;
  return options;
}

CUmemGenericAllocationHandle create_on(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(cuMemCreate(&handle, kBytes, &prop, 0), CUDA_SUCCESS);
  return handle;
}

CUdeviceptr reserve() {
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemAddressReserve(&address, kBytes, 0, 0, 0), CUDA_SUCCESS);
  return address;
}

CUdeviceptr mapped(CUmemGenericAllocationHandle handle) {
  const CUdeviceptr address = reserve();
  EXPECT_EQ(cuMemMap(address, kBytes, 0, handle, 0), CUDA_SUCCESS);
  CUmemAccessDesc access{};
  EXPECT_EQ(cuMemSetAccess(address, kBytes, &access, 1), CUDA_SUCCESS);
  return address;
}

cudaError_t write(CUdeviceptr address, uint32_t value) {
  return cudaMemcpy(reinterpret_cast<void*>(address), &value, sizeof value, cudaMemcpyHostToDevice);
}
uint32_t read(CUdeviceptr address) {
  uint32_t value = 0;
  EXPECT_EQ(
      cudaMemcpy(&value, reinterpret_cast<void*>(address), sizeof value, cudaMemcpyDeviceToHost),
      cudaSuccess);
  return value;
}

TEST(Mappings, TwoAddressesNameTheSameBytes) {
  Runtime runtime(with_devices());
  const auto memory = create_on(0);
  const CUdeviceptr one = mapped(memory), other = mapped(memory);
  EXPECT_NE(one, other);
  ASSERT_EQ(write(one + 64, 5), cudaSuccess);
  EXPECT_EQ(read(other + 64), 5u);
  // Released memory stays as long as it is mapped, and an address can be used again.
  EXPECT_EQ(cuMemRelease(memory), CUDA_SUCCESS);
  EXPECT_EQ(cuMemUnmap(one, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(read(other + 64), 5u);
  EXPECT_EQ(cuMemMap(one, kBytes, 0, create_on(1), 0), CUDA_SUCCESS);
  ASSERT_EQ(write(one + 64, 6), cudaSuccess);
  EXPECT_EQ(read(other + 64), 5u);
  EXPECT_EQ(cuMemUnmap(one, kBytes), CUDA_SUCCESS);
  EXPECT_EQ(cuMemAddressFree(one, kBytes), CUDA_SUCCESS);
  EXPECT_NE(write(one, 1), cudaSuccess);
}

TEST(Mappings, MisuseIsRefused) {
  Runtime runtime(with_devices());
  const auto memory = create_on(0);
  const CUdeviceptr address = mapped(memory);
  EXPECT_EQ(cuMemMap(address, kBytes, 0, memory, 0), CUDA_ERROR_INVALID_VALUE);  // it is in use
  EXPECT_EQ(cuMemAddressFree(address, kBytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(reserve(), kBytes, 0, memory + 77, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(address + 64, kBytes, 0, memory, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(reserve(), kBytes, 4096, memory, 0), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(cuMemUnmap(reserve(), kBytes), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemRelease(memory + 77), CUDA_ERROR_INVALID_VALUE);
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, kDevices};
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(cuMemCreate(&handle, kBytes, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  prop.location.id = 0;
  EXPECT_EQ(cuMemCreate(&handle, kBytes + 1, &prop, 0), CUDA_ERROR_INVALID_VALUE);
}

// --- Multicast -------------------------------------------------------------------

CUmemGenericAllocationHandle multicast_of(unsigned devices) {
  CUmulticastObjectProp prop{};
  prop.numDevices = devices;
  prop.size = kBytes;
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(cuMulticastCreate(&handle, &prop), CUDA_SUCCESS);
  return handle;
}

TEST(Mappings, AMulticastAddressNamesTheMemoryOfItsTeam) {
  for (const bool binds_first : {true, false}) {
    Runtime runtime(with_devices());
    const auto multicast = multicast_of(2);
    EXPECT_EQ(cuMulticastAddDevice(multicast, 0), CUDA_SUCCESS);
    const auto first = create_on(0), second = create_on(2);
    EXPECT_EQ(cuMulticastBindMem(multicast, 0, first, 0, kBytes, 0), CUDA_ERROR_INVALID_VALUE)
        << "not all devices are in the team";
    EXPECT_EQ(cuMulticastAddDevice(multicast, 2), CUDA_SUCCESS);
    EXPECT_EQ(cuMulticastAddDevice(multicast, 1), CUDA_ERROR_INVALID_VALUE) << "it is full";
    const CUdeviceptr early = binds_first ? 0 : mapped(multicast);
    if (!binds_first) {
      EXPECT_EQ(runtime.machine.memory().team_of(early), nullptr);
    }
    EXPECT_EQ(cuMulticastBindMem(multicast, 0, first, 0, kBytes, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMulticastBindMem(multicast, 0, first, 0, kBytes, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMulticastBindMem(multicast, 0, create_on(1), 0, kBytes, 0),
              CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(cuMulticastBindMem(multicast, 0, second, 0, kBytes, 0), CUDA_SUCCESS);
    const CUdeviceptr address = binds_first ? mapped(multicast) : early;
    const CUdeviceptr own = mapped(first), peers = mapped(second);
    const auto* team = runtime.machine.memory().team_of(address);
    ASSERT_NE(team, nullptr);
    EXPECT_EQ(*team, (std::vector<Region*>{runtime.machine.region_at(own),
                                           runtime.machine.region_at(peers)}));
    EXPECT_NE(write(address, 1), cudaSuccess) << "a copy does not take it";
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
