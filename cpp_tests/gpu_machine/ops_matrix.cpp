// Matrices that a warp loads, stores and multiplies together: ldmatrix, stmatrix and mma.sync.
// Source: PTX ISA 9.0, sections 9.7.14.5.
#include <algorithm>
#include <cstring>

#include "gpu_machine/decoder.h"
#include "gpu_machine/fragments.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr int kRows = 8;            // of a matrix of ldmatrix
constexpr uint32_t kRowBytes = 16;  // 8 elements
constexpr int kMostDepth = 16;      // of mma
constexpr Type kWord{'b', 32, 1};

// The element (row, column) of a matrix in half `part` of a lane's register.
struct Place {
  int row, column;
};
Place place_in_matrix(int lane, int part, bool is_transposed) {
  const int along = lane / 4, across = 2 * (lane % 4) + part;
  return is_transposed ? Place{across, along} : Place{along, across};
}

void load_matrices(const Op& op, Warp& warp, uint32_t mask) {
  expect_all_lanes(warp, mask);
  const Slot* slots = warp.list(op);
  uint16_t loaded[4][kRows][kRows];
  for (int i = 0; i < op.count * kRows; ++i) {  // lane i holds the address of row i
    std::memcpy(loaded[i / kRows][i % kRows], warp.read(op, warp.address(op, i), kRowBytes, i),
                kRowBytes);
  }
  for (int i = 0; i < op.count; ++i) {
    auto* target = warp.lanes<uint16_t>(slots[i]);
    for (int j = 0; j < 2 * kLanes; ++j) {
      const Place from = place_in_matrix(j / 2, j % 2, op.choice != 0);
      target[j] = loaded[i][from.row][from.column];
    }
  }
}

void store_matrices(const Op& op, Warp& warp, uint32_t mask) {
  expect_all_lanes(warp, mask);
  const Slot* slots = warp.list(op);
  uint16_t stored[4][kRows][kRows];
  for (int i = 0; i < op.count; ++i) {
    const auto* source = warp.lanes<uint16_t>(slots[i]);
    for (int j = 0; j < 2 * kLanes; ++j) {
      const Place to = place_in_matrix(j / 2, j % 2, op.choice != 0);
      stored[i][to.row][to.column] = source[j];
    }
  }
  for (int i = 0; i < op.count * kRows; ++i) {
    std::memcpy(warp.write(op, warp.address(op, i), kRowBytes, i), stored[i / kRows][i % kRows],
                kRowBytes);
  }
  warp.machine.note_change();
}

void decode_load_or_store(Decoder& d, bool loads) {
  Op& op = d.op();
  const bool known = d.take("sync") && d.take("aligned") && d.take("m8n8") && d.take("b16");
  if (!known) d.fail("the machine knows only .sync.aligned.m8n8 of .b16");
  const std::string count = d.take_one({"x1", "x2", "x4"});
  if (count.empty()) d.fail("expected .x1, .x2 or .x4");
  op.count = static_cast<uint8_t>(count[1] - '0');
  op.choice = d.take("trans") ? 1 : 0;
  const Space space = take_space(d);
  op.flow = Flow::kMeetAll;
  op.execute = loads ? load_matrices : store_matrices;
  op.at = d.address(loads ? 1 : 0, space);
  if (d.list(loads ? 0 : 1, kWord) != op.count) d.fail("it needs a register for each matrix");
}

// For mma, an Op's `choice` is the Element, `count` the number of A's registers, and `type` that of
// the sums. Its list holds the registers of D, A, B and C.
void multiply(const Op& op, Warp& warp, uint32_t mask) {
  expect_all_lanes(warp, mask);
  const auto element = static_cast<Element>(op.choice);
  const int depth = 2 * op.count * 4 / bytes_of(element);
  const Slot* target = warp.list(op);
  const bool in_half = op.type.bits == 16;
  const Sums result{target, 8, in_half};
  const Slot* a = target + result.num_slots();
  const Slot* b = a + op.count;
  const Slot* c = b + op.count / 2;
  float rows[16 * kMostDepth], columns[kMostDepth * 8], sums[16 * 8];
  gather_rows(warp, a, op.count, element, rows);
  gather_columns(warp, b, op.count / 2, element, columns);
  gather_sums(warp, {c, 8, in_half}, sums);
  multiply_add(rows, columns, sums, 16, 8, depth);
  scatter_sums(warp, result, sums);
}

struct Shape {
  std::string_view name, type;
  Element element;
  uint8_t a_registers;
};
constexpr Shape kShapes[] = {
    {"m16n8k16", "bf16", Element::kBrain, 4}, {"m16n8k8", "bf16", Element::kBrain, 2},
    {"m16n8k16", "f16", Element::kHalf, 4},   {"m16n8k8", "f16", Element::kHalf, 2},
    {"m16n8k8", "tf32", Element::kTf32, 4},   {"m16n8k4", "tf32", Element::kTf32, 2},
};

void decode_multiplication(Decoder& d) {
  Op& op = d.op();
  if (!d.take("sync") || !d.take("aligned")) d.fail("expected .sync.aligned");
  if (!d.take("row") || !d.take("col")) d.fail("the machine knows only .row.col");
  const std::string name = d.take_first(), result = d.take_first(), a = d.take_first(),
                    b = d.take_first(), sums = d.take_first();
  const auto* shape = std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& known) {
    return known.name == name && known.type == a && a == b;
  });
  const bool in_half = sums == "f16" && a == "f16";
  if (shape == std::end(kShapes) || result != sums || (sums != "f32" && !in_half)) {
    d.fail("the machine does not know this shape with these types");
  }
  op.type = type_of(sums);
  op.choice = static_cast<uint8_t>(shape->element);
  op.count = shape->a_registers;
  op.flow = Flow::kMeetAll;
  op.execute = multiply;
  const int sum_registers = in_half ? 2 : 4;
  if (d.list(0, kWord) != sum_registers || d.list(1, kWord) != op.count ||
      d.list(2, kWord) != op.count / 2 || d.list(3, kWord) != sum_registers) {
    d.fail("an operand has another number of registers");
  }
}

}  // namespace

bool decode_matrix(Decoder& d) {
  if (d.opcode() == "ldmatrix" || d.opcode() == "stmatrix") {
    decode_load_or_store(d, d.opcode() == "ldmatrix");
  } else if (d.opcode() == "mma") {
    decode_multiplication(d);
  } else {
    return false;
  }
  return true;
}

}  // namespace axonn::gpu_machine
