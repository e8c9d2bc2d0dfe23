// Strong memory accesses. Another process may access the memory at the same time, so they are
// atomic for the host, too, with at least the order that PTX gives them: loads acquire, stores
// release, and updates do both. Each element is aligned to its size.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace axonn::gpu_machine {

namespace strong {

template <size_t kBytes>
using Bits = std::conditional_t<
    kBytes == 8, uint64_t,
    std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>;

template <typename T>
std::atomic_ref<T> at(std::byte* place) {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  return std::atomic_ref<T>(*reinterpret_cast<T*>(place));
}
template <typename T>
void load(void* to, const std::byte* from) {
  const T value = at<T>(const_cast<std::byte*>(from)).load(std::memory_order_acquire);
  std::memcpy(to, &value, sizeof value);
}
template <typename T>
void store(std::byte* to, const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  at<T>(to).store(value, std::memory_order_release);
}

}  // namespace strong

// Loads an element of 1, 2, 4 or 8 bytes.
inline void load_strong(void* to, const std::byte* from, uint64_t bytes) {
  switch (bytes) {
    case 1:
      return strong::load<uint8_t>(to, from);
    case 2:
      return strong::load<uint16_t>(to, from);
    case 4:
      return strong::load<uint32_t>(to, from);
    default:
      return strong::load<uint64_t>(to, from);
  }
}
inline void store_strong(std::byte* to, const void* from, uint64_t bytes) {
  switch (bytes) {
    case 1:
      return strong::store<uint8_t>(to, from);
    case 2:
      return strong::store<uint16_t>(to, from);
    case 4:
      return strong::store<uint32_t>(to, from);
    default:
      return strong::store<uint64_t>(to, from);
  }
}
// Replaces the value at `place` by what `change` makes of it, and returns the old value.
template <typename T, typename Change>
T update_strong(std::byte* place, const Change& change) {
  using Bits = strong::Bits<sizeof(T)>;
  const auto target = strong::at<Bits>(place);
  Bits old = target.load(std::memory_order_acquire);
  while (!target.compare_exchange_weak(old, std::bit_cast<Bits>(change(std::bit_cast<T>(old))),
                                       std::memory_order_acq_rel, std::memory_order_acquire)) {
  }
  return std::bit_cast<T>(old);
}

}  // namespace axonn::gpu_machine
