// Branches, exits, barriers of a CTA, and sleep. Source: PTX ISA 9.0, sections 9.7.12 and 9.7.13.
#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

void trap(const Op&, Warp& warp, uint32_t mask) {
  if (mask == 0) return;
  const uint32_t owing = warp.lanes_that_owe_host() & mask;
  if (owing != 0) {
    warp.fail(MachineError::Kind::kRace,
              "race: nothing makes what was written for the host come there before the trap",
              __builtin_ctz(owing));
  }
  warp.fail(MachineError::Kind::kTrap, "a trap ended the kernel", __builtin_ctz(mask));
}

// PTX lets a sleep last up to twice its duration.
void sleep(const Op& op, Warp& warp, uint32_t mask) {
  if (mask == 0) return;
  const uint32_t ns = warp.lanes<uint32_t>(op.a)[__builtin_ctz(mask)];
  warp.wake_at = warp.machine.now_ns() + warp.machine.draw(2 * ns + 1);
}

const Type kWord{'u', 32, 1};

void decode_barrier(Decoder& d) {
  Op& op = d.op();
  const bool is_aligned = d.opcode() == "bar" || d.take("aligned");
  d.take("cta");
  op.flow = Flow::kBarrier;
  size_t first = 0;
  if (d.take("sync")) {
    op.barrier = BarrierKind::kSync;
  } else if (d.take("arrive")) {
    op.barrier = BarrierKind::kArrive;
  } else if (d.take("red")) {
    const std::string kind = d.take_one({"popc", "and", "or"});
    if (kind.empty()) d.fail("expected an operation");
    op.barrier = kind == "popc"  ? BarrierKind::kPopc
                 : kind == "and" ? BarrierKind::kAnd
                                 : BarrierKind::kOr;
    d.take_type();
    op.d = kind == "popc" ? d.slot(0, kWord) : d.slot(0, {'p', 1, 1});
    op.c = d.predicate(d.num_operands() - 1);
    first = 1;
  } else {
    d.fail("the machine does not know this barrier");
  }
  op.choice = is_aligned ? 1 : 0;
  op.a = d.slot(first, kWord);
  const size_t trailing = first == 1 ? 1 : 0;
  op.has_count = d.num_operands() > first + 1 + trailing;
  if (op.has_count) op.b = d.slot(first + 1, kWord);
  if (op.barrier == BarrierKind::kArrive && !op.has_count) d.fail("expected a number of threads");
}

}  // namespace

bool decode_control(Decoder& d) {
  Op& op = d.op();
  const std::string opcode = d.opcode();
  if (opcode == "bra") {
    d.take("uni");
    op.flow = Flow::kBranch;
    op.target = static_cast<uint32_t>(d.label(d.operand(0)));
  } else if (opcode == "ret" || opcode == "exit") {
    d.take("uni");
    op.flow = Flow::kExit;
  } else if (opcode == "trap") {
    op.execute = trap;
  } else if (opcode == "nanosleep") {
    d.take_type();
    op.a = d.slot(0, kWord);
    op.execute = sleep;
    op.flow = Flow::kYield;
  } else if (opcode == "barrier" || (opcode == "bar" && !d.is_warp_barrier())) {
    decode_barrier(d);
  } else {
    return false;
  }
  return true;
}

}  // namespace axonn::gpu_machine
