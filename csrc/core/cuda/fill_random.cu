#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/cuda/fill_random.h"

namespace axonn::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8192;  // several waves on any GPU; threads loop over the rest

struct FillParams {
  BlockLayout layout;
  RandomStream stream;
  int64_t counters_per_row;  // at most; a row may start in any of a counter's four lanes
};

template <typename T>
__device__ T cast(float value) {
  return static_cast<T>(value);
}
template <>
__device__ __nv_bfloat16 cast<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __half cast<__half>(float value) {
  return __float2half_rn(value);
}

// In each iteration a thread draws one counter, which gives four adjacent elements.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    fill_kernel(T* out, const __grid_constant__ FillParams params) {
  const BlockLayout& layout = params.layout;
  const int64_t total = layout.rows * params.counters_per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / params.counters_per_row;
    const int64_t start = layout.row_start(row);
    const int64_t counter = start / kRandomLanes + i % params.counters_per_row;
    // Column of the counter's first lane; negative if the row starts within the counter.
    const int64_t column = counter * kRandomLanes - start;
    if (column >= layout.columns) continue;
    float values[kRandomLanes];
    draw_random(counter, params.stream, values);
#pragma unroll
    for (int lane = 0; lane < kRandomLanes; ++lane) {
      const int64_t c = column + lane;
      if (c >= 0 && c < layout.columns) out[row * layout.columns + c] = cast<T>(values[lane]);
    }
  }
}

template <typename T>
cudaError_t launch(void* out, const FillParams& params, cudaStream_t cuda_stream) {
  const int64_t total = params.layout.rows * params.counters_per_row;
  const int64_t blocks = std::min((total + kThreads - 1) / kThreads, kMaxBlocks);
  fill_kernel<T>
      <<<static_cast<unsigned>(blocks), kThreads, 0, cuda_stream>>>(static_cast<T*>(out), params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t fill_random(void* out, const BlockLayout& layout, DataType dtype,
                        const RandomStream& stream, cudaStream_t cuda_stream) {
  if (layout.rows == 0 || layout.columns == 0) return cudaSuccess;
  const FillParams params{layout, stream, (layout.columns + 2 * kRandomLanes - 2) / kRandomLanes};
  switch (dtype) {
    case DataType::kFloat32:
      return launch<float>(out, params, cuda_stream);
    case DataType::kFloat64:
      return launch<double>(out, params, cuda_stream);
    case DataType::kBFloat16:
      return launch<__nv_bfloat16>(out, params, cuda_stream);
    case DataType::kFloat16:
      return launch<__half>(out, params, cuda_stream);
    case DataType::kInt64:
      return launch<int64_t>(out, params, cuda_stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace axonn::kernels::cuda
