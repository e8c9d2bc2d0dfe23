// The host code of fused calls, on ranks that run concurrently.
#include "core/cuda/fused/fused_calls.h"

#include <gtest/gtest.h>

#include "core/cuda/fused/copies.h"
#include "gpu_machine/runtime/operands.h"

namespace axonn::gpu_machine {
namespace {

using testing::CudaError;
using testing::DeviceGuard;
using testing::DeviceMatrix;
using testing::Matrix;
using testing::Operands;
using testing::VirtualRanks;

RuntimeOptions with_seed(uint64_t seed, int devices) {
  RuntimeOptions options;
  options.machine.seed = seed;
  options.devices = devices;
  return options;
}

struct Shape {
  int ranks;
  int64_t m, k, n;
};

class EachShape : public ::testing::TestWithParam<Shape> {};

// Calls of random kinds follow each other, in the same order on all ranks, each on a random stream
// of its rank. The epochs begin at 0 or shortly before they wrap. In the first two runs the
// streams' queues write the flags. In the others flags are copied, as they also are where a graph
// counts calls; in one of these, from host memory, as if the ranks shared a device.
TEST_P(EachShape, CallsGiveWhatTheCpuComputes) {
  const Shape shape = GetParam();
  for (uint64_t seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_seed(seed, shape.ranks));
    std::mt19937_64 random(seed);
    VirtualRanks ranks(shape.ranks, seed % 2 == 0 ? 0 : 0xFFFFFFFEu);
    for (int r = 0; r < shape.ranks; ++r) ranks[r].peers.alone = seed % 3 != 0;
    if (seed < 2) ranks.probe_writes();  // else flags of peers are copied
    const Operands with(ranks, shape.m, shape.k, shape.n, random);
    std::vector<std::vector<DeviceMatrix>> results;
    std::vector<uint64_t> kinds;
    for (int call = 0; call < 4; ++call) {
      kinds.push_back(random() % 3);  // a gather, a reduce-scatter, an all-reduce
      results.push_back(with.outputs(kinds.back() == 1 ? shape.m / shape.ranks : shape.m));
      for (int r = 0; r < shape.ranks; ++r) {
        const auto rank = static_cast<size_t>(r);
        cudaStream_t stream = random() % 2 == 0 ? ranks[r].compute.get() : ranks[r].other.get();
        const DeviceMatrix& output = results.back()[rank];
        if (kinds.back() == 0) {
          ranks.gather(r, with.shards[rank], with.bs[rank], output, shape.m, shape.k, shape.n,
                       stream);
        } else {
          ranks.sum(r, with.as[rank], with.bs[rank], output, shape.m, shape.k, shape.n,
                    kinds.back() == 2, stream);
        }
        if (random() % 4 == 0) runtime.give_turns(static_cast<int>(random() % 3000));
      }
    }
    testing::synchronize_all(shape.ranks);
    for (size_t call = 0; call < kinds.size(); ++call) {
      for (int r = 0; r < shape.ranks; ++r) {
        const auto rank = static_cast<size_t>(r);
        const int64_t rows = shape.m / shape.ranks;
        const Matrix want = kinds[call] == 0   ? with.gathered[rank]
                            : kinds[call] == 2 ? *with.sum
                                               : with.sum->row_range(r * rows, (r + 1) * rows);
        EXPECT_EQ(results[call][rank].read(), want) << "call " << call << ", rank " << r;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, EachShape,
                         ::testing::Values(Shape{1, 6, 8, 8}, Shape{2, 8, 8, 16},
                                           Shape{2, 1024, 8, 8}, Shape{3, 9, 16, 8},
                                           Shape{4, 12, 8, 24}));

// The first rank enqueues all of its calls and runs for long before the second one comes.
TEST(FusedCalls, ALateRankIsWaitedFor) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_seed(seed, 2));
    std::mt19937_64 random(seed);
    VirtualRanks ranks(2);
    const Operands with(ranks, 8, 8, 8, random);
    const auto gathered = with.outputs(8), summed = with.outputs(8);
    for (int r = 0; r < 2; ++r) {
      const auto rank = static_cast<size_t>(r);
      cudaStream_t stream = ranks[r].compute.get();
      for (int i = 0; i < 2; ++i) {
        ranks.gather(r, with.shards[rank], with.bs[rank], gathered[rank], 8, 8, 8, stream);
        ranks.sum(r, with.as[rank], with.bs[rank], summed[rank], 8, 8, 8, true, stream);
      }
      runtime.give_turns(20'000);
      EXPECT_EQ(cudaStreamQuery(stream), r == 0 ? cudaErrorNotReady : cudaSuccess);
    }
    testing::synchronize_all(2);
    for (size_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(gathered[rank].read(), with.gathered[rank]);
      EXPECT_EQ(summed[rank].read(), *with.sum);
    }
  }
}

// The wait in which a rank waits in vain for another: for the previous call, which has not ended
// there, for the rows of a gather, or for those of a sum.
enum class Waits { kForTheCallBefore, kForRows, kForAddends };

void check_wait_in_vain(Waits waits) {
  SCOPED_TRACE(static_cast<int>(waits));
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Runtime runtime(with_seed(seed, 2));
    std::mt19937_64 random(seed);
    VirtualRanks ranks(2, 7, 1e-4);
    const Operands with(ranks, 8, 8, 8, random);
    const auto outputs = with.outputs(8);
    const bool before = waits == Waits::kForTheCallBefore;
    if (before) {
      const uint32_t ended = 6;
      const int64_t flag = comm::signal_offset_bytes(kernels::cuda::kDoneFlags + 0);
      AXONN_CUDA_CHECK(cudaMemcpy(kernels::cuda::at(ranks[1].peers.pads[1], flag), &ended,
                                  sizeof ended, cudaMemcpyDefault));
    }
    EXPECT_THROW(
        {
          cudaStream_t stream = ranks[1].compute.get();
          if (waits == Waits::kForAddends) {
            ranks.sum(1, with.as[1], with.bs[1], outputs[1], 8, 8, 8, true, stream);
          } else {
            ranks.gather(1, with.shards[1], with.bs[1], outputs[1], 8, 8, 8, stream);
          }
          testing::synchronize_all(2);
        },
        CudaError);
    testing::expect_wait_in_vain(runtime, ranks, before ? 7 : 8, before ? 6 : 7);
    if (before) {  // later work has not begun
      EXPECT_NE(std::string(runtime.failure()->what()).find("begin_kernel"), std::string::npos)
          << runtime.failure()->what();
    }
  }
}

TEST(FusedCalls, ARankThatNeverComesIsNamed) {
  check_wait_in_vain(Waits::kForTheCallBefore);
  check_wait_in_vain(Waits::kForRows);
  check_wait_in_vain(Waits::kForAddends);
}

// If any CUDA call fails on one rank, the rank raises an error and joins what it has already
// enqueued: a later copy into the shard does not race with the delivery.
TEST(FusedCalls, ACallThatIsCutShortIsJoined) {
  for (const std::string function : {"cudaLaunchKernel", "cudaMemcpyAsync", "cuStreamWriteValue32",
                                     "cudaEventRecord", "cudaStreamWaitEvent"}) {
    int raised = 0;
    for (int skipped = 0; skipped < 6; ++skipped) {
      SCOPED_TRACE(function + ", " + std::to_string(skipped));
      Runtime runtime(with_seed(static_cast<uint64_t>(skipped), 2));
      std::mt19937_64 random(1);
      VirtualRanks ranks(2, 0, 1e-4);
      ranks.probe_writes();
      const Operands with(ranks, 8, 8, 8, random);
      const auto outputs = with.outputs(8);
      testing::synchronize_all(2);
      cudaStream_t stream = ranks[0].compute.get();
      runtime.fail(function, cudaErrorMemoryAllocation, skipped);
      bool failed = false;
      try {
        ranks.gather(0, with.shards[0], with.bs[0], outputs[0], 8, 8, 8, stream);
      } catch (const CudaError& error) {
        failed = true;
        EXPECT_EQ(error.status, cudaErrorMemoryAllocation) << error.what();
      }
      if (!failed) continue;
      ++raised;
      // The only failure left is that of the peer, whose wait ends.
      const DeviceGuard guard(0);
      (void)cudaMemsetAsync(with.shards[0].data(), 0, 8, stream);
      (void)cudaStreamSynchronize(stream);
      if (runtime.failure()) {
        EXPECT_NE(static_cast<int>(runtime.failure()->kind()),
                  static_cast<int>(MachineError::Kind::kRace))
            << runtime.failure()->what();
      }
    }
    EXPECT_GT(raised, 0) << function;
  }
}

// The GEMM of one rank cannot be launched. The rank has pushed its rows and marks its call as
// ended, so its peer's call is correct, and so are the next calls of both, on other streams.
TEST(FusedCalls, TheCallsAfterOneThatIsCutShortAreRight) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_seed(seed, 2));
    std::mt19937_64 random(seed);
    VirtualRanks ranks(2);
    const Operands with(ranks, 8, 8, 8, random);
    const auto first = with.outputs(8), second = with.outputs(8);
    const auto gather = [&](int r, const DeviceMatrix& output, cudaStream_t stream) {
      const auto rank = static_cast<size_t>(r);
      ranks.gather(r, with.shards[rank], with.bs[rank], output, 8, 8, 8, stream);
    };
    runtime.fail("cudaLaunchKernel", cudaErrorMemoryAllocation, 1);
    EXPECT_THROW(gather(0, first[0], ranks[0].compute.get()), CudaError);
    gather(1, first[1], ranks[1].compute.get());
    for (int r = 0; r < 2; ++r) {
      gather(r, second[static_cast<size_t>(r)], ranks[r].other.get());
    }
    testing::synchronize_all(2);
    EXPECT_EQ(first[1].read(), with.gathered[1]);
    for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(second[rank].read(), with.gathered[rank]);
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
