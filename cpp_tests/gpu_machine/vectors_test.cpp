// Each instruction alone, against results worked out by hand or by the CPU's IEEE arithmetic. All
// 32 lanes run it, and again lanes 3 and 17 alone, so that both ways of storing results are seen.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kUntouched = 0xEEEEEEEEEEEEEEEEu;

struct Vector {
  std::string instruction;  // its result and operands are written $d, $a, $b, $c, $e
  std::vector<uint64_t> operands;
  uint64_t expected;
};

uint64_t f(float value) { return std::bit_cast<uint32_t>(value); }
uint64_t g(double value) { return std::bit_cast<uint64_t>(value); }
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kTiny = 0x1p-130f;  // a subnormal number
constexpr uint64_t kGpuNan = 0x7FFFFFFF;

// `widths` are the bits of $d, $a, $b, ...; 1 is a predicate.
std::string body_of(const Vector& vector, const std::vector<int>& widths) {
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

// Runs the vectors, and compares; all have the same widths.
void check(const std::vector<int>& widths, const std::vector<Vector>& vectors) {
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

TEST(Vectors, IntegersOf32Bits) {
  check({32, 32, 32}, {{"add.s32 $d, $a, $b", {0xFFFFFFFF, 2}, 1},
                       {"add.sat.s32 $d, $a, $b", {0x7FFFFFFF, 1}, 0x7FFFFFFF},
                       {"add.sat.s32 $d, $a, $b", {0x80000000, 0xFFFFFFFF}, 0x80000000},
                       {"sub.u32 $d, $a, $b", {3, 5}, 0xFFFFFFFE},
                       {"sub.sat.s32 $d, $a, $b", {0x80000000, 1}, 0x80000000},
                       {"mul.lo.u32 $d, $a, $b", {0x10001, 0x10001}, 0x20001},
                       {"mul.hi.u32 $d, $a, $b", {0xFFFFFFFF, 0xFFFFFFFF}, 0xFFFFFFFE},
                       {"mul.hi.s32 $d, $a, $b", {0xFFFFFFFF, 0xFFFFFFFF}, 0},
                       {"mul.hi.s32 $d, $a, $b", {0x80000000, 3}, 0xFFFFFFFE},
                       {"div.s32 $d, $a, $b", {0xFFFFFFF9, 2}, 0xFFFFFFFD},
                       {"div.u32 $d, $a, $b", {0xFFFFFFF9, 2}, 0x7FFFFFFC},
                       {"div.s32 $d, $a, $b", {0x80000000, 0xFFFFFFFF}, 0x80000000},
                       {"rem.s32 $d, $a, $b", {0xFFFFFFF9, 2}, 0xFFFFFFFF},
                       {"rem.u32 $d, $a, $b", {17, 5}, 2},
                       {"min.s32 $d, $a, $b", {0xFFFFFFFF, 1}, 0xFFFFFFFF},
                       {"min.u32 $d, $a, $b", {0xFFFFFFFF, 1}, 1},
                       {"max.s32 $d, $a, $b", {0xFFFFFFFF, 1}, 1},
                       {"max.u32 $d, $a, $b", {0xFFFFFFFF, 1}, 0xFFFFFFFF},
                       {"and.b32 $d, $a, $b", {0xF0F0, 0xFF00}, 0xF000},
                       {"or.b32 $d, $a, $b", {0xF0F0, 0xFF00}, 0xFFF0},
                       {"xor.b32 $d, $a, $b", {0xF0F0, 0xFF00}, 0x0FF0},
                       {"shl.b32 $d, $a, $b", {0x80000001, 1}, 2},
                       {"shl.b32 $d, $a, $b", {1, 32}, 0},
                       {"shl.b32 $d, $a, $b", {1, 0xFFFFFFFF}, 0},
                       {"shr.u32 $d, $a, $b", {0x80000000, 31}, 1},
                       {"shr.u32 $d, $a, $b", {0x80000000, 32}, 0},
                       {"shr.s32 $d, $a, $b", {0x80000000, 4}, 0xF8000000},
                       {"shr.s32 $d, $a, $b", {0x80000000, 77}, 0xFFFFFFFF}});
  check({32, 32}, {{"not.b32 $d, $a", {0xF0}, 0xFFFFFF0F},
                   {"neg.s32 $d, $a", {1}, 0xFFFFFFFF},
                   {"neg.s32 $d, $a", {0x80000000}, 0x80000000},
                   {"abs.s32 $d, $a", {0xFFFFFFFB}, 5},
                   {"popc.b32 $d, $a", {0xF00F}, 8},
                   {"clz.b32 $d, $a", {0x00010000}, 15},
                   {"clz.b32 $d, $a", {0}, 32},
                   {"brev.b32 $d, $a", {1}, 0x80000000},
                   {"bfind.u32 $d, $a", {0x00010000}, 16},
                   {"bfind.s32 $d, $a", {0xFFFFFFFF}, 0xFFFFFFFF},
                   {"bfind.s32 $d, $a", {0xFFFFFF00}, 7},
                   {"bfind.shiftamt.u32 $d, $a", {0x00010000}, 15}});
}

TEST(Vectors, IntegersOfThreeOperands) {
  check({32, 32, 32, 32},
        {{"mad.lo.s32 $d, $a, $b, $c", {3, 0xFFFFFFFF, 10}, 7},
         {"mad.hi.u32 $d, $a, $b, $c", {0x80000000, 6, 1}, 4},
         {"lop3.b32 $d, $a, $b, $c, 0x96", {0xF0, 0xCC, 0xAA}, 0x96},
         {"lop3.b32 $d, $a, $b, $c, 0xE8", {0xF0, 0xCC, 0xAA}, 0xE8},
         {"prmt.b32 $d, $a, $b, $c", {0x33221100, 0x77665544, 0x7531}, 0x77553311},
         {"prmt.b32 $d, $a, $b, $c", {0x33228100, 0, 0x9999}, 0xFFFFFFFF},
         {"shf.l.wrap.b32 $d, $a, $b, $c", {0x80000000, 1, 33}, 3},
         {"shf.l.clamp.b32 $d, $a, $b, $c", {7, 1, 40}, 7},
         {"shf.r.wrap.b32 $d, $a, $b, $c", {0x10, 1, 4}, 0x10000001},
         {"shf.r.clamp.b32 $d, $a, $b, $c", {7, 9, 32}, 9},
         {"bfe.u32 $d, $a, $b, $c", {0x00ABCD00, 8, 8}, 0xCD},
         {"bfe.s32 $d, $a, $b, $c", {0x00ABCD00, 8, 8}, 0xFFFFFFCD},
         {"bfe.s32 $d, $a, $b, $c", {0x80000000, 31, 8}, 0xFFFFFFFF},
         {"bfe.u32 $d, $a, $b, $c", {0xFFFFFFFF, 4, 0}, 0}});
  check({32, 32, 32, 32, 32}, {{"bfi.b32 $d, $a, $b, $c, $e", {0xFF, 0, 4, 8}, 0xFF0},
                               {"bfi.b32 $d, $a, $b, $c, $e", {0, 0xFFFFFFFF, 8, 4}, 0xFFFFF0FF}});
}

TEST(Vectors, IntegersOf16And64Bits) {
  check({16, 16, 16}, {{"add.u16 $d, $a, $b", {0xFFFF, 2}, 1},
                       {"mul.lo.u16 $d, $a, $b", {0x101, 0x101}, 0x201},
                       {"mul.hi.s16 $d, $a, $b", {0x8000, 2}, 0xFFFF},
                       {"min.s16 $d, $a, $b", {0xFFFF, 1}, 0xFFFF},
                       {"max.u16 $d, $a, $b", {0xFFFF, 1}, 0xFFFF},
                       {"div.s16 $d, $a, $b", {0xFFF9, 2}, 0xFFFD}});
  check({64, 64, 64},
        {{"add.s64 $d, $a, $b", {~uint64_t{0}, 2}, 1},
         {"sub.s64 $d, $a, $b", {0, 1}, ~uint64_t{0}},
         {"mul.lo.s64 $d, $a, $b", {0x100000001, 0x100000001}, 0x200000001},
         {"mul.hi.u64 $d, $a, $b", {~uint64_t{0}, ~uint64_t{0}}, ~uint64_t{1}},
         {"mul.hi.s64 $d, $a, $b", {~uint64_t{0}, 2}, ~uint64_t{0}},
         {"div.s64 $d, $a, $b", {static_cast<uint64_t>(-7), 2}, static_cast<uint64_t>(-3)},
         {"div.u64 $d, $a, $b", {~uint64_t{0}, 2}, ~uint64_t{0} >> 1},
         {"rem.s64 $d, $a, $b", {static_cast<uint64_t>(-7), 2}, static_cast<uint64_t>(-1)},
         {"rem.u64 $d, $a, $b", {100, 7}, 2},
         {"min.s64 $d, $a, $b", {static_cast<uint64_t>(-1), 1}, static_cast<uint64_t>(-1)},
         {"max.s64 $d, $a, $b", {static_cast<uint64_t>(-1), 1}, 1},
         {"xor.b64 $d, $a, $b", {0xFF00FF00FF00FF00, 0xFFFF0000FFFF0000}, 0x00FFFF0000FFFF00}});
  check({64, 64, 32}, {{"shl.b64 $d, $a, $b", {1, 63}, uint64_t{1} << 63},
                       {"shl.b64 $d, $a, $b", {1, 64}, 0},
                       {"shr.s64 $d, $a, $b", {uint64_t{1} << 63, 100}, ~uint64_t{0}},
                       {"shr.u64 $d, $a, $b", {uint64_t{1} << 63, 62}, 2}});
  check({64, 32, 32}, {{"mul.wide.u32 $d, $a, $b", {0xFFFFFFFF, 2}, 0x1FFFFFFFE},
                       {"mul.wide.s32 $d, $a, $b", {0xFFFFFFFF, 2}, ~uint64_t{1}},
                       {"mov.b64 $d, {$a, $b}", {1, 2}, 0x200000001}});
  check({64, 32, 32, 64}, {{"mad.wide.s32 $d, $a, $b, $c", {0xFFFFFFFF, 2, 5}, 3},
                           {"mad.wide.u32 $d, $a, $b, $c", {0xFFFFFFFF, 2, 5}, 0x200000003}});
  check({32, 64}, {{"popc.b64 $d, $a", {~uint64_t{0}}, 64},
                   {"clz.b64 $d, $a", {1}, 63},
                   {"mov.b64 {$d, _}, $a", {0x200000001}, 1},
                   {"mov.b64 {_, $d}, $a", {0x200000001}, 2}});
  check({32, 16, 16}, {{"mov.b32 $d, {$a, $b}", {0x1111, 0x2222}, 0x22221111},
                       {"mul.wide.s16 $d, $a, $b", {0xFFFF, 2}, 0xFFFFFFFE}});
}

TEST(Vectors, FloatsOf32Bits) {
  const float third = 1.0f / 3.0f;
  check({32, 32, 32}, {{"add.f32 $d, $a, $b", {f(1), f(0x1p-24f)}, f(1)},  // a tie goes to even
                       {"add.rz.f32 $d, $a, $b", {f(1), f(0x1.8p-24f)}, f(1)},
                       {"add.rp.f32 $d, $a, $b", {f(1), f(0x1p-40f)}, f(0x1.000002p0f)},
                       {"add.rm.f32 $d, $a, $b", {f(-1), f(-0x1p-40f)}, f(-0x1.000002p0f)},
                       {"add.rm.f32 $d, $a, $b", {f(1), f(-1)}, f(-0.0f)},
                       {"add.f32 $d, $a, $b", {f(kInf), f(-kInf)}, kGpuNan},
                       {"add.sat.f32 $d, $a, $b", {f(0.75f), f(0.5f)}, f(1)},
                       {"add.sat.f32 $d, $a, $b", {f(-3), f(1)}, f(0)},
                       {"add.sat.f32 $d, $a, $b", {f(kNan), f(1)}, f(0)},
                       {"add.ftz.f32 $d, $a, $b", {f(kTiny), f(0)}, f(0)},
                       {"add.f32 $d, $a, $b", {f(kTiny), f(0)}, f(kTiny)},
                       {"sub.f32 $d, $a, $b", {f(1), f(third)}, f(1 - third)},
                       {"mul.f32 $d, $a, $b", {f(0x1p100f), f(0x1p100f)}, f(kInf)},
                       {"mul.rz.f32 $d, $a, $b", {f(0x1p100f), f(0x1p100f)}, 0x7F7FFFFF},
                       {"mul.ftz.f32 $d, $a, $b", {f(-0x1p-70f), f(0x1p-60f)}, f(-0.0f)},
                       {"mul.f32 $d, $a, $b", {f(-0x1p-70f), f(0x1p-60f)}, f(-0x1p-130f)},
                       {"div.rn.f32 $d, $a, $b", {f(1), f(3)}, f(third)},
                       {"div.rm.f32 $d, $a, $b", {f(1), f(3)}, 0x3EAAAAAA},
                       {"div.rn.f32 $d, $a, $b", {f(-1), f(0)}, f(-kInf)},
                       {"min.f32 $d, $a, $b", {f(kNan), f(2)}, f(2)},
                       {"min.f32 $d, $a, $b", {f(0.0f), f(-0.0f)}, f(-0.0f)},
                       {"min.NaN.f32 $d, $a, $b", {f(kNan), f(2)}, kGpuNan},
                       {"max.f32 $d, $a, $b", {f(-0.0f), f(0.0f)}, f(0)},
                       {"max.f32 $d, $a, $b", {f(kNan), f(kNan)}, kGpuNan},
                       {"max.f32 $d, $a, $b", {f(-3), f(-2)}, f(-2)},
                       {"copysign.f32 $d, $a, $b", {f(-1), f(5)}, f(-5)}});
  check({32, 32, 32, 32},
        {{"fma.rn.f32 $d, $a, $b, $c",
          {f(0x1.000002p0f), f(0x1.000002p0f), f(-1)},
          f(0x1.000001p-22f * 1.0f)},
         {"fma.rz.f32 $d, $a, $b, $c", {f(1), f(1), f(0x1.8p-24f)}, f(1)},
         {"fma.rp.f32 $d, $a, $b, $c", {f(1), f(1), f(0x1p-80f)}, f(0x1.000002p0f)},
         {"fma.rm.f32 $d, $a, $b, $c", {f(1), f(1), f(-0x1p-80f)}, f(0x1.fffffep-1f)},
         {"fma.rn.sat.f32 $d, $a, $b, $c", {f(2), f(2), f(2)}, f(1)}});
  check({32, 32}, {{"neg.f32 $d, $a", {f(0)}, f(-0.0f)},
                   {"abs.f32 $d, $a", {f(-kInf)}, f(kInf)},
                   {"rcp.rn.f32 $d, $a", {f(3)}, f(third)},
                   {"rcp.approx.f32 $d, $a", {f(4)}, f(0.25f)},
                   {"rcp.approx.ftz.f32 $d, $a", {f(kTiny)}, f(kInf)},
                   {"sqrt.rn.f32 $d, $a", {f(2)}, f(std::sqrt(2.0f))},
                   {"sqrt.rn.f32 $d, $a", {f(-1)}, kGpuNan},
                   {"rsqrt.approx.f32 $d, $a", {f(16)}, f(0.25f)},
                   {"ex2.approx.f32 $d, $a", {f(-3)}, f(0.125f)},
                   {"ex2.approx.f32 $d, $a", {f(-kInf)}, f(0)},
                   {"ex2.approx.ftz.f32 $d, $a", {f(-130)}, f(0)},
                   {"ex2.approx.f32 $d, $a", {f(-130)}, f(0x1p-130f)},
                   {"lg2.approx.f32 $d, $a", {f(8)}, f(3)},
                   {"lg2.approx.f32 $d, $a", {f(0)}, f(-kInf)},
                   {"sin.approx.f32 $d, $a", {f(0)}, f(0)},
                   {"cos.approx.f32 $d, $a", {f(0)}, f(1)},
                   {"tanh.approx.f32 $d, $a", {f(kInf)}, f(1)}});
}

TEST(Vectors, FloatsOf64Bits) {
  check({64, 64, 64}, {{"add.f64 $d, $a, $b", {g(1), g(0x1p-53)}, g(1)},
                       {"add.rp.f64 $d, $a, $b", {g(1), g(0x1p-90)}, g(0x1.0000000000001p0)},
                       {"sub.f64 $d, $a, $b", {g(0.3), g(0.1)}, g(0.3 - 0.1)},
                       {"mul.rz.f64 $d, $a, $b", {g(1e200), g(1e200)}, 0x7FEFFFFFFFFFFFFF},
                       {"div.rn.f64 $d, $a, $b", {g(1), g(3)}, g(1.0 / 3.0)},
                       {"min.f64 $d, $a, $b", {g(2), g(-1)}, g(-1)},
                       {"max.f64 $d, $a, $b", {g(2), g(-1)}, g(2)}});
  check({64, 64, 64, 64}, {{"fma.rn.f64 $d, $a, $b, $c",
                            {g(0x1.0000000000001p0), g(0x1.0000000000001p0), g(-1)},
                            g(std::fma(0x1.0000000000001p0, 0x1.0000000000001p0, -1.0))}});
  check({64, 64}, {{"sqrt.rn.f64 $d, $a", {g(2)}, g(std::sqrt(2.0))},
                   {"rcp.rn.f64 $d, $a", {g(3)}, g(1.0 / 3.0)},
                   {"neg.f64 $d, $a", {g(1)}, g(-1)},
                   {"abs.f64 $d, $a", {g(-1)}, g(1)}});
}

TEST(Vectors, FloatsOf16Bits) {
  // 0x3C00 and 0x3F80 are 1 in float16 and bfloat16; their last bits are 2^-10 and 2^-7.
  check({16, 16, 16}, {{"add.f16 $d, $a, $b", {0x3C00, 0x3C00}, 0x4000},
                       {"add.f16 $d, $a, $b", {0x3C00, 0x1000}, 0x3C00},  // 2^-11: a tie
                       {"add.f16 $d, $a, $b", {0x3C01, 0x1000}, 0x3C02},  // to even
                       {"mul.f16 $d, $a, $b", {0x7BFF, 0x4000}, 0x7C00},  // infinity
                       {"mul.f16 $d, $a, $b", {0x0001, 0x3800}, 0x0000},  // half of the least
                       {"sub.f16 $d, $a, $b", {0x3C00, 0x4000}, 0xBC00},
                       {"min.f16 $d, $a, $b", {0x7E00, 0x3C00}, 0x3C00},
                       {"max.NaN.bf16 $d, $a, $b", {0x7FC0, 0x3F80}, 0x7FFF},
                       {"add.bf16 $d, $a, $b", {0x3F80, 0x3B80}, 0x3F80},  // 2^-8: a tie
                       {"mul.bf16 $d, $a, $b", {0x3FC0, 0x3FC0}, 0x4010}});
  check({16, 16, 16, 16},
        {{"fma.rn.f16 $d, $a, $b, $c",
          {0x3C01, 0x3C01, 0xBC02},
          0x0010},  // 2^-20
                    // (1 + 2^-7) (1 + 2^-1) = 1.5 + 3 2^-8 is a tie, which 2^-70 decides.
         {"fma.rn.bf16 $d, $a, $b, $c", {0x3F81, 0x3FC0, 0x1C80}, 0x3FC2},
         {"fma.rn.bf16 $d, $a, $b, $c", {0x3F81, 0x3FC0, 0x9C80}, 0x3FC1},
         {"fma.rn.relu.bf16 $d, $a, $b, $c", {0xBF80, 0x3F80, 0x0000}, 0x0000}});
  check({32, 32, 32}, {{"add.f16x2 $d, $a, $b", {0x3C004000, 0x3C003C00}, 0x40004200},
                       {"mul.bf16x2 $d, $a, $b", {0x3F804000, 0x40004000}, 0x40004080}});
}

TEST(Vectors, ConversionsToIntegers) {
  check({32, 32}, {{"cvt.rni.s32.f32 $d, $a", {f(2.5f)}, 2},
                   {"cvt.rni.s32.f32 $d, $a", {f(-3.5f)}, 0xFFFFFFFC},
                   {"cvt.rzi.s32.f32 $d, $a", {f(-3.9f)}, 0xFFFFFFFD},
                   {"cvt.rmi.s32.f32 $d, $a", {f(-3.1f)}, 0xFFFFFFFC},
                   {"cvt.rpi.s32.f32 $d, $a", {f(3.1f)}, 4},
                   {"cvt.rzi.s32.f32 $d, $a", {f(3e9f)}, 0x7FFFFFFF},
                   {"cvt.rzi.s32.f32 $d, $a", {f(-kInf)}, 0x80000000},
                   {"cvt.rzi.s32.f32 $d, $a", {f(kNan)}, 0},
                   {"cvt.rzi.u32.f32 $d, $a", {f(-5)}, 0},
                   {"cvt.rzi.u32.f32 $d, $a", {f(4e9f)}, 4000000000},
                   {"cvt.s32.s8 $d, $a", {0x1FF}, 0xFFFFFFFF},
                   {"cvt.u32.u16 $d, $a", {0x12345678}, 0x5678},
                   {"cvt.s32.s16 $d, $a", {0xFFFF8000}, 0xFFFF8000},
                   {"cvt.sat.u8.s32 $d, $a", {300}, 255},
                   {"cvt.sat.s8.s32 $d, $a", {0xFFFFFF00}, 0xFFFFFF80}});
  check({64, 32},
        {{"cvt.u64.u32 $d, $a", {0xFFFFFFFF}, 0xFFFFFFFF},
         {"cvt.s64.s32 $d, $a", {0xFFFFFFFF}, ~uint64_t{0}},
         {"cvt.rzi.s64.f32 $d, $a", {f(-0x1p40f)}, static_cast<uint64_t>(-(int64_t{1} << 40))},
         {"cvt.rzi.u64.f32 $d, $a", {f(0x1p63f)}, uint64_t{1} << 63}});
  check({32, 64}, {{"cvt.u32.u64 $d, $a", {0x1234567890ABCDEF}, 0x90ABCDEF},
                   {"cvt.rni.s32.f64 $d, $a", {g(0.5)}, 0},
                   {"cvt.sat.s32.s64 $d, $a", {uint64_t{1} << 40}, 0x7FFFFFFF}});
}

TEST(Vectors, ConversionsToFloats) {
  check({32, 32}, {{"cvt.rn.f32.s32 $d, $a", {0xFFFFFFFF}, f(-1)},
                   {"cvt.rn.f32.u32 $d, $a", {0xFFFFFFFF}, f(0x1p32f)},
                   {"cvt.rz.f32.u32 $d, $a", {0xFFFFFFFF}, f(0x1.fffffep31f)},
                   {"cvt.rp.f32.s32 $d, $a", {0x01000001}, f(0x1.000002p24f)},
                   {"cvt.rm.f32.s32 $d, $a", {0xFEFFFFFF}, f(-0x1.000002p24f)},
                   {"cvt.rni.f32.f32 $d, $a", {f(-2.5f)}, f(-2)},
                   {"cvt.rzi.f32.f32 $d, $a", {f(2.9f)}, f(2)},
                   {"cvt.sat.f32.f32 $d, $a", {f(1.5f)}, f(1)},
                   {"cvt.sat.f32.f32 $d, $a", {f(kNan)}, f(0)}});
  check({32, 64}, {{"cvt.rn.f32.f64 $d, $a", {g(1 + 0x1p-24)}, f(1)},
                   {"cvt.rp.f32.f64 $d, $a", {g(1 + 0x1p-50)}, f(0x1.000002p0f)},
                   {"cvt.rz.f32.f64 $d, $a", {g(-1e300)}, 0xFF7FFFFF},
                   {"cvt.rn.f32.u64 $d, $a",
                    {(uint64_t{1} << 60) + (uint64_t{1} << 36) + 1},
                    f(0x1.000002p60f)}});  // a tie but for the last bit
  check({64, 32}, {{"cvt.f64.f32 $d, $a", {f(0.1f)}, g(0.1f)}});
  check({16, 32}, {{"cvt.rn.bf16.f32 $d, $a", {0x3F808000}, 0x3F80},
                   {"cvt.rn.bf16.f32 $d, $a", {0x3F818000}, 0x3F82},
                   {"cvt.rz.bf16.f32 $d, $a", {0x3F81FFFF}, 0x3F81},
                   {"cvt.rn.bf16.f32 $d, $a", {f(kNan)}, 0x7FFF},
                   {"cvt.rn.f16.f32 $d, $a", {f(65520)}, 0x7C00},
                   {"cvt.rn.f16.f32 $d, $a", {f(65519)}, 0x7BFF},
                   {"cvt.rz.f16.f32 $d, $a", {f(1e9f)}, 0x7BFF},
                   {"cvt.rn.f16.f32 $d, $a", {f(0x1.8p-24f)}, 0x0002},
                   {"cvt.rn.f16.s32 $d, $a", {2049}, 0x6800},
                   {"cvt.rn.relu.f16.f32 $d, $a", {f(-1)}, 0}});
  check({32, 16}, {{"cvt.f32.bf16 $d, $a", {0xC000}, f(-2)},
                   {"cvt.f32.f16 $d, $a", {0x0001}, f(0x1p-24f)},
                   {"cvt.f32.f16 $d, $a", {0xFC00}, f(-kInf)}});
  check({32, 32, 32}, {{"cvt.rn.bf16x2.f32 $d, $a, $b", {f(1), f(2)}, 0x3F804000},
                       {"cvt.rn.f16x2.f32 $d, $a, $b", {f(1), f(2)}, 0x3C004000}});
}

TEST(Vectors, ComparisonsAndChoices) {
  check({1, 32, 32}, {{"setp.eq.s32 $d, $a, $b", {5, 5}, 1},
                      {"setp.ne.u32 $d, $a, $b", {5, 5}, 0},
                      {"setp.lt.s32 $d, $a, $b", {0xFFFFFFFF, 0}, 1},
                      {"setp.lt.u32 $d, $a, $b", {0xFFFFFFFF, 0}, 0},
                      {"setp.hs.u32 $d, $a, $b", {0xFFFFFFFF, 0}, 1},
                      {"setp.ge.s32 $d, $a, $b", {4, 4}, 1},
                      {"setp.lt.f32 $d, $a, $b", {f(kNan), f(0)}, 0},
                      {"setp.ltu.f32 $d, $a, $b", {f(kNan), f(0)}, 1},
                      {"setp.ne.f32 $d, $a, $b", {f(kNan), f(kNan)}, 0},
                      {"setp.neu.f32 $d, $a, $b", {f(kNan), f(kNan)}, 1},
                      {"setp.eq.f32 $d, $a, $b", {f(-0.0f), f(0)}, 1},
                      {"setp.eq.ftz.f32 $d, $a, $b", {f(kTiny), f(0)}, 1},
                      {"setp.nan.f32 $d, $a, $b", {f(kNan), f(0)}, 1},
                      {"setp.num.f32 $d, $a, $b", {f(1), f(0)}, 1}});
  check({1, 32, 32, 1}, {{"setp.lt.and.s32 $d, $a, $b, $c", {1, 2, 0}, 0},
                         {"setp.lt.or.s32 $d, $a, $b, !$c", {2, 1, 0}, 1},
                         {"setp.lt.xor.s32 $d, $a, $b, $c", {1, 2, 1}, 0}});
  check({1, 16, 16}, {{"setp.lt.f16 $d, $a, $b", {0xBC00, 0x3C00}, 1},
                      {"setp.gt.bf16 $d, $a, $b", {0x4000, 0x3F80}, 1},
                      {"setp.ne.s16 $d, $a, $b", {1, 0}, 1}});
  check({1, 64, 64}, {{"setp.gt.s64 $d, $a, $b", {~uint64_t{0}, 0}, 0},
                      {"setp.gt.u64 $d, $a, $b", {~uint64_t{0}, 0}, 1},
                      {"setp.le.f64 $d, $a, $b", {g(1), g(1)}, 1}});
  check({1, 1, 1}, {{"and.pred $d, $a, $b", {1, 0}, 0},
                    {"or.pred $d, $a, $b", {1, 0}, 1},
                    {"xor.pred $d, $a, $b", {1, 1}, 0}});
  check({1, 1}, {{"not.pred $d, $a", {1}, 0}, {"mov.pred $d, $a", {1}, 1}});
  check({32, 32, 32, 1}, {{"selp.b32 $d, $a, $b, $c", {1, 2, 1}, 1},
                          {"selp.b32 $d, $a, $b, $c", {1, 2, 0}, 2},
                          {"selp.b32 $d, $a, $b, !$c", {1, 2, 0}, 1}});
}

}  // namespace
}  // namespace axonn::gpu_machine
