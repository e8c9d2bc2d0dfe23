// Bit fields, permutations and counts. Source: PTX ISA 9.0, sections 9.7.1, 9.7.8 and 9.7.9.7.
#include <bit>
#include <type_traits>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"

namespace axonn::gpu_machine {
namespace {

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
    for (size_t i = 0; i < 8 * sizeof(T); ++i)
      reversed |= (a >> i & T{1}) << (8 * sizeof(T) - 1 - i);
    return reversed;
  }
};
// The position of the highest bit that differs from the sign.
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
// prmt picks four of the eight bytes of b:a; the top bit of a selector replicates a byte's sign.
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
      d[i] =
          static_cast<std::remove_reference_t<decltype(d[i])>>((b[i] & ~place) | (moved & place));
    };
    if (op.type.bits == 32) {
      insert(warp.lanes<uint32_t>(op.a), warp.lanes<uint32_t>(op.b), warp.lanes<uint32_t>(op.d));
    } else {
      insert(warp.lanes<uint64_t>(op.a), warp.lanes<uint64_t>(op.b), warp.lanes<uint64_t>(op.d));
    }
  });
}

template <typename F>
Execute bits32_of_any(int bits) {
  return bits == 32 ? map1<F, uint32_t, uint32_t> : map1<F, uint32_t, uint64_t>;
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
    op.execute =
        op.type.bits == 32
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

void decode_three_words(Decoder& d, const std::string& opcode) {
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
    op.execute =
        left ? (clamps ? map3<Funnel<Left, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                       : map3<Funnel<Left, false>, uint32_t, uint32_t, uint32_t, uint32_t>)
             : (clamps ? map3<Funnel<Right, true>, uint32_t, uint32_t, uint32_t, uint32_t>
                       : map3<Funnel<Right, false>, uint32_t, uint32_t, uint32_t, uint32_t>);
  }
  const Type type = d.take_type();
  if (type.bits != 32) d.fail("expected a type of 32 bits");
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  op.b = d.slot(2, type);
  op.c = d.slot(3, type);
}

Execute counting(const std::string& opcode, Type type, bool shift) {
  if (opcode == "popc") return bits32_of_any<Popc>(type.bits);
  if (opcode == "brev") {
    return type.bits == 32 ? map1<Brev, uint32_t, uint32_t> : map1<Brev, uint64_t, uint64_t>;
  }
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

}  // namespace

bool decode_bits(Decoder& d) {
  const std::string opcode = d.opcode();
  if (opcode == "bfe" || opcode == "bfi") {
    decode_bit_fields(d, opcode);
  } else if (opcode == "lop3" || opcode == "prmt" || opcode == "shf") {
    decode_three_words(d, opcode);
  } else if (opcode == "popc" || opcode == "clz" || opcode == "bfind" || opcode == "brev") {
    Op& op = d.op();
    const bool shift = d.take("shiftamt");
    const Type type = d.take_type();
    op.d = d.slot(0, opcode == "brev" ? type : Type{'u', 32, 1});
    op.a = d.slot(1, type);
    op.execute = counting(opcode, type, shift);
  } else {
    return false;
  }
  return true;
}

}  // namespace axonn::gpu_machine
