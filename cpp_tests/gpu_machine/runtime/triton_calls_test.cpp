// The host code of fused calls with the Triton GEMMs, which csrc/ops/cuda/triton_gemm.cpp passes to
// it through Python. Four ranks run concurrently.
#include <gtest/gtest.h>

#include <optional>

#include "core/cuda/fused/fused_calls.h"
#include "gpu_machine/runtime/api.h"
#include "gpu_machine/runtime/virtual_ranks.h"
#include "gpu_machine/triton_kernel.h"

namespace axonn::gpu_machine {
namespace {

using kernels::cuda::FusedGemm;
using kernels::cuda::SpinFailure;
using testing::CudaError;
using testing::DeviceGuard;
using testing::DeviceMatrix;
using testing::Matrix;
using testing::TritonArguments;
using testing::TritonCase;
using testing::VirtualRanks;

constexpr int kRanks = 4;  // the kernels are compiled for this number
constexpr uint32_t kPrograms = 2;

// The kernel with pointers that was compiled for sizes of any alignment.
std::optional<TritonCase> find_case(const std::string& kernel) {
  for (const TritonCase& one : testing::triton_cases_of(kernel)) {
    const bool scattered = !one.is_true("aligned") && !one.facts.contains("a.box");
    if (scattered && one.dtype() == testing::DataType::kBFloat16) return one;
  }
  return std::nullopt;
}

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

TritonArguments arguments_of(const FusedGemm& gemm) {
  TritonArguments made;
  made.set("a", address(gemm.a));
  made.set("b", address(gemm.b));
  made.set("m", gemm.m);
  made.set("n", gemm.n);
  made.set("k", gemm.k);
  made.set("stride_am", gemm.lda);
  made.set("stride_bk", gemm.ldb);
  return made;
}

TritonArguments arguments_of_gather(const FusedGemm& gemm) {
  const kernels::cuda::Arrivals& from = gemm.arrivals;
  TritonArguments made = arguments_of(gemm);
  made.set("c_ptr", address(gemm.d));
  made.set("stride_cm", gemm.ldd);
  made.set("pad", address(from.pad));
  made.set("epoch_at", address(from.epoch));
  made.set("failure", address(from.limit.failure));
  made.set("timeout", from.limit.budget_ns);
  made.set("rows", from.plan.count / from.plan.num_shards);
  made.set("rank", int64_t{from.rank});
  made.set("chunks", from.plan.chunks_per_shard);
  made.set("chunk_tile", from.plan.tile);
  return made;
}

TritonArguments arguments_of_scatter(const FusedGemm& gemm) {
  const kernels::cuda::Departures& to = gemm.departures;
  TritonArguments made = arguments_of(gemm);
  for (int rank = 0; rank < kernels::cuda::kMaxPeers; ++rank) {
    made.set("slot" + std::to_string(rank), address(to.slots[rank < kRanks ? rank : 0]));
    made.set("pad" + std::to_string(rank), address(to.pads[rank < kRanks ? rank : 0]));
  }
  made.set("counters", address(to.counters));
  made.set("epoch_at", address(to.epoch));
  made.set("rows", gemm.m / to.num_ranks);
  made.set("rank", int64_t{to.rank});
  made.set("chunks", int64_t{to.chunks_per_shard});
  return made;
}

cudaError_t launch(const FusedGemm& gemm, const kernels::LaunchConfig& /*config*/,
                   cudaStream_t stream) {
  const bool departs = gemm.departures.num_ranks > 0;
  const TritonCase what = *find_case(departs ? "multiply_and_send" : "all_gather_matmul");
  const TritonArguments made = departs ? arguments_of_scatter(gemm) : arguments_of_gather(gemm);
  return api("cudaLaunchKernel", [&](Runtime& runtime) {
    const auto enqueue = [&runtime, what, made](int on) {
      testing::launch_triton(runtime.machine, on, what, made, kPrograms);
    };
    return runtime.submit(stream, enqueue, Node::Kind::kKernel);
  });
}

kernels::cuda::GemmBackend triton_backend() {
  return {.why_unsupported = [](const FusedGemm&) -> const char* { return nullptr; },
          .launch = &launch,
          .sum_to_all = nullptr,
          .sum_in_switch = nullptr,
          .load = [] { return cudaSuccess; },
          .chooses_tiles = true};
}

class TritonCalls : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!find_case("all_gather_matmul")) GTEST_SKIP() << "no PTX of Triton's kernels";
  }
  static RuntimeOptions with_seed(uint64_t seed) {
    RuntimeOptions options;
    options.machine.seed = seed;
    options.devices = kRanks;
    return options;
  }
  static void load(Runtime& runtime) {
    for (const char* kernel : {"all_gather_matmul", "multiply_and_send"}) {
      runtime.machine.load(testing::fenced_ptx_of(*find_case(kernel)));
    }
  }
};

