// The project's communicators of a grid, on NCCL in software. Each rank's host code runs in its own
// thread, next to its watching thread.
#include "core/cuda/nccl/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <optional>

#include "gpu_machine/runtime/nccl/nccl_ranks.h"
#include "ranks/in_memory_store.h"

namespace axonn::gpu_machine::nccl {
namespace {

using comm::AxisRanks;
using comm::Communicator;
using comm::CommunicatorGrid;
using comm::CommunicatorOptions;
using comm::PendingCall;
using comm::testing::InMemoryStore;
using testing::Array;
using testing::HighPriorityStream;
using testing::on_threads;
using testing::with_threads;

constexpr auto kFloat32 = kernels::DataType::kFloat32;

// A store that all ranks share, and for each rank a grid of x and y.
struct World {
  explicit World(int of_x, int of_y) : x(of_x), y(of_y) {}

  std::vector<AxisRanks> axes_of(int rank) const {
    std::vector<AxisRanks> axes;
    AxisRanks along_x{"x", {}}, along_y{"y", {}};
    for (int i = 0; i < x; ++i) along_x.ranks.push_back(rank / x * x + i);
    for (int i = 0; i < y; ++i) along_y.ranks.push_back(i * x + rank % x);
    if (x > 1) axes.push_back(along_x);
    if (y > 1) axes.push_back(along_y);
    return axes;
  }
  std::unique_ptr<CommunicatorGrid> grid(int rank, CommunicatorOptions options) const {
    options.device = rank;
    return std::make_unique<CommunicatorGrid>(options, rank, x * y, axes_of(rank), "grid", store,
                                              store);
  }
  int size() const { return x * y; }

  const int x, y;
  std::shared_ptr<InMemoryStore> store = std::make_shared<InMemoryStore>();
};

CommunicatorOptions with_timeout(double seconds) {
  CommunicatorOptions options;
  options.timeout = std::chrono::duration<double>(seconds);
  return options;
}

// Returns the message that a body throws; empty if it throws nothing.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Waits until the watching thread has seen a failure, and returns its message.
std::string failure_of(const CommunicatorGrid& grid) {
  for (int i = 0; i < 4000; ++i) {
    const std::string text = error_of([&] { grid.check(); });
    if (!text.empty()) return text;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "no failure";
}

void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  }
}

// Gathers, sums and exchanges along both axes, each using the result of the other axis. The
// caller's stream waits for what it needs; the host waits for nothing.
void run_calls(CommunicatorGrid& grid, int rank, const World& world, int rounds) {
  Communicator& x = grid.axis("x");
  Communicator& y = grid.axis("y");
  const HighPriorityStream stream;
  const auto nx = static_cast<size_t>(world.x);
  const Array<float> input(std::vector<float>(4, static_cast<float>(rank + 1)));
  const Array<float> gathered(4 * nx), sum(4 * nx), columns(4 * nx), added(size_t{4});
  for (int i = 0; i < rounds; ++i) {
    x.all_gather(input.data(), gathered.data(), 4, kFloat32, stream.get()).block(stream.get());
    y.all_reduce(gathered.data(), sum.data(), static_cast<int64_t>(4 * nx), kFloat32, stream.get())
        .block(stream.get());
    const PendingCall exchanged =
        x.all_to_all(sum.data(), columns.data(), 4, kFloat32, stream.get());
    y.all_reduce(input.data(), added.data(), 4, kFloat32, stream.get()).block(stream.get());
    exchanged.block(stream.get());
  }
  AXONN_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
  // The sum over y of rank + 1, for this rank's x. Every rank along x sends it.
  const auto column_of = [&](int column) {
    float total = 0;
    for (int row = 0; row < world.y; ++row) total += static_cast<float>(row * world.x + column + 1);
    return total;
  };
  const float own = column_of(rank % world.x);
  EXPECT_EQ(columns.read(), std::vector<float>(4 * nx, own));
  EXPECT_EQ(added.read(), std::vector<float>(4, own));
}

TEST(Communicators, CallsOfTwoAxesFollowEachOther) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_threads(seed, 4));
    const World world(2, 2);
    on_threads(4, [&](int rank) {
      const auto grid = world.grid(rank, with_timeout(20));
      run_calls(*grid, rank, world, 3);
      grid->close();
    });
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

// The other ranks wait for a late one.
TEST(Communicators, ALateRankIsWaitedFor) {
  Runtime runtime(with_threads(1, 2));
  const World world(2, 1);
  on_threads(2, [&](int rank) {
    const auto grid = world.grid(rank, with_timeout(20));
    Communicator& x = grid->axis("x");
    const HighPriorityStream stream;
    const Array<float> input(std::vector<float>(4, static_cast<float>(rank))), output(size_t{8});
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    x.all_gather(input.data(), output.data(), 4, kFloat32, stream.get()).block(stream.get());
    AXONN_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
    EXPECT_EQ(output.read(), (std::vector<float>{0, 0, 0, 0, 1, 1, 1, 1}));
    grid->close();
  });
  EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
}

