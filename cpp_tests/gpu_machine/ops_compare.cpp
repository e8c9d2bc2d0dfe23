// Comparisons, selects and moves. Source: PTX ISA 9.0, sections 9.7.6, 9.7.7 and 9.7.9.
#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/narrow_float.h"

namespace axonn::gpu_machine {
namespace {

struct Flush {
  template <typename T>
  T operator()(T value) const {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::abs(value) < std::numeric_limits<T>::min()) return std::copysign(T{0}, value);
    }
    return value;
  }
};

// Every comparison is a set of these outcomes, which `choice` holds.
constexpr uint8_t kEqual = 1, kLess = 2, kGreater = 4, kUnordered = 8;

template <typename T, typename Element = T>
uint32_t compare_lanes(const Op& op, Warp& warp) {
  const Element* a = warp.lanes<Element>(op.a);
  const Element* b = warp.lanes<Element>(op.b);
  uint32_t result = 0;
  for (int i = 0; i < kLanes; ++i) {
    T x, y;
    if constexpr (std::is_same_v<T, Element>) {
      x = op.ftz ? Flush{}(a[i]) : a[i];
      y = op.ftz ? Flush{}(b[i]) : b[i];
    } else {
      x = a[i].wide();
      y = b[i].wide();
    }
    const uint8_t is = x == y ? kEqual : x < y ? kLess : x > y ? kGreater : kUnordered;
    result |= static_cast<uint32_t>((op.choice & is) != 0) << i;
  }
  return result;
}

// Stores the comparison and its negation, each possibly combined with the predicate c (setp).
template <typename T, typename Element = T>
void compare(const Op& op, Warp& warp, uint32_t mask) {
  const uint32_t result = compare_lanes<T, Element>(op, warp);
  uint32_t first = result, second = ~result;
  if (op.count != 1) {
    const uint32_t other = warp.predicate(op.c) ^ op.negated;
    const auto combine = [&](uint32_t value) {
      return op.count == 2 ? value & other : op.count == 3 ? value | other : value ^ other;
    };
    first = combine(first);
    second = combine(second);
  }
  store_predicate(warp, op.d, first, mask);
  if (op.d2 != op.d) store_predicate(warp, op.d2, second, mask);
}

Execute compare_of(Type type) {
  if (type.letter == 'f' && type.bits == 16) return compare<double, Half>;
  if (type.letter == 'h') return compare<double, Brain>;
  if (type.letter == 'f') return type.bits == 32 ? compare<float> : compare<double>;
  if (type.bits == 16) return type.is_signed() ? compare<int16_t> : compare<uint16_t>;
  if (type.bits == 32) return type.is_signed() ? compare<int32_t> : compare<uint32_t>;
  return type.is_signed() ? compare<int64_t> : compare<uint64_t>;
}

uint8_t bits_of_comparison(Decoder& d) {
  const std::string name = d.take_one({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu",
                                       "leu", "gtu", "geu", "lo", "ls", "hi", "hs", "num", "nan"});
  if (name == "num") return kEqual | kLess | kGreater;
  if (name == "nan") return kUnordered;
  const uint8_t unordered = name.size() == 3 ? kUnordered : 0;
  const std::string base = name.substr(0, 2);
  if (base == "eq") return kEqual | unordered;
  if (base == "ne") return kLess | kGreater | unordered;
  if (base == "lt" || base == "lo") return kLess | unordered;
  if (base == "le" || base == "ls") return kLess | kEqual | unordered;
  if (base == "gt" || base == "hi") return kGreater | unordered;
  if (base == "ge" || base == "hs") return kGreater | kEqual | unordered;
  d.fail("expected a comparison");
}

void decode_setp(Decoder& d) {
  Op& op = d.op();
  const Type predicate{'p', 1, 1};
  op.choice = bits_of_comparison(d);
  op.ftz = d.take("ftz");
  const std::string combined = d.take_one({"and", "or", "xor"});
  const Type type = d.take_type();
  if (type.lanes != 1) d.fail("the machine does not compare packed types");
  op.execute = compare_of(type);
  const Operand& result = d.operand(0);
  if (result.kind == Operand::Kind::kVector) {
    op.d = d.slot(result.parts[0], predicate);
    op.d2 = d.slot(result.parts[1], predicate);
  } else {
    op.d = op.d2 = d.slot(0, predicate);
  }
  op.a = d.slot(1, type);
  op.b = d.slot(2, type);
  if (combined.empty()) return;
  op.count = combined == "and" ? 2 : combined == "or" ? 3 : 4;
  op.c = d.predicate(3);
}

