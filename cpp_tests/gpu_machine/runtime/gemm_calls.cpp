#include "gpu_machine/runtime/gemm_calls.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#ifdef AXONN_HAS_CUTLASS

#include "core/cuda/sm90/instances.h"
#include "core/cuda/sm90/plans.h"
#include "core/cuda/sm90/sum_to_all.h"
#include "core/cuda/sm90/switch_sum.h"

namespace axonn::gpu_machine::testing {

using kernels::LaunchConfig;
using kernels::cuda::Arriving;
using kernels::cuda::FusedGemm;
using kernels::cuda::SumBroadcast;

std::string GemmCall::describe() const {
  static constexpr const char* kWays[] = {
      "stays",        "gathers A",      "gathers B",         "scatters",
      "sums by copy", "sums by stores", "sums by multicast", "sums in the switch"};
  const std::string shape = std::to_string(m) + " x " + std::to_string(n) + " x " +
                            std::to_string(k) + (adds ? ", adds" : "");
  return std::string(kWays[static_cast<int>(way)]) + ", " + layout.name + ", " +
         (dtype == DataType::kFloat16 ? "float16" : "bfloat16") + ", " + shape +
         (tile ? ", tile " + std::to_string(*tile) : "");
}

Arriving GemmCall::arriving() const {
  if (way == Way::kGathersA) return layout.a_transposed ? Arriving::kInner : Arriving::kRows;
  if (way == Way::kGathersB) return layout.b_transposed ? Arriving::kColumns : Arriving::kInner;
  return Arriving::kNothing;
}

GemmCall draw_call(Way way, DataType dtype, Layout layout, int ranks, int64_t most_rows,
                   std::mt19937_64& random) {
  GemmCall call{way, dtype, layout, 0, 0, 0};
  const auto draw = [&](int64_t most, int64_t multiple) {
    return (1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most / multiple))) * multiple;
  };
  // Stored rows are a multiple of 16 bytes long.
  constexpr int64_t kElements = 8;
  const int64_t unit_m = layout.a_transposed ? kElements : 1, unit_n = kElements;
  const int64_t unit_k = layout.a_transposed && !layout.b_transposed ? 1 : kElements;
  call.m = draw(300, unit_m);
  call.n = draw(300, unit_n);
  call.k = draw(300, unit_k);
  const Arriving arriving = call.arriving();
  const bool shares_m = arriving == Arriving::kRows || leaves(way);
  const int64_t unit = shares_m ? unit_m : arriving == Arriving::kColumns ? unit_n : unit_k;
  // Shares of what arrives need not be aligned, only their sum; shares of what leaves must be.
  const int64_t unit_of_share = leaves(way) ? unit : unit / std::gcd(unit, int64_t{ranks});
  const int64_t whole = ranks * draw(std::max(most_rows, unit), unit_of_share);
  if (shares_m) call.m = whole;
  if (arriving == Arriving::kColumns) call.n = whole;
  if (arriving == Arriving::kInner) call.k = whole;
  call.adds = !leaves(way) && random() % 2 == 0;
  return call;
}

// --- A call with its operands -----------------------------------------------------

GemmProblem::GemmProblem(VirtualRanks& ranks, const GemmCall& call, std::mt19937_64& random)
    : ranks_(ranks), call_(call) {
  const Matrix whole_a = Matrix::random(call.m, call.k, random);
  const Matrix whole_b = Matrix::random(call.k, call.n, random);
  const auto stored = [](const Matrix& m, bool transposed) {
    return transposed ? m.transposed() : m;
  };
  Matrix sum = Matrix::zeros(call.m, call.n);
  for (int r = 0; r < ranks.size(); ++r) {
    const DeviceGuard guard(r);
    const Matrix a = call.way == Way::kGathersA ? whole_a : Matrix::random(call.m, call.k, random);
    const Matrix b = call.way == Way::kGathersB ? whole_b : Matrix::random(call.k, call.n, random);
    const Matrix bias = Matrix::random(1, call.n, random);
    const Matrix residual = Matrix::random(call.m, call.n, random);
    const auto own = [&](const Matrix& m, bool is_gathered) {
      const comm::Range rows = comm::part_of(m.rows, ranks.size(), r);
      return is_gathered ? m.row_range(rows.begin, rows.end) : m;
    };
    Matrix want = a * b;
    for (int64_t i = 0; call.adds && i < call.m; ++i) {
      for (int64_t j = 0; j < call.n; ++j) want.at(i, j) += bias.at(0, j) + residual.at(i, j);
    }
    want = want.rounded(call.dtype);
    sum = sum + want;
    const auto tile =
        call.tile ? static_cast<size_t>(*call.tile) : random() % kernels::kNumSm90Tiles;
    LaunchConfig config = kernels::config_of(kernels::kSm90Tiles[tile], kernels::kSm90ElementBytes);
    config.num_ctas = call.ctas ? *call.ctas : static_cast<int>(2 + random() % 5);
    operands_.push_back(
        {DeviceMatrix(own(stored(a, call.layout.a_transposed), call.way == Way::kGathersA),
                      call.dtype),
         DeviceMatrix(own(stored(b, call.layout.b_transposed), call.way == Way::kGathersB),
                      call.dtype),
         DeviceMatrix(bias, call.dtype), DeviceMatrix(residual, call.dtype),
         DeviceMatrix(call.way == Way::kScatters ? call.m / ranks.size() : call.m, call.n,
                      call.dtype),
         std::move(want), config});
  }
  if (!leaves(call.way)) return;
  sum = sum.rounded(call.dtype);
  for (int r = 0; r < ranks.size(); ++r) {
    const comm::Range own = comm::part_of(call.m, ranks.size(), r);
    operands_[static_cast<size_t>(r)].want =
        call.way == Way::kScatters ? sum.row_range(own.begin, own.end) : sum;
  }
}

