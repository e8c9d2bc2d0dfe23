// Integer arithmetic and logic. Source: PTX ISA 9.0, sections 9.7.1 and 9.7.8.
#include <type_traits>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"

namespace axonn::gpu_machine {
namespace {

template <typename T>
using Wide = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, Int128, UInt128>>>;

// Sums and products wrap around, as unsigned 64-bit arithmetic does for every width.
template <typename T>
T wrap(uint64_t value) {
  return static_cast<T>(value);
}

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    return wrap<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
struct Sub {
  template <typename T>
  T operator()(T a, T b) const {
    return wrap<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
  }
};
struct MulLow {
  template <typename T>
  T operator()(T a, T b) const {
    return wrap<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
struct MulHigh {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(Wide<T>{a} * Wide<T>{b} >> (8 * sizeof(T)));
  }
};
struct MulWide {
  template <typename T>
  Wide<T> operator()(T a, T b) const {
    return static_cast<Wide<T>>(Wide<T>{a} * Wide<T>{b});
  }
};
// Division by zero gives all ones, and its remainder is the dividend: PTX leaves both undefined,
// and compilers do not use them.
struct Div {
  template <typename T>
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub{}(T{0}, a);
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <typename T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct And {
  template <typename T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <typename T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct AddSaturated {
  int32_t operator()(int32_t a, int32_t b) const { return clamp(int64_t{a} + b); }
  static int32_t clamp(int64_t value) {
    return static_cast<int32_t>(value > INT32_MAX   ? INT32_MAX
                                : value < INT32_MIN ? INT32_MIN
                                                    : value);
  }
};
struct SubSaturated {
  int32_t operator()(int32_t a, int32_t b) const { return AddSaturated::clamp(int64_t{a} - b); }
};
struct Not {
  template <typename T>
  T operator()(T a) const {
    return static_cast<T>(~a);
  }
};
struct Neg {
  template <typename T>
  T operator()(T a) const {
    return Sub{}(T{0}, a);
  }
};
struct Abs {
  template <typename T>
  T operator()(T a) const {
    return a < 0 ? Sub{}(T{0}, a) : a;
  }
};
struct Mad {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return Add{}(MulLow{}(a, b), c);
  }
};
struct MadHigh {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return Add{}(MulHigh{}(a, b), c);
  }
};
struct MadWide {
  template <typename T>
  Wide<T> operator()(T a, T b, Wide<T> c) const {
    return Add{}(MulWide{}(a, b), c);
  }
};
// Shifts by the width or more give 0, or copies of the sign.
struct Shl {
  template <typename T>
  T operator()(T a, uint32_t b) const {
    return b < 8 * sizeof(T) ? wrap<T>(static_cast<uint64_t>(a) << b) : T{0};
  }
};
struct Shr {
  template <typename T>
  T operator()(T a, uint32_t b) const {
    constexpr uint32_t kMost = 8 * sizeof(T) - 1;
    if (b <= kMost) return static_cast<T>(a >> b);
    return std::is_signed_v<T> ? static_cast<T>(a >> kMost) : T{0};
  }
};
// Logic on predicates.
template <typename F>
void predicates(const Op& op, Warp& warp, uint32_t mask) {
  store_predicate(warp, op.d, F{}(warp.predicate(op.a), warp.predicate(op.b)), mask);
}
void not_predicate(const Op& op, Warp& warp, uint32_t mask) {
  store_predicate(warp, op.d, ~warp.predicate(op.a), mask);
}

void set_slots(Decoder& d, Type type, bool is_binary) {
  Op& op = d.op();
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  if (is_binary) op.b = d.slot(2, type);
}

void decode_product(Decoder& d, const std::string& opcode) {
  Op& op = d.op();
  const std::string part = d.take_one({"lo", "hi", "wide"});
  const Type type = d.take_type();
  const Type result = part == "wide" ? Type{type.letter, 2 * type.bits, 1} : type;
  op.d = d.slot(0, result);
  op.a = d.slot(1, type);
  op.b = d.slot(2, type);
  const bool adds = opcode == "mad", wide = part == "wide", high = part == "hi";
  if (adds) op.c = d.slot(3, result);
  const auto pick = [&]<typename T>(T) -> Execute {
    if (adds) {
      if constexpr (sizeof(T) < 8) {
        if (wide) return map3<MadWide, Wide<T>, T, T, Wide<T>>;
      }
      return high ? map3<MadHigh, T, T, T, T> : map3<Mad, T, T, T, T>;
    }
    if constexpr (sizeof(T) < 8) {
      if (wide) return map2<MulWide, Wide<T>, T, T>;
    }
    return high ? map2<MulHigh, T, T, T> : map2<MulLow, T, T, T>;
  };
  if (wide && type.bits == 64) d.fail("there is no product of 128 bits");
  op.execute = type.bits == 16   ? (type.is_signed() ? pick(int16_t{}) : pick(uint16_t{}))
               : type.bits == 32 ? (type.is_signed() ? pick(int32_t{}) : pick(uint32_t{}))
                                 : (type.is_signed() ? pick(int64_t{}) : pick(uint64_t{}));
}

void decode_shift(Decoder& d, const std::string& opcode) {
  Op& op = d.op();
  const Type type = d.take_type();
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  op.b = d.slot(2, {'u', 32, 1});
  const auto pick = [&]<typename T>(T) -> Execute {
    return opcode == "shl" ? map2<Shl, T, T, uint32_t> : map2<Shr, T, T, uint32_t>;
  };
  op.execute = type.bits == 16   ? (type.is_signed() ? pick(int16_t{}) : pick(uint16_t{}))
               : type.bits == 32 ? (type.is_signed() ? pick(int32_t{}) : pick(uint32_t{}))
                                 : (type.is_signed() ? pick(int64_t{}) : pick(uint64_t{}));
}

void decode_predicates(Decoder& d, const std::string& opcode) {
  Op& op = d.op();
  d.take_type();
  op.d = d.slot(0, {'p', 1, 1});
  op.a = d.predicate(1);
  if (op.negated != 0) d.fail("the machine does not know a negated operand here");
  if (opcode != "not") op.b = d.predicate(2);
  if (op.negated != 0) d.fail("the machine does not know a negated operand here");
  op.execute = opcode == "and"   ? predicates<And>
               : opcode == "or"  ? predicates<Or>
               : opcode == "xor" ? predicates<Xor>
                                 : not_predicate;
}

Execute plain_function(const std::string& opcode, Type type) {
  if (opcode == "add") return binary_of<Add, false>(type.bits);
  if (opcode == "sub") return binary_of<Sub, false>(type.bits);
  if (opcode == "div") return binary_of<Div>(type);
  if (opcode == "rem") return binary_of<Rem>(type);
  if (opcode == "min") return binary_of<Min>(type);
  if (opcode == "max") return binary_of<Max>(type);
  if (opcode == "and") return binary_of<And, false>(type.bits);
  if (opcode == "or") return binary_of<Or, false>(type.bits);
  if (opcode == "xor") return binary_of<Xor, false>(type.bits);
  if (opcode == "not") return unary_of<Not, false>(type.bits);
  if (opcode == "neg") return unary_of<Neg, false>(type.bits);
  if (opcode == "abs") return unary_of<Abs, true>(type.bits);
  return nullptr;
}

}  // namespace

bool decode_integer(Decoder& d) {
  const std::string opcode = d.opcode();
  if (d.last_type().is_float()) return false;
  Op& op = d.op();
  if (opcode == "mul" || opcode == "mad") {
    decode_product(d, opcode);
    return true;
  }
  if (opcode == "shl" || opcode == "shr") {
    decode_shift(d, opcode);
    return true;
  }
  const bool is_logic = opcode == "and" || opcode == "or" || opcode == "xor" || opcode == "not";
  if (is_logic && d.last_type().letter == 'p') {
    decode_predicates(d, opcode);
    return true;
  }
  if (plain_function(opcode, {'u', 32, 1}) == nullptr) return false;
  const bool saturates = d.take("sat");
  const Type type = d.take_type();
  const bool is_unary = opcode == "not" || opcode == "neg" || opcode == "abs";
  set_slots(d, type, !is_unary);
  op.execute = plain_function(opcode, type);
  if (saturates) {
    if (type.letter != 's' || type.bits != 32) d.fail("only .s32 saturates");
    op.execute = opcode == "add" ? map2<AddSaturated, int32_t, int32_t, int32_t>
                                 : map2<SubSaturated, int32_t, int32_t, int32_t>;
    if (opcode != "add" && opcode != "sub") d.fail("only add and sub saturate");
  }
  if (op.execute == nullptr) d.fail("the machine does not know this width");
  return true;
}

}  // namespace axonn::gpu_machine
