// One thread block handles a row. It reads the row once, 16 bytes at a time.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "core/cuda/accumulator.cuh"
#include "core/cuda/cross_entropy.h"

namespace axonn::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // blocks loop over the remaining rows
constexpr int kVectorBytes = 16;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
static_assert(kWarps <= kWarpSize, "one warp joins what the others found");

struct GradientParams {
  LogitRows rows;
  const void* dy;
  const void* statistics;
  void* out;
  int64_t out_row_stride;
};

template <typename T>
using Acc = typename Accumulator<T>::type;

// exp(x) for x <= 0. The fast form is accurate enough for 16-bit logits: its error is about 1e-6
// where the result matters.
template <typename T>
__device__ Acc<T> exponential(Acc<T> x) {
  if constexpr (sizeof(T) == 2) {
    return __expf(x);
  } else if constexpr (std::is_same_v<T, float>) {
    return expf(x);
  } else {
    return exp(x);
  }
}

// The largest logit so far, and the sum of exp(logit - largest).
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.
template <typename T>
struct Running {
  static constexpr Acc<T> kLow = -std::numeric_limits<Acc<T>>::infinity();
  Acc<T> top = kLow, sum = 0;

  template <int kWidth>
  __device__ void add(const Acc<T> (&x)[kWidth]) {
    Acc<T> highest = top;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) highest = x[e] > highest ? x[e] : highest;
    if (highest > top) {
      sum *= exponential<T>(top - highest);
      top = highest;
    }
    const Acc<T> shift = shift_of(top);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sum += exponential<T>(x[e] - shift);
  }
  __device__ void join(Acc<T> other_top, Acc<T> other_sum) {
    const Acc<T> highest = other_top > top ? other_top : top;
    const Acc<T> shift = shift_of(highest);
    sum = sum * exponential<T>(top - shift) + other_sum * exponential<T>(other_top - shift);
    top = highest;
  }
  // If every logit is -inf, x - top is NaN. A shift of 0 makes the sum 0, or NaN for a NaN logit.
  __device__ static Acc<T> shift_of(Acc<T> top) { return top == kLow ? Acc<T>{0} : top; }

  __device__ void join_warp() {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const Acc<T> other_top = __shfl_xor_sync(kAllLanes, top, distance);
      join(other_top, __shfl_xor_sync(kAllLanes, sum, distance));
    }
  }
};

// How a row is split: elements up to a 16-byte boundary, whole vectors, and the remaining elements.
template <typename T>
struct Pieces {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  int64_t head, vectors;

  __device__ Pieces(const T* row, int64_t columns) {
    const auto offset = reinterpret_cast<uintptr_t>(row) % kVectorBytes;
    const int64_t before = offset == 0 ? 0 : (kVectorBytes - offset) / sizeof(T);
    head = before < columns ? before : columns;
    vectors = (columns - head) / kWidth;
  }
  __device__ int64_t rest() const { return head + vectors * kWidth; }
};

