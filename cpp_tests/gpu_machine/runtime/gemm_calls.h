// Fused calls of every kind on the GEMMs for sm_90, with what each rank must get. A call is one
// product of all ranks; a table of calls, a number of ranks and a seed are a run.
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

// How operands come and how the result goes.
enum class Way {
  kStays,       // no rank needs another
  kGathersA,    // A's rows, or K if A is transposed, arrive
  kGathersB,    // B's columns, or K unless B is transposed, arrive
  kScatters,    // rows leave, and each rank adds up its own
  kSumsByCopy,  // and sends the sums to all ranks, in one of three ways
  kSumsByStores,
  kSumsByMulticast,
  kSumsInSwitch,  // the switch adds up what stays on its rank, in any order
};
inline bool gathers(Way way) { return way == Way::kGathersA || way == Way::kGathersB; }
inline bool leaves(Way way) { return way >= Way::kScatters; }

struct Layout {
  const char* name;
  bool a_transposed, b_transposed;
};
inline constexpr Layout kTn{"tn", false, true}, kNn{"nn", false, false}, kNt{"nt", true, false};

// D [m, n] = A [m, k] @ B [k, n]; each rank multiplies so much.
struct GemmCall {
  Way way;
  DataType dtype;
  Layout layout;
  int64_t m, n, k;
  bool adds = false;          // a bias and a residual, where the result stays
  std::optional<int> tile{};  // of the list; if not set, each rank draws its own
  std::optional<int> ctas{};  // the same holds of the grid

  std::string describe() const;
  kernels::cuda::Arriving arriving() const;
};

// Returns a call of a legal shape for so many ranks: of up to `most_rows` in each rank's share of
// the dimension that arrives or leaves.
GemmCall draw_call(Way way, DataType dtype, Layout layout, int ranks, int64_t most_rows,
                   std::mt19937_64& random);

// A call with its operands on all ranks.
class GemmProblem {
 public:
  GemmProblem(VirtualRanks& ranks, const GemmCall& call, std::mt19937_64& random);

  // Enqueues one rank's part, as csrc/ops/cuda does. If it pulls, the copy engine fetches the
  // shards of peers from their memory; otherwise it pushes the own shard to them.
  void enqueue(int rank, cudaStream_t stream, bool pulls = false);
  void expect_results() const;

 private:
  struct Operands {
    DeviceMatrix a, b, bias, residual, d;  // of what is gathered, the own shard
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
  uint32_t epoch = 0;  // calls that were made before
  std::vector<GemmCall> calls{};
  bool pulls = false;
  bool is_late = false;  // each rank enqueues all of its calls long before the next rank comes
};

// The kernels for sm_90, as csrc/ops/cuda finds them.
kernels::cuda::GemmBackend sm90_backend();
// Returns what the largest of these calls needs.
int64_t workspace_bytes(const std::vector<GemmCall>& calls);

RuntimeOptions options_of(uint64_t seed, int ranks);

// Runs the calls one after the other on the same workspaces, on random streams, and compares all
// results. With seeds 0, 3, 4, 7 and so on the streams' queues write the flags of gathers; with the
// others they are copied.
void check_run(const GemmRun& run);

}  // namespace axonn::gpu_machine::testing
