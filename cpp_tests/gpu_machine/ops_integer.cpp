// Arithmetic and logic of integers. Source: PTX ISA 9.0, sections 9.7.1 and 9.7.8.
#include <bit>
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

// Sums and products wrap around; unsigned arithmetic of 64 bits does so for every width.
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
// The result of a division by zero is all ones, and the remainder the dividend: PTX leaves both
// open, and compilers do not use them.
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
// Shifts by the width and more give 0, or copies of the sign.
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
struct ShiftLeftFunnel {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    return static_cast<uint32_t>(((uint64_t{b} << 32 | a) << c) >> 32);
  }
};
struct ShiftRightFunnel {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> c);
  }
};
template <typename F, bool kClamps>
struct Funnel {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    if (kClamps && c >= 32) return std::is_same_v<F, ShiftLeftFunnel> ? a : b;
    return F{}(a, b, c & 31u);
  }
};
struct Popc {
  template <typename T>
  uint32_t operator()(T a) const {
    return static_cast<uint32_t>(std::popcount(a));
  }
};
struct Clz {
  template <typename T>
  uint32_t operator()(T a) const {
    return static_cast<uint32_t>(std::countl_zero(a));
  }
};
struct Brev {
  template <typename T>
  T operator()(T a) const {
    T reversed = 0;
    for (size_t i = 0; i < 8 * sizeof(T); ++i) reversed |= (a >> i & T{1}) << (8 * sizeof(T) - 1 - i);
    return reversed;
  }
};
// The place of the highest bit that differs from the sign.
template <bool kShift>
struct Find {
  template <typename T>
  uint32_t operator()(T a) const {
    using U = std::make_unsigned_t<T>;
    const U bits = a < 0 ? static_cast<U>(~a) : static_cast<U>(a);
    if (bits == 0) return ~0u;
    const auto above = static_cast<uint32_t>(std::countl_zero(bits));
    return kShift ? above : static_cast<uint32_t>(8 * sizeof(T)) - 1 - above;
  }
};
struct FieldMask {
  static uint64_t of(uint32_t length) {
    return length >= 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1;
  }
};
struct Extract {
  template <typename T>
  T operator()(T a, uint32_t b, uint32_t c) const {
    constexpr uint32_t kBits = 8 * sizeof(T);
    const uint32_t start = b & 0xFF, length = c & 0xFF;
    using U = std::make_unsigned_t<T>;
    uint64_t field = start < kBits ? uint64_t{static_cast<U>(a)} >> start : 0;
    field &= FieldMask::of(length);
    if (std::is_signed_v<T> && length != 0) {
      const uint32_t top = start + length - 1 < kBits ? start + length - 1 : kBits - 1;
      const bool negative = (static_cast<U>(a) >> top & 1) != 0;
      const uint32_t filled = top + 1 > start ? top + 1 - start : 0;
      if (negative) field |= ~FieldMask::of(filled < length ? filled : length);
    }
    return static_cast<T>(field);
  }
};
// prmt picks four of the eight bytes of b:a; the highest bit of a selector copies a byte's sign.
struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t selector = c >> (4 * i) & 15u;
      auto byte = static_cast<uint32_t>(bytes >> (8 * (selector & 7u)) & 0xFF);
      if ((selector & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xFF : 0;
      result |= byte << (8 * i);
    }
    return result;
  }
};

void lop3(const Op& op, Warp& warp, uint32_t mask) {
  const uint32_t* a = warp.lanes<uint32_t>(op.a);
  const uint32_t* b = warp.lanes<uint32_t>(op.b);
  const uint32_t* c = warp.lanes<uint32_t>(op.c);
  uint32_t result[kLanes] = {};
  for (uint32_t row = 0; row < 8; ++row) {
    if ((op.choice >> row & 1u) == 0) continue;
    for (int i = 0; i < kLanes; ++i) {
      result[i] |= ((row & 4u) != 0 ? a[i] : ~a[i]) & ((row & 2u) != 0 ? b[i] : ~b[i]) &
                   ((row & 1u) != 0 ? c[i] : ~c[i]);
    }
  }
  store_lanes(warp, op.d, result, mask);
}

void insert_field(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const uint32_t start = warp.lanes<uint32_t>(op.c)[i] & 0xFF;
    const uint64_t field = FieldMask::of(warp.lanes<uint32_t>(op.e)[i] & 0xFF);
    const auto insert = [&](auto* a, auto* b, auto* d) {
      const uint64_t place = start < 64 ? field << start : 0;
      const uint64_t moved = start < 64 ? uint64_t{a[i]} << start : 0;
      d[i] = static_cast<std::remove_reference_t<decltype(d[i])>>((b[i] & ~place) | (moved & place));
    };
    if (op.type.bits == 32) {
      insert(warp.lanes<uint32_t>(op.a), warp.lanes<uint32_t>(op.b), warp.lanes<uint32_t>(op.d));
    } else {
      insert(warp.lanes<uint64_t>(op.a), warp.lanes<uint64_t>(op.b), warp.lanes<uint64_t>(op.d));
    }
  });
}

