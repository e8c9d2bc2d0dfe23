// Conversions. Source: PTX ISA 9.0, section 9.7.9.21 (cvt) and 9.7.9.20 (cvta).
#include <bit>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/memory.h"
#include "gpu_machine/narrow_float.h"

namespace axonn::gpu_machine {
namespace {

// Intermediate values of the lanes: integers extended to 64 bits, and floats as doubles.
struct Values {
  alignas(64) int64_t integers[kLanes];
  alignas(64) double floats[kLanes];
};

int64_t truncated(uint64_t bits, Type type) {
  const int unused = 64 - type.bits;
  const uint64_t high = bits << unused;
  return type.is_signed() ? static_cast<int64_t>(high) >> unused
                          : static_cast<int64_t>(high >> unused);
}

template <typename T>
void load_integers(const Op& op, Warp& warp, Values& values) {
  const T* a = warp.lanes<T>(op.a);
  for (int i = 0; i < kLanes; ++i) values.integers[i] = truncated(a[i], op.source_type);
}

template <typename T>
void load_floats(const Op& op, Warp& warp, Values& values) {
  const T* a = warp.lanes<T>(op.a);
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (std::is_floating_point_v<T>) {
      const bool flushes = op.ftz && std::abs(a[i]) < std::numeric_limits<T>::min();
      values.floats[i] = flushes ? std::copysign(T{0}, a[i]) : a[i];
    } else {
      values.floats[i] = a[i].wide();
    }
  }
}

void load(const Op& op, Warp& warp, Values& values) {
  if (op.source_type.letter == 'h') return load_floats<Brain>(op, warp, values);
  if (op.source_type.letter == 'f') {
    if (op.source_type.bits == 16) return load_floats<Half>(op, warp, values);
    if (op.source_type.bits == 32) return load_floats<float>(op, warp, values);
    return load_floats<double>(op, warp, values);
  }
  if (op.source_bytes == 2) return load_integers<uint16_t>(op, warp, values);
  if (op.source_bytes == 4) return load_integers<uint32_t>(op, warp, values);
  return load_integers<uint64_t>(op, warp, values);
}

// Rounds a double to an integer of the type, saturating at the type's limits; NaN becomes 0.
int64_t integer_of(double value, Type type, Rounding rounding) {
  if (value != value) return 0;
  const double rounded = to_integral(value, rounding);
  const double end = std::ldexp(1.0, type.is_signed() ? type.bits - 1 : type.bits);
  const double begin = type.is_signed() ? -end : 0;
  if (rounded < begin)
    return type.is_signed() ? truncated(uint64_t{1} << (type.bits - 1), type) : 0;
  if (rounded >= end) {
    const uint64_t ones = ~uint64_t{0} >> (64 - type.bits);
    return static_cast<int64_t>(type.is_signed() ? ones >> 1 : ones);
  }
  if (!type.is_signed() && type.bits == 64)
    return static_cast<int64_t>(static_cast<uint64_t>(rounded));
  return static_cast<int64_t>(rounded);
}

int64_t saturated(int64_t value, Type from, Type to) {
  using Wide = Int128;
  const Wide wide = from.is_signed() ? Wide{value} : Wide{static_cast<uint64_t>(value)};
  const Wide end = Wide{1} << (to.is_signed() ? to.bits - 1 : to.bits);
  const Wide begin = to.is_signed() ? -end : Wide{0};
  return static_cast<int64_t>(wide < begin ? begin : wide >= end ? end - 1 : wide);
}

float rounded_float(double value, Rounding rounding) {
  const auto nearest = static_cast<float>(value);
  if (value != value) return std::bit_cast<float>(0x7FFFFFFFu);
  if (rounding == Rounding::kNearest || nearest == value) return nearest;
  const bool down = rounding == Rounding::kDown || (rounding == Rounding::kZero && value > 0);
  if (down) return nearest > value ? std::nextafterf(nearest, -HUGE_VALF) : nearest;
  return nearest < value ? std::nextafterf(nearest, HUGE_VALF) : nearest;
}

void store_integers(const Op& op, Warp& warp, const Values& values, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const auto bits =
        static_cast<uint64_t>(truncated(static_cast<uint64_t>(values.integers[i]), op.type));
    if (op.register_bytes == 2) warp.lanes<uint16_t>(op.d)[i] = static_cast<uint16_t>(bits);
    if (op.register_bytes == 4) warp.lanes<uint32_t>(op.d)[i] = static_cast<uint32_t>(bits);
    if (op.register_bytes == 8) warp.lanes<uint64_t>(op.d)[i] = bits;
  });
}

