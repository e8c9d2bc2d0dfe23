// Individual conversions, comparisons and selects, against results from the CPU or by hand.
#include <bit>
#include <cmath>

#include "gpu_machine/vector_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::check;
using testing::f;
using testing::g;
using testing::kInf;
using testing::kNan;
using testing::kTiny;

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
                    f(0x1.000002p60f)}});  // a tie except for the last bit
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
