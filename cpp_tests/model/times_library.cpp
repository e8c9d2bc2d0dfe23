#include "model/times_library.h"

#include <algorithm>
#include <limits>

#include "model/times_choice.h"

namespace axonn::times {

double cublas_us(const Work& work, const Rates& rates) {
  double best = std::numeric_limits<double>::infinity();
  for (const kernels::LaunchConfig& tile : library_tiles()) {
    const GemmRun run = run_gemm(grid_of(work, Flow::kStays, tile), 0, {}, {}, rates);
    best = std::min(best, run.end_us);
  }
  // A small product is bounded by the bytes that it must read and write at least once.
  const int64_t bytes =
      work.gathered_bytes() + work.result_bytes() + work.n * work.k * kElementBytes;
  return std::max(best, us_of(static_cast<double>(bytes), rates.hbm_gbps));
}

// Each link of a ring carries all but one rank's part. A reduce-scatter is a gather in reverse.
double nccl_gather_us(int64_t bytes, int32_t ranks, const Rates& rates) {
  const double moved = static_cast<double>(bytes) * (ranks - 1) / ranks;
  return std::min(rates.nccl_small_us + us_of(moved, rates.nccl_small_gbps),
                  rates.nccl_us + us_of(moved, rates.nccl_gbps));
}

double nccl_sum_us(int64_t bytes, const Rates& rates) {
  const auto size = static_cast<double>(bytes);
  return std::min(rates.nccl_sum_small_us + us_of(size, rates.nccl_sum_small_gbps),
                  rates.nccl_sum_us + us_of(size, rates.nccl_sum_gbps));
}

double library_gather_us(const Work& work, const Rates& rates) {
  return 2 * rates.kernel_us + nccl_gather_us(work.gathered_bytes(), work.ranks, rates) +
         cublas_us(work, rates);
}

double library_scatter_us(const Work& work, const Rates& rates) {
  return 2 * rates.kernel_us + cublas_us(work, rates) +
         nccl_gather_us(work.result_bytes(), work.ranks, rates);
}

double library_sum_us(const Work& work, const Rates& rates) {
  return 2 * rates.kernel_us + cublas_us(work, rates) + nccl_sum_us(work.result_bytes(), rates);
}

}  // namespace axonn::times
