#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/cuda/accumulator.cuh"
#include "core/cuda/reduce.h"

namespace axonn::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;
constexpr int64_t kVectorBytes = 16;

struct Slots {
  const void* sources[kMaxSlots];
  int64_t num_sources;
};
static_assert(sizeof(Slots) + 2 * sizeof(int64_t) <= 4096, "kernel parameters of every CUDA");

template <ReduceOp op, typename T>
__device__ T combine(T a, T b) {
  if constexpr (op == ReduceOp::kSum) {
    if constexpr (std::is_same_v<T, long long>) {  // wraps, as in torch; signed overflow is UB
      return static_cast<T>(static_cast<unsigned long long>(a) +
                            static_cast<unsigned long long>(b));
    }
    return a + b;
  } else {
    return (b > a || b != b) ? b : a;  // NaN wins, as in torch
  }
}

// Reduces `count` vectors. A thread reads element i of every source before it writes element i, so
// the destination may be a source.
template <typename T, int kWidth, ReduceOp op>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(void* destination, const __grid_constant__ Slots slots, int64_t count) {
  using Acc = Accumulator<T>;
  using Pack = Vector<T, kWidth>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    typename Acc::type acc[kWidth];
    Pack pack = static_cast<const Pack*>(slots.sources[0])[i];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) acc[e] = Acc::load(pack.values[e]);
#pragma unroll 4  // loads in flight together; the additions keep their order
    for (int64_t s = 1; s < slots.num_sources; ++s) {
      pack = static_cast<const Pack*>(slots.sources[s])[i];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) acc[e] = combine<op>(acc[e], Acc::load(pack.values[e]));
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) pack.values[e] = Acc::store(acc[e]);
    static_cast<Pack*>(destination)[i] = pack;
  }
}

template <typename T, int kWidth, ReduceOp op>
cudaError_t launch(void* destination, const Slots& slots, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMaxBlocks);
  reduce_kernel<T, kWidth, op>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(destination, slots, count);
  return cudaGetLastError();
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

template <typename T, ReduceOp op>
cudaError_t reduce(void* destination, Slots slots, int64_t count, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool aligned = is_aligned(destination) &&
                       std::all_of(slots.sources, slots.sources + slots.num_sources, is_aligned);
  const int64_t vectors = aligned ? count / kWidth : 0;
  const cudaError_t status = launch<T, kWidth, op>(destination, slots, vectors, stream);
  if (status != cudaSuccess) return status;
  const int64_t done = vectors * kWidth;
  for (int64_t s = 0; s < slots.num_sources; ++s) {
    slots.sources[s] = static_cast<const T*>(slots.sources[s]) + done;
  }
  return launch<T, 1, op>(static_cast<T*>(destination) + done, slots, count - done, stream);
}

template <typename T>
cudaError_t reduce(void* destination, const Slots& slots, int64_t count, ReduceOp op,
                   cudaStream_t stream) {
  return op == ReduceOp::kSum ? reduce<T, ReduceOp::kSum>(destination, slots, count, stream)
                              : reduce<T, ReduceOp::kMax>(destination, slots, count, stream);
}

template <typename T>
cudaError_t load_sums() {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reduce_kernel<T, kWidth, ReduceOp::kSum>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, reduce_kernel<T, 1, ReduceOp::kSum>);
}

}  // namespace

cudaError_t load_reduce_slots(DataType dtype) {
  if (dtype == DataType::kBFloat16) return load_sums<__nv_bfloat16>();
  if (dtype == DataType::kFloat16) return load_sums<__half>();
  return cudaErrorInvalidValue;
}

cudaError_t reduce_slots(void* destination, const void* const* sources, int64_t num_sources,
                         int64_t count, DataType dtype, ReduceOp op, cudaStream_t stream) {
  if (num_sources < 1 || num_sources > kMaxSlots || count < 0) return cudaErrorInvalidValue;
  Slots slots{};
  std::memcpy(slots.sources, sources, static_cast<size_t>(num_sources) * sizeof(void*));
  slots.num_sources = num_sources;
  switch (dtype) {
    case DataType::kFloat32:
      return reduce<float>(destination, slots, count, op, stream);
    case DataType::kFloat64:
      return reduce<double>(destination, slots, count, op, stream);
    case DataType::kBFloat16:
      return reduce<__nv_bfloat16>(destination, slots, count, op, stream);
    case DataType::kFloat16:
      return reduce<__half>(destination, slots, count, op, stream);
    case DataType::kInt64:
      return reduce<long long>(destination, slots, count, op, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace axonn::kernels::cuda
