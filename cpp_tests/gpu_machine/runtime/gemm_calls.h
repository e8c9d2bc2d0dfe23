// Fused calls of every kind on the sm_90 GEMMs, with the result that each rank must get. A call is
// one product on all ranks; a run is a list of calls, a number of ranks and a seed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/gemm/sm90_tiles.h"
#include "gpu_machine/runtime/virtual_ranks.h"

namespace axonn::gpu_machine::testing {

// How operands arrive and where the result goes.
enum class Way {
  kStays,       // no rank needs another
  kGathersA,    // A's rows, or K if A is transposed, arrive
  kGathersB,    // B's columns, or K unless B is transposed, arrive
  kScatters,    // rows leave, and each rank adds up its own
  kSumsByCopy,  // likewise, then sends the sums to all ranks, in one of three ways
  kSumsByStores,
  kSumsByMulticast,
  kSumsInSwitch,  // products stay on their ranks, and the switch adds them in any order
};
inline bool gathers(Way way) { return way == Way::kGathersA || way == Way::kGathersB; }
inline bool leaves(Way way) { return way >= Way::kScatters; }

struct Layout {
  const char* name;
  bool a_transposed, b_transposed;
};
inline constexpr Layout kTn{"tn", false, true}, kNn{"nn", false, false}, kNt{"nt", true, false};

// D [m, n] = A [m, k] @ B [k, n] on each rank.
struct GemmCall {
  Way way;
  DataType dtype;
  Layout layout;
  int64_t m, n, k;
  bool adds = false;          // a bias and a residual, if the result stays
  std::optional<int> tile{};  // index in the list; if not set, each rank draws its own
  std::optional<int> ctas{};  // likewise for the grid

  std::string describe() const;
  kernels::cuda::Arriving arriving() const;
};

// Returns a call of a legal shape for this number of ranks, with up to `most_rows` in each rank's
// share of the dim that arrives or leaves.
GemmCall draw_call(Way way, DataType dtype, Layout layout, int ranks, int64_t most_rows,
                   std::mt19937_64& random);

// A call with its operands on all ranks.
class GemmProblem {
 public:
  GemmProblem(VirtualRanks& ranks, const GemmCall& call, std::mt19937_64& random);

  // Enqueues one rank's part, as csrc/ops/cuda does. If `pulls`, the copy engine fetches the shards
  // of peers from their memory; otherwise it pushes the rank's own shard to them.
  void enqueue(int rank, cudaStream_t stream, bool pulls = false);
  void expect_results() const;

 private:
  struct Operands {
    DeviceMatrix a, b, bias, residual, d;  // for a gathered operand, the rank's own shard
    Matrix want;
    kernels::LaunchConfig config;
  };
  kernels::cuda::FusedGemm gemm_of(const Operands& with) const;
  void enqueue_gather(VirtualRanks::Rank& rank, const Operands& with,
                      const kernels::cuda::FusedGemm& gemm,
                      const kernels::cuda::CallStreams& streams, bool pulls);

  VirtualRanks& ranks_;
  const GemmCall call_;
  std::vector<Operands> operands_;
};

struct GemmRun {
  int ranks = 2;
  uint64_t seed = 0;
  uint32_t epoch = 0;  // number of calls made before
  std::vector<GemmCall> calls{};
  bool pulls = false;
  bool is_late = false;  // each rank enqueues all of its calls long before the next rank comes
};

// The sm_90 kernels, as csrc/ops/cuda finds them.
kernels::cuda::GemmBackend sm90_backend();
// Returns the bytes that the largest of these calls needs.
int64_t workspace_bytes(const std::vector<GemmCall>& calls);

RuntimeOptions options_of(uint64_t seed, int ranks);

// Runs the calls one after the other on the same workspaces, on random streams, and checks all
// results. With seeds 0, 3, 4, 7 and so on, the streams' queues write the flags of gathers; with
// the others the flags are copied.
void check_run(const GemmRun& run);

}  // namespace axonn::gpu_machine::testing
