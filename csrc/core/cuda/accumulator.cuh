// Accumulator<T> names the type in which elements of type T are summed; Vector holds adjacent
// elements. Every kernel that sums slots uses these types, so all of them produce the same
// bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace axonn::kernels::cuda {

template <typename T>
struct Accumulator {
  using type = T;
  static __device__ T load(T value) { return value; }
  static __device__ T store(T value) { return value; }
};
template <>
struct Accumulator<__nv_bfloat16> {
  using type = float;
  static __device__ float load(__nv_bfloat16 value) { return __bfloat162float(value); }
  static __device__ __nv_bfloat16 store(float value) { return __float2bfloat16_rn(value); }
};
template <>
struct Accumulator<__half> {
  using type = float;
  static __device__ float load(__half value) { return __half2float(value); }
  static __device__ __half store(float value) { return __float2half_rn(value); }
};

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

}  // namespace axonn::kernels::cuda
