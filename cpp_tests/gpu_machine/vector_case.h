// Tests of single instructions. All 32 lanes run one, and then only lanes 3 and 17, so that both
// ways of storing results are covered.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine::testing {

inline constexpr uint64_t kUntouched = 0xEEEEEEEEEEEEEEEEu;

struct Vector {
  std::string instruction;  // with $d, $a, $b, $c, $e for its result and operands
  std::vector<uint64_t> operands;
  uint64_t expected;
};

inline uint64_t f(float value) { return std::bit_cast<uint32_t>(value); }
inline uint64_t g(double value) { return std::bit_cast<uint64_t>(value); }
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kTiny = 0x1p-130f;  // a subnormal number
inline constexpr uint64_t kGpuNan = 0x7FFFFFFF;

// `widths` are the sizes of $d, $a, $b, ... in bits; 1 is a predicate.
inline std::string body_of(const Vector& vector, const std::vector<int>& widths) {
  const std::string names = "dabce";
  std::string text, instruction = vector.instruction;
  const auto register_of = [&](size_t i) {
    const std::string number = std::to_string(i + 1);
    return widths[i] == 1    ? "%p" + number
           : widths[i] == 16 ? "%h" + number
           : widths[i] == 32 ? "%r" + number
                             : "%d" + number;
  };
  for (size_t i = 1; i < widths.size(); ++i) {
    const std::string value = std::to_string(vector.operands[i - 1]);
    if (widths[i] == 1) {
      text += "  setp.ne.s32 " + register_of(i) + ", " + value + ", 0;\n";
    } else {
      text += "  mov.b" + std::to_string(widths[i]) + " " + register_of(i) + ", " + value + ";\n";
    }
  }
  for (size_t i = 0; i < widths.size(); ++i) {
    const std::string place = std::string("$") + names[i];
    for (size_t at; (at = instruction.find(place)) != std::string::npos;) {
      instruction.replace(at, 2, register_of(i));
    }
  }
  const std::string result = register_of(0);
  const std::string widen =
      widths[0] == 1    ? "  selp.b64 %d10, 1, 0, " + result + ";\n"
      : widths[0] == 64 ? "  mov.b64 %d10, " + result + ";\n"
                        : "  cvt.u64.u" + std::to_string(widths[0]) + " %d10, " + result + ";\n";
  return text + R"(
  mov.u32 %r20, %laneid;
  mul.wide.u32 %d11, %r20, 8;
  add.s64 %d11, %out, %d11;
  setp.eq.u32 %p10, %r20, 3;
  setp.eq.or.u32 %p10, %r20, 17, %p10;
  )" + instruction +
         ";\n" + widen + "  st.global.u64 [%d11], %d10;\n" +
         (widths[0] == 64   ? "  mov.b64 %d1, -1;\n"
          : widths[0] == 32 ? "  mov.b32 %r1, -1;\n"
          : widths[0] == 16 ? "  mov.b16 %h1, -1;\n"
                            : "  setp.eq.s32 %p1, 0, 0;\n") +
         "  @%p10 " + instruction + ";\n" + widen + "  @%p10 st.global.u64 [%d11+256], %d10;\n";
}

// Runs the vectors, which all have the same widths, and checks the results.
inline void check(const std::vector<int>& widths, const std::vector<Vector>& vectors) {
  for (const Vector& vector : vectors) {
    SCOPED_TRACE(vector.instruction);
    Machine machine;
    machine.load(testing::kernel_of(body_of(vector, widths)));
    const uint64_t out = machine.put(std::vector<uint64_t>(64, kUntouched), "out");
    machine.launch(machine.new_stream(0), machine.kernel("test"), {1, 1, 1}, {32, 1, 1}, out);
    machine.run();
    const auto got = machine.get<uint64_t>(out, 64);
    for (size_t lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(got[lane], vector.expected) << std::hex << got[lane] << " lane " << lane;
      const bool takes_part = lane == 3 || lane == 17;
      EXPECT_EQ(got[32 + lane], takes_part ? vector.expected : kUntouched);
    }
  }
}

}  // namespace axonn::gpu_machine::testing
