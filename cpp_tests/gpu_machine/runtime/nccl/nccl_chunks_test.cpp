// Fused gathers whose rows come by NCCL, on NCCL in software: the real host code, the handshake's
// kernels, and a GEMM that waits for rows. Each rank's host code runs in its own thread.
#include "core/cuda/nccl/nccl_chunks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>

#include "core/ranks/errors.h"
#include "core/schedule/partition.h"
#include "gpu_machine/runtime/nccl/nccl_ranks.h"
#include "gpu_machine/runtime/virtual_ranks.h"
#include "ranks/in_memory_store.h"

namespace axonn::gpu_machine::nccl {
namespace {

using gpu_machine::testing::DeviceMatrix;
using gpu_machine::testing::Matrix;
using gpu_machine::testing::VirtualRanks;
using kernels::cuda::FusedGemm;
using kernels::cuda::NcclChunks;
using testing::on_threads;
using Kind = MachineError::Kind;

struct Shape {
  int ranks;
  int64_t m, k, n;
};

// Ranks, each with a shard of the rows and a matrix to multiply by, and NCCL between them.
class Gathers {
 public:
  Gathers(Shape of_shape, std::mt19937_64& random, double timeout_seconds = 1, uint32_t epoch = 0,
          double accept_seconds = 5)
      : shape(of_shape), ranks(of_shape.ranks, epoch, timeout_seconds), chunks(ranks.ranks.size()) {
    const Matrix whole = Matrix::random(shape.m, shape.k, random);
    for (int r = 0; r < shape.ranks; ++r) {
      const testing::DeviceGuard guard(r);
      const comm::Range own = comm::part_of(shape.m, shape.ranks, r);
      shards.emplace_back(whole.row_range(own.begin, own.end));
      const Matrix b = Matrix::random(shape.k, shape.n, random);
      bs.emplace_back(b);
      wants.push_back(whole * b);
      ranks[r].peers.apart = true;
    }
    comm::testing::InMemoryStore store;
    on_threads(shape.ranks, [&](int r) {
      chunks[static_cast<size_t>(r)] = std::make_unique<NcclChunks>(
          r, shape.ranks, store, "nccl", std::chrono::duration<double>(accept_seconds));
    });
  }

  DeviceMatrix output() const { return {shape.m, shape.n}; }

  // Makes one call on all ranks, since NCCL may connect them then. Later calls have this limit.
  void connect(double timeout_seconds) {
    on_threads(shape.ranks, [&](int r) {
      const DeviceMatrix unused = output();
      call(r, unused, ranks[r].compute.get());
      AXONN_CUDA_CHECK(cudaDeviceSynchronize());
    });
    for (int r = 0; r < shape.ranks; ++r) {
      ranks[r].peers.limit = {static_cast<uint64_t>(timeout_seconds * 1e9),
                              &ranks[r].pinned.failure(), r};
    }
  }

  // Enqueues this rank's gather as csrc/ops/cuda does.
  void call(int r, const DeviceMatrix& output, cudaStream_t stream) {
    const auto at = static_cast<size_t>(r);
    auto& rank = ranks[r];
    FusedGemm gemm{};
    gemm.b = bs[at].data();
    gemm.d = output.data();
    gemm.m = shape.m;
    gemm.n = gemm.ldb = gemm.ldd = shape.n;
    gemm.k = gemm.lda = shape.k;
    gemm.dtype = kernels::DataType::kBFloat16;
    const comm::ChunkPlan plan{shape.m, shape.ranks,
                               kernels::cuda::chunks_per_shard(shape.m / shape.ranks)};
    ranks.call(r, stream, [&](const kernels::cuda::CallStreams& streams) {
      kernels::cuda::all_gather_gemm(
          rank.peers, ranks.backend, {}, gemm, kernels::cuda::Arriving::kRows,
          {shards[at].data(), shape.k * 2, plan, true}, *chunks[at], streams);
    });
  }