FusedGemm GemmProblem::gemm_of(const Operands& with) const {
  FusedGemm gemm{};
  gemm.m = call_.m;
  gemm.n = gemm.ldd = call_.n;
  gemm.k = call_.k;
  gemm.a_transposed = call_.layout.a_transposed;
  gemm.b_transposed = call_.layout.b_transposed;
  gemm.lda = gemm.a_transposed ? gemm.m : gemm.k;
  gemm.ldb = gemm.b_transposed ? gemm.k : gemm.n;
  gemm.dtype = call_.dtype;
  if (call_.way != Way::kGathersA) gemm.a = with.a.data();
  if (call_.way != Way::kGathersB) gemm.b = with.b.data();
  if (!leaves(call_.way)) gemm.d = with.d.data();
  if (call_.adds) {
    gemm.bias = with.bias.data();
    gemm.residual = with.residual.data();
  }
  return gemm;
}

void GemmProblem::enqueue_gather(VirtualRanks::Rank& rank, const Operands& with,
                                 const FusedGemm& gemm, const kernels::cuda::CallStreams& streams,
                                 bool pulls) {
  const bool is_a = call_.way == Way::kGathersA;
  const Arriving arriving = call_.arriving();
  const int64_t count = arriving == Arriving::kRows      ? call_.m
                        : arriving == Arriving::kColumns ? call_.n
                                                         : call_.k;
  const int32_t chunks = kernels::cuda::chunks_per_shard(count / ranks_.size());
  const kernels::cuda::GatheredRows rows{
      (is_a ? with.a : with.b).data(),
      (is_a ? gemm.lda : gemm.ldb) * static_cast<int64_t>(sizeof(uint16_t)),
      {count, ranks_.size(), chunks},
      is_a};
  std::vector<const void*> shards;
  for (const Operands& of : operands_) shards.push_back((is_a ? of.a : of.b).data());
  kernels::cuda::CopyEnginePush push;
  kernels::cuda::CopyEnginePull pull(shards.data());
  kernels::cuda::ShardTransport* transport = &push;
  if (pulls) transport = &pull;
  kernels::cuda::all_gather_gemm(rank.peers, ranks_.backend, with.config, gemm, arriving, rows,
                                 *transport, streams);
}

void GemmProblem::enqueue(int rank, cudaStream_t stream, bool pulls) {
  auto& of = ranks_[rank];
  const Operands& with = operands_[static_cast<size_t>(rank)];
  const DeviceGuard guard(rank);
  const FusedGemm gemm = gemm_of(with);
  if (call_.way == Way::kStays) {
    AXONN_CUDA_CHECK(ranks_.backend.launch(gemm, with.config, stream));
    return;
  }
  ranks_.call(rank, stream, [&](const kernels::cuda::CallStreams& streams) {
    if (gathers(call_.way)) {
      enqueue_gather(of, with, gemm, streams, pulls);
    } else if (call_.way == Way::kScatters) {
      kernels::cuda::gemm_reduce_scatter(of.peers, ranks_.backend, with.config, gemm, with.d.data(),
                                         streams);
    } else {
      const SumBroadcast broadcast = call_.way == Way::kSumsByCopy     ? SumBroadcast::kCopyEngine
                                     : call_.way == Way::kSumsByStores ? SumBroadcast::kPeerStores
                                     : call_.way == Way::kSumsInSwitch ? SumBroadcast::kSwitch
                                                                       : SumBroadcast::kMulticast;
      kernels::cuda::gemm_all_reduce(of.peers, ranks_.backend, with.config, gemm, broadcast,
                                     with.d.data(), streams);
    }
  });
}