// A stream that an allocator knows of outlives the communicator that made it.
TEST(Communicators, AStreamThatIsStillUsedStays) {
  Runtime runtime(with_threads(1, 2));
  const World world(2, 1);
  on_threads(2, [&](int rank) {
    auto grid = world.grid(rank, with_timeout(20));
    const cudaStream_t stream = grid->axis("x").stream_that_stays();
    grid->close();
    grid.reset();
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  });
}

// Replays of a graph next to calls outside of any graph.
TEST(Communicators, AGraphIsReplayedBesideOtherCalls) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_threads(seed, 2));
    const World world(2, 1);
    on_threads(2, [&](int rank) {
      const auto grid = world.grid(rank, with_timeout(20));
      Communicator& x = grid->axis("x");
      const HighPriorityStream stream;
      const Array<float> input(std::vector<float>(4, static_cast<float>(rank + 1)));
      const Array<float> gathered(size_t{8}), sum(size_t{4}), outside(size_t{4});
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replay = nullptr;
      AXONN_CUDA_CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
      x.all_gather(input.data(), gathered.data(), 4, kFloat32, stream.get()).block(stream.get());
      x.all_reduce(input.data(), sum.data(), 4, kFloat32, stream.get()).block(stream.get());
      AXONN_CUDA_CHECK(cudaStreamEndCapture(stream.get(), &graph));
      AXONN_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
      AXONN_CUDA_CHECK(cudaGraphDestroy(graph));
      for (int i = 0; i < 3; ++i) {
        AXONN_CUDA_CHECK(cudaGraphLaunch(replay, stream.get()));
        x.all_reduce(input.data(), outside.data(), 4, kFloat32, stream.get()).block(stream.get());
      }
      AXONN_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
      EXPECT_EQ(gathered.read(), (std::vector<float>{1, 1, 1, 1, 2, 2, 2, 2}));
      EXPECT_EQ(sum.read(), std::vector<float>(4, 3));
      EXPECT_EQ(outside.read(), std::vector<float>(4, 3));
      AXONN_CUDA_CHECK(cudaGraphExecDestroy(replay));  // before the communicator
      grid->close();
    });
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

// --- Failures ---------------------------------------------------------------------

// NCCL may accept the call and wait in its kernel, or wait for the ranks to connect first.
TEST(Communicators, ARankThatNeverCallsIsNamedOnAll) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_threads(seed, 2));
    const World world(2, 1);
    on_threads(2, [&](int rank) {
      const auto grid = world.grid(rank, with_timeout(0.2));
      const HighPriorityStream stream;
      const Array<float> input(std::vector<float>(4, 1)), output(size_t{8});
      const auto gather = [&] {
        grid->axis("x")
            .all_gather(input.data(), output.data(), 4, kFloat32, stream.get())
            .block(stream.get());
      };
      if (rank == 0) (void)error_of(gather);
      const std::string failure = failure_of(*grid);
      if (rank == 0) {
        // Rank 1 is behind, or has not yet told how far it is.
        expect_contains(failure,
                        {"axis x: call 1, all_gather float32[4], is not done after 0.2", "rank 1"});
      } else {
        expect_contains(failure, {"rank 0 reports: axis x: call 1"});
      }
      EXPECT_EQ(error_of(gather), failure);
      // The kernel is ended, not left waiting forever.
      EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
    });
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

