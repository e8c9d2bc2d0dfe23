#include <algorithm>

#include "core/cuda/goldfish.h"

namespace axonn::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8192;  // some waves of blocks on any GPU; threads loop over the rest

struct GoldfishParams {
  GoldfishRows rows;
  GoldfishRule rule;
  int64_t ignore_index;
  int64_t* out;
};

// A thread hashes the window of one target a turn. Neighbours share all tokens of it but two, which
// they find in L1.
__global__ void __launch_bounds__(kThreads)
    goldfish_kernel(const __grid_constant__ GoldfishParams params) {
  const GoldfishRows& rows = params.rows;
  const int64_t per_row = rows.targets_per_row(), total = rows.num_targets();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / per_row, place = i % per_row + 1;
    const int64_t* ids = rows.ids + row * rows.length;
    const int64_t* documents =
        rows.documents == nullptr ? nullptr : rows.documents + row * rows.length;
    const bool drops = goldfish_drops(ids, documents, place, params.rule);
    params.out[i] = drops ? params.ignore_index : ids[place];
  }
}

}  // namespace

cudaError_t goldfish_labels(const GoldfishRows& rows, const GoldfishRule& rule,
                            int64_t ignore_index, int64_t* out, cudaStream_t stream) {
  const int64_t total = rows.num_targets();
  if (total == 0) return cudaSuccess;
  const int64_t blocks = std::min((total + kThreads - 1) / kThreads, kMaxBlocks);
  const GoldfishParams params{rows, rule, ignore_index, out};
  goldfish_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace axonn::kernels::cuda