// Gathers, reduce-scatters and all-reduces in turn. The epochs begin shortly before they
// wrap.
void run_calls(uint64_t seed, int64_t m, int64_t k, int64_t n, int num_calls) {
  std::mt19937_64 random(seed);
  VirtualRanks ranks(kRanks, 0xFFFFFFFEu, 1, triton_backend());
  const int64_t own = m / kRanks;
  const Matrix whole = Matrix::random(m, k, random);
  std::vector<DeviceMatrix> shards, as, bs;
  std::vector<Matrix> gathered;
  Matrix sum = Matrix::zeros(m, n);
  for (int r = 0; r < kRanks; ++r) {
    const DeviceGuard guard(r);
    const Matrix a = Matrix::random(m, k, random), b = Matrix::random(k, n, random);
    shards.emplace_back(whole.row_range(r * own, (r + 1) * own));
    as.emplace_back(a);
    bs.emplace_back(b);
    gathered.push_back(whole * b);
    sum = sum + a * b;
  }
  std::vector<std::vector<DeviceMatrix>> results;
  for (int call = 0; call < num_calls; ++call) {
    results.emplace_back();
    for (int r = 0; r < kRanks; ++r) {
      const auto rank = static_cast<size_t>(r);
      const DeviceGuard guard(r);
      const DeviceMatrix& output = results.back().emplace_back(call % 3 == 1 ? own : m, n);
      cudaStream_t stream = random() % 2 == 0 ? ranks[r].compute.get() : ranks[r].other.get();
      if (call % 3 == 0) {
        ranks.gather(r, shards[rank], bs[rank], output, m, k, n, stream);
      } else {
        ranks.sum(r, as[rank], bs[rank], output, m, k, n, call % 3 == 2, stream);
      }
    }
  }
  testing::synchronize_all(kRanks);
  for (int call = 0; call < num_calls; ++call) {
    for (int r = 0; r < kRanks; ++r) {
      const Matrix want = call % 3 == 0   ? gathered[static_cast<size_t>(r)]
                          : call % 3 == 2 ? sum
                                          : sum.row_range(r * own, (r + 1) * own);
      EXPECT_EQ(results[static_cast<size_t>(call)][static_cast<size_t>(r)].read(), want)
          << "call " << call << ", rank " << r;
    }
  }
}

TEST_F(TritonCalls, GiveWhatTheCpuComputes) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_seed(seed));
    load(runtime);
    run_calls(seed, /*m=*/24, /*k=*/20, /*n=*/17, /*num_calls=*/6);
  }
}

TEST_F(TritonCalls, OfSeveralChunksToo) {
  Runtime runtime(with_seed(7));
  load(runtime);
  run_calls(7, /*m=*/kRanks * 2 * kernels::cuda::kChunkRows, /*k=*/8, /*n=*/8, /*num_calls=*/3);
}

TEST_F(TritonCalls, ARankThatDoesNotComeIsNamed) {
  Runtime runtime(with_seed(1));
  load(runtime);
  VirtualRanks ranks(kRanks, 0, /*timeout_seconds=*/0.001, triton_backend());
  std::mt19937_64 random(1);
  std::vector<DeviceMatrix> kept;
  for (int r = 1; r < kRanks; ++r) {
    const DeviceGuard guard(r);
    kept.emplace_back(Matrix::random(6, 20, random));
    kept.emplace_back(Matrix::random(20, 17, random));
    kept.emplace_back(24, 17);
  }
  for (int r = 1; r < kRanks; ++r) {
    const auto at = static_cast<size_t>(3 * (r - 1));
    ranks.gather(r, kept[at], kept[at + 1], kept[at + 2], 24, 20, 17, ranks[r].compute.get());
  }
  EXPECT_THROW(testing::synchronize_all(kRanks), CudaError);
  ASSERT_TRUE(runtime.failure());
  EXPECT_EQ(runtime.failure()->kind(), MachineError::Kind::kTrap) << runtime.failure()->what();
  int num_records = 0;
  for (int r = 1; r < kRanks; ++r) {
    const SpinFailure& record = ranks[r].pinned.failure();
    if (record.state != SpinFailure::kWritten) continue;
    ++num_records;
    EXPECT_EQ(record.rank, r);
    EXPECT_EQ(record.peer, 0);
    EXPECT_EQ(record.expected, 1u);
    EXPECT_EQ(record.seen, 0u);
  }
  EXPECT_GT(num_records, 0);
}

}  // namespace
}  // namespace axonn::gpu_machine