  const Shape shape;
  VirtualRanks ranks;
  std::vector<DeviceMatrix> shards, bs;
  std::vector<Matrix> wants;
  std::vector<std::unique_ptr<NcclChunks>> chunks;
};

class NcclChunksShapes : public ::testing::TestWithParam<Shape> {};

// Calls in sequence, on two streams, while epochs wrap; one rank is late.
TEST_P(NcclChunksShapes, BringTheRows) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Runtime runtime(testing::with_threads(seed, GetParam().ranks));
    Gathers gathers(GetParam(), random, 1, 0xFFFFFFFEu);
    const int late = static_cast<int>(random() % static_cast<uint64_t>(GetParam().ranks));
    on_threads(GetParam().ranks, [&](int r) {
      auto& rank = gathers.ranks[r];
      if (r == late) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::vector<DeviceMatrix> outputs;
      for (int call = 0; call < 3; ++call) {
        outputs.push_back(gathers.output());
        gathers.call(r, outputs.back(), call == 1 ? rank.other.get() : rank.compute.get());
      }
      AXONN_CUDA_CHECK(cudaDeviceSynchronize());
      for (const DeviceMatrix& output : outputs) {
        EXPECT_EQ(output.read(), gathers.wants[static_cast<size_t>(r)]);
      }
    });
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, NcclChunksShapes,
                         ::testing::Values(Shape{2, 8, 8, 16}, Shape{2, 1024, 8, 8},
                                           Shape{3, 9, 16, 8}, Shape{4, 12, 8, 24}));

// Replays next to calls outside of graphs.
TEST(NcclChunks, GraphsAreReplayed) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Runtime runtime(testing::with_threads(seed, 2));
    Gathers gathers({2, 8, 8, 8}, random);
    on_threads(2, [&](int r) {
      const DeviceMatrix eager = gathers.output(), replayed = gathers.output();
      cudaStream_t stream = gathers.ranks[r].compute.get();
      gathers.call(r, eager, stream);
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replay = nullptr;
      AXONN_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      gathers.call(r, replayed, stream);
      AXONN_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      AXONN_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
      AXONN_CUDA_CHECK(cudaGraphDestroy(graph));
      for (int i = 0; i < 3; ++i) {
        AXONN_CUDA_CHECK(cudaGraphLaunch(replay, stream));
        gathers.call(r, eager, gathers.ranks[r].other.get());
      }
      AXONN_CUDA_CHECK(cudaDeviceSynchronize());
      EXPECT_EQ(eager.read(), gathers.wants[static_cast<size_t>(r)]);
      EXPECT_EQ(replayed.read(), gathers.wants[static_cast<size_t>(r)]);
      AXONN_CUDA_CHECK(cudaGraphExecDestroy(replay));
    });
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

// --- Failures ---------------------------------------------------------------------

TEST(NcclChunks, ARankThatDoesNotConnectIsNamed) {
  Runtime runtime(testing::with_threads(1, 2));
  comm::testing::InMemoryStore store;
  const auto connect = [&] {
    NcclChunks chunks(0, 2, store, "nccl", std::chrono::duration<double>(0.1));
  };
  std::string error;
  try {
    connect();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  EXPECT_NE(error.find("connecting 2 ranks: not done after 0.1 s"), std::string::npos) << error;
}

// What a rank records in pinned memory when it waits in vain for a peer that made no call.
TEST(NcclChunks, ARankThatNeverComesIsNamed) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    std::mt19937_64 random(seed);
    Runtime runtime(testing::with_threads(seed, 2));
    Gathers gathers({2, 8, 8, 8}, random);
    gathers.connect(1e-4);
    on_threads(2, [&](int r) {
      if (r == 0) return;
      const DeviceMatrix output = gathers.output();
      gathers.call(r, output, gathers.ranks[r].compute.get());
      EXPECT_NE(cudaDeviceSynchronize(), cudaSuccess);
    });
    testing::expect_failure(runtime, Kind::kTrap, {"trap"});
    const kernels::cuda::SpinFailure& failure = gathers.ranks[1].pinned.failure();
    EXPECT_EQ(failure.state, kernels::cuda::SpinFailure::kWritten);
    EXPECT_EQ(failure.rank, 1);
    EXPECT_EQ(failure.peer, 0);
  }
}

// The GEMM's CTAs hold the SMs while they wait for rows that NCCL's CTAs must bring. If there is
// room left for kMostCtas, every seed succeeds; if there is none, some waits run into their time
// limit.
TEST(NcclChunks, NeedTheSmsThatTheGemmLeaves) {
  constexpr Shape kShape{2, 1024, 8, 8};
  constexpr int kGemmCtas = 4, kWaitingCtas = 2;  // one per chunk; one per chunk of the peer
  constexpr std::chrono::milliseconds kBlink{1};
  int stuck = 0;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    for (const bool enough : {true, false}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + (enough ? ", enough" : ", none left"));
      std::mt19937_64 random(seed);
      RuntimeOptions options = testing::with_threads(seed, 2, enough ? 5 : 0.5);
      options.machine.resident_ctas = enough ? kGemmCtas + NcclChunks::kMostCtas : kWaitingCtas;
      Runtime runtime(options);
      Gathers gathers(kShape, random, enough ? 1 : 1e-4, 0, enough ? 5 : 0.2);
      std::atomic<bool> first_called = false;
      std::vector<DeviceMatrix> outputs;
      for (int r = 0; r < 2; ++r) {
        const testing::DeviceGuard guard(r);
        outputs.push_back(gathers.output());
      }
      on_threads(2, [&](int r) {
        const DeviceMatrix& output = outputs[static_cast<size_t>(r)];
        if (!enough) {
          try {
            while (r == 1 && !first_called) std::this_thread::sleep_for(kBlink);
            gathers.call(r, output, gathers.ranks[r].compute.get());
            for (int i = 0; i < 100; ++i) (void)cudaStreamQuery(gathers.ranks[r].compute.get());
          } catch (const std::exception&) {  // the peer's trap may come first
          }
          first_called = true;
          return;
        }
        gathers.call(r, output, gathers.ranks[r].compute.get());
        AXONN_CUDA_CHECK(cudaDeviceSynchronize());
        EXPECT_EQ(output.read(), gathers.wants[static_cast<size_t>(r)]);
      });
      testing::run_to_the_end(2);
      if (enough) {
        EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
      } else if (runtime.failure()) {
        ++stuck;
      }
    }
  }
  EXPECT_GT(stuck, 0);
}

