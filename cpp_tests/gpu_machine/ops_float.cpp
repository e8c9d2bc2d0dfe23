// Floating-point arithmetic. Source: PTX ISA 9.0, sections 9.7.3 to 9.7.5.
#include <bit>
#include <cfenv>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/narrow_float.h"

namespace axonn::gpu_machine {
namespace {

// GPUs return this value for every 32-bit NaN.
float canonical(float value) { return value == value ? value : std::bit_cast<float>(0x7FFFFFFFu); }
double canonical(double value) { return value; }

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    return canonical(a + b);
  }
};
struct Sub {
  template <typename T>
  T operator()(T a, T b) const {
    return canonical(a - b);
  }
};
struct Mul {
  template <typename T>
  T operator()(T a, T b) const {
    return canonical(a * b);
  }
};
struct Div {
  template <typename T>
  T operator()(T a, T b) const {
    return canonical(a / b);
  }
};
struct Fma {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return canonical(std::fma(a, b, c));
  }
};
// A number wins over NaN, and -0 is less than +0.
struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    if (a != a) return b != b ? canonical(b) : b;
    if (b != b) return a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    if (a != a) return b != b ? canonical(b) : b;
    if (b != b) return a;
    return a > b || (a == b && std::signbit(b)) ? a : b;
  }
};
template <typename F>
struct NanWins {
  template <typename T>
  T operator()(T a, T b) const {
    return a != a || b != b ? canonical(std::numeric_limits<T>::quiet_NaN()) : F{}(a, b);
  }
};
struct Neg {
  template <typename T>
  T operator()(T a) const {
    return -a;
  }
};
struct Abs {
  template <typename T>
  T operator()(T a) const {
    return std::abs(a);
  }
};
struct CopySign {  // takes the sign of the first
  template <typename T>
  T operator()(T a, T b) const {
    return std::copysign(b, a);
  }
};
struct Rcp {
  template <typename T>
  T operator()(T a) const {
    return canonical(T{1} / a);
  }
};
struct Sqrt {
  template <typename T>
  T operator()(T a) const {
    return canonical(std::sqrt(a));
  }
};
// Approximations are computed in double and rounded once. This is within PTX's bounds and more
// accurate than a GPU, which may differ from it by as much as PTX allows.
template <double (*function)(double)>
struct Approximate {
  float operator()(float a) const { return canonical(static_cast<float>(function(a))); }
};
double reciprocal_root(double a) { return 1 / std::sqrt(a); }
double reciprocal(double a) { return 1 / a; }

template <typename T>
void flush(T* values) {
  for (int i = 0; i < kLanes; ++i) {
    const bool is_subnormal = std::abs(values[i]) < std::numeric_limits<T>::min();
    values[i] = is_subnormal ? std::copysign(T{0}, values[i]) : values[i];
  }
}
template <typename T>
void saturate(T* values) {  // NaN becomes 0
  for (int i = 0; i < kLanes; ++i) {
    values[i] = values[i] > 0 ? (values[i] < 1 ? values[i] : T{1}) : T{0};
  }
}

template <typename T>
void load_floats(const Op& op, Warp& warp, Slot slot, T* values) {
  std::memcpy(values, warp.lanes<T>(slot), sizeof(T) * kLanes);
  if (op.ftz) flush(values);
}
template <typename T>
void store_floats(const Op& op, Warp& warp, T* values, uint32_t mask) {
  if (op.ftz) flush(values);
  if (op.sat) saturate(values);
  store_lanes(warp, op.d, values, mask);
}

template <typename F, typename T, int kOperands>
void float_map(const Op& op, Warp& warp, uint32_t mask) {
  alignas(64) T a[kLanes], b[kLanes], c[kLanes], result[kLanes];
  load_floats(op, warp, op.a, a);
  if constexpr (kOperands > 1) load_floats(op, warp, op.b, b);
  if constexpr (kOperands > 2) load_floats(op, warp, op.c, c);
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (kOperands == 1) result[i] = F{}(a[i]);
    if constexpr (kOperands == 2) result[i] = F{}(a[i], b[i]);
    if constexpr (kOperands == 3) result[i] = F{}(a[i], b[i], c[i]);
  }
  store_floats(op, warp, result, mask);
}

// 16-bit elements, one or two per lane, are computed in double and rounded once.
struct NarrowFma {
  double operator()(double a, double b, double c) const { return multiply_add_to_odd(a, b, c); }
};
template <typename F, typename T, int kOperands>
void narrow_map(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int lane) {
    for (int part = 0; part < op.type.lanes; ++part) {
      const int i = lane * op.type.lanes + part;
      const auto at = [&](Slot slot) { return warp.lanes<T>(slot)[i].wide(); };
      double result = 0;
      if constexpr (kOperands == 1) result = F{}(at(op.a));
      if constexpr (kOperands == 2) result = F{}(at(op.a), at(op.b));
      if constexpr (kOperands == 3) result = F{}(at(op.a), at(op.b), at(op.c));
      if (op.sat) result = result > 0 ? std::min(result, 1.0) : 0.0;
      if (op.choice != 0 && !(result > 0)) result = result != result ? result : 0.0;  // .relu
      warp.lanes<T>(op.d)[i] = narrow<T>(result);
    }
  });
}

