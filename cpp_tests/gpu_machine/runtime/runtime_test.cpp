// The runtime itself: what CUDA promises about order, and what it does not promise.
#include <array>

#include "core/cuda/reduce.h"
#include "gpu_machine/runtime/fat_binary.h"
#include "gpu_machine/runtime/runtime_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::device_words;
using testing::failures;
using testing::fill;
using testing::first_word;
using testing::kBytes;
using testing::kSeeds;
using testing::kWords;
using testing::new_event;
using testing::pinned_words;
using testing::stream_with;
using testing::with_seed;

TEST(RuntimeMemory, CopiesGoBetweenDevicesAndAllMemoryOfTheHost) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed));
    std::array<uint32_t, kWords> from{}, to{};
    for (size_t i = 0; i < kWords; ++i) from[i] = static_cast<uint32_t>(seed * 1000 + i);
    uint32_t* first = device_words();
    AXONN_CUDA_CHECK(cudaSetDevice(1));
    uint32_t* second = device_words();
    uint32_t* pinned = pinned_words();
    cudaStream_t stream = stream_with(cudaStreamNonBlocking);
    AXONN_CUDA_CHECK(cudaMemcpyAsync(first, from.data(), kBytes, cudaMemcpyDefault, stream));
    std::array<uint32_t, kWords> unchanged = from;
    from.fill(0);  // pageable memory is read before the call returns
    AXONN_CUDA_CHECK(cudaMemcpyAsync(second, first, kBytes, cudaMemcpyDefault, stream));
    AXONN_CUDA_CHECK(cudaMemcpyAsync(pinned, second, kBytes, cudaMemcpyDefault, stream));
    AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
    EXPECT_TRUE(std::equal(unchanged.begin(), unchanged.end(), pinned));
    pinned[3] = 77;  // the host writes it, and a copy reads it
    AXONN_CUDA_CHECK(cudaMemcpyAsync(first, pinned, kBytes, cudaMemcpyDefault, stream));
    AXONN_CUDA_CHECK(cudaMemcpyAsync(to.data(), first, kBytes, cudaMemcpyDefault, stream));
    EXPECT_EQ(to[3], 77u);  // pageable memory is written when the call returns
    AXONN_CUDA_CHECK(cudaFree(first));
    EXPECT_NE(cudaMemcpy(to.data(), first, kBytes, cudaMemcpyDefault), cudaSuccess);
  }
}

TEST(RuntimeMemory, WhatNobodyHasWrittenIsNotRead) {
  EXPECT_EQ(failures(MachineError::Kind::kMemory,
                     [](Runtime&) {
                       std::array<uint32_t, kWords> to{};
                       EXPECT_EQ(cudaMemcpy(to.data(), device_words(), kBytes, cudaMemcpyDefault),
                                 cudaErrorIllegalAddress);
                     }),
            kSeeds);
}

TEST(RuntimeStreams, OnlyEventsOrderThem) {
  for (const bool ordered : {false, true}) {
    const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime&) {
      cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
      uint32_t* words = device_words();
      fill(words, 1, a);
      if (ordered) {
        cudaEvent_t event = new_event();
        AXONN_CUDA_CHECK(cudaEventRecord(event, a));
        AXONN_CUDA_CHECK(cudaStreamWaitEvent(b, event, 0));
      }
      (void)cudaMemsetAsync(words, 2, kBytes, b);
      (void)cudaStreamSynchronize(b);
    });
    EXPECT_EQ(races, ordered ? 0 : kSeeds);
  }
}

TEST(RuntimeStreams, AnEventOrdersOnlyWhatCameBeforeItsRecord) {
  EXPECT_EQ(failures(MachineError::Kind::kRace,
                     [](Runtime&) {
                       cudaStream_t a = stream_with(cudaStreamNonBlocking),
                                    b = stream_with(cudaStreamNonBlocking);
                       uint32_t* words = device_words();
                       cudaEvent_t event = new_event();
                       AXONN_CUDA_CHECK(cudaEventRecord(event, a));
                       fill(words, 1, a);
                       (void)cudaStreamWaitEvent(b, event, 0);
                       (void)cudaMemsetAsync(words, 2, kBytes, b);
                     }),
            kSeeds);
}

