// Prints how many warp instructions the machine executes per second: with arithmetic only, and with
// a memory access in every tenth instruction.
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

double rate(const std::string& body) {
  Machine machine;
  machine.load(testing::kernel_of(R"(
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %tid.x;
  mad.lo.u32 %r3, %r1, 256, %r2;
  mul.wide.u32 %d1, %r3, 4;
  add.s64 %d1, %out, %d1;
  mov.u32 %r4, 0;
  mov.f32 %f1, 0f3F800000;
LOOP:
)" + body + R"(
  add.s32 %r4, %r4, 1;
  setp.lt.u32 %p1, %r4, 2000;
  @%p1 bra LOOP;
  st.global.u32 [%d1], %r5;
)"));
  const uint64_t out = machine.put(std::vector<uint32_t>(4096, 1), "out");
  machine.launch(machine.new_stream(0), machine.kernel("test"), {16, 1, 1}, {256, 1, 1}, out);
  const auto start = std::chrono::steady_clock::now();
  machine.run();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(machine.warp_instructions()) / seconds.count();
}

}  // namespace
}  // namespace axonn::gpu_machine

int main() {
  const std::string arithmetic = R"(
  add.s32 %r5, %r4, %r2;
  xor.b32 %r6, %r5, %r4;
  mul.wide.u32 %d2, %r5, %r6;
  shr.u32 %r7, %r6, 3;
  fma.rn.f32 %f1, %f1, 0f3F7FFFFF, 0f3F000000;
  mul.f32 %f2, %f1, %f1;
)";
  const double alone = axonn::gpu_machine::rate(arithmetic);
  const double mixed = axonn::gpu_machine::rate(arithmetic + "  ld.global.u32 %r8, [%d1];\n");
  std::printf("warp instructions a second: %.2g of arithmetic, %.2g with loads\n", alone, mixed);
  return 0;
}
