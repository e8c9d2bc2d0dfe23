#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/cuda/accumulator.cuh"
#include "core/cuda/sm90/multicast.cuh"
#include "core/cuda/sm90/sum_to_all.h"

namespace axonn::kernels::sm90 {
namespace {

using cuda::Accumulator;
using cuda::kMaxPeers;
using cuda::kStoreBytes;
using cuda::SumToAll;

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

template <typename T>
using Pack = cuda::Vector<T, kStoreBytes / sizeof(T)>;

template <typename T, bool kMulticast>
__global__ void __launch_bounds__(kThreads)
    sum_to_all_kernel(const __grid_constant__ SumToAll sum, int64_t count) {
  constexpr int kWidth = kStoreBytes / sizeof(T);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    float acc[kWidth];
    Pack<T> pack = static_cast<const Pack<T>*>(sum.sources[0])[i];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) acc[e] = Accumulator<T>::load(pack.values[e]);
#pragma unroll 4  // loads in flight together; the additions keep their order
    for (int s = 1; s < sum.num_ranks; ++s) {
      pack = static_cast<const Pack<T>*>(sum.sources[s])[i];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) acc[e] += Accumulator<T>::load(pack.values[e]);
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) pack.values[e] = Accumulator<T>::store(acc[e]);
    if constexpr (kMulticast) {
      uint4 bits;
      memcpy(&bits, &pack, sizeof(bits));
      store_multicast(static_cast<Pack<T>*>(sum.destinations[0]) + i, bits);
    } else {
      for (int r = 0; r < sum.num_ranks; ++r) static_cast<Pack<T>*>(sum.destinations[r])[i] = pack;
    }
  }
}

template <typename T>
cudaError_t launch(const SumToAll& sum, cudaStream_t stream) {
  const int64_t count = sum.bytes / kStoreBytes;
  if (count == 0) return cudaSuccess;
  const auto blocks =
      static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
  if (sum.multicast) {
    sum_to_all_kernel<T, true><<<blocks, kThreads, 0, stream>>>(sum, count);
  } else {
    sum_to_all_kernel<T, false><<<blocks, kThreads, 0, stream>>>(sum, count);
  }
  return cudaGetLastError();
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kStoreBytes == 0;
}

template <typename T>
cudaError_t load() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, sum_to_all_kernel<T, false>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, sum_to_all_kernel<T, true>);
}

}  // namespace

cudaError_t load_sum_to_all() {
  const cudaError_t error = load<__nv_bfloat16>();
  return error != cudaSuccess ? error : load<__half>();
}

cudaError_t sum_to_all(const SumToAll& sum, cudaStream_t stream) {
  if (sum.num_ranks < 1 || sum.num_ranks > kMaxPeers || sum.bytes < 0 ||
      sum.bytes % kStoreBytes != 0) {
    return cudaErrorInvalidValue;
  }
  const int32_t num_destinations = sum.multicast ? 1 : sum.num_ranks;
  if (!std::all_of(sum.sources, sum.sources + sum.num_ranks, is_aligned) ||
      !std::all_of(sum.destinations, sum.destinations + num_destinations, is_aligned)) {
    return cudaErrorInvalidValue;
  }
  if (sum.dtype == DataType::kBFloat16) return launch<__nv_bfloat16>(sum, stream);
  if (sum.dtype == DataType::kFloat16) return launch<__half>(sum, stream);
  return cudaErrorInvalidValue;
}

}  // namespace axonn::kernels::sm90
