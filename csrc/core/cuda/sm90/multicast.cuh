// Accesses to the memory of all ranks at once, through a multicast address. Such an address allows
// only these accesses, and these accesses allow only such an address.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace axonn::kernels::sm90 {

// Stores 16 bytes at all ranks. The type f32 only gives the size; nothing is rounded.
__device__ inline void store_multicast(void* address, const uint4& bits) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(__uint_as_float(bits.x)), "f"(__uint_as_float(bits.y)),
               "f"(__uint_as_float(bits.z)), "f"(__uint_as_float(bits.w))
               : "memory");
}

// Returns 16 bytes of elements, each summed over all ranks. The switch adds in fp32, in its own
// order, and rounds to T.
template <typename T>
__device__ uint4 load_multicast_sum(const void* address) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  uint4 bits;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
        : "l"(address)
        : "memory");
  } else {
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
        : "l"(address)
        : "memory");
  }
  return bits;
}

}  // namespace axonn::kernels::sm90
