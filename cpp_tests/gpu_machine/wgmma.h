// One product of a warpgroup, and how an Op describes it.
//
// For wgmma.mma_async, an Op's `choice` is the Element, `count` the columns divided by 8, and
// `type` that of the sums; `a` and `b` hold the descriptors, `c` the predicate scale-d, and
// `source_bytes` the flags below. Its list holds the registers of D, followed by those of A.
#pragma once

#include "gpu_machine/fragments.h"
#include "gpu_machine/products.h"

namespace axonn::gpu_machine {

enum ProductFlag : uint8_t {
  kAInRegisters = 1,
  kAAlongM = 2,  // contiguous in memory along M, not along K
  kBAlongN = 4,
  kNegatesA = 8,
  kNegatesB = 16,
};

inline constexpr int kRowsOfGroup = 64, kMostProductColumns = 256, kMostProductDepth = 16;

inline bool has_a_in_registers(const Op& op) { return (op.source_bytes & kAInRegisters) != 0; }
inline Element element_of(const Op& op) { return static_cast<Element>(op.choice); }
inline int columns_of(const Op& op) { return 8 * op.count; }
inline int depth_of(const Op& op) { return 32 / bytes_of(element_of(op)); }
inline Sums sums_of(const Op& op, const Slot* slots) {
  return {slots, columns_of(op), op.type.bits == 16};
}
inline int num_sum_slots(const Op& op) { return sums_of(op, nullptr).num_slots(); }
inline int num_a_slots(const Op& op) { return has_a_in_registers(op) ? 4 : 0; }
inline bool same_shape(const Op& one, const Op& other) {
  return one.count == other.count && one.choice == other.choice && one.type.bits == other.type.bits;
}

class ProductOperation final : public AsyncOperation {
 public:
  ProductOperation(Warp& last, const Product& product);

  // Reads all operands and writes all sums at once. Nothing could tell the difference, because
  // using them before the wait is an error.
  void step() override;
  bool uses(const Cta& cta) const override { return &cta == &cta_; }

 private:
  void read_a(float* a);
  void read_b(float* b);
  // Elements [rows][depth] of a matrix, whichever axis is contiguous.
  void read_matrix(const MatrixDescriptor& matrix, int rows, bool along_rows, float* target);
  const std::byte* read_chunk(uint64_t offset);

  Cta& cta_;
  const ProductOperands operands_;
  const std::array<Warp*, kWarpsOfGroup> warps_;
};

}  // namespace axonn::gpu_machine