TEST(RuntimeStreams, TheHostOrdersWhatItHasWaitedFor) {
  for (const bool waits : {false, true}) {
    const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime& runtime) {
      cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
      uint32_t* words = device_words();
      fill(words, 1, a);
      runtime.give_turns(1000);  // the work has ended, but the host does not know
      if (waits) AXONN_CUDA_CHECK(cudaStreamSynchronize(a));
      (void)cudaMemsetAsync(words, 2, kBytes, b);
    });
    EXPECT_EQ(races, waits ? 0 : kSeeds);
  }
}

TEST(RuntimeStreams, TheDefaultStreamAndBlockingOnesWaitForEachOther) {
  for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    for (const bool default_first : {false, true}) {
      const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime&) {
        cudaStream_t other = stream_with(flags);
        uint32_t* words = device_words();
        fill(words, 1, default_first ? nullptr : other);
        (void)cudaMemsetAsync(words, 2, kBytes, default_first ? other : nullptr);
      });
      EXPECT_EQ(races, flags == cudaStreamNonBlocking ? kSeeds : 0) << default_first;
    }
  }
}

TEST(RuntimeStreams, ADeviceIsWaitedForWithTheStreamsThatAreGone) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed));
    uint32_t* pinned = pinned_words();
    cudaStream_t stream = stream_with(cudaStreamNonBlocking);
    for (int i = 1; i <= 20; ++i) AXONN_CUDA_CHECK(cudaMemsetAsync(pinned, i, kBytes, stream));
    AXONN_CUDA_CHECK(cudaStreamDestroy(stream));
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT_EQ(pinned[0], 0x14141414u);
  }
}

TEST(RuntimeStreams, TheDefaultStreamWaitsForABlockingOneThatIsGone) {
  for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
    const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime&) {
      cudaStream_t other = stream_with(flags);
      uint32_t* words = device_words();
      fill(words, 1, other);
      AXONN_CUDA_CHECK(cudaStreamDestroy(other));
      (void)cudaMemsetAsync(words, 2, kBytes, nullptr);
    });
    EXPECT_EQ(races, flags == cudaStreamNonBlocking ? kSeeds : 0);
  }
}

TEST(RuntimeStreams, TheHostGoesOnWhileAStreamWaits) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed));
    cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
    uint32_t *words = device_words(), *flag = device_words();
    fill(flag, 0, a);
    AXONN_CUDA_CHECK(cudaStreamSynchronize(a));
    const auto address = reinterpret_cast<CUdeviceptr>(flag);
    EXPECT_EQ(cuStreamWaitValue32(a, address, 7, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
    (void)cudaMemsetAsync(words, 2, kBytes, a);
    cudaEvent_t event = new_event();
    AXONN_CUDA_CHECK(cudaEventRecord(event, a));
    runtime.give_turns(500);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
    EXPECT_EQ(cudaStreamQuery(a), cudaErrorNotReady);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    fill(words, 1, b);
    EXPECT_EQ(cuStreamWriteValue32(b, address, 7, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_SUCCESS);
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);  // the value has ordered the streams
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
    EXPECT_EQ(first_word(words), 0x02020202u);
  }
}

TEST(RuntimeStreams, AWaitInVainIsADeadlockThatNamesIt) {
  Runtime runtime;
  uint32_t* flag = device_words();
  fill(flag, 0, nullptr);
  (void)cuStreamWaitValue32(nullptr, reinterpret_cast<CUdeviceptr>(flag), 1,
                            CU_STREAM_WAIT_VALUE_GEQ);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorUnknown);
  ASSERT_TRUE(runtime.failure());
  EXPECT_NE(std::string(runtime.failure()->what()).find("waits for a value"), std::string::npos);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorUnknown);  // as all later calls
}