template <typename T>
void select(const Op& op, Warp& warp, uint32_t mask) {
  const T* a = warp.lanes<T>(op.a);
  const T* b = warp.lanes<T>(op.b);
  const uint32_t picks = warp.predicate(op.c) ^ op.negated;
  alignas(64) T result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = (picks >> i & 1u) != 0 ? a[i] : b[i];
  store_lanes(warp, op.d, result, mask);
}

struct Same {
  template <typename T>
  T operator()(T a) const {
    return a;
  }
};
void move_predicate(const Op& op, Warp& warp, uint32_t mask) {
  store_predicate(warp, op.d, warp.predicate(op.a) ^ op.negated, mask);
}

// mov between a register and a vector of narrower ones, lowest first.
void pack(const Op& op, Warp& warp, uint32_t mask) {
  const int bytes = op.register_bytes / op.count;
  for_each_lane(mask, [&](int i) {
    std::byte whole[8];
    for (int part = 0; part < op.count; ++part) {
      const auto* from = warp.lanes<std::byte>(op.vector[part]) + i * bytes;
      std::memcpy(whole + part * bytes, from, static_cast<size_t>(bytes));
    }
    std::memcpy(warp.lanes<std::byte>(op.d) + i * op.register_bytes, whole, op.register_bytes);
  });
}
void unpack(const Op& op, Warp& warp, uint32_t mask) {
  const int bytes = op.register_bytes / op.count;
  for_each_lane(mask, [&](int i) {
    std::byte whole[8];
    std::memcpy(whole, warp.lanes<std::byte>(op.a) + i * op.register_bytes, op.register_bytes);
    for (int part = 0; part < op.count; ++part) {
      auto* to = warp.lanes<std::byte>(op.vector[part]) + i * bytes;
      std::memcpy(to, whole + part * bytes, static_cast<size_t>(bytes));
    }
  });
}

void decode_vector_move(Decoder& d, Type type) {
  Op& op = d.op();
  const bool packs = d.operand(1).kind == Operand::Kind::kVector;
  const auto& parts = d.operand(packs ? 1 : 0).parts;
  op.count = static_cast<uint8_t>(parts.size());
  op.register_bytes = static_cast<uint8_t>(type.register_bytes());
  if (type.bits % static_cast<int>(parts.size()) != 0 || parts.size() > 4) {
    d.fail("expected a vector of equal parts");
  }
  const Type part{'b', type.bits / static_cast<int>(parts.size()), 1};
  for (size_t i = 0; i < parts.size(); ++i) {
    uint8_t unused = 0;
    op.vector[i] =
        parts[i].name == "_" ? d.any_register(parts[i], &unused) : d.slot(parts[i], part);
  }
  (packs ? op.d : op.a) = packs ? d.slot(0, type) : d.slot(1, type);
  op.execute = packs ? pack : unpack;
}

// The virtual time in nanoseconds, for %clock64 as well.
void read_timer(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) { warp.lanes<uint64_t>(op.d)[i] = warp.machine.now_ns(); });
}

void decode_move(Decoder& d) {
  Op& op = d.op();
  const Type type = d.take_type();
  const Operand& source = d.operand(1);
  const bool is_vector =
      source.kind == Operand::Kind::kVector || d.operand(0).kind == Operand::Kind::kVector;
  if (is_vector) {
    decode_vector_move(d, type);
  } else if (type.letter == 'p') {
    op.d = d.slot(0, type);
    op.a = d.predicate(1);
    op.execute = move_predicate;
  } else if (source.name == "%globaltimer" || source.name == "%clock64") {
    op.d = d.slot(0, type);
    if (type.bits != 64) d.fail("the timer has 64 bits");
    op.execute = read_timer;
    op.flow = Flow::kYield;
  } else {
    op.d = d.slot(0, type);
    op.a = d.slot(1, type);
    op.execute = unary_of<Same, false>(type.bits);
  }
}

void decode_select(Decoder& d) {
  Op& op = d.op();
  const Type type = d.take_type();
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  op.b = d.slot(2, type);
  op.c = d.predicate(3);
  op.execute = type.register_bytes() == 2   ? select<uint16_t>
               : type.register_bytes() == 4 ? select<uint32_t>
                                            : select<uint64_t>;
}

}  // namespace

bool decode_compare(Decoder& d) {
  const std::string opcode = d.opcode();
  if (opcode == "setp") {
    decode_setp(d);
  } else if (opcode == "selp") {
    decode_select(d);
  } else if (opcode == "mov") {
    decode_move(d);
  } else {
    return false;
  }
  return true;
}

}  // namespace axonn::gpu_machine
