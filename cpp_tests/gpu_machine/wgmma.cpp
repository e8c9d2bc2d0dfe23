#include "gpu_machine/wgmma.h"

#include <algorithm>

#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kIdentity = 0x3A;  // sets these operations apart from others
constexpr int kRowsOfWarp = 16;

uint64_t group_of(const Warp& warp) {
  return static_cast<uint64_t>(warp.cta.id) * kLanes +
         static_cast<uint64_t>(warp.index / kWarpsOfGroup);
}

}  // namespace

ProductOperation::ProductOperation(Warp& last, const Product& product)
    : AsyncOperation(last, -1, Proxy::kAsync, {group_of(last), kIdentity}),
      cta_(last.cta),
      operands_(product.operands),
      warps_(product.warps) {
  // Anything that only some of the warps have seen is not ordered before the product.
  clock = product.seen;
}

const std::byte* ProductOperation::read_chunk(uint64_t offset) {
  Region& shared = cta_.shared;
  if (offset < kVariablesStart || offset + kChunkBytes > shared.bytes.size()) {
    fail(MachineError::Kind::kMemory,
         "a matrix descriptor reaches outside shared memory, at " + std::to_string(offset));
  }
  note_read(shared, offset, kChunkBytes, {}, -1);
  return shared.bytes.data() + offset;
}

void ProductOperation::read_matrix(const MatrixDescriptor& matrix, int rows, bool along_rows,
                                   float* target) {
  const Element element = element_of(*operands_.op);
  const int per_chunk = static_cast<int>(kChunkBytes) / bytes_of(element);
  const int depth = depth_of(*operands_.op);
  float values[8];
  if (!along_rows) {
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < depth / per_chunk; ++i) {
        const uint64_t at =
            matrix.chunk_along_k(static_cast<uint64_t>(row), static_cast<uint64_t>(i));
        widen(element, read_chunk(at), per_chunk, target + row * depth + i * per_chunk);
      }
    }
    return;
  }
  for (int k = 0; k < depth; ++k) {
    for (int i = 0; i < rows / per_chunk; ++i) {
      const uint64_t at = matrix.chunk_along_mn(static_cast<uint64_t>(i), static_cast<uint64_t>(k));
      widen(element, read_chunk(at), per_chunk, values);
      for (int j = 0; j < per_chunk; ++j) target[(i * per_chunk + j) * depth + k] = values[j];
    }
  }
}

void ProductOperation::read_a(float* a) {
  const Op& op = *operands_.op;
  const int depth = depth_of(op);
  if (has_a_in_registers(op)) {
    for (int i = 0; i < kWarpsOfGroup; ++i) {
      Warp& warp = *warps_[static_cast<size_t>(i)];
      gather_rows(warp, warp.list(op) + num_sum_slots(op), num_a_slots(op), element_of(op),
                  a + i * kRowsOfWarp * depth);
    }
  } else {
    const bool along_rows = (op.source_bytes & kAAlongM) != 0;
    read_matrix(*MatrixDescriptor::decode(operands_.a), kRowsOfGroup, along_rows, a);
  }
  const bool negates = ((op.source_bytes & kNegatesA) != 0) != ((op.source_bytes & kNegatesB) != 0);
  if (!negates) return;
  for (int i = 0; i < kRowsOfGroup * depth; ++i) a[i] = -a[i];
}

// [depth][columns] with contiguous columns, as multiply_add expects.
void ProductOperation::read_b(float* b) {
  const Op& op = *operands_.op;
  const int columns = columns_of(op), depth = depth_of(op);
  float by_column[kMostProductColumns * kMostProductDepth];
  read_matrix(*MatrixDescriptor::decode(operands_.b), columns, (op.source_bytes & kBAlongN) != 0,
              by_column);
  for (int k = 0; k < depth; ++k) {
    for (int column = 0; column < columns; ++column) {
      b[k * columns + column] = by_column[column * depth + k];
    }
  }
}

void ProductOperation::step() {
  const Op& op = *operands_.op;
  const int columns = columns_of(op), depth = depth_of(op);
  float a[kRowsOfGroup * kMostProductDepth], b[kMostProductDepth * kMostProductColumns];
  read_a(a);
  read_b(b);
  float sums[kRowsOfWarp * kMostProductColumns];
  for (int i = 0; i < kWarpsOfGroup; ++i) {
    Warp& warp = *warps_[static_cast<size_t>(i)];
    const Sums place = sums_of(op, warp.list(op));
    if (operands_.adds) {
      gather_sums(warp, place, sums);
    } else {
      std::fill_n(sums, kRowsOfWarp * columns, 0.0f);
    }
    multiply_add(a + i * kRowsOfWarp * depth, b, sums, kRowsOfWarp, columns, depth);
    scatter_sums(warp, place, sums);
  }
  reach(Stage::kDone);
}

}  // namespace axonn::gpu_machine