// Logic of predicates.
template <typename F>
void predicates(const Op& op, Warp& warp, uint32_t mask) {
  store_predicate(warp, op.d, F{}(warp.predicate(op.a), warp.predicate(op.b)), mask);
}
void not_predicate(const Op& op, Warp& warp, uint32_t mask) {
  store_predicate(warp, op.d, ~warp.predicate(op.a), mask);
}

template <typename F>
Execute bits32_of_any(int bits) {
  return bits == 32 ? map1<F, uint32_t, uint32_t> : map1<F, uint32_t, uint64_t>;
}

void set_slots(Decoder& d, Type result, Type operands) {
  Op& op = d.op();
  op.d = d.slot(0, result);
  op.a = d.slot(1, operands);
  if (d.num_operands() > 2) op.b = d.slot(2, operands);
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

void decode_bit_fields(Decoder& d, const std::string& opcode) {
  Op& op = d.op();
  op.type = d.take_type();
  const Type word{'u', 32, 1};
  op.d = d.slot(0, op.type);
  op.a = d.slot(1, op.type);
  if (opcode == "bfe") {
    op.b = d.slot(2, word);
    op.c = d.slot(3, word);
    op.execute = op.type.bits == 32
                     ? (op.type.is_signed() ? map3<Extract, int32_t, int32_t, uint32_t, uint32_t>
                                            : map3<Extract, uint32_t, uint32_t, uint32_t, uint32_t>)
                     : (op.type.is_signed() ? map3<Extract, int64_t, int64_t, uint32_t, uint32_t>
                                            : map3<Extract, uint64_t, uint64_t, uint32_t, uint32_t>);
  } else {
    op.b = d.slot(2, op.type);
    op.c = d.slot(3, word);
    op.e = d.slot(4, word);
    op.execute = insert_field;
  }
}

bool decode_three_words(Decoder& d, const std::string& opcode) {
  Op& op = d.op();
  if (opcode == "lop3") {
    if (d.operand(4).kind != Operand::Kind::kImmediate) d.fail("expected a table of 8 bits");
    op.choice = static_cast<uint8_t>(d.operand(4).bits);
    op.execute = lop3;
  } else if (opcode == "prmt") {
    op.execute = map3<Permute, uint32_t, uint32_t, uint32_t, uint32_t>;
  } else {
    const bool left = d.take("l"), clamps = d.take("clamp");
    if (!left && !d.take("r")) d.fail("expected .l or .r");
    if (!clamps && !d.take("wrap")) d.fail("expected .clamp or .wrap");
    using Left = ShiftLeftFunnel;
    using Right = ShiftRightFunnel;
    op.execute = left ? (clamps ? map3<Funnel<Left, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                                : map3<Funnel<Left, false>, uint32_t, uint32_t, uint32_t, uint32_t>)
                      : (clamps
                             ? map3<Funnel<Right, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                             : map3<Funnel<Right, false>, uint32_t, uint32_t, uint32_t, uint32_t>);
  }
  const Type type = d.take_type();
  if (type.bits != 32) d.fail("expected a type of 32 bits");
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  op.b = d.slot(2, type);
  op.c = d.slot(3, type);
  return true;
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
  op.execute = opcode == "and"  ? predicates<And>
               : opcode == "or" ? predicates<Or>
               : opcode == "xor" ? predicates<Xor>
                                : not_predicate;
}

Execute counting(const std::string& opcode, Type type, bool shift) {
  if (opcode == "popc") return bits32_of_any<Popc>(type.bits);
  if (opcode == "clz") return bits32_of_any<Clz>(type.bits);
  const auto find = [&]<bool kShift>(std::bool_constant<kShift>) -> Execute {
    if (type.bits == 32) {
      return type.is_signed() ? map1<Find<kShift>, uint32_t, int32_t>
                              : map1<Find<kShift>, uint32_t, uint32_t>;
    }
    return type.is_signed() ? map1<Find<kShift>, uint32_t, int64_t>
                            : map1<Find<kShift>, uint32_t, uint64_t>;
  };
  return shift ? find(std::true_type{}) : find(std::false_type{});
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
  if (opcode == "brev") {
    return type.bits == 32 ? map1<Brev, uint32_t, uint32_t> : map1<Brev, uint64_t, uint64_t>;
  }
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
  if (opcode == "bfe" || opcode == "bfi") {
    decode_bit_fields(d, opcode);
    return true;
  }
  if (opcode == "lop3" || opcode == "prmt" || opcode == "shf") return decode_three_words(d, opcode);
  if (opcode == "shl" || opcode == "shr") {
    decode_shift(d, opcode);
    return true;
  }
  const bool is_logic = opcode == "and" || opcode == "or" || opcode == "xor" || opcode == "not";
  if (is_logic && d.last_type().letter == 'p') {
    decode_predicates(d, opcode);
    return true;
  }
  if (opcode == "popc" || opcode == "clz" || opcode == "bfind") {
    const bool shift = d.take("shiftamt");
    const Type type = d.take_type();
    set_slots(d, {'u', 32, 1}, type);
    op.execute = counting(opcode, type, shift);
    return true;
  }
  if (plain_function(opcode, {'u', 32, 1}) == nullptr) return false;
  const bool saturates = d.take("sat");
  const Type type = d.take_type();
  set_slots(d, type, type);
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