template <typename T>
__device__ Running<T> scan_row(const T* row, int64_t columns) {
  using Pack = Vector<T, Pieces<T>::kWidth>;
  const Pieces<T> pieces(row, columns);
  Running<T> running;
  const auto* packs = reinterpret_cast<const Pack*>(row + pieces.head);
  for (int64_t v = threadIdx.x; v < pieces.vectors; v += kThreads) {
    const Pack pack = packs[v];
    Acc<T> x[Pieces<T>::kWidth];
#pragma unroll
    for (int e = 0; e < Pieces<T>::kWidth; ++e) x[e] = Accumulator<T>::load(pack.values[e]);
    running.add(x);
  }
  // At most seven elements at either end, fewer than a block has threads.
  const int64_t c = threadIdx.x;
  if (c < pieces.head) running.add({Accumulator<T>::load(row[c])});
  if (pieces.rest() + c < columns) running.add({Accumulator<T>::load(row[pieces.rest() + c])});
  return running;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scan_kernel(const __grid_constant__ LogitRows rows, Acc<T>* found) {
  __shared__ Acc<T> tops[kWarps], sums[kWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  for (int64_t r = blockIdx.x; r < rows.rows; r += gridDim.x) {
    const int64_t label = rows.labels[r];
    if (label == rows.ignore_index) {  // the same for all threads of the block
      if (threadIdx.x == 0) {
        found[r] = 0;
        found[rows.rows + r] = 1;
        found[2 * rows.rows + r] = 0;
      }
      continue;
    }
    const T* row = static_cast<const T*>(rows.logits) + r * rows.row_stride;
    Running<T> running = scan_row(row, rows.columns);
    running.join_warp();
    if (lane == 0) {
      tops[warp] = running.top;
      sums[warp] = running.sum;
    }
    __syncthreads();  // orders the warps' writes before the first warp's reads
    if (warp == 0) {
      running = Running<T>{};
      if (lane < kWarps) {
        running.top = tops[lane];
        running.sum = sums[lane];
      }
      running.join_warp();
      if (lane == 0) {
        const int64_t column = label - rows.first_column;
        const bool is_here = column >= 0 && column < rows.columns;
        found[r] = running.top;
        found[rows.rows + r] = running.sum;
        found[2 * rows.rows + r] = is_here ? Accumulator<T>::load(row[column]) : Acc<T>{0};
      }
    }
    __syncthreads();  // orders these reads before the writes for the next row
  }
}

// The inputs of a row's gradient, except its logits.
template <typename T>
struct RowGradient {
  Acc<T> top, scale, dy;
  int64_t label;  // negative or beyond the columns if another rank holds it

  __device__ T of(T logit, int64_t column) const {
    const Acc<T> p = exponential<T>(Accumulator<T>::load(logit) - top) * scale;
    return Accumulator<T>::store(column == label ? p - dy : p);
  }
};

template <typename T, typename Function>
__device__ void write_row(T* out, const T* row, int64_t columns, const Function& function) {
  constexpr int kWidth = Pieces<T>::kWidth;
  using Pack = Vector<T, kWidth>;
  const Pieces<T> pieces(row, columns);
  const bool together =
      (reinterpret_cast<uintptr_t>(out) - reinterpret_cast<uintptr_t>(row)) % kVectorBytes == 0;
  if (!together) {  // then no column is 16-byte aligned in both rows
    for (int64_t c = threadIdx.x; c < columns; c += kThreads) out[c] = function(row[c], c);
    return;
  }
  const auto* packs = reinterpret_cast<const Pack*>(row + pieces.head);
  auto* out_packs = reinterpret_cast<Pack*>(out + pieces.head);
  for (int64_t v = threadIdx.x; v < pieces.vectors; v += kThreads) {
    Pack pack = packs[v];
    const int64_t first = pieces.head + v * kWidth;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) pack.values[e] = function(pack.values[e], first + e);
    out_packs[v] = pack;
  }
  const int64_t c = threadIdx.x, rest = pieces.rest() + c;
  if (c < pieces.head) out[c] = function(row[c], c);
  if (rest < columns) out[rest] = function(row[rest], rest);
}

// One thread reads and writes each element, so `out` may alias the logits.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ GradientParams params) {
  const LogitRows& rows = params.rows;
  const auto* tops = static_cast<const Acc<T>*>(params.statistics);
  for (int64_t r = blockIdx.x; r < rows.rows; r += gridDim.x) {
    const T* row = static_cast<const T*>(rows.logits) + r * rows.row_stride;
    T* out = static_cast<T*>(params.out) + r * params.out_row_stride;
    const int64_t label = rows.labels[r];
    if (label == rows.ignore_index) {
      const T zero = Accumulator<T>::store(Acc<T>{0});
      for (int64_t c = threadIdx.x; c < rows.columns; c += kThreads) out[c] = zero;
      continue;
    }
    const Acc<T> dy = static_cast<const Acc<T>*>(params.dy)[r];
    const RowGradient<T> gradient{tops[r], dy / tops[rows.rows + r], dy, label - rows.first_column};
    write_row(out, row, rows.columns, [&](T x, int64_t c) { return gradient.of(x, c); });
  }
}

unsigned blocks_of(int64_t rows) { return static_cast<unsigned>(std::min(rows, kMaxBlocks)); }

template <typename T>
cudaError_t scan(const LogitRows& rows, void* found, cudaStream_t stream) {
  scan_kernel<T><<<blocks_of(rows.rows), kThreads, 0, stream>>>(rows, static_cast<Acc<T>*>(found));
  return cudaGetLastError();
}

template <typename T>
cudaError_t gradient(const GradientParams& params, cudaStream_t stream) {
  gradient_kernel<T><<<blocks_of(params.rows.rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t cross_entropy_scan(const LogitRows& rows, void* found, DataType dtype,
                               cudaStream_t stream) {
  if (rows.rows == 0) return cudaSuccess;
  switch (dtype) {
    case DataType::kFloat32:
      return scan<float>(rows, found, stream);
    case DataType::kFloat64:
      return scan<double>(rows, found, stream);
    case DataType::kBFloat16:
      return scan<__nv_bfloat16>(rows, found, stream);
    case DataType::kFloat16:
      return scan<__half>(rows, found, stream);
    case DataType::kInt64:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t cross_entropy_gradient(const LogitRows& rows, const void* dy, const void* statistics,
                                   void* out, int64_t out_row_stride, DataType dtype,
                                   cudaStream_t stream) {
  if (rows.rows == 0 || rows.columns == 0) return cudaSuccess;
  const GradientParams params{rows, dy, statistics, out, out_row_stride};
  switch (dtype) {
    case DataType::kFloat32:
      return gradient<float>(params, stream);
    case DataType::kFloat64:
      return gradient<double>(params, stream);
    case DataType::kBFloat16:
      return gradient<__nv_bfloat16>(params, stream);
    case DataType::kFloat16:
      return gradient<__half>(params, stream);
    case DataType::kInt64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace axonn::kernels::cuda
