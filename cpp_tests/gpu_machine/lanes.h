// Applies functions of one lane to all lanes in a mask.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "gpu_machine/warp.h"

namespace axonn::gpu_machine {

__extension__ using Int128 = __int128;
__extension__ using UInt128 = unsigned __int128;

template <typename T>
void store_lanes(Warp& warp, Slot slot, const T* values, uint32_t mask) {
  T* target = warp.lanes<T>(slot);
  if (mask == kAllLanes) {
    std::memcpy(target, values, sizeof(T) * kLanes);
    return;
  }
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1u) != 0) target[i] = values[i];
  }
}

inline void store_predicate(Warp& warp, Slot slot, uint32_t values, uint32_t mask) {
  uint32_t& target = warp.predicate(slot);
  target = (target & ~mask) | (values & mask);
}

inline void expect_all_lanes(const Warp& warp, uint32_t mask) {
  if (mask == kAllLanes) return;
  warp.fail(MachineError::Kind::kUndefined, "all 32 lanes must run it together",
            __builtin_ctz(~mask));
}

template <typename Visit>
void for_each_lane(uint32_t mask, const Visit& visit) {
  for (; mask != 0; mask &= mask - 1) visit(__builtin_ctz(mask));
}

// d = F(a), F(a, b) or F(a, b, c), for any operand types.
template <typename F, typename D, typename A>
void map1(const Op& op, Warp& warp, uint32_t mask) {
  const A* a = warp.lanes<A>(op.a);
  alignas(64) D result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = F{}(a[i]);
  store_lanes(warp, op.d, result, mask);
}
template <typename F, typename D, typename A, typename B>
void map2(const Op& op, Warp& warp, uint32_t mask) {
  const A* a = warp.lanes<A>(op.a);
  const B* b = warp.lanes<B>(op.b);
  alignas(64) D result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = F{}(a[i], b[i]);
  store_lanes(warp, op.d, result, mask);
}
template <typename F, typename D, typename A, typename B, typename C>
void map3(const Op& op, Warp& warp, uint32_t mask) {
  const A* a = warp.lanes<A>(op.a);
  const B* b = warp.lanes<B>(op.b);
  const C* c = warp.lanes<C>(op.c);
  alignas(64) D result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = F{}(a[i], b[i], c[i]);
  store_lanes(warp, op.d, result, mask);
}

// The version of a function for a type of 16, 32 or 64 bits, signed or unsigned; null if there is
// none. Results that do not depend on the sign use the first.
template <typename F, bool kSigned>
Execute unary_of(int bits) {
  using U16 = std::conditional_t<kSigned, int16_t, uint16_t>;
  using U32 = std::conditional_t<kSigned, int32_t, uint32_t>;
  using U64 = std::conditional_t<kSigned, int64_t, uint64_t>;
  return bits == 16   ? map1<F, U16, U16>
         : bits == 32 ? map1<F, U32, U32>
         : bits == 64 ? map1<F, U64, U64>
                      : nullptr;
}
template <typename F, bool kSigned>
Execute binary_of(int bits) {
  using U16 = std::conditional_t<kSigned, int16_t, uint16_t>;
  using U32 = std::conditional_t<kSigned, int32_t, uint32_t>;
  using U64 = std::conditional_t<kSigned, int64_t, uint64_t>;
  return bits == 16   ? map2<F, U16, U16, U16>
         : bits == 32 ? map2<F, U32, U32, U32>
         : bits == 64 ? map2<F, U64, U64, U64>
                      : nullptr;
}
template <typename F>
Execute binary_of(Type type) {
  return type.is_signed() ? binary_of<F, true>(type.bits) : binary_of<F, false>(type.bits);
}

}  // namespace axonn::gpu_machine
