// Ranks for tests of NCCL, each with its own device of the runtime.
#pragma once

#include <gtest/gtest.h>
#include <nccl.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/stream.h"
#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine::nccl::testing {

using axonn::cuda::DeviceGuard;
using axonn::cuda::HighPriorityStream;

inline RuntimeOptions with_seed(uint64_t seed, int devices, int resident_ctas = 16) {
  RuntimeOptions options;
  options.machine.seed = seed;
  options.machine.resident_ctas = resident_ctas;
  options.devices = devices;
  return options;
}
// For hosts with several threads: a call waits for the others before it reports a deadlock.
inline RuntimeOptions with_threads(uint64_t seed, int devices, double patience_seconds = 5) {
  RuntimeOptions options = with_seed(seed, devices);
  options.patience = std::chrono::duration<double>(patience_seconds);
  return options;
}

// An array on the current device; it is freed with the runtime.
template <typename T>
class Array {
 public:
  explicit Array(size_t size) : size_(size) {
    AXONN_CUDA_CHECK(cudaMalloc(&data_, size * sizeof(T)));
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    AXONN_CUDA_CHECK(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> read() const {
    std::vector<T> values(size_);
    AXONN_CUDA_CHECK(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

// Communicators of all devices, made by one thread, and one stream per device.
struct Ranks {
  explicit Ranks(int count, const ncclConfig_t* config = nullptr)
      : comms(static_cast<size_t>(count)) {
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    for (int r = 0; r < count; ++r) {
      const DeviceGuard guard(r);
      ncclConfig_t its = NCCL_CONFIG_INITIALIZER;
      if (config != nullptr) its = *config;
      const ncclResult_t result =
          ncclCommInitRankConfig(&comms[static_cast<size_t>(r)], count, id, r, &its);
      EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress);
      streams.push_back(std::make_unique<HighPriorityStream>());
    }
    const ncclResult_t result = ncclGroupEnd();
    EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress);
    for (int r = 0; r < count; ++r) settle(r);
  }

  ncclComm_t operator[](int rank) const { return comms[static_cast<size_t>(rank)]; }
  cudaStream_t stream(int rank) const { return streams[static_cast<size_t>(rank)]->get(); }
  int size() const { return static_cast<int>(comms.size()); }

  // Waits until a nonblocking communicator has done what it was told.
  void settle(int rank) const {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      ASSERT_EQ(ncclCommGetAsyncError((*this)[rank], &state), ncclSuccess);
    }
    EXPECT_EQ(state, ncclSuccess) << ncclGetLastError(nullptr);
  }

  std::vector<ncclComm_t> comms;
  std::vector<std::unique_ptr<HighPriorityStream>> streams;
};

// Runs each rank's host code in its own thread, on the rank's device.
template <typename Body>
void on_threads(int count, const Body& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < count; ++r) {
    threads.emplace_back([&body, r] {
      try {
        (void)cudaSetDevice(r);
        body(r);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void synchronize(int devices) {
  for (int d = 0; d < devices; ++d) {
    const DeviceGuard guard(d);
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
  }
}

// How often each function that a test may make fail was called: all but those that release things,
// whose errors nobody could make up for, and those that the tests themselves call.
inline std::map<std::string, int> failing_calls(const Runtime& runtime) {
  std::map<std::string, int> calls = runtime.calls();
  for (const char* function : {"ncclCommAbort", "cudaStreamDestroy", "cudaEventDestroy",
                               "cudaFreeHost", "cudaGetDevice", "cudaSetDevice", "cudaMalloc",
                               "cudaMemcpy", "cudaDeviceSynchronize", "cudaStreamSynchronize"}) {
    calls.erase(function);
  }
  return calls;
}

// Runs all devices until everything has ended, or until an error ends the machine.
inline void run_to_the_end(int devices) {
  for (int d = 0; d < devices; ++d) {
    (void)cudaSetDevice(d);
    (void)cudaDeviceSynchronize();
  }
  (void)cudaSetDevice(0);
}

// Expects that the machine ended with this kind of error, with these parts in its message.
inline void expect_failure(const Runtime& runtime, MachineError::Kind kind,
                           const std::vector<std::string>& parts) {
  ASSERT_TRUE(runtime.failure()) << "nothing failed";
  EXPECT_EQ(static_cast<int>(runtime.failure()->kind()), static_cast<int>(kind))
      << runtime.failure()->what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(runtime.failure()->what()).find(part), std::string::npos)
        << "no '" << part << "' in: " << runtime.failure()->what();
  }
}

}  // namespace axonn::gpu_machine::nccl::testing