void GemmProblem::expect_results() const {
  for (size_t r = 0; r < operands_.size(); ++r) {
    const Matrix got = operands_[r].d.read();
    const Matrix& want = operands_[r].want;
    const auto differs = std::mismatch(got.values.begin(), got.values.end(), want.values.begin());
    const auto at = static_cast<int64_t>(differs.first - got.values.begin());
    EXPECT_TRUE(got == want) << call_.describe() << ": rank " << r << " has "
                             << (got == want ? 0 : *differs.first) << " at (" << at / want.columns
                             << ", " << at % want.columns << "), not "
                             << (got == want ? 0 : *differs.second);
  }
}

// --- Runs -------------------------------------------------------------------------

kernels::cuda::GemmBackend sm90_backend() {
  namespace sm90 = kernels::sm90;
  return {&sm90::why_unsupported, &sm90::fused_gemm, &sm90::sum_to_all, &sm90::sum_in_switch,
          &sm90::load};
}

int64_t workspace_bytes(const std::vector<GemmCall>& calls) {
  int64_t most = 1;
  for (const GemmCall& call : calls) {
    const int64_t matrices = std::max({call.m * call.k, call.k * call.n, 2 * call.m * call.n});
    most = std::max(most, matrices * static_cast<int64_t>(sizeof(uint16_t)));
  }
  return most;
}

RuntimeOptions options_of(uint64_t seed, int ranks) {
  RuntimeOptions options;
  options.machine.seed = seed;
  options.devices = ranks;
  return options;
}

namespace {

void enqueue_all(const GemmRun& run, VirtualRanks& ranks, std::vector<GemmProblem>& problems,
                 Runtime& runtime, std::mt19937_64& random) {
  const auto enqueue = [&](GemmProblem& problem, int r) {
    const bool first = random() % 2 == 0;
    problem.enqueue(r, (first ? ranks[r].compute : ranks[r].other).get(), run.pulls);
  };
  if (run.is_late) {
    for (int r = 0; r < run.ranks; ++r) {
      for (GemmProblem& problem : problems) enqueue(problem, r);
      runtime.give_turns(20'000);
    }
    return;
  }
  std::vector<int> order(static_cast<size_t>(run.ranks));
  std::iota(order.begin(), order.end(), 0);
  for (GemmProblem& problem : problems) {
    std::shuffle(order.begin(), order.end(), random);
    for (const int r : order) {
      enqueue(problem, r);
      if (random() % 4 == 0) runtime.give_turns(static_cast<int>(random() % 3000));
    }
  }
}

}  // namespace

void check_run(const GemmRun& run) {
  SCOPED_TRACE(std::to_string(run.ranks) + " ranks, seed " + std::to_string(run.seed));
  Runtime runtime(options_of(run.seed, run.ranks));
  std::mt19937_64 random(run.seed);
  try {
    VirtualRanks ranks(run.ranks, run.epoch, 1, sm90_backend(), workspace_bytes(run.calls));
    if (std::any_of(run.calls.begin(), run.calls.end(),
                    [](const GemmCall& c) { return c.way >= Way::kSumsByMulticast; })) {
      ranks.add_multicast();
    }
    if ((run.seed + 1) / 2 % 2 == 0) ranks.probe_writes();  // else flags of peers are copied
    std::vector<GemmProblem> problems;
    problems.reserve(run.calls.size());
    for (const GemmCall& call : run.calls) problems.emplace_back(ranks, call, random);
    const auto begin = std::chrono::steady_clock::now();
    enqueue_all(run, ranks, problems, runtime, random);
    synchronize_all(run.ranks);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const auto instructions = static_cast<double>(runtime.machine.warp_instructions());
    ::testing::Test::RecordProperty("warp_instructions", std::to_string(instructions));
    ::testing::Test::RecordProperty("warp_instructions_a_second",
                                    std::to_string(instructions / seconds.count()));
    for (const GemmProblem& problem : problems) problem.expect_results();
  } catch (const CudaError& error) {
    ADD_FAILURE() << error.what() << ": "
                  << (runtime.failure() ? runtime.failure()->what() : "the machine goes on");
  }
}

}  // namespace axonn::gpu_machine::testing

#endif
