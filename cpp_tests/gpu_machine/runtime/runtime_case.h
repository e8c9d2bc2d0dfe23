// Memory, streams and events for tests of the runtime, and runs with many seeds.
#pragma once

#include <cuda.h>
#include <gtest/gtest.h>

#include "core/cuda/check.h"
#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine::testing {

inline constexpr size_t kWords = 64, kBytes = 4 * kWords;
inline constexpr uint64_t kSeeds = 20;

inline RuntimeOptions with_seed(uint64_t seed) {
  RuntimeOptions options;
  options.machine.seed = seed;
  return options;
}

inline uint32_t* device_words() {
  void* memory = nullptr;
  AXONN_CUDA_CHECK(cudaMalloc(&memory, kBytes));
  return static_cast<uint32_t*>(memory);
}

inline uint32_t* pinned_words() {
  void* memory = nullptr;
  AXONN_CUDA_CHECK(cudaHostAlloc(&memory, kBytes, cudaHostAllocDefault));
  return static_cast<uint32_t*>(memory);
}

inline cudaStream_t stream_with(unsigned flags) {
  cudaStream_t stream = nullptr;
  AXONN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

inline cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  AXONN_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

inline void fill(uint32_t* words, int value, cudaStream_t stream) {
  AXONN_CUDA_CHECK(cudaMemsetAsync(words, value, kBytes, stream));
}

inline uint32_t first_word(const uint32_t* words) {
  uint32_t value = 0;
  AXONN_CUDA_CHECK(cudaMemcpy(&value, words, sizeof value, cudaMemcpyDefault));
  return value;
}

// Runs `what` with many seeds. Returns how often the machine fails with this kind of error, and
// expects no other kind.
template <typename Do>
inline uint64_t failures(MachineError::Kind kind, Do&& what) {
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

}  // namespace axonn::gpu_machine::testing
