// Tile sizes and grid of a persistent GEMM: which are legal on a GPU, and which are best. This is
// plain host code without CUDA headers, so that CPU tests cover it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace axonn::kernels {

// CUTLASS's schedules. Cooperative: all math warps share each tile. Pingpong: two halves of the
// math warps take tiles in turn, so that one half multiplies while the other stores.
enum class Schedule { kCooperative, kPingpong };

// There is one CTA per SM, because the stages and the tile of a persistent GEMM fill it.
struct LaunchConfig {
  int64_t block_m;
  int64_t block_n;
  int64_t block_k;
  int64_t num_stages;          // of shared memory between loads and math
  int64_t num_math_warps;      // that hold accumulators
  int64_t num_producer_warps;  // that load
  int64_t cluster_m = 1;       // CTAs that share loads of B
  int64_t cluster_n = 1;       // CTAs that share loads of A
  int64_t num_ctas = 0;        // of the persistent grid
  Schedule schedule = Schedule::kCooperative;

  std::string describe() const;
  std::string tile() const;  // name of the tile, like "128x256"
};

// The link that carries rows from and to other ranks, as cost_us models it.
struct Link {
  double copy_gbps;   // GB/s at which chunks arrive
  double chunk_us;    // time per chunk in addition to its bytes
  double store_gbps;  // GB/s at which a kernel's stores leave
};

// NVLink of an H100, and NCCL over a network of 400 Gbit/s. Source: docs/kernel_model.md. A guess:
// the first holds for all GPUs that access each other's memory, and the second for PCIe 5.
inline constexpr Link kNvlink{.copy_gbps = 376, .chunk_us = 2.1, .store_gbps = 333};
inline constexpr Link kNetwork{.copy_gbps = 48, .chunk_us = 12, .store_gbps = 48};

// The rows of A or columns of B that arrive while the GEMM computes, in chunks of equal size.
struct ArrivingChunks {
  int64_t count = 0;     // 0: everything is already there
  int64_t own = 0;       // that are there at the start; the others follow one by one
  double each_us = 0;    // after the previous one
  bool columns = false;  // columns of B, instead of rows of A
};

// The rows that leave while the GEMM computes: the first ones; the others stay.
struct LeavingRows {
  double share = 0;  // fraction of the rows
  double gbps = 1;
};

// C [m, n] = A [m, k] @ B [k, n], accumulated in fp32.
struct GemmProblem {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t element_bytes = 2;
  // The edges of chunks (ChunkPlan::tile) along m and n. 0 means that the dimension is not cut, or
  // is cut anywhere; a gather may be cut anywhere, as its tiles wait for all chunks they touch.
  int64_t chunk_tile_m = 0;
  int64_t chunk_tile_n = 0;
  // Rows that leave: the number of equal parts of m, each of which begins with a new cluster.
  int64_t batches = 1;
  // For the model in cost_us.
  ArrivingChunks arriving{};
  LeavingRows leaving{};
};

// The other users of the device and the link while a GEMM spins on flags. The kernels that raise
// the flags need SMs that no spinning CTA holds, because CTAs of a persistent grid end only when
// all their tiles are done.
struct Residency {
  int64_t ranks_per_device = 1;  // virtual ranks, each with its own share of the SMs
  int64_t producer_ctas = 0;     // per rank; 0: the copy engine, which needs none
  // SMs to leave free for other kernels, at most half of the share. CTAs without an SM start only
  // when such a kernel ends, and a persistent grid then takes up to twice as long.
  int64_t free_sms = 0;
  Link link = kNvlink;  // over which rows come and go
};

struct DeviceLimits {
  int64_t architecture;  // 90: sm_90
  int64_t num_sms;
  int64_t shared_bytes_per_block;
  int64_t threads_per_block;
  int64_t max_cluster;  // CTAs; the size that every device of the architecture supports
  int64_t mma_m;        // rows that one instruction of `warps_per_mma` warps multiplies
  int64_t mma_n;        // step of its columns
  int64_t mma_k_bytes;  // depth
  int64_t warps_per_mma;
  int64_t max_box;           // elements of a tile's edge that one load covers
  int64_t max_accumulators;  // fp32 registers per thread that addresses and loops leave free
  // The numbers below are for the model in cost_us.
  double clock_ghz;
  double flops_per_cycle;     // of one SM, for 2-byte elements; half as many for 4-byte ones
  double l2_bytes_per_cycle;  // into one SM
};