void store_floats(const Op& op, Warp& warp, const Values& values, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const double value = values.floats[i];
    if (op.type.letter == 'h') {
      warp.lanes<Brain>(op.d)[i] = narrow<Brain>(value, op.rounding);
    } else if (op.type.bits == 16) {
      warp.lanes<Half>(op.d)[i] = narrow<Half>(value, op.rounding);
    } else if (op.type.bits == 32) {
      float result = rounded_float(value, op.rounding);
      const bool flushes = op.ftz && std::abs(result) < std::numeric_limits<float>::min();
      warp.lanes<float>(op.d)[i] = flushes ? std::copysign(0.0f, result) : result;
    } else {
      warp.lanes<double>(op.d)[i] = value;
    }
  });
}

// choice: 1 rounds to an integer that stays a float; 2 is .relu.
void adjust_floats(const Op& op, Values& values) {
  for (double& value : values.floats) {
    if (op.choice == 1) value = to_integral(value, op.rounding);
    if (op.choice == 2 && value <= 0) value = 0;
    if (op.sat) value = value > 0 ? std::min(value, 1.0) : 0.0;
  }
}

void convert(const Op& op, Warp& warp, uint32_t mask) {
  Values values;
  load(op, warp, values);
  if (op.source_type.is_float() && op.type.is_float()) {
    adjust_floats(op, values);
    store_floats(op, warp, values, mask);
  } else if (op.source_type.is_float()) {
    for (int i = 0; i < kLanes; ++i) {
      values.integers[i] = integer_of(values.floats[i], op.type, op.rounding);
    }
    store_integers(op, warp, values, mask);
  } else {
    if (op.sat) {
      for (int64_t& value : values.integers) value = saturated(value, op.source_type, op.type);
    }
    store_integers(op, warp, values, mask);
  }
}

// Converts a 64-bit integer to a float with a single rounding, in any direction.
template <typename T>
T float_of_integer(uint64_t magnitude, bool negative, Rounding rounding) {
  const int bits = std::numeric_limits<T>::digits;
  const int excess = 64 - std::countl_zero(magnitude) - bits;
  if (excess <= 0) return negative ? -static_cast<T>(magnitude) : static_cast<T>(magnitude);
  uint64_t kept = magnitude >> excess;
  const uint64_t lost = magnitude & ((uint64_t{1} << excess) - 1),
                 half = uint64_t{1} << (excess - 1);
  const bool away = rounding == Rounding::kNearest
                        ? lost > half || (lost == half && (kept & 1) != 0)
                    : rounding == Rounding::kUp   ? lost != 0 && !negative
                    : rounding == Rounding::kDown ? lost != 0 && negative
                                                  : false;
  kept += away ? 1 : 0;
  const T value = std::ldexp(static_cast<T>(kept), excess);
  return negative ? -value : value;
}

void convert_integer_to_float(const Op& op, Warp& warp, uint32_t mask) {
  Values values;
  load(op, warp, values);
  for_each_lane(mask, [&](int i) {
    const bool negative = op.source_type.is_signed() && values.integers[i] < 0;
    const auto bits = static_cast<uint64_t>(values.integers[i]);
    const uint64_t magnitude = negative ? ~bits + 1 : bits;
    if (op.type.bits == 64) {
      warp.lanes<double>(op.d)[i] = float_of_integer<double>(magnitude, negative, op.rounding);
    } else if (op.type.bits == 32) {
      warp.lanes<float>(op.d)[i] = float_of_integer<float>(magnitude, negative, op.rounding);
    } else {
      // Bits beyond the 53 of a double set its last bit, so that the second rounding is correct.
      const bool is_long = magnitude >> 53 != 0 && (magnitude & 0x7FF) != 0;
      const uint64_t odd = is_long ? (magnitude & ~uint64_t{0x7FF}) | 0x800 : magnitude;
      const double wide = negative ? -static_cast<double>(odd) : static_cast<double>(odd);
      if (op.type.letter == 'h') {
        warp.lanes<Brain>(op.d)[i] = narrow<Brain>(wide, op.rounding);
      } else {
        warp.lanes<Half>(op.d)[i] = narrow<Half>(wide, op.rounding);
      }
    }
  });
}

