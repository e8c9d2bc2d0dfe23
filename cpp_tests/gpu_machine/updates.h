// The new values that atomic operations and reductions compute from old ones.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

namespace axonn::gpu_machine {

enum Update : uint8_t {
  kAdd,
  kExchange,
  kCompare,
  kAnd,
  kOr,
  kXor,
  kMin,
  kMax,
  kIncrement,
  kDecrement
};

// The update with this name in PTX; kAdd for any other name.
inline Update update_of(const std::string& name) {
  for (const auto& [known, update] :
       std::initializer_list<std::pair<const char*, Update>>{{"exch", kExchange},
                                                             {"cas", kCompare},
                                                             {"and", kAnd},
                                                             {"or", kOr},
                                                             {"xor", kXor},
                                                             {"min", kMin},
                                                             {"max", kMax},
                                                             {"inc", kIncrement},
                                                             {"dec", kDecrement}}) {
    if (name == known) return update;
  }
  return kAdd;
}

template <typename T>
T updated(uint8_t update, T old, T b, T c) {
  switch (update) {
    case kAdd:
      if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(static_cast<uint64_t>(old) + static_cast<uint64_t>(b));
      } else {
        return old + b;
      }
    case kExchange:
      return b;
    case kCompare:
      return old == b ? c : old;
    case kMin:
      return b < old ? b : old;
    case kMax:
      return old < b ? b : old;
    default:
      break;
  }
  if constexpr (std::is_unsigned_v<T>) {
    if (update == kAnd) return old & b;
    if (update == kOr) return old | b;
    if (update == kXor) return old ^ b;
    if (update == kIncrement) return old >= b ? 0 : old + 1;
    if (update == kDecrement) return old == 0 || old > b ? b : old - 1;
  }
  return old;
}

}  // namespace axonn::gpu_machine
