// wgmma: warpgroup products, their fences and groups. Source: PTX ISA 9.0, section 9.7.15.
#include <charconv>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/wgmma.h"

namespace axonn::gpu_machine {
namespace {

constexpr Type kWord{'b', 32, 1};
constexpr Type kDescriptor{'b', 64, 1};

void begin_product(const Op& op, Warp& warp, uint32_t mask) {
  expect_all_lanes(warp, mask);
  warp.products().begin(op, warp);
}

void fence(const Op&, Warp& warp, uint32_t mask) {
  expect_all_lanes(warp, mask);
  warp.products().fence();
}

void commit(const Op&, Warp& warp, uint32_t mask) {
  expect_all_lanes(warp, mask);
  warp.products().commit();
}

bool have_ended(const Op& op, Warp& warp, uint32_t) { return warp.products().have_ended(op.count); }

void learn(const Op& op, Warp& warp, uint32_t mask) {
  expect_all_lanes(warp, mask);
  warp.products().learn(warp, op.count);
}

// Takes 1 or -1, and sets the flag for -1.
void take_sign(Decoder& d, size_t index, ProductFlag flag) {
  const Operand& sign = d.operand(index);
  const auto value = static_cast<int64_t>(sign.bits);
  if (sign.kind != Operand::Kind::kImmediate || (value != 1 && value != -1)) {
    d.fail("expected 1 or -1 as a scale");
  }
  if (value == -1) d.op().source_bytes |= flag;
}

void take_major(Decoder& d, size_t index, ProductFlag flag) {
  const Operand& major = d.operand(index);
  if (major.kind != Operand::Kind::kImmediate || major.bits > 1) {
    d.fail("expected 0 or 1 for the major axis of a matrix");
  }
  if (major.bits == 1) d.op().source_bytes |= flag;
}

// Takes m64nNkK, the type of the sums, and the types of A and B.
void take_shape(Decoder& d) {
  Op& op = d.op();
  const std::string shape = d.take_first(), sums = d.take_first(), a = d.take_first(),
                    b = d.take_first();
  op.choice = static_cast<uint8_t>(a == "bf16"  ? Element::kBrain
                                   : a == "f16" ? Element::kHalf
                                                : Element::kTf32);
  const bool known = a == b && (a == "bf16" || a == "f16" || a == "tf32");
  if (!known || (sums != "f32" && (sums != "f16" || a != "f16"))) {
    d.fail("the machine does not know a product of these types");
  }
  op.type = type_of(sums);
  int columns = 0;
  const std::string_view left = std::string_view(shape).substr(0, 4) == "m64n"
                                    ? std::string_view(shape).substr(4)
                                    : std::string_view();
  const auto [end, error] = std::from_chars(left.data(), left.data() + left.size(), columns);
  const std::string_view depth = depth_of(op) == 16 ? "k16" : "k8";
  if (error != std::errc() || left.substr(static_cast<size_t>(end - left.data())) != depth ||
      columns % 8 != 0 || columns < 8 || columns > kMostProductColumns) {
    d.fail("there is no such shape of a product");
  }
  op.count = static_cast<uint8_t>(columns / 8);
}

void decode_product(Decoder& d) {
  Op& op = d.op();
  take_shape(d);
  if (d.operand(1).kind == Operand::Kind::kVector) op.source_bytes = kAInRegisters;
  if (d.list(0, kWord) != num_sum_slots(op)) d.fail("D has another number of registers");
  if (has_a_in_registers(op)) {
    if (d.list(1, kWord) != num_a_slots(op)) d.fail("A has another number of registers");
  } else {
    op.a = d.slot(1, kDescriptor);
  }
  op.b = d.slot(2, kDescriptor);
  op.c = d.predicate(3);
  take_sign(d, 4, kNegatesA);
  take_sign(d, 5, kNegatesB);
  if (element_of(op) != Element::kTf32) {
    if (!has_a_in_registers(op)) take_major(d, 6, kAAlongM);
    take_major(d, has_a_in_registers(op) ? 6 : 7, kBAlongN);
  }
  op.execute = begin_product;
  d.note_product();
}

}  // namespace

bool decode_wgmma(Decoder& d) {
  if (d.opcode() != "wgmma") return false;
  Op& op = d.op();
  const std::string what = d.take_first();
  if (!d.take("sync") || !d.take("aligned")) d.fail("expected .sync.aligned");
  op.flow = Flow::kMeetAll;
  if (what == "mma_async") {
    decode_product(d);
  } else if (what == "fence") {
    op.execute = fence;
  } else if (what == "commit_group") {
    op.execute = commit;
  } else if (what == "wait_group") {
    const Operand& most = d.operand(0);
    if (most.kind != Operand::Kind::kImmediate || most.bits > 7) {
      d.fail("expected a number of groups up to 7");
    }
    op.count = static_cast<uint8_t>(most.bits);
    op.ready = have_ended;
    op.execute = learn;
  } else {
    d.fail("the machine does not know this instruction");
  }
  return true;
}

}  // namespace axonn::gpu_machine