// One rank's call fails after some of its chunks. That rank's next call would send its first chunk
// where the peer still waits for the other one, so it is refused.
TEST(NcclChunks, AreRefusedAfterACallThatWasCutShort) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    Runtime runtime(testing::with_threads(seed, 2));
    Gathers gathers({2, 1024, 8, 8}, random);
    gathers.connect(1e-3);
    std::atomic<bool> failed = false;
    on_threads(2, [&](int r) {
      const DeviceMatrix output = gathers.output(), second = gathers.output();
      cudaStream_t stream = gathers.ranks[r].compute.get();
      if (r == 0) {
        runtime.fail("ncclSend", static_cast<cudaError_t>(ncclSystemError), 1);
        EXPECT_THROW(gathers.call(r, output, stream), comm::CommunicationError);
        EXPECT_THROW(gathers.call(r, second, stream), comm::CommunicationError);
        failed = true;
        return;
      }
      while (!failed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      gathers.call(r, output, stream);
      EXPECT_NE(cudaDeviceSynchronize(), cudaSuccess);
    });
    testing::expect_failure(runtime, Kind::kTrap, {"trap"});
  }
}

// Makes two calls on both ranks, in which the n-th call of a function fails. Returns how often each
// function was called.
std::map<std::string, int> check_failing_call(const std::string& function, int number) {
  SCOPED_TRACE(function + ", call " + std::to_string(number));
  std::mt19937_64 random(1);
  Runtime runtime(testing::with_threads(1, 2));
  Gathers gathers({2, 1024, 8, 8}, random, 1e-4, 0, 0.3);
  std::vector<std::vector<DeviceMatrix>> outputs(2);
  std::vector<std::string> errors(2);
  for (int r = 0; r < 2; ++r) {
    const testing::DeviceGuard guard(r);
    for (int i = 0; i < 2; ++i) outputs[static_cast<size_t>(r)].push_back(gathers.output());
  }
  const std::map<std::string, int> before = runtime.calls();
  if (!function.empty()) {
    const bool is_nccl = function.starts_with("nccl");
    runtime.fail(function,
                 is_nccl ? static_cast<cudaError_t>(ncclSystemError) : cudaErrorMemoryAllocation,
                 number);
  }
  on_threads(2, [&](int r) {
    for (const DeviceMatrix& output : outputs[static_cast<size_t>(r)]) {
      try {
        gathers.call(r, output, gathers.ranks[r].compute.get());
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(r)] += std::string(error.what()) + "; ";
      }
    }
    (void)cudaDeviceSynchronize();
  });
  std::map<std::string, int> calls = testing::failing_calls(runtime);
  for (auto& [name, count] : calls) {
    const auto found = before.find(name);
    if (found != before.end()) count -= found->second;
  }
  // A peer's wait may have reached its limit; nothing else ends the machine.
  if (runtime.failure()) {
    EXPECT_EQ(static_cast<int>(runtime.failure()->kind()), static_cast<int>(Kind::kTrap))
        << runtime.failure()->what();
    EXPECT_FALSE(errors[0].empty() && errors[1].empty()) << "nobody was told";
    return calls;
  }
  for (int r = 0; r < 2; ++r) {
    if (!errors[static_cast<size_t>(r)].empty()) continue;
    const testing::DeviceGuard guard(r);
    for (const DeviceMatrix& output : outputs[static_cast<size_t>(r)]) {
      EXPECT_EQ(output.read(), gathers.wants[static_cast<size_t>(r)]);
    }
  }
  return calls;
}

// One in every `every` calls fails, each in its own run.
void let_calls_fail(int every) {
  int at = 0;
  for (const auto& [function, count] : check_failing_call("", 0)) {
    for (int number = 0; number < count; ++number) {
      if (at++ % every == 0) (void)check_failing_call(function, number);
    }
  }
  EXPECT_GT(at, 30);
}

TEST(NcclChunks, SomeCallThatFailsIsTold) { let_calls_fail(9); }
TEST(SlowNcclChunks, AnyCallThatFailsIsTold) { let_calls_fail(1); }

}  // namespace
}  // namespace axonn::gpu_machine::nccl
