// A runtime for programs whose host also computes on device memory, with PTX from files.
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "core/cuda/reduce.h"
#include "gpu_machine/runtime/fat_binary.h"
#include "gpu_machine/runtime/runtime_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::device_words;
using testing::fill;
using testing::first_word;
using testing::kBytes;
using testing::kWords;
using testing::stream_with;

RuntimeOptions for_host() {
  RuntimeOptions options;
  options.host_reaches_devices = true;
  return options;
}

void copy_by_kernel(uint32_t* to, const uint32_t* from) {
  const void* sources[] = {from};
  AXONN_CUDA_CHECK(kernels::cuda::reduce_slots(to, sources, 1, kWords, kernels::DataType::kFloat32,
                                               kernels::ReduceOp::kSum, nullptr));
}

TEST(HostAccess, HostAndKernelsUseTheSameMemory) {
  Runtime runtime(for_host());
  uint32_t *from = device_words(), *to = device_words();
  const float value = 2.5f;
  for (size_t i = 0; i < kWords; ++i) std::memcpy(from + i, &value, sizeof value);
  copy_by_kernel(to, from);
  AXONN_CUDA_CHECK(cudaDeviceSynchronize());
  EXPECT_EQ(std::memcmp(to, from, kBytes), 0);
  cudaPointerAttributes attributes;
  AXONN_CUDA_CHECK(cudaPointerGetAttributes(&attributes, to));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  AXONN_CUDA_CHECK(cudaPointerGetAttributes(&attributes, &value));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST(HostAccess, FreedAddressesAreGivenAwayAgain) {
  RuntimeOptions options = for_host();
  options.device_bytes = 3 * kBytes;
  Runtime runtime(options);
  uint32_t* kept = device_words();
  for (int i = 0; i < 2000; ++i) {
    uint32_t* words = device_words();
    fill(words, 1, nullptr);
    if (i == 1999) {
      EXPECT_EQ(first_word(words), 0x01010101u);
    }
    AXONN_CUDA_CHECK(cudaFree(words));
    if (i == 0) {
      EXPECT_EQ(cudaFree(words), cudaErrorInvalidValue);
    }
  }
  fill(kept, 7, nullptr);
  EXPECT_EQ(first_word(kept), 0x07070707u);
}

TEST(HostAccess, ADeviceHasSoMuchMemory) {
  RuntimeOptions options = for_host();
  options.device_bytes = 2 * kBytes;
  Runtime runtime(options);
  uint32_t* first = device_words();
  void* second = nullptr;
  EXPECT_EQ(cudaMalloc(&second, 2 * kBytes), cudaErrorMemoryAllocation);
  size_t free = 0, total = 0;
  AXONN_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(free, kBytes);
  EXPECT_EQ(total, 2 * kBytes);
  AXONN_CUDA_CHECK(cudaFree(first));
  EXPECT_EQ(cudaMalloc(&second, 2 * kBytes), cudaSuccess);
}

TEST(HostAccess, AFunctionOfTheHostComesInItsPlaceInAStream) {
  for (const bool captured : {false, true}) {
    Runtime runtime(for_host());
    cudaStream_t stream = stream_with(cudaStreamNonBlocking);
    uint32_t *from = device_words(), *to = device_words();
    if (captured) AXONN_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    fill(from, 1, stream);
    AXONN_CUDA_CHECK(
        cudaLaunchHostFunc(stream, [](void* words) { ++*static_cast<uint32_t*>(words); }, from));
    AXONN_CUDA_CHECK(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream));
    if (captured) {
      cudaGraph_t graph = nullptr;
      AXONN_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      size_t nodes = 0;
      AXONN_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
      EXPECT_EQ(nodes, 3u);
      cudaGraphExec_t exec = nullptr;
      AXONN_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
      for (int i = 0; i < 3; ++i) AXONN_CUDA_CHECK(cudaGraphLaunch(exec, stream));
    }
    AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
    EXPECT_EQ(to[0], 0x01010102u);
  }
}

TEST(HostAccess, KernelsAreFoundInFiles) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("ptx" + std::to_string(getpid()));
  fs::create_directory(folder);
  for (const bool there : {true, false}) {
    RuntimeOptions options = for_host();
    options.ptx_folder = folder;
    if (there) {
      int number = 0;
      std::set<const void*> written;
      for (const auto& [host, function] : registered().functions) {
        if (!written.insert(function.fat_binary).second) continue;
        std::ofstream(folder / (std::to_string(number++) + ".ptx")) << ptx_of(function.fat_binary);
      }
    }
    Runtime runtime(options);
    uint32_t *from = device_words(), *to = device_words();
    fill(from, 0x40, nullptr);
    if (there) {
      copy_by_kernel(to, from);
      AXONN_CUDA_CHECK(cudaDeviceSynchronize());
      EXPECT_EQ(to[kWords - 1], 0x40404040u);
    } else {
      const auto* kernel = registered().functions.begin()->first;
      EXPECT_EQ(cudaLaunchKernel(kernel, {1, 1, 1}, {32, 1, 1}, nullptr, 0, nullptr),
                cudaErrorInvalidDeviceFunction);
      const std::string why = cudaGetErrorString(cudaErrorInvalidDeviceFunction);
      EXPECT_NE(why.find(registered().functions.begin()->second.name), std::string::npos) << why;
    }
    fs::remove_all(folder);
    fs::create_directory(folder);
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace axonn::gpu_machine
