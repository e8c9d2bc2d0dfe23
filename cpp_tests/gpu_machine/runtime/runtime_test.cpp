// The runtime itself: what CUDA promises about order, and what it does not promise.
#include "gpu_machine/runtime/runtime.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <array>

#include "core/cuda/check.h"

namespace axonn::gpu_machine {
namespace {

constexpr size_t kWords = 64, kBytes = 4 * kWords;
constexpr uint64_t kSeeds = 20;

RuntimeOptions with_seed(uint64_t seed) {
  RuntimeOptions options;
  options.machine.seed = seed;
  return options;
}

uint32_t* device_words() {
  void* memory = nullptr;
  AXONN_CUDA_CHECK(cudaMalloc(&memory, kBytes));
  return static_cast<uint32_t*>(memory);
}

uint32_t* pinned_words() {
  void* memory = nullptr;
  AXONN_CUDA_CHECK(cudaHostAlloc(&memory, kBytes, cudaHostAllocDefault));
  return static_cast<uint32_t*>(memory);
}

cudaStream_t stream_with(unsigned flags) {
  cudaStream_t stream = nullptr;
  AXONN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  AXONN_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

void fill(uint32_t* words, int value, cudaStream_t stream) {
  AXONN_CUDA_CHECK(cudaMemsetAsync(words, value, kBytes, stream));
}

uint32_t first_word(const uint32_t* words) {
  uint32_t value = 0;
  AXONN_CUDA_CHECK(cudaMemcpy(&value, words, sizeof value, cudaMemcpyDefault));
  return value;
}

// Does it with many seeds. Returns how often the machine fails in this way, and expects that it
// fails in no other.
template <typename Do>
uint64_t failures(MachineError::Kind kind, Do&& what) {
  uint64_t count = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime(with_seed(seed));
    what(runtime);
    (void)cudaDeviceSynchronize();
    if (!runtime.failure()) continue;
    EXPECT_EQ(static_cast<int>(runtime.failure()->kind()), static_cast<int>(kind))
        << runtime.failure()->what();
    ++count;
  }
  return count;
}

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
      runtime.give_turns(1000);  // it is over, but the host does not know
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

// --- Graphs ---

cudaGraphExec_t instantiated(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  AXONN_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec = nullptr;
  AXONN_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  return exec;
}

// Captures two branches that fill the same words.
cudaGraphExec_t two_branches(cudaStream_t a, cudaStream_t b, uint32_t* words, bool ordered) {
  cudaEvent_t forked = new_event(), joined = new_event();
  AXONN_CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  AXONN_CUDA_CHECK(cudaEventRecord(forked, a));
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(b, forked, 0));
  fill(words, 1, b);
  if (!ordered) fill(words, 2, a);
  AXONN_CUDA_CHECK(cudaEventRecord(joined, b));
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(a, joined, 0));
  if (ordered) fill(words, 2, a);
  return instantiated(a);
}

TEST(RuntimeGraphs, BranchesAreOrderedOnlyByEvents) {
  for (const bool ordered : {false, true}) {
    const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime&) {
      cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
      uint32_t* words = device_words();
      const cudaGraphExec_t graph = two_branches(a, b, words, ordered);
      for (int replay = 0; replay < 3; ++replay) (void)cudaGraphLaunch(graph, b);
      if (ordered) {
        AXONN_CUDA_CHECK(cudaStreamSynchronize(b));
        EXPECT_EQ(first_word(words), 0x02020202u);
      }
    });
    EXPECT_EQ(races, ordered ? 0 : kSeeds);
  }
}

// A replay waits for what an external event was recorded behind before the launch, and records it
// for those that wait after the launch.
TEST(RuntimeGraphs, ExternalEventsOrderReplaysWithStreams) {
  for (const bool waits : {false, true}) {
    for (const bool records : {false, true}) {
      const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime&) {
        cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
        uint32_t* words = device_words();
        cudaEvent_t event = new_event();
        AXONN_CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
        if (waits) AXONN_CUDA_CHECK(cudaStreamWaitEvent(a, event, cudaEventWaitExternal));
        fill(words, 1, a);
        if (records) AXONN_CUDA_CHECK(cudaEventRecordWithFlags(event, a, cudaEventRecordExternal));
        const cudaGraphExec_t graph = instantiated(a);
        for (int i = 0; i < 2; ++i) {
          (void)cudaStreamWaitEvent(b, event, 0);
          (void)cudaMemsetAsync(words, 2, kBytes, b);
          (void)cudaEventRecord(event, b);
          (void)cudaGraphLaunch(graph, a);
        }
      });
      EXPECT_EQ(races, waits && records ? 0 : kSeeds) << waits << records;
    }
  }
}

TEST(RuntimeGraphs, WhatACaptureForbidsBreaksIt) {
  cudaGraph_t graph = nullptr;
  Runtime runtime;
  cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
  cudaEvent_t event = new_event();
  uint32_t* words = device_words();
  const auto begin = [&] {
    AXONN_CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  };
  begin();  // to wait for a stream that is captured
  EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  AXONN_CUDA_CHECK(cudaEventRecord(event, b));
  begin();  // to wait for what is outside
  EXPECT_EQ(cudaStreamWaitEvent(a, event, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  begin();  // to leave a branch open
  AXONN_CUDA_CHECK(cudaEventRecord(event, a));
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(b, event, 0));
  fill(words, 1, b);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(cudaStreamWaitEvent(b, event, 0), cudaErrorCapturedEvent);
}

}  // namespace
}  // namespace axonn::gpu_machine