// cvt.rn.bf16x2.f32 d, a, b: a becomes the upper half.
template <typename T>
void convert_pair(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    double high = warp.lanes<float>(op.a)[i], low = warp.lanes<float>(op.b)[i];
    if (op.choice == 2) {
      high = high <= 0 ? 0 : high;
      low = low <= 0 ? 0 : low;
    }
    warp.lanes<T>(op.d)[2 * i] = narrow<T>(low, op.rounding);
    warp.lanes<T>(op.d)[2 * i + 1] = narrow<T>(high, op.rounding);
  });
}

void add_offset(const Op& op, Warp& warp, uint32_t mask) {
  const uint64_t* a = warp.lanes<uint64_t>(op.a);
  uint64_t result[kLanes];
  for (int i = 0; i < kLanes; ++i) result[i] = a[i] + static_cast<uint64_t>(op.at.offset);
  store_lanes(warp, op.d, result, mask);
}

// The name of a parameter is its generic address. PTX may keep only its lower 32 bits, and turn
// these into an address again.
void to_parameter(const Op& op, Warp& warp, uint32_t mask) {
  const uint64_t* a = warp.lanes<uint64_t>(op.a);
  uint64_t result[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    result[i] = a[i] >> kWindowBits == 0 ? a[i] + window_start(kParamWindow) : a[i];
  }
  store_lanes(warp, op.d, result, mask);
}

// Global addresses equal generic ones; those of shared and local memory lie in windows.
void decode_address_conversion(Decoder& d) {
  Op& op = d.op();
  const bool to = d.take("to");
  const bool shared = !d.take_one({"shared", "shared::cta", "shared::cluster"}).empty();
  const bool local = d.take("local"), param = d.take("param");
  if (!shared && !local && !param && !d.take("global") && !d.take("const")) {
    d.fail("the machine does not know this space");
  }
  const Type type = d.take_type();
  if (type.bits != 64) d.fail("addresses have 64 bits");
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  const auto window = static_cast<int64_t>(shared  ? window_start(kSharedWindow)
                                           : local ? window_start(kLocalWindow)
                                                   : 0);
  op.at.offset = to ? -window : window;
  op.execute = param && !to ? to_parameter : add_offset;
}

void take_modifiers(Decoder& d) {
  Op& op = d.op();
  const std::string integral = d.take_one({"rni", "rzi", "rmi", "rpi"});
  op.rounding = integral == "rzi"   ? Rounding::kZero
                : integral == "rmi" ? Rounding::kDown
                : integral == "rpi" ? Rounding::kUp
                                    : d.take_rounding();
  op.ftz = d.take("ftz");
  op.sat = d.take("sat");
  if (!integral.empty()) op.choice = 1;
  if (d.take("relu")) op.choice = 2;
}

}  // namespace

bool decode_convert(Decoder& d) {
  if (d.opcode() == "cvta") {
    decode_address_conversion(d);
    return true;
  }
  if (d.opcode() != "cvt") return false;
  Op& op = d.op();
  take_modifiers(d);
  op.source_type = d.take_type();
  op.type = d.take_type();
  if (op.type.lanes == 2) {
    if (op.source_type.letter != 'f' || op.source_type.bits != 32 || op.choice == 1 || op.sat) {
      d.fail("the machine makes packed types of .f32 alone");
    }
    op.d = d.slot(0, op.type);
    op.a = d.slot(1, op.source_type);
    op.b = d.slot(2, op.source_type);
    op.execute = op.type.letter == 'h' ? convert_pair<Brain> : convert_pair<Half>;
    return true;
  }
  const auto slot_of = [&](size_t index, Type type, uint8_t* bytes) {
    if (!d.is_register(d.operand(index)) || type.is_float()) {
      *bytes = static_cast<uint8_t>(type.register_bytes());
      return d.slot(index, type);
    }
    const Slot slot = d.any_register(d.operand(index), bytes);
    if (*bytes * 8 < type.bits) d.fail("a register is narrower than the type");
    return slot;
  };
  op.d = slot_of(0, op.type, &op.register_bytes);
  op.a = slot_of(1, op.source_type, &op.source_bytes);
  const bool to_float = !op.source_type.is_float() && op.type.is_float();
  op.execute = to_float ? convert_integer_to_float : convert;
  return true;
}

}  // namespace axonn::gpu_machine
