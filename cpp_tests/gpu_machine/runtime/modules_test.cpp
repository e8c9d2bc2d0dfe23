// Modules that a program loads itself.
#include <cuda.h>
#include <gtest/gtest.h>

#include <string>

#include "gpu_machine/runtime/runtime_case.h"

namespace axonn::gpu_machine {
namespace {

// A kernel that writes `value` to where its parameter points.
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

}  // namespace
}  // namespace axonn::gpu_machine