// The watching thread looks for reports once a second, so the call fails first.
TEST(Communicators, ACallThatFailsSaysWhatAPeerHasReported) {
  Runtime runtime(with_threads(1, 2));
  const World world(2, 1);
  std::atomic<bool> is_over = false;
  on_threads(2, [&](int rank) {
    const auto grid = world.grid(rank, with_timeout(20));
    while (rank == 1 && !is_over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (rank == 1) return;
    const HighPriorityStream stream;
    const Array<float> input(std::vector<float>(4, 1)), output(size_t{8});
    world.store->set("grid/failure", "rank 1 reports: out of memory");
    runtime.fail("ncclAllGather", static_cast<cudaError_t>(ncclRemoteError));
    EXPECT_EQ(error_of([&] {
                grid->axis("x").all_gather(input.data(), output.data(), 4, kFloat32, stream.get());
              }),
              "rank 1 reports: out of memory");
    is_over = true;
  });
  EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
}

TEST(Communicators, CallsThatDivergeAreToldBeforeTheyAreIssued) {
  Runtime runtime(with_threads(1, 2));
  const World world(2, 1);
  on_threads(2, [&](int rank) {
    CommunicatorOptions with = with_timeout(5);
    with.compare_calls = true;
    const auto grid = world.grid(rank, with);
    const HighPriorityStream stream;
    const Array<float> input(std::vector<float>(4, 1)), output(size_t{8});
    const std::string error = error_of([&] {
      grid->axis("x").all_gather(input.data(), output.data(), 4 - rank, kFloat32, stream.get());
    });
    expect_contains(error, {"axis x: the ranks diverge at call 1", "[4]", "[3]"});
  });
  EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
}

// NCCL's thread stores the communicator when it ends, so the variable must still exist then, even
// if its owner has given up waiting.
TEST(Communicators, ARankThatDoesNotConnectIsNamed) {
  Runtime runtime(with_threads(1, 2));
  const World world(2, 1);
  (void)cudaSetDevice(0);
  expect_contains(error_of([&] { (void)world.grid(0, with_timeout(0.1)); }),
                  {"connecting 2 ranks: not done after 0.1 s"});
  EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
}

TEST(Communicators, ARankThatDoesNotSplitIsNamed) {
  Runtime runtime(with_threads(1, 2));
  const World world(2, 1);
  std::vector<std::string> errors(2);
  runtime.fail("ncclCommSplit", static_cast<cudaError_t>(ncclSystemError));
  on_threads(2, [&](int rank) {
    errors[static_cast<size_t>(rank)] =
        error_of([&] { (void)world.grid(rank, with_timeout(0.2)); });
  });
  if (errors[0].find("unhandled system error") == std::string::npos)
    std::swap(errors[0], errors[1]);
  expect_contains(errors[0], {"splitting off axis x failed: unhandled system error"});
  // The other rank notices this, possibly while still connecting, or waits in vain.
  EXPECT_TRUE(errors[1].find("remote process exited") != std::string::npos ||
              errors[1].find("splitting off axis x: not done") != std::string::npos)
      << errors[1];
  EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
}

// A call along x waits, through the caller's stream, for a call along y that a peer never makes.
// NCCL ends a communicator only after its kernels, so x cannot end before y.
TEST(Communicators, CallsThatWaitForEachOtherAreEndedTogether) {
  for (const bool in_destructor : {false, true}) {
    Runtime runtime(with_threads(1, 4, 2));
    const World world(2, 2);
    on_threads(4, [&](int rank) {
      auto grid = world.grid(rank, with_timeout(in_destructor ? 20 : 0.2));
      const HighPriorityStream stream;
      const Array<float> input(std::vector<float>(4, 1)), output(size_t{8});
      const auto call_both = [&] {
        for (const char* axis : {"y", "x"}) {
          grid->axis(axis)
              .all_gather(input.data(), output.data(), 4, kFloat32, stream.get())
              .block(stream.get());
        }
      };
      // A rank that ends at once may keep the others from making any call.
      if (rank != 3) (void)error_of(call_both);
      if (!in_destructor) expect_contains(failure_of(*grid), {"axis "});
      grid.reset();
      EXPECT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
    });
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

// Both ranks make a grid, make a few calls and close it, while one call of a function fails on one
// of them. Returns how often each function was called.
std::map<std::string, int> check_failing_call(const std::string& function, int number) {
  SCOPED_TRACE(function + ", call " + std::to_string(number));
  Runtime runtime(with_threads(1, 2));
  if (!function.empty()) {
    const bool is_nccl = function.starts_with("nccl");
    runtime.fail(function,
                 is_nccl ? static_cast<cudaError_t>(ncclSystemError) : cudaErrorMemoryAllocation,
                 number);
  }
  const World world(2, 1);
  std::vector<std::string> errors(2);
  on_threads(2, [&](int rank) {
    errors[static_cast<size_t>(rank)] = error_of([&] {
      const auto grid = world.grid(rank, with_timeout(0.2));
      Communicator& x = grid->axis("x");
      const HighPriorityStream stream;
      const Array<float> input(std::vector<float>(4, 1)), sum(size_t{4}), received(size_t{4});
      x.all_reduce(input.data(), sum.data(), 4, kFloat32, stream.get()).block(stream.get());
      x.all_to_all(sum.data(), received.data(), 2, kFloat32, stream.get()).block(stream.get());
      AXONN_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
      grid->check();  // if not, the communicators may have been aborted
      EXPECT_EQ(received.read(), std::vector<float>(4, 2));
      grid->close();
    });
  });
  const std::map<std::string, int> calls = testing::failing_calls(runtime);
  // Nothing is left running on the devices, and no error has ended the machine.
  testing::run_to_the_end(2);
  EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  if (function.empty()) {
    EXPECT_EQ(errors, std::vector<std::string>(2));
  }
  return calls;
}

void let_calls_fail(int every) {
  int at = 0;
  for (const auto& [function, count] : check_failing_call("", 0)) {
    for (int number = 0; number < std::min(count, 8); ++number) {
      if (at++ % every == 0) (void)check_failing_call(function, number);
    }
  }
  EXPECT_GT(at, 30);
}

TEST(Communicators, SomeCallThatFailsEndsInAnError) { let_calls_fail(9); }
TEST(SlowCommunicators, AnyCallThatFailsEndsInAnError) { let_calls_fail(1); }

}  // namespace
}  // namespace axonn::gpu_machine::nccl
