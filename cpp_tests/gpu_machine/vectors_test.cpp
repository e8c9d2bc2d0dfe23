// Single arithmetic instructions, against results by hand or by the CPU's IEEE arithmetic.
#include <bit>
#include <cmath>

#include "gpu_machine/vector_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::check;
using testing::f;
using testing::g;
using testing::kGpuNan;
using testing::kInf;
using testing::kNan;
using testing::kTiny;

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
                    // (1 + 2^-7) (1 + 2^-1) = 1.5 + 3 2^-8 is a tie that 2^-70 breaks.
         {"fma.rn.bf16 $d, $a, $b, $c", {0x3F81, 0x3FC0, 0x1C80}, 0x3FC2},
         {"fma.rn.bf16 $d, $a, $b, $c", {0x3F81, 0x3FC0, 0x9C80}, 0x3FC1},
         {"fma.rn.relu.bf16 $d, $a, $b, $c", {0xBF80, 0x3F80, 0x0000}, 0x0000}});
  check({32, 32, 32}, {{"add.f16x2 $d, $a, $b", {0x3C004000, 0x3C003C00}, 0x40004200},
                       {"mul.bf16x2 $d, $a, $b", {0x3F804000, 0x40004000}, 0x40004080}});
}

}  // namespace
}  // namespace axonn::gpu_machine
