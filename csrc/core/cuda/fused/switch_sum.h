// An all-reduce that the switch between the GPUs sums: its parts, and the arguments of its kernel.
// This is plain host code without CUDA headers, so that CPU tests cover it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/cuda/fused/fused_gemm.h"
#include "core/cuda/fused/sum_broadcast.h"
#include "core/gemm/launch_config.h"
#include "core/numeric/data_type.h"
#include "core/schedule/partition.h"

namespace axonn::kernels::cuda {

// The rows of the product, cut into parts that are summed one after the other while the GEMM works
// on the next ones. The GEMM announces chunks of equal batches. All ranks must cut alike, even if
// their tiles differ, so the number of parts and their ends depend only on the rows.
struct SwitchParts {
  int32_t batches;
  int32_t chunks_per_batch;

  constexpr int32_t count() const { return batches * chunks_per_batch; }

  static constexpr SwitchParts of(int64_t rows) {
    int32_t batches = kMaxPeers;
    // A batch of a transposed A must begin at an address that TMA can load from.
    constexpr int64_t kAligned = kLoadBytes / 2;
    while (batches > 1 && (rows % (batches * kAligned) != 0 || rows / batches < kChunkRows)) {
      batches /= 2;
    }
    return {batches, chunks_per_shard(rows / batches)};
  }

  // Returns the end row (exclusive) of a part.
  constexpr int64_t row_end(int64_t rows, int32_t part) const {
    const comm::ChunkPlan plan{rows, batches, chunks_per_batch, kPartRows};
    return plan.chunk(plan.from_ordinal(part)).end;
  }
};

// The number of CTAs that sum while the GEMM runs, each on its own SM: an eighth of the SMs. 15 SMs
// of an H100 saturate its links (arXiv:2511.13940).
constexpr int64_t switch_sum_ctas(int64_t num_ctas) { return std::max<int64_t>(num_ctas / 8, 1); }

// Returns the config with a grid that leaves SMs for the sum, but keeps at least one cluster.
constexpr LaunchConfig beside_switch_sum(LaunchConfig config) {
  const int64_t cluster = config.cluster_m * config.cluster_n;
  const int64_t left = config.num_ctas - switch_sum_ctas(config.num_ctas);
  config.num_ctas = std::max(left / cluster, int64_t{1}) * cluster;
  return config;
}

// Returns the best config for the product in parts, on the SMs that the sum leaves free. Its grid
// still includes the sum's SMs, which beside_switch_sum takes away. If no cluster would be left, it
// chooses for the whole grid, of which beside_switch_sum keeps one cluster.
inline std::optional<LaunchConfig> best_config_beside_switch_sum(GemmProblem problem,
                                                                 const Residency& residency,
                                                                 const DeviceLimits& limits) {
  problem.batches = SwitchParts::of(problem.m).batches;
  problem.leaving = {1, residency.link.store_gbps};  // the switch reads this rank's own rows, too
  DeviceLimits left = limits;
  left.num_sms -= switch_sum_ctas(limits.num_sms);
  auto config = best_config(problem, residency, left);
  if (!config) return best_config(problem, residency, limits);
  config->num_ctas = max_ctas(*config, residency, limits);
  return config;
}

// A part has three kinds of flags: those that a rank's GEMM raises at that rank only; those that
// tell all ranks that a rank's addends are ready; and those that tell all ranks that a rank's sums
// are ready.
enum SwitchPhase : int32_t { kAddends, kSums, kMultiplied, kNumSwitchPhases };

// Each rank sums an equal share of each part. Addresses are multiples of kStoreBytes.
struct SwitchSum {
  const void* addends;   // multicast address of the ranks' products
  void* sums;            // multicast address of the sums of the products
  const void* own_sums;  // this rank's own address of the sums
  void* output;          // where this rank copies the sums to
  DataType dtype;
  int32_t num_parts;
  int64_t part_end[kMaxChunks];  // in units of kStoreBytes
  int32_t num_ctas;
};

}  // namespace axonn::kernels::cuda
