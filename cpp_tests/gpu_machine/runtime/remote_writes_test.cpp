// Streams that write values (cuStreamWriteValue32) to memory of other devices: the write works, is
// refused, or does nothing. Memory of the stream's own device and of the host is always written.
#include "gpu_machine/runtime/process_case.h"
#include "gpu_machine/runtime/runtime_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::device_words;
using testing::fill;
using testing::first_word;
using testing::in_processes;
using testing::kSeeds;
using testing::pinned_words;
using testing::Process;
using testing::stream_with;

// The words start as 0.
uint32_t* words_of(int device) {
  AXONN_CUDA_CHECK(cudaSetDevice(device));
  uint32_t* words = device_words();
  fill(words, 0, nullptr);
  AXONN_CUDA_CHECK(cudaDeviceSynchronize());
  return words;
}

CUresult write(cudaStream_t stream, void* to, uint32_t value) {
  return cuStreamWriteValue32(stream, reinterpret_cast<CUdeviceptr>(to), value,
                              CU_STREAM_WRITE_VALUE_DEFAULT);
}

class RemoteWrite : public ::testing::TestWithParam<RemoteWrites> {
 protected:
  CUresult wanted() const {
    return GetParam() == RemoteWrites::kRefused ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  }
  uint32_t expected(uint32_t value) const { return GetParam() == RemoteWrites::kWork ? value : 0; }
  RuntimeOptions with_seed(uint64_t seed) const {
    RuntimeOptions options = testing::with_seed(seed);
    options.remote_writes = GetParam();
    options.host_reaches_devices = seed % 2 == 0;
    return options;
  }
};

TEST_P(RemoteWrite, OfAnotherDeviceDependsOnTheOption) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_seed(seed));
    uint32_t *first = words_of(0), *second = words_of(1), *pinned = pinned_words();
    *pinned = 0;
    cudaStream_t stream = stream_with(cudaStreamNonBlocking);  // of device 1
    AXONN_CUDA_CHECK(cudaSetDevice(0));                        // this does not matter
    EXPECT_EQ(write(stream, first, 5), wanted());
    EXPECT_EQ(write(stream, second, 6), CUDA_SUCCESS);
    EXPECT_EQ(write(stream, pinned, 7), CUDA_SUCCESS);
    AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
    EXPECT_EQ(first_word(first), expected(5));
    EXPECT_EQ(first_word(second), 6u);
    EXPECT_EQ(*pinned, 7u);
    // The default stream belongs to the current device.
    EXPECT_EQ(write(nullptr, first, 8), CUDA_SUCCESS);
    EXPECT_EQ(write(nullptr, second, 9), wanted());
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT_EQ(first_word(first), 8u);
    EXPECT_EQ(first_word(second), GetParam() == RemoteWrites::kWork ? 9u : 6u);
    EXPECT_FALSE(runtime.failure());
  }
}

// Work after an ignored write still runs, and a wait for the value is in vain.
TEST_P(RemoteWrite, AWaitForOneThatDoesNotComeIsInVain) {
  Runtime runtime(with_seed(0));
  uint32_t *first = words_of(0), *second = words_of(1);
  cudaStream_t stream = stream_with(cudaStreamNonBlocking);
  EXPECT_EQ(write(stream, first, 5), wanted());
  EXPECT_EQ(write(stream, second, 6), CUDA_SUCCESS);
  AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
  EXPECT_EQ(first_word(second), 6u);
  AXONN_CUDA_CHECK(cudaSetDevice(0));
  (void)cuStreamWaitValue32(nullptr, reinterpret_cast<CUdeviceptr>(first), 5,
                            CU_STREAM_WAIT_VALUE_GEQ);
  const bool comes = GetParam() == RemoteWrites::kWork;
  EXPECT_EQ(cudaDeviceSynchronize(), comes ? cudaSuccess : cudaErrorUnknown);
  EXPECT_EQ(runtime.failure().has_value(), !comes);
}

TEST_P(RemoteWrite, OfAGraphIsLikewise) {
  Runtime runtime(with_seed(0));
  uint32_t *first = words_of(0), *second = words_of(1);
  cudaStream_t stream = stream_with(cudaStreamNonBlocking);
  AXONN_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(write(stream, first, 5), wanted());
  EXPECT_EQ(write(stream, second, 6), CUDA_SUCCESS);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  AXONN_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  AXONN_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  AXONN_CUDA_CHECK(cudaGraphLaunch(exec, stream));
  AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
  EXPECT_EQ(first_word(first), expected(5));
  EXPECT_EQ(first_word(second), 6u);
}

// The process that owns the memory does not matter; the device it lies on does.
TEST_P(RemoteWrite, OfAnotherProcessDependsOnItsDevice) {
  const CUresult refused_or_not = wanted();
  const uint32_t comes = expected(7);
  const auto body = [&](Process& p) {
    const auto shared = p.map_all(p.create_on(0)), own = p.map_all(p.create());
    const auto self = static_cast<size_t>(p.rank), other = 1 - self;
    p.meet();
    p.expect(cudaSetDevice(0) == cudaSuccess, "cudaSetDevice");
    p.succeeds(write(nullptr, reinterpret_cast<void*>(shared[other]), 3), "on the same device");
    p.expect(cudaSetDevice(p.rank) == cudaSuccess, "cudaSetDevice");
    p.succeeds(write(nullptr, reinterpret_cast<void*>(own[self] + 64), 5), "of this process");
    p.expect(write(nullptr, reinterpret_cast<void*>(own[other]), 7) == refused_or_not,
             "on another device");
    for (const int device : {0, p.rank}) {
      p.expect(cudaSetDevice(device) == cudaSuccess, "cudaSetDevice");
      p.expect(cudaDeviceSynchronize() == cudaSuccess, "cudaDeviceSynchronize");
    }
    p.meet();
    p.expect(p.read(shared[self]) == 3, "the other has written it on the same device");
    p.expect(p.read(own[self] + 64) == 5, "this process has written its own");
    p.expect(p.read(own[self]) == comes, "the other has written it, if it could");
    p.meet();
  };
  in_processes(2, body, 30, GetParam());
}

std::string name_of(const ::testing::TestParamInfo<RemoteWrites>& test) {
  constexpr const char* kNames[] = {"Works", "IsRefused", "IsIgnored"};
  return kNames[static_cast<size_t>(test.param)];
}
INSTANTIATE_TEST_SUITE_P(All, RemoteWrite,
                         ::testing::Values(RemoteWrites::kWork, RemoteWrites::kRefused,
                                           RemoteWrites::kIgnored),
                         &name_of);

}  // namespace
}  // namespace axonn::gpu_machine