// For rounding modes other than to nearest: sets the CPU's mode; the call is one across which the
// compiler cannot move arithmetic.
void with_rounding(const Op& op, Warp& warp, uint32_t mask) {
  const int before = std::fegetround();
  std::fesetround(op.rounding == Rounding::kZero   ? FE_TOWARDZERO
                  : op.rounding == Rounding::kDown ? FE_DOWNWARD
                                                   : FE_UPWARD);
  op.inner(op, warp, mask);
  std::fesetround(before);
}

template <typename F, int kOperands, typename Narrow = F>
Execute of_type(Type type) {
  if (type.letter == 'f' && type.bits == 32) return float_map<F, float, kOperands>;
  if (type.letter == 'f' && type.bits == 64) return float_map<F, double, kOperands>;
  if (type.letter == 'f' && type.bits == 16) return narrow_map<Narrow, Half, kOperands>;
  return narrow_map<Narrow, Brain, kOperands>;
}

Execute function_of(const std::string& opcode, Type type, bool nan_wins) {
  if (opcode == "add") return of_type<Add, 2>(type);
  if (opcode == "sub") return of_type<Sub, 2>(type);
  if (opcode == "mul") return of_type<Mul, 2>(type);
  if (opcode == "fma" || opcode == "mad") return of_type<Fma, 3, NarrowFma>(type);
  if (opcode == "min") return nan_wins ? of_type<NanWins<Min>, 2>(type) : of_type<Min, 2>(type);
  if (opcode == "max") return nan_wins ? of_type<NanWins<Max>, 2>(type) : of_type<Max, 2>(type);
  if (opcode == "neg") return of_type<Neg, 1>(type);
  if (opcode == "abs") return of_type<Abs, 1>(type);
  if (type.bits < 32) return nullptr;
  if (opcode == "div") return of_type<Div, 2>(type);
  if (opcode == "rcp") return of_type<Rcp, 1>(type);
  if (opcode == "sqrt") return of_type<Sqrt, 1>(type);
  if (opcode == "copysign") return of_type<CopySign, 2>(type);
  return nullptr;
}

int num_operands_of(const std::string& opcode) {
  if (opcode == "fma" || opcode == "mad") return 3;
  const bool is_binary = opcode == "add" || opcode == "sub" || opcode == "mul" || opcode == "div" ||
                         opcode == "min" || opcode == "max" || opcode == "copysign";
  return is_binary ? 2 : 1;
}

Execute approximation_of(const std::string& opcode) {
  if (opcode == "ex2") return float_map<Approximate<std::exp2>, float, 1>;
  if (opcode == "lg2") return float_map<Approximate<std::log2>, float, 1>;
  if (opcode == "sin") return float_map<Approximate<std::sin>, float, 1>;
  if (opcode == "cos") return float_map<Approximate<std::cos>, float, 1>;
  if (opcode == "tanh") return float_map<Approximate<std::tanh>, float, 1>;
  if (opcode == "rsqrt") return float_map<Approximate<reciprocal_root>, float, 1>;
  if (opcode == "rcp") return float_map<Approximate<reciprocal>, float, 1>;
  return nullptr;
}

}  // namespace

bool decode_float(Decoder& d) {
  const std::string opcode = d.opcode();
  const Type type = d.last_type();
  if (!type.is_float()) return false;
  const bool is_known =
      function_of(opcode, {'f', 32, 1}, false) != nullptr || approximation_of(opcode) != nullptr;
  if (!is_known) return false;
  Op& op = d.op();
  op.type = d.take_type();
  op.rounding = d.take_rounding();
  op.ftz = d.take("ftz");
  op.sat = d.take("sat");
  if (d.take("relu")) op.choice = 1;
  const bool approximates = d.take("approx") || d.take("full");
  const bool nan_wins = d.take("NaN");
  if (approximates && opcode != "div" && opcode != "sqrt") {
    if (type.bits != 32) d.fail("only approximations of .f32 are known");
    op.execute = approximation_of(opcode);
  } else {
    op.execute = function_of(opcode, type, nan_wins);
  }
  if (op.execute == nullptr) d.fail("the machine does not know this type or form");
  if (op.choice != 0 && type.bits != 16) d.fail(".relu is for types of 16 bits");
  if (op.rounding != Rounding::kNearest) {
    if (type.bits == 16) d.fail("types of 16 bits round to nearest");
    op.inner = op.execute;
    op.execute = with_rounding;
  }
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  const int operands = num_operands_of(opcode);
  if (operands > 1) op.b = d.slot(2, type);
  if (operands > 2) op.c = d.slot(3, type);
  return true;
}

}  // namespace axonn::gpu_machine
