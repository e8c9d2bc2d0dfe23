// Modules that a program loads itself.
#include <cuda.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "gpu_machine/runtime/capability.h"
#include "gpu_machine/runtime/ptx_files.h"
#include "gpu_machine/runtime/runtime_case.h"

namespace axonn::gpu_machine {
namespace {

// A kernel that writes `value` to the address in its parameter.
std::string writes(int value) {
  return ".version 9.0\n.target sm_90\n.address_size 64\n"
         ".visible .entry write(.param .u64 to)\n{\n"
         ".reg .b32 %r<2>;\n.reg .b64 %rd<2>;\n"
         "ld.param.u64 %rd1, [to];\n"
         "mov.u32 %r1, " +
         std::to_string(value) + ";\nst.global.u32 [%rd1], %r1;\nret;\n}\n";
}

CUmodule loaded(const std::string& text) {
  CUmodule module = nullptr;
  EXPECT_EQ(cuModuleLoadData(&module, text.c_str()), CUDA_SUCCESS);
  return module;
}

CUfunction function_of(CUmodule module) {
  CUfunction function = nullptr;
  EXPECT_EQ(cuModuleGetFunction(&function, module, "write"), CUDA_SUCCESS);
  return function;
}

CUresult launch(CUfunction function, uint32_t* to, unsigned shared_bytes = 0) {
  CUlaunchConfig config{};
  config.gridDimX = config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shared_bytes;
  void* parameters[] = {&to};
  return cuLaunchKernelEx(&config, function, parameters, nullptr);
}

TEST(Modules, KernelsOfOneNameStayApart) {
  Runtime runtime;
  uint32_t* words = testing::device_words();
  const CUmodule one = loaded(writes(1)), two = loaded(writes(2));
  const CUfunction first = function_of(one), second = function_of(two);
  ASSERT_EQ(launch(first, words), CUDA_SUCCESS);
  EXPECT_EQ(testing::first_word(words), 1U);
  ASSERT_EQ(launch(second, words), CUDA_SUCCESS);
  EXPECT_EQ(testing::first_word(words), 2U);
  EXPECT_EQ(cuModuleUnload(one), CUDA_SUCCESS);
  ASSERT_EQ(launch(second, words + 1), CUDA_SUCCESS);
  EXPECT_EQ(testing::first_word(words + 1), 2U);
}

TEST(Modules, AKernelThatIsUnloadedRunsToItsEnd) {
  Runtime runtime;
  uint32_t* words = testing::device_words();
  const CUmodule module = loaded(writes(7));
  ASSERT_EQ(launch(function_of(module), words), CUDA_SUCCESS);
  ASSERT_EQ(cuModuleUnload(module), CUDA_SUCCESS);
  EXPECT_EQ(testing::first_word(words), 7U);
}

TEST(Modules, SharedMemoryIsAskedForFirst) {
  Runtime runtime;
  uint32_t* words = testing::device_words();
  const CUfunction function = function_of(loaded(writes(3)));
  constexpr unsigned kMuch = 100000;
  EXPECT_EQ(launch(function, words, kMuch), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kMuch),
            CUDA_SUCCESS);
  ASSERT_EQ(launch(function, words, kMuch), CUDA_SUCCESS);
  EXPECT_EQ(testing::first_word(words), 3U);
}

// A kernel's own shared memory counts toward the default limit and toward the block's maximum, but
// not toward the dynamic memory that was requested.
TEST(Modules, SharedMemoryOfTheKernelIsNoDynamicOne) {
  constexpr unsigned kOwn = 1024, kWithoutAsking = 49152;
  Runtime runtime;
  const auto whole = static_cast<unsigned>(runtime.options.capability.shared_of_block);
  uint32_t* words = testing::device_words();
  std::string text = writes(3);
  const size_t body = text.find("{\n") + 2;
  text.insert(body, ".shared .align 16 .b8 own[" + std::to_string(kOwn) + "];\n");
  const CUfunction function = function_of(loaded(text));
  const auto ask = [&](unsigned bytes) {
    return cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                              static_cast<int>(bytes));
  };
  EXPECT_EQ(launch(function, words, kWithoutAsking - kOwn), CUDA_SUCCESS);
  EXPECT_EQ(launch(function, words, kWithoutAsking - kOwn + 16), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(ask(whole - kOwn + 16), CUDA_ERROR_INVALID_VALUE);
  for (const unsigned bytes : {kWithoutAsking, whole - kOwn}) {
    ASSERT_EQ(ask(bytes), CUDA_SUCCESS);
    EXPECT_EQ(launch(function, words, bytes), CUDA_SUCCESS);
    EXPECT_EQ(launch(function, words, bytes + 16), CUDA_ERROR_INVALID_VALUE);
  }
  EXPECT_EQ(testing::first_word(words), 3U);
}

TEST(Modules, WhatIsRefused) {
  Runtime runtime;
  CUmodule module = nullptr;
  EXPECT_EQ(cuModuleLoadData(&module,
                             "\x7f"
                             "ELF"),
            CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(cuModuleLoadData(&module, ".version 9.0\n.entry {"), CUDA_ERROR_INVALID_PTX);
  module = loaded(writes(1));
  CUfunction function = nullptr;
  EXPECT_EQ(cuModuleGetFunction(&function, module, "other"), CUDA_ERROR_NOT_FOUND);
  int registers = 0;
  ASSERT_EQ(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function_of(module)),
            CUDA_SUCCESS);
  EXPECT_GT(registers, 0);
}

TEST(Faults, AGpuThatIsGoneAnswersNothing) {
  Runtime runtime;
  uint32_t* words = testing::device_words();
  runtime.fail("cudaMemsetAsync", cudaErrorECCUncorrectable);
  EXPECT_EQ(cudaMemsetAsync(words, 0, 4, nullptr), cudaErrorECCUncorrectable);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorECCUncorrectable);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorECCUncorrectable)).find("the GPU is gone"),
            std::string::npos);
}

TEST(PtxFiles, KernelsForAnotherGpuAloneAreLeftOut) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "ptx_files";
  std::filesystem::create_directories(folder);
  std::string own = writes(1);
  own.replace(own.find("sm_90"), 5, "sm_90a");
  std::ofstream(folder / "own.ptx") << own;
  std::string other = writes(2);
  other.replace(other.find("entry write"), 11, "entry other");
  std::ofstream(folder / "any.ptx") << other;
  EXPECT_TRUE(files_of_kernels(folder, 90).contains("write"));
  const auto found = files_of_kernels(folder, 80);
  EXPECT_FALSE(found.contains("write"));
  EXPECT_TRUE(found.contains("other"));
  std::filesystem::remove_all(folder);
}

TEST(Capability, IsWhatTheDeviceSays) {
  EXPECT_THROW(capability_of(70), std::invalid_argument);
  RuntimeOptions options;
  options.capability = capability_of(80);
  Runtime runtime(options);
  const auto attribute = [](cudaDeviceAttr what) {
    int value = -1;
    EXPECT_EQ(cudaDeviceGetAttribute(&value, what, 0), cudaSuccess);
    return value;
  };
  EXPECT_EQ(attribute(cudaDevAttrComputeCapabilityMajor), 8);
  EXPECT_EQ(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), 166912);
  int multicast = -1;
  EXPECT_EQ(cuDeviceGetAttribute(&multicast, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0),
            CUDA_SUCCESS);
  EXPECT_EQ(multicast, 0);
}

}  // namespace
}  // namespace axonn::gpu_machine