TEST(RuntimeMemory, OfAnotherDeviceIsReachedOnceItIsEnabled) {
  for (const bool enabled : {false, true}) {
    Runtime runtime;
    constexpr auto kType = kernels::DataType::kFloat32;
    float* near = reinterpret_cast<float*>(device_words());
    AXONN_CUDA_CHECK(cudaSetDevice(1));
    void* far = device_words();
    fill(static_cast<uint32_t*>(far), 0, nullptr);
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
    AXONN_CUDA_CHECK(cudaSetDevice(0));
    if (enabled) {
      EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaSuccess);
      EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
    }
    const void* sources[] = {far};
    (void)kernels::cuda::reduce_slots(near, sources, 1, kWords, kType, kernels::ReduceOp::kSum,
                                      nullptr);
    EXPECT_EQ(cudaDeviceSynchronize(), enabled ? cudaSuccess : cudaErrorIllegalAddress);
    ASSERT_EQ(runtime.failure().has_value(), !enabled);
    if (!enabled) {
      EXPECT_NE(std::string(runtime.failure()->what()).find("not enabled as a peer"),
                std::string::npos);
    }
  }
}

TEST(RuntimeStreams, EventsTellTheTimeBetweenThem) {
  Runtime runtime;
  uint32_t* words = device_words();
  fill(words, 0, nullptr);
  cudaEvent_t begin = nullptr, end = nullptr;
  AXONN_CUDA_CHECK(cudaEventCreate(&begin));
  AXONN_CUDA_CHECK(cudaEventCreate(&end));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  AXONN_CUDA_CHECK(cudaEventRecord(begin, nullptr));
  const void* sources[] = {words};
  AXONN_CUDA_CHECK(kernels::cuda::reduce_slots(
      words, sources, 1, kWords, kernels::DataType::kFloat32, kernels::ReduceOp::kSum, nullptr));
  AXONN_CUDA_CHECK(cudaEventRecord(end, nullptr));
  AXONN_CUDA_CHECK(cudaEventSynchronize(end));
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GT(milliseconds, 0);  // one nanosecond per warp instruction
  EXPECT_LT(milliseconds, 0.1f);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, new_event()),
            cudaErrorInvalidResourceHandle);
}

TEST(RuntimeLaunches, ACooperativeGridMustFit) {
  RuntimeOptions options;
  options.machine.sms = 2;
  Runtime runtime(options);
  int count = 0;
  AXONN_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  EXPECT_EQ(count, 2);
  const auto* kernel = registered().functions.begin()->first;
  int most = 0;
  AXONN_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, kernel, 32, 0));
  EXPECT_GT(most, 0);
  const auto ctas = static_cast<unsigned>(count * most + 1);
  EXPECT_EQ(cudaLaunchCooperativeKernel(kernel, {ctas, 1, 1}, {32, 1, 1}, nullptr, 0, nullptr),
            cudaErrorCooperativeLaunchTooLarge);
}

TEST(RuntimeErrors, AreInjectedAtACall) {
  Runtime runtime;
  runtime.fail("cudaMalloc", cudaErrorMemoryAllocation, 1);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 8), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&memory, 8), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&memory, 8), cudaSuccess);
}

TEST(RuntimeLaunches, WhatIsNoKernelOrNoGridIsAnError) {
  Runtime runtime;
  int no_kernel = 0;
  EXPECT_EQ(cudaLaunchKernel(&no_kernel, {1, 1, 1}, {32, 1, 1}, nullptr, 0, nullptr),
            cudaErrorInvalidDeviceFunction);
  cudaFuncAttributes attributes;
  EXPECT_EQ(cudaFuncGetAttributes(&attributes, &no_kernel), cudaErrorInvalidDeviceFunction);
}

}  // namespace
}  // namespace axonn::gpu_machine