// NVIDIA H100 SXM. Source: CUDA C programming guide, compute capabilities; H100 whitepaper (989
// TFLOP/s = 132 SMs * 1.83 GHz * 4096). The clock is the one sustained under load, and the L2
// bandwidth is the lowest with which a published kernel is possible (docs/kernel_model.md).
inline constexpr DeviceLimits kSm90{.architecture = 90,
                                    .num_sms = 132,
                                    .shared_bytes_per_block = 227 * 1024,
                                    .threads_per_block = 1024,
                                    .max_cluster = 8,
                                    .mma_m = 64,
                                    .mma_n = 8,
                                    .mma_k_bytes = 32,
                                    .warps_per_mma = 4,
                                    .max_box = 256,
                                    .max_accumulators = 192,
                                    .clock_ghz = 1.48,
                                    .flops_per_cycle = 4096,
                                    .l2_bytes_per_cycle = 43};

inline constexpr int64_t kBarrierBytes = 1024;  // mbarriers of the stages, scheduler, alignment

// Returns the shared memory of a CTA: the stages, the output tile, and barriers.
constexpr int64_t shared_bytes(const LaunchConfig& config, int64_t element_bytes) {
  const int64_t stage = (config.block_m + config.block_n) * config.block_k * element_bytes;
  // The output is stored a quarter of a tile at a time, so that its staging does not cost a stage.
  const int64_t epilogue = config.block_m * config.block_n * element_bytes / 4;
  return config.num_stages * stage + epilogue + kBarrierBytes;
}

// Returns the largest legal grid of a config: the SMs of one rank, minus those that its producers
// need and those to leave free, in whole clusters; 0 if none are left.
int64_t max_ctas(const LaunchConfig& config, const Residency& residency,
                 const DeviceLimits& limits);

// Returns why a config cannot run, or could run and hang; an empty string if it is legal.
std::string why_illegal(const LaunchConfig& config, const GemmProblem& problem,
                        const Residency& residency, const DeviceLimits& limits);

// Returns the modelled, not measured, microseconds of the GEMM until all departing rows have left.
//
// Without communication, it takes waves of tiles times the time of a tile. A tile takes as long as
// its math or its loads from L2, whichever is longer, and then as long as its epilogue, which
// overlaps the next tile in pingpong. The model leaves out the time until a departing tile has
// arrived and is counted, about 2 us, for which pingpong delays the next epilogue
// (sm90/departure_epilogue.cuh). Only if K is below about 600 does this add to each tile; otherwise
// it adds only to the last one, as in the cooperative schedule.
//
// The product of the last chunks cannot begin before they have arrived, nor can the rows of the
// last tiles leave before they are computed. So small tiles may be best for few rows, even if large
// ones are faster without communication.
//
// The model is good for ranking configs. The config must be legal.
double cost_us(const LaunchConfig& config, const GemmProblem& problem, const DeviceLimits& limits);

// Returns the configs that kernels are built for, without num_ctas: those of sm90_tiles.h for
// sm_90, none for other architectures.
std::vector<LaunchConfig> candidates(const DeviceLimits& limits, int64_t element_bytes);

// A config and the modelled microseconds of a product on it.
struct ModelledConfig {
  LaunchConfig config;
  double us;
};

// Returns the legal candidates, each on its largest legal grid, in the order of `candidates`.
std::vector<ModelledConfig> legal_configs(const GemmProblem& problem, const Residency& residency,
                                          const DeviceLimits& limits);

// Returns the legal candidate with the lowest modelled cost, on its largest legal grid; the first
// one if several tie. Returns none if no candidate is legal; the op then uses another algorithm.
std::optional<LaunchConfig> best_config(const GemmProblem& problem, const Residency& residency,
                                        const DeviceLimits& limits);

}  // namespace axonn::kernels
